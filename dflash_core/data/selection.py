"""Which conversations a run takes: from all sources to part files, every row accounted for.

    sources --survey--> spool file, 27 bytes a row --decide--> which rows, how often, which side --write--> part files

The decisions are made in the order of the reasons below; a row that several would leave out is counted by the first. Rows stay in
the order of the sources: what a limit takes is drawn by hash, so neither the order of a file nor other rows decide about a row, and
reading stays sequential. Deciding takes about 60 bytes a row at its peak.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_core.config import fingerprint
from dflash_core.data import duplicates
from dflash_core.data.conversations import check_usable, from_line, write_part
from dflash_core.data.duplicates import STEP, Hashes
from dflash_core.data.sources import source_ingredients
from dflash_core.data.survey import Survey, Working, survey_sources
from dflash_core.data_config import DataConfig, SourceConfig
from dflash_core.records import Conversation

TRUNCATED, EXACT, OVERLAP, NEAR = "truncated answer", "exact duplicate", "overlaps an evaluation prompt", "near duplicate"
REPEATED = "repeat by weight"
WEIGHT, SOURCE_LIMIT, LIMIT = "left out by the source's weight", "beyond the source's max_rows", "beyond data.max_rows"
BY_CHOICE = frozenset((TRUNCATED, EXACT, OVERLAP, NEAR, WEIGHT, SOURCE_LIMIT, LIMIT))  # usable rows; `min_kept` is not about them


PROMPT_SIMILARITY = 0.6  # for the split: prompts are short, and a leak costs more than a cluster too large
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Part files, and what became of every row.

    `ledger`: {"rows_in": 20, "kept": 13, "dropped": {"truncated answer": 7}}; a repeat by weight is a row in of its own. `noted`
    counts what was found, dropped or not: {"truncated answer": 7}.
    """

    parts: tuple[str, ...]
    rows: int
    validation_rows: int
    ledger: dict[str, Any]
    noted: dict[str, int]
    places: dict[str, list[str]]  # reason -> where the first rows dropped for it stand
    sources: tuple[dict[str, Any], ...]  # {path, rows_in, usable, kept, files, ignored, empty}


@dataclass
class Decision:
    """Rows still wanted, and why the others are not."""

    wanted: NDArray[np.bool_]  # [N]
    dropped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)

    def leave_out(self, rows: NDArray[np.bool_], reason: str, policy: str = "drop") -> None:
        """Notes the wanted rows among `rows` [N] and, where the policy says so, drops them."""
        found = rows & self.wanted
        self.noted[reason] += int(found.sum())
        if policy == "drop":
            self.dropped[reason] += int(found.sum())
            self.wanted &= ~rows


def select(config: DataConfig, *, seed: int, prompts: Sequence[str], directory: Path, part_rows: int) -> Selection:
    """Reads all sources and writes what the config takes as `directory`/part-00000.jsonl ..., `part_rows` conversations each.

    `prompts` are the texts of the evaluation prompts. Older parts in the directory are removed. Raises ValueError where a source
    is missing, where fewer rows than `config.min_kept` can be used, and where the split leaves nothing to train on.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("part-*.jsonl*"):
        old.unlink()
    with Working(directory) as working:
        survey = survey_sources(config, duplicates.prompt_grams(prompts), working)
        check_usable(config, survey.drops, len(survey.offsets))
        decision = _decide(config, survey, working)
        validation = _validation(config, survey, working)
        rows, copies = _take(config, seed, survey, decision, validation)
        if config.validation and validation[rows].all():
            raise ValueError(
                f"data.validation {config.validation}: all {len(rows)} rows fall on its side, for their first prompts are "
                "near-duplicates of each other; set data.validation_by to prompt"
            )
        if config.validation and not validation[rows].any():
            LOG.warning("data.validation %s: none of %d rows falls on its side", config.validation, len(rows))
        chosen = _chosen(working, survey, rows, copies, validation)
        parts = tuple(_write_parts(chosen, len(rows), directory, part_rows))
    return _selection(survey, decision, rows, validation, parts)


def ingredients(config: DataConfig, *, seed: int, prompts: Sequence[str]) -> dict[str, Any]:
    """What decides the selection beside the fields of `config`: the sources' content, and the rest only where it has a say."""
    from importlib.metadata import version

    drawn = config.max_rows or any(source.max_rows or source.weight % 1 for source in config.conversations)
    near = config.near_duplicates == "drop" or config.validation
    return {
        "sources": source_ingredients(config.conversations),
        "seed": seed if config.shuffle and drawn else None,
        "prompts": fingerprint(list(prompts)) if config.prompt_overlap == "drop" else None,
        "datasketch": version("datasketch") if near else None,
    }


