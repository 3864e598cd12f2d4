"""What Prefect and MLflow cost a run: `python -m tests.benchmarks.orchestration [--config FILE] [OPTION OF THE RUN ...]`.

The whole of `python -m flows.train`, with its temporary Prefect server and MLflow's store, against the same work called directly
in a process that imports neither. Both from nothing, one after the other, on a machine with nothing else to do; neither collects
garbage while it imports, nor at its end.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anyio

from dflash_core.config import Config
from dflash_core.rundir import open_run
from flows.garbage import begin_work, keep_imports

QUICKSTART = "configs/quickstart.yaml"


def without(file: str) -> None:
    """Prepares, trains, exports and measures the run of a config file, and writes its report."""
    keep_imports()
    from dflash_core import assembly, measurement, preparation

    begin_work()
    config = Config.model_validate_json(Path(file).read_text(encoding="utf-8"))
    assembly.check(config)
    run = open_run(config)
    preparation.prepare(config, run)

    async def work() -> None:
        stop = anyio.Event()
        await assembly.train(config, run, stop, lambda metrics, total: None)
        assembly.export(config, run)
        acceptance = await measurement.evaluate(config, run, stop)
        assert acceptance is not None
        measurement.write_report(config, run, acceptance)

    anyio.run(work)
    assert not {"prefect", "mlflow"} & set(sys.modules)


def timed(*command: str) -> tuple[float, float]:
    """(seconds, CPU-seconds of all its processes) of a command that must end well."""
    start, before = time.perf_counter(), _cpu_seconds()
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start, _cpu_seconds() - before


def _cpu_seconds() -> float:
    """Of the processes that have ended, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Prints both times and their difference, whose limit is 20 s."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=QUICKSTART)
    given, options = parser.parse_known_args()
    from flows.settings import load_config

    overrides = dict(zip((name.removeprefix("--") for name in options[::2]), options[1::2], strict=True))
    with tempfile.TemporaryDirectory() as place:
        apart = load_config(given.config, overrides | {"places.runs": f"{place}/without"})
        file = Path(place) / "config.json"
        file.write_text(apart.model_dump_json())
        alone, alone_cpu = timed("tests.benchmarks.orchestration", "--without", str(file))
        whole, whole_cpu = timed("flows.train", "--config", given.config, *options, "--places.runs", f"{place}/with")
        steps = {json.loads(found.read_text())["step"] for found in Path(place).glob("*/*/training.json")}
    print(f"optimizer steps of each: {steps}")
    print(f"without Prefect and MLflow {alone:6.1f} s, with {whole:6.1f} s: {whole - alone:.1f} s more (at most 20)")
    print(f"CPU-seconds of all processes: {alone_cpu:.1f} without, {whole_cpu:.1f} with: {whole_cpu - alone_cpu:.1f} more")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--without"]:
        without(sys.argv[2])
    else:
        main()
