"""Whether shards are what they should be: all at once on request, or each in the background before its first use.

    sizes, row counts, lengths      at once, while opening                          reader
    sha256, token ids               before a shard's first row is handed out        BackgroundVerifier
    everything                      python -m flows.prepare --verify DIR            verify_shards

Files without a manifest have their sha256 and ids taken at first use; what was found is kept beside the run, so that a later start
reads them no more, and a file rewritten meanwhile is refused.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dflash_core.config import fingerprint
from dflash_core.data.arrow import COLUMNS, Columns, map_shard
from dflash_core.data.mapped import MappedShard
from dflash_core.data.reader import ShardSet, TokenDataset, data_files, find_shards, identity
from dflash_core.data.shards import MANIFEST, check_shards
from dflash_core.files import file_sha256
from dflash_core.records import Manifest, ShardFile

# ---- everything, on request ------------------------------------------------------------------------------------------


def verify_shards(directory: Path, *, vocab_size: int | None = None, columns: Columns = COLUMNS) -> Manifest:
    """Reads all of a shard directory; returns its manifest, or one made from the content where it has none.

    Checked: sizes, sha256, columns, lengths, masks, ids (below `vocab_size` where it is given), every count of the manifest, and
    that its ledger adds up. Raises ValueError that names the broken shard.
    """
    found = find_shards(directory)
    if found.manifest is not None:
        check_shards(directory, found.manifest, checksums=True)
        if data_files(directory) != [shard.name for shard in found.manifest.shards]:
            raise ValueError(f"{directory}: state.json and {MANIFEST} name other files; prepare the data anew")
    dataset = TokenDataset([found], columns=columns)
    manifest = dataset.manifest()
    for path, shard in zip(found.files, manifest.shards, strict=True):
        mapped = map_shard(path, columns=columns)
        low, high = mapped.id_range()
        counts = {
            "rows": mapped.rows,
            "tokens": int(mapped.lengths().sum(dtype=np.int64)),
            "supervised": int(mapped.count_masks().sum(dtype=np.int64)),
        }
        for name, count in counts.items():
            if count != getattr(shard, name):
                raise ValueError(f"shard {path}: {count} {name}, the manifest says {getattr(shard, name)}")
        if found.manifest is not None and (high, mapped.places(0)) != (shard.max_id, shard.places):
            raise ValueError(
                f"shard {path}: largest token id {high} and buffers at {tuple(mapped.places(0))}, "
                f"the manifest says {shard.max_id} and {shard.places}"
            )
        _check_ids(mapped, low, high, vocab_size)
    _check_sums(directory, manifest)
    return manifest


def _check_sums(directory: Path, manifest: Manifest) -> None:
    for name in ("rows", "tokens", "supervised"):
        total = sum(getattr(shard, name) for shard in manifest.shards)
        if total != getattr(manifest, name):
            raise ValueError(f"{directory}: its shards hold {total} {name}, the manifest says {getattr(manifest, name)}")


def _check_ids(mapped: MappedShard, low: int, high: int, vocab_size: int | None) -> None:
    for token in (low, high):
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            limit = f"outside the target's vocabulary of {vocab_size}" if vocab_size is not None else "below 0"
            raise ValueError(
                f"shard {mapped.path}: row {mapped.row_with_id(token)} has the token id {token}, {limit}: "
                "these rows are of another tokenizer"
            )


# ---- of which tokenizer ----------------------------------------------------------------------------------------------


def check_tokenizer(sets: Sequence[ShardSet], *, target: str, tokenizer: Mapping[str, str], vocab_size: int) -> None:
    """Refuses shards whose manifest names another tokenizer (file name -> sha256) or ids beyond the vocabulary. Raises ValueError."""
    for one in sets:
        if one.manifest is None:
            continue
        ingredients = one.manifest.ingredients
        stored: Mapping[str, str] = ingredients.get("tokenizer", {})
        names = {name for name in stored.keys() | tokenizer.keys() if _decides_ids(name)}
        other = sorted(name for name in names if stored.get(name) != tokenizer.get(name))
        if other and stored and tokenizer:  # a hub id names no files
            made_for = ingredients.get("target", {}).get("path", "an unnamed target")
            raise ValueError(
                f"{one.name} was tokenized for {made_for}, this run's target is {target}: their tokenizers differ "
                f"({', '.join(other)}); prepare the data for this target"
            )
        for shard in one.manifest.shards:
            if shard.max_id >= vocab_size:
                raise ValueError(
                    f"{one.name}: shard {shard.name} has the token id {shard.max_id}, outside the vocabulary of {vocab_size} "
                    f"of {target}: these rows are of another tokenizer"
                )


def _decides_ids(name: str) -> bool:
    """False for files that other versions of transformers write differently for the same tokenizer."""
    return name not in ("tokenizer_config.json", "special_tokens_map.json") and not name.startswith("chat_template")


# ---- in the background -----------------------------------------------------------------------------------------------


class BackgroundVerifier:
    """Runs one check a shard, in order, in a thread of its own. Whoever needs a shard sooner runs its check himself.

    So reading waits for the shards it touches and for nothing else, and a check that failed is raised where the shard is used.
    """

    def __init__(self, checks: Sequence[Callable[[], None]]) -> None:
        self._checks = checks
        self._locks = [threading.Lock() for _ in checks]
        self._done = [False] * len(checks)
        self._failed: dict[int, ValueError | OSError] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verify shards", daemon=True)

    def __enter__(self) -> "BackgroundVerifier":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _run(self) -> None:
        for shard in range(len(self._checks)):
            if self._stop.is_set():
                return
            self._check(shard)

    def _check(self, shard: int) -> None:
        with self._locks[shard]:
            if not self._done[shard]:
                try:
                    self._checks[shard]()
                except (ValueError, OSError) as error:
                    self._failed[shard] = error
                self._done[shard] = True

    def wait_for(self, shard: int) -> None:
        """Returns when a shard is known to be good. Raises ValueError, which names it, where it is not."""
        self._check(shard)
        if shard in self._failed:
            raise self._failed[shard]


@contextmanager
def verified_dataset(
    sets: Sequence[ShardSet], *, index: Path, vocab_size: int, columns: Columns = COLUMNS
) -> Iterator[TokenDataset]:
    """The rows of all sets; a shard's bytes are checked before its first row is handed out. `index` keeps what was found."""
    checks: list[Callable[[], None]] = []
    for one in sets:
        shards: Sequence[ShardFile | None] = one.manifest.shards if one.manifest else [None] * len(one.files)
        for path, shard in zip(one.files, shards, strict=True):
            checks.append(partial(check_content, path, shard, index=index, vocab_size=vocab_size, columns=columns))
    with BackgroundVerifier(checks) as verifier:
        yield TokenDataset(sets, columns=columns, index=index, before_use=verifier.wait_for)