def report_lines(config: DataConfig, selection: Selection) -> list[str]:
    """What a user should read: `truncated answer: 7 (35 %), kept`, and what each source gave."""
    rows = selection.ledger["rows_in"]
    given = sum(source["rows_in"] for source in selection.sources)
    lines = []
    for source in selection.sources:
        extras = [f"{len(source[name])} {name}: {', '.join(source[name][:5])}" for name in ("ignored", "empty") if source[name]]
        counts = f"{source['rows_in']} rows in, {source['usable']} usable, {source['kept']} taken"
        lines.append("; ".join([f"{source['path']}: {counts}", *extras]))
    dropped = selection.ledger["dropped"]
    for reason, count in selection.noted.items():
        if count and reason not in dropped:
            lines.append(f"{reason}: {count} ({count / rows:.0%}), kept")
    for reason, count in dropped.items():
        where = f", first at {selection.places[reason][0]}" if reason in selection.places else ""
        lines.append(f"{reason}: {count} ({count / rows:.0%}), dropped{where}")
    if rows != given:
        lines.append(
            f"rows with their repeats: {rows} ({given} given, {rows - given} taken again by weight); shares are of these"
        )
    return lines


# ---- decisions -------------------------------------------------------------------------------------------------------


def _decide(config: DataConfig, survey: Survey, working: Working) -> Decision:
    """Which rows the policies leave, in the order of the reasons."""
    contents = np.frombuffer(survey.contents, np.uint64)
    decision = Decision(np.ones(len(contents), bool))
    decision.leave_out(np.frombuffer(survey.truncated, bool), TRUNCATED, config.truncated_answers)
    wanted = np.flatnonzero(decision.wanted)
    repeated = np.zeros(len(contents), bool)
    repeated[wanted] = ~duplicates.first_of_each(contents[wanted])
    decision.leave_out(repeated, EXACT, config.exact_duplicates)
    decision.leave_out(np.frombuffer(survey.overlap, bool), OVERLAP, config.prompt_overlap)
    if config.near_duplicates != "off":
        cluster = duplicates.clusters(working.signatures("contents"), contents, config.similarity)
        wanted = np.flatnonzero(decision.wanted & ~repeated)
        near = np.zeros(len(contents), bool)
        near[wanted] = ~duplicates.first_of_each(cluster[wanted])
        decision.leave_out(near, NEAR, config.near_duplicates)
    return decision


def _validation(config: DataConfig, survey: Survey, working: Working) -> NDArray[np.bool_]:
    """Which rows [N] are kept apart: by the hash of the first prompt, or of the prompt with the least hash in its cluster.

    Answers, ids, seed and order play no part; a new row moves others only where it becomes the least of their cluster.
    """
    prompts = np.frombuffer(survey.prompts, np.uint64)
    if not config.validation:
        return np.zeros(len(prompts), bool)
    if config.validation_by == "near_duplicates":
        prompts = prompts[duplicates.clusters(working.signatures("prompts"), prompts, PROMPT_SIMILARITY)]
    return _uniform(prompts, salt=1) < config.validation


