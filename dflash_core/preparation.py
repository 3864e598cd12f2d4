"""Conversations to shards: the data half of the composition root.

    check     the sources exist                                        before anything heavy
    prepared  shards made from exactly these inputs?                   -> Manifest | None
    select    sources -> parts of conversations                        -> Selected
    tokenizer each part on its own -> its token rows                  -> PartTokenizer: part -> Ledger
    shard     all parts' rows, in order -> shards/ and validation/     -> Manifest

`prepare` does it all in this order; the flow does the same with the parts as tasks. What is in the making stands in `working`.
"""

import datetime
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.config import PREPARATION_WORK, Config, fingerprint
from dflash_core.data import selection, tokenization
from dflash_core.data.preview import Look, look, page, spread
from dflash_core.data.prompts import prompt_texts
from dflash_core.data.selection import Selection
from dflash_core.data.shards import check_shards, read_batches, read_manifest, write_shards
from dflash_core.data.sources import locate
from dflash_core.data.storage import check_places
from dflash_core.data.tokenization import Ledger, Limits, row_files
from dflash_core.data.workers import PartTokenizer, Tokenizing, part_tokenizer, usable_cores
from dflash_core.files import file_sha256, written_beside
from dflash_core.modeling.target import read_facts
from dflash_core.records import Manifest
from dflash_core.rundir import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Selected:
    """The conversations to tokenize."""

    selection: Selection  # with the part files, and what was left out before
    ingredients: dict[str, Any]  # of the fingerprint, as they were before anything was read

    @property
    def parts(self) -> tuple[Path, ...]:
        """Part files, in order."""
        return tuple(map(Path, self.selection.parts))


def check(config: Config) -> None:
    """Raises ValueError where the sources of the data cannot be read."""
    if config.data.shards:
        return check_places(config.data.shards)
    for source in config.data.conversations:
        locate(source)


# ---- what decides the rows -------------------------------------------------------------------------------------------


def data_ingredients(config: Config, *, date: str | None = None) -> dict[str, Any]:
    """Everything that decides the rows of the shards; the fingerprint is its hash. `date` is the `frozen_date`."""
    from importlib.metadata import version

    code = sorted((Path(__file__).parent / "data").glob("*.py"))
    facts = read_facts(config.target.path)
    return {
        "conversations": selection.ingredients(config.data, seed=config.seed, prompts=prompt_texts(config.evaluation)),
        "tokenizer": {file.name: file_sha256(file) for file in tokenization.tokenizer_files(config.target.path)},
        "target": {"path": config.target.path, "stop_ids": list(facts.eos_ids), "vocab_size": facts.vocab_size},
        "data": config.data.model_dump(mode="json", exclude={"conversations", "date", *PREPARATION_WORK}),
        "date": date,
        "code": fingerprint([file_sha256(file) for file in code]),
        "versions": {name: version(name) for name in ("tokenizers", "transformers", "jinja2")},
    }


def frozen_date(config: Config, run: RunDirectory) -> str | None:
    """The day that the chat template prints, the same for all of a run's life; None where it prints none."""
    if not tokenization.prints_date(config.target.path):
        return None
    manifest = read_manifest(run.shards)
    before = manifest.ingredients["date"] if manifest is not None else None
    return config.data.date or before or datetime.date.today().isoformat()


def prepared(config: Config, run: RunDirectory) -> Manifest | None:
    """The manifest of the run's shards if they are complete and made from exactly these inputs."""
    manifest = read_manifest(run.shards)
    if manifest is None or manifest.fingerprint != fingerprint(data_ingredients(config, date=frozen_date(config, run))):
        return None
    check_shards(run.shards, manifest)
    if manifest.ledger["validation_rows"]:
        validation = read_manifest(run.validation)
        if validation is None or validation.fingerprint != manifest.fingerprint:
            return None
        check_shards(run.validation, validation)
    return manifest


# ---- the steps -------------------------------------------------------------------------------------------------------


@contextmanager
def working(run: RunDirectory) -> Iterator[Path]:
    """The directory of what is in the making; gone at the end, whatever the end."""
    work = run.root / "preparing"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work)


def select(config: Config, run: RunDirectory, work: Path) -> Selected:
    """The conversations to tokenize, as parts in `work`, and the ingredients of the fingerprint. Raises ValueError."""
    # the ingredients first: a file that changes meanwhile must not pass for read
    ingredients = data_ingredients(config, date=frozen_date(config, run))
    chosen = selection.select(
        config.data, seed=config.seed, prompts=prompt_texts(config.evaluation), directory=work, part_rows=config.data.part_rows
    )
    return Selected(selection=chosen, ingredients=ingredients)


