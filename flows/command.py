"""What the command lines share: `python -m flows.NAME` from its arguments to its exit code.

    arguments --read_command_line--> Command --run_flow--> flow in this process --> 0 done, 2 bad input, 3 stopped

The arguments are read before Prefect is imported, so --help and misspelt options answer at once, and Prefect finds its
environment defaults set. Without PREFECT_API_URL the flow runs against Prefect's own temporary server.
"""

import argparse
import errno
import os
import shlex
import shutil
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from dflash_core.config import Config
from flows.garbage import begin_work, keep_imports
from flows.settings import QUICKSTART, closest, config_yaml, dig, leaves, origin_comments, resolve

DONE, BAD_INPUT, STOPPED, INTERRUPTED = 0, 2, 3, 130  # exit codes
NO_DIRECTORY = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR)
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
ENVIRONMENT_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_LOGGING_SERVER_LEVEL": "CRITICAL",  # else the temporary server's end prints its cancelled tasks
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the console is ours; the run's log in Prefect stays whole
    "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,dflash_core",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a command line asks for; `overrides` are its dotted keys, as a deployment would give them."""

    path: str
    overrides: dict[str, Any]
    fresh: bool
    config: Config
    options: dict[str, Any] = field(default_factory=dict)  # of one command alone


class _Options(Config, BaseSettings):
    """Config as command line options."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        fail(message)