def _uniform(hashes: Hashes, salt: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each hash (SplitMix64's finalizer, Steele et al. 2014)."""
    mixed = hashes + np.uint64(int(STEP) * salt % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) / 2.0**64


def _take(
    config: DataConfig, seed: int, survey: Survey, decision: Decision, validation: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and the number of the copy of each, in reading order, after weights, each source's limit and the whole limit."""
    contents, sources = np.frombuffer(survey.contents, np.uint64), np.frombuffer(survey.sources, np.uint16)
    taken = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for number, source in enumerate(config.conversations):
        rows = np.flatnonzero(decision.wanted & (sources == number))
        copies = _copies(source, _draw(config, seed, contents[rows]))
        copies = np.where(validation[rows], np.minimum(copies, 1), copies)
        decision.dropped[WEIGHT] += int((copies == 0).sum())
        decision.noted[REPEATED] += int(np.maximum(copies - 1, 0).sum())
        rows = np.repeat(rows, copies)
        copy = np.arange(len(rows)) - np.repeat(np.cumsum(copies) - copies, copies)
        kept = _least(_draw(config, seed, contents[rows], copy), source.max_rows)
        decision.dropped[SOURCE_LIMIT] += len(rows) - len(kept)
        taken.append((rows[kept], copy[kept]))
    rows, copy = (np.concatenate(each) for each in zip(*taken, strict=True))
    kept = _least(_draw(config, seed, contents[rows], copy), config.max_rows)
    decision.dropped[LIMIT] += len(rows) - len(kept)
    return rows[kept], copy[kept]


def _draw(config: DataConfig, seed: int, contents: Hashes, copy: NDArray[np.int64] | int = 0) -> NDArray[np.float64]:
    """The order in which a limit takes rows: by hash of seed, content and copy; without shuffle as they stand."""
    if not config.shuffle:
        return np.arange(len(contents), dtype=np.float64)
    return _uniform(contents + STEP * np.asarray(copy).astype(np.uint64), salt=seed + 2)


def _copies(source: SourceConfig, order: NDArray[np.float64]) -> NDArray[np.int64]:
    whole, part = divmod(source.weight, 1)
    copies = np.full(len(order), int(whole))
    copies[_least(order, round(part * len(order)))] += 1
    return copies


def _least(order: NDArray[np.float64], limit: int | None) -> NDArray[np.int64]:
    """Places of the `limit` least values, rising."""
    if limit is None:
        return np.arange(len(order))
    return np.sort(np.argsort(order, kind="stable")[:limit])


# ---- writing ---------------------------------------------------------------------------------------------------------


def _chosen(
    working: Working, survey: Survey, rows: NDArray[np.int64], copies: NDArray[np.int64], validation: NDArray[np.bool_]
) -> Iterator[Conversation]:
    """The rows that are taken, from the spool; a second copy of a row has the id `id#2`."""
    with open(working.spool, "rb") as spool:
        for row, copy in zip(rows, copies, strict=True):
            spool.seek(survey.offsets[row])
            conversation = from_line(spool.readline())
            name = f"{conversation.id}#{copy + 1}" if copy else conversation.id
            yield replace(conversation, id=name, validation=bool(validation[row]))


def _write_parts(chosen: Iterator[Conversation], rows: int, directory: Path, part_rows: int) -> Iterator[str]:
    for number, _ in enumerate(range(0, rows, part_rows)):
        path = directory / f"part-{number:05d}.jsonl"
        write_part(path, itertools.islice(chosen, part_rows))
        yield str(path)


def _selection(
    survey: Survey,
    decision: Decision,
    rows: NDArray[np.int64],
    validation: NDArray[np.bool_],
    parts: tuple[str, ...],
) -> Selection:
    dropped = survey.drops.counts + decision.dropped
    kept = Counter(np.frombuffer(survey.sources, np.uint16)[rows].tolist())
    rows_in = sum(seen["rows_in"] for seen in survey.seen) + decision.noted[REPEATED]
    assert rows_in == len(rows) + dropped.total(), (rows_in, len(rows), dropped)
    return Selection(
        parts=parts,
        rows=len(rows),
        validation_rows=int(validation[rows].sum()),
        ledger={"rows_in": rows_in, "kept": len(rows), "dropped": dict(dropped.most_common())},
        noted=dict(decision.noted),
        places=survey.drops.places,
        sources=tuple(seen | {"kept": kept[number]} for number, seen in enumerate(survey.seen)),
    )