def check_content(path: Path, shard: ShardFile | None, *, index: Path, vocab_size: int, columns: Columns) -> None:
    """A shard's sha256 is its manifest's, or the one that this run found before; without a manifest its ids are read too.

    A file that is the one looked at before, by size, times and inode, is not read again. Raises ValueError that names it.
    """
    note_file = index / f"{fingerprint(str(path.absolute()))[:32]}.json"
    note = json.loads(note_file.read_text(encoding="utf-8")) if note_file.is_file() else None
    now = identity(path)
    if note is None or note["identity"] != now:
        mapped = None if shard else map_shard(path, columns=columns)
        low, high = mapped.id_range() if mapped else (0, shard.max_id if shard else 0)
        found: dict[str, Any] = {"identity": now, "sha256": file_sha256(path), "low": low, "high": high}
        wanted = shard.sha256 if shard else note["sha256"] if note else found["sha256"]
        if found["sha256"] != wanted:
            whose = "the manifest's" if shard else "the one it had when this run first read it"
            raise ValueError(f"shard {path}: its sha256 is not {whose}: it was rewritten or damaged; prepare or copy it anew")
        write_note(note_file, found)
        note = found
    if shard is None:
        _check_ids(map_shard(path, columns=columns), note["low"], note["high"], vocab_size)


def write_note(path: Path, note: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    beside.write_text(json.dumps(note), encoding="utf-8")
    os.replace(beside, path)