def fail(message: str) -> NoReturn:
    """Ends the process because of bad input: one line, no traceback."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(BAD_INPUT)


def _parser(name: str, purpose: str, *, fresh: bool, options: Mapping[str, Mapping[str, Any]]) -> _Parser:
    parser = _Parser(
        prog=f"python -m flows.{name}",
        usage="%(prog)s [--config FILE] [--SECTION.FIELD VALUE ...]",
        description=purpose,
        epilog=textwrap.fill(
            "Layers: the file, then DFLASH_RUNS, DFLASH_COPIES, DFLASH_CACHE and DFLASH_MLFLOW_URI from the environment, then the options. `null` unsets "
            "an optional value; lists are written 0,1,2. Exit codes: 0 done, 2 bad input, 3 stopped and resumable.",
            width=110,
        ),
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=118),
    )
    parser.add_argument("--config", metavar="FILE", default=QUICKSTART, help="the run as YAML (default: %(default)s)")
    parser.add_argument("--print-config", action="store_true", help="show the resolved run as YAML and where values came from")
    if fresh:
        parser.add_argument("--fresh", action="store_true", help="set an older run of this name aside and start anew")
    for option, described in options.items():
        parser.add_argument(f"--{option}", **described)
    return parser


def read_command_line(
    name: str,
    purpose: str,
    *,
    fresh: bool = False,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    arguments: Sequence[str] | None = None,
) -> Command:
    """Parses `python -m flows.<name> ...`; ends the process after --help, --print-config and bad input.

    `options` are those of this command alone: {"preview": {"type": int, "help": "..."}}, as argparse takes them.
    """
    parser = _parser(name, purpose, fresh=fresh, options=options or {})
    settings: CliSettingsSource[Any] = CliSettingsSource(
        _Options,
        root_parser=parser,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_parse_none_str="null",
        cli_use_class_docs_for_groups=True,
    )
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = {option for option in parser._option_string_actions if option.startswith("--")}
        fail(f"{unknown[0]}: unknown option{closest(unknown[0].split('=')[0], flags)}")
    own = vars(given)
    path, show, is_fresh = own.pop("config"), own.pop("print_config"), own.pop("fresh", False)
    special = {option: own.pop(option.replace("-", "_")) for option in options or {}}
    try:
        chosen = settings(parsed_args=own)()
    except SettingsError as error:
        fail(f"{error}; a mapping is written KEY=VALUE, a list 0,1,2")
    values = {key: dig(chosen, key) for key in leaves(chosen)}
    try:
        resolved = resolve(path, values, "command line")
    except ValueError as error:
        fail(str(error))
    if show:
        try:
            shown = config_yaml(resolved.config, origin_comments(resolved, path))
        except ValueError as error:  # its fingerprint holds the content of training.warm_start
            fail(str(error))
        print(f"# {path}, and where other values came from")
        print(shown, end="")
        raise SystemExit(DONE)
    for key, value in ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(key, value)
    dumped = resolved.config.model_dump(mode="json")
    overrides = {key: dig(dumped, key) for key in values}
    keep_imports()
    return Command(path=path, overrides=overrides, fresh=is_fresh, config=resolved.config, options=special)


def run_flow(
    flow: Callable[..., Coroutine[Any, Any, Any]],
    command: Command,
    *,
    check: Callable[[Config], Any] | None = None,
    beside: Callable[[Config], None] = lambda config: None,
    **parameters: Any,
) -> NoReturn:
    """Checks the config, runs the flow in this process and ends it with an exit code.

    `check` raises ValueError for bad input, by default for what training needs. `beside` is slow preparation that can be done
    while Prefect's local server starts.
    """
    import anyio
    from prefect.exceptions import CancelledRun
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from flows import console, local_server
    from flows.running import load_core

    console.attach()
    signal.signal(signal.SIGTERM, _leave)
    settings: dict[Any, Any] = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}  # nobody watches, and its end takes a second
    server = local_server.LocalServer() if local_server.needed() else None
    try:
        (check or load_core()[0].check)(command.config)
        beside(command.config)
        if server is not None:
            server.wait()
            settings[PREFECT_API_URL] = server.api
        begin_work()
        with temporary_settings(settings):
            anyio.run(partial(flow, config=command.path, overrides=command.overrides, **parameters))
    except CancelledRun as stopped:
        again = shlex.join(argument for argument in sys.orig_argv if argument != "--fresh")
        console.say(f"{stopped}. To go on, run the same again: {again}")
        raise SystemExit(STOPPED) from None
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)  # an ordinary exit would wait for the threads, whose work may take long
    except RuntimeError as error:
        if not str(error).startswith("Failed to reach API"):  # Prefect's words
            raise
        fail(f"{error}: start that server, or unset PREFECT_API_URL to use a temporary one")
    except (ValueError, OSError) as error:
        fail(_bad_input(error, command.config))
    raise SystemExit(DONE)


def run_plain(work: Callable[[Config], None], command: Command) -> NoReturn:
    """Work that is no flow, with the same exit codes: no server is started and nothing is recorded."""
    from flows import console

    console.attach()
    begin_work()
    try:
        work(command.config)
    except (ValueError, OSError) as error:
        fail(_bad_input(error, command.config))
    raise SystemExit(DONE)


def _leave(*_: Any) -> NoReturn:
    """SIGTERM before and after the flow, which has its own receiver. An exception could be swallowed by a library that is being
    imported; the local server sees that this process is gone."""
    os._exit(128 + signal.SIGTERM)


def _bad_input(error: ValueError | OSError, config: Config) -> str:
    """What a user has to mend, in one line. Raises the error itself where it is none of that."""
    if isinstance(error, OSError):
        if _keeps_no_runs(error, Path(config.places.runs).absolute()):
            return f"places.runs {config.places.runs!r}: {error.strerror}: {error.filename}; name a directory that can be written"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) and "No space left" not in str(error):
            raise error
        runs = Path(config.places.runs).absolute()
        held = next(place for place in (runs, *runs.parents) if place.exists())
        free = shutil.disk_usage(held).free
        return f"no space left while writing; {runs} has {free:,} bytes free. Make room or set places.runs; what was finished is kept"
    if not _is_ours(error):
        raise error
    return str(error)


def _keeps_no_runs(error: OSError, runs: Path) -> bool:
    """Whether the directory of all runs cannot be made, or nothing can be written right in it."""
    if not isinstance(error.filename, str):
        return False
    place = Path(error.filename).absolute()
    if runs.is_relative_to(place):
        return error.errno in NO_DIRECTORY + NOT_WRITABLE
    return place.parent == runs and error.errno in NOT_WRITABLE


def _is_ours(error: ValueError) -> bool:
    """Whether our own code found the input bad; a ValueError from a library's inside is a bug and keeps its traceback."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    root = Path(__file__).parent.parent
    return any(Path(last).is_relative_to(root / room) for room in ("dflash_core", "flows"))