def tokenizing(config: Config, date: str | None) -> Tokenizing:
    """The target's chat format and the limits of a row. Raises ValueError where the target has no chat template."""
    facts = read_facts(config.target.path)
    return Tokenizing(
        tokenizer=tokenization.load_tokenizer(config.target.path),
        stop_ids=frozenset(facts.eos_ids),
        mask_token_id=config.drafter.mask_token_id,
        date=date,
        thinking=config.data.thinking,
        limits=Limits(max_length=config.data.max_length, too_long=config.data.too_long, vocab_size=facts.vocab_size),
    )


def tokenizer(config: Config, how: Tokenizing, selected: Selected, work: Path) -> AbstractContextManager[PartTokenizer]:
    """What tokenizes the parts: this process, a pool where there are several parts, or workers elsewhere."""
    return part_tokenizer(
        how,
        saved=work / "tokenizing.pickle",
        processes=processes(config, selected),
        elsewhere=config.data.task_runner != "threads",
    )


def processes(config: Config, selected: Selected) -> int:
    """How many parts are tokenized at a time."""
    return min(config.data.processes or usable_cores(), len(selected.parts) or 1)


def shard(config: Config, run: RunDirectory, work: Path, selected: Selected, ledgers: Sequence[Ledger]) -> Manifest:
    """All parts' rows, in order, as shard directories; older ones, made from other inputs, are replaced at the end.

    Raises ValueError with the main reasons where too few conversations were kept.
    """
    chosen = selected.selection
    ledger = sum(ledgers, Ledger(dropped=Counter(chosen.ledger["dropped"])))
    tokenization.check_kept(ledger, config.data.min_kept, by_choice=selection.BY_CHOICE | {tokenization.LONG})
    assert ledger.rows_in == chosen.ledger["rows_in"], (ledger, chosen.ledger)
    found = {"noted": chosen.noted, "sources": list(chosen.sources), "places": chosen.places}
    manifests = []
    for name, side in (("shards", 0), ("validation", 1)):
        files = [row_files(part)[side] for part in selected.parts]
        batches = itertools.chain.from_iterable(read_batches(file) for file in files if file.exists())
        if side == 0 or ledger.validation_rows:
            manifest = write_shards(
                work / name,
                batches,
                shard_tokens=config.data.shard_tokens,
                fingerprint=fingerprint(selected.ingredients),
                ingredients=selected.ingredients,
                ledger=ledger.as_dict() | found,
            )
            manifests.append(manifest)
    replace(run.validation, work / "validation", work / "validation.old")
    replace(run.shards, work / "shards", work / "shards.old")  # last: its manifest says that all is there
    return manifests[0]


def replace(directory: Path, new: Path, old: Path) -> None:
    """`new`, where it exists, takes the place of `directory`, which is moved to `old`."""
    if directory.exists():
        directory.rename(old)
    if new.exists():
        new.rename(directory)


def prepare(config: Config, run: RunDirectory) -> Manifest:
    """All steps in order, without a flow."""
    with working(run) as work:
        selected = select(config, run, work)
        how = tokenizing(config, selected.ingredients["date"])
        with tokenizer(config, how, selected, work) as tokenize:
            ledgers = [tokenize(part) for part in selected.parts]
        return shard(config, run, work, selected, ledgers)


# ---- to look at ------------------------------------------------------------------------------------------------------


def preview(config: Config, *, count: int) -> tuple[list[Look], Path, dict[str, int]]:
    """`count` conversations, spread over the run's data, as they will be trained; the page of them in the run directory; and
    what was left out before, by reason.

    The run need not exist; its name stays free. Raises ValueError for bad input.
    """
    if count < 1:
        raise ValueError(f"--preview {count}: must be at least 1")
    if config.data.shards:
        raise ValueError("--preview shows data.conversations; the rows of data.shards come as tokens")
    run = RunDirectory(root=Path(config.places.runs).absolute() / config.name, state="new")
    run.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=config.places.runs) as work:
        selected = select(config, run, Path(work))
        chosen = spread(selected.parts, rows=selected.selection.rows, count=count)
    how = tokenizing(config, selected.ingredients["date"])
    chat = how.open()
    looks = [shown for each in chosen for shown in look(each, chat=chat, tokenizer=how.tokenizer, limits=how.limits)]
    title = f"{config.name}: {len(chosen)} of {selected.selection.rows:,} conversations"
    with written_beside(run.preview) as place:
        place.write_text(page(looks, title=title), encoding="utf-8")
    return looks, run.preview, selected.selection.ledger["dropped"]
