"""Which texts say nearly the same, and which hold an evaluation prompt.

    text -> words -> grams -> MinHash signature [P]            P = 128 numbers, 512 bytes a text
    signatures [N, P] -> bands of equal numbers -> pairs -> pairs that are similar enough -> clusters [N]

MinHash and the number of bands are datasketch's; the bands are compared by sorting, which needs tens of bytes a text where an
index of dictionaries needs thousands. Signatures may lie in a mapped file.
"""

import re
import zlib
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERMUTATIONS = 128
WORDS = 3  # a gram of a conversation
CHARACTERS = 5  # a gram of a prompt, where one other word of five must not count as another prompt
OVERLAP_WORDS = 13  # a gram of an evaluation prompt (Brown et al. 2020, appendix C)
WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff]+|[\u3040-\u30ff\u3400-\u9fff]")  # scripts without blanks: a sign is a word
STEP = np.uint64(0x9E3779B97F4A7C15)
GRAMS_AT_ONCE = 256  # x 128 numbers stay in the cache: a quarter of the time of thousands at once
PAIRS_AT_ONCE = 4096

Hashes = NDArray[np.uint64]


def words(text: str) -> list[str]:
    """Words in lower case; neither case, blanks nor punctuation make a difference."""
    return WORD.findall(text.lower())


def word_hashes(text: str) -> Hashes:
    """A hash for each word, in order."""
    found = words(text)
    return np.fromiter(map(zlib.crc32, map(str.encode, found)), np.uint64, len(found))


def character_grams(text: str, size: int = CHARACTERS) -> Hashes:
    """A hash for each run of `size` characters of the words."""
    signs = np.frombuffer(" ".join(words(text)).encode("utf-32-le", "replace"), np.uint32)
    return grams(signs.astype(np.uint64), size)


def grams(values: Hashes, size: int) -> Hashes:
    """A hash for each run of `size` values; of all values where there are fewer."""
    size = min(size, len(values))
    total = np.zeros(len(values) - size + 1 if size else 0, np.uint64)
    for place in range(size):
        total = (total + values[place : place + len(total)]) * STEP
        total ^= total >> np.uint64(29)
    return total


# ---- evaluation prompts ----------------------------------------------------------------------------------------------


def prompt_grams(prompts: Iterable[str]) -> Hashes:
    """Sorted hashes of what a row must not hold: any 13 successive words of a prompt, or a shorter prompt as a whole message."""
    found = [grams(word_hashes(prompt), OVERLAP_WORDS) for prompt in prompts]
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *found]))


def overlaps(message: Hashes, prompts: Hashes) -> bool:
    """Whether the words of a message hold one of `prompt_grams`."""
    if not len(prompts):
        return False
    own = grams(message, OVERLAP_WORDS)
    return bool((prompts[np.searchsorted(prompts[:-1], own)] == own).any())


# ---- near-duplicates -------------------------------------------------------------------------------------------------


@cache
def _permutations() -> Any:
    from datasketch import MinHash

    return MinHash(num_perm=PERMUTATIONS, seed=1, scheme="affine32").permutations


def signature(found: Hashes) -> NDArray[np.uint32]:
    """MinHash [P] of a set of grams: two signatures agree in a share of places that estimates the sets' Jaccard similarity."""
    from datasketch import MinHash

    sketch = MinHash(num_perm=PERMUTATIONS, seed=1, scheme="affine32", permutations=_permutations(), hashfunc=int)
    short = np.unique((found >> np.uint64(32)).astype(np.uint32)).tolist()
    for start in range(0, len(short), GRAMS_AT_ONCE):
        sketch.update_batch(short[start : start + GRAMS_AT_ONCE])
    return sketch.hashvalues.astype(np.uint32)


def clusters(signatures: NDArray[np.uint32], keys: Hashes, similarity: float) -> NDArray[np.int64]:
    """For each of N texts the index of the member of its cluster with the least key.

    A cluster is what pairs of at least `similarity` join, directly or over others. The result does not depend on the order of
    the texts. Pairs are sought as in locality-sensitive hashing, so a few that are barely similar enough are missed.
    """
    from datasketch import MinHashLSH
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    if not len(keys):
        return np.zeros(0, np.int64)
    index = MinHashLSH(threshold=similarity, num_perm=PERMUTATIONS, weights=(0.1, 0.9))  # rather look at a pair too many
    by_key = np.argsort(keys, kind="stable")
    rank = np.empty_like(by_key)
    rank[by_key] = np.arange(len(keys))
    label, count = np.arange(len(keys)), len(keys)
    for band in range(index.b):
        leaders, members = _band_pairs(signatures[:, band * index.r : (band + 1) * index.r], rank)
        apart = label[leaders] != label[members]
        leaders, members = _similar(signatures, leaders[apart], members[apart], similarity)
        edges = coo_array((np.ones(len(leaders), bool), (label[leaders], label[members])), shape=(count, count))
        count, joined = connected_components(edges, directed=False)
        label = joined[label]
    least = np.full(count, len(keys))
    np.minimum.at(least, label, rank)
    return by_key[least[label]]


def _band_pairs(band: NDArray[np.uint32], rank: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of the first text, by rank, of each group whose numbers in this band are equal, with each other text of the group."""
    mixed = np.zeros(len(band), np.uint64)
    for column in range(band.shape[1]):
        mixed = (mixed + band[:, column]) * STEP
        mixed ^= mixed >> np.uint64(29)
    order = np.lexsort((rank, mixed))
    opens = np.concatenate([[True], mixed[order][1:] != mixed[order][:-1]])
    leaders = order[opens][np.cumsum(opens) - 1]
    return leaders[~opens], order[~opens]


def _similar(
    signatures: NDArray[np.uint32], first: NDArray[np.int64], second: NDArray[np.int64], similarity: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    kept = np.zeros(len(first), bool)
    for start in range(0, len(first), PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        kept[part] = (signatures[first[part]] == signatures[second[part]]).mean(axis=1) >= similarity
    return first[kept], second[kept]


def first_of_each(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Which entries are the first of their value."""
    first = np.zeros(len(values), bool)
    first[np.unique(values, return_index=True)[1]] = True
    return first
