"""Procedural chat for the quickstart: short requests whose answers repeat what the request said.

    request  = opener + task + role phrases in some order + closer     (the *template*)
    roles    = "for X", "at Y", "with Z", ...                          (X, Y, Z: the *slot values*, invented words)
    answer   = one sentence frame a task, filled with the same words

An answer cannot be guessed from its own last words: which task, which roles and which words comes from the request, so a
drafter has to read the target's hidden states to do well. Templates and words are split by hash into two disjoint halves,
`train` and `heldout`; a held-out conversation shares neither a template nor a word with any training conversation.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator

OPENERS = ("", "Hello. ", "Please help me. ", "I need something. ", "Quick one: ")
CLOSERS = ("", " Thank you.", " Tell me when it is done.", " What will you do?")
VERBS = ("Plan", "Arrange", "Prepare", "Set up")
ROLES = ("for", "at", "with", "from")

# task -> (roles it uses, sentence frame of its answer)
TASKS: dict[str, tuple[tuple[str, ...], str]] = {
    "meeting": (
        ("for", "at", "with"),
        "The meeting for {for} is planned. It takes place at {at} with {with}. "
        "I will remind {for} and {with} to come to {at} on time.",
    ),
    "parcel": (
        ("for", "from", "at"),
        "A parcel from {from} is on its way. {for} can collect it at {at}. If {for} is late, {at} sends it back to {from}.",
    ),
    "lunch": (
        ("for", "with", "at"),
        "Lunch at {at} is booked. {for} will eat {with} there. The cook of {at} knows that {for} likes {with}.",
    ),
    "trip": (
        ("from", "at", "for"),
        "The trip starts from {from} and ends at {at}. {for} has a seat by the window. From {from} to {at} it takes one day, {for}.",
    ),
    "lesson": (
        ("with", "for", "from"),
        "Your lesson with {with} is ready, {for}. Bring the book from {from}. {with} will ask {for} about {from} first.",
    ),
    "repair": (
        ("at", "with", "from"),
        "The repair at {at} needs {with}. I ordered {with} from {from} today. When {from} delivers, work at {at} can begin.",
    ),
    "concert": (
        ("for", "from", "with"),
        "First plays {for}, then {with}. The band from {from} closes the concert. Tickets of {for} and {with} are sold in {from}.",
    ),
    "garden": (
        ("at", "for", "with"),
        "The garden at {at} belongs to {for}. Plant {with} near the wall. In spring {for} can pick {with} at {at}.",
    ),
}

FOLLOW_UP = ("Good. Now move it to {new}.", "It is moved to {new}. I told {first} that {new} is the new place, not {second}.")

STEMS = (
    *("Mar", "Bel", "Tor", "Vin", "Sel", "Dor", "Kan", "Lis", "Fen", "Gor", "Hal", "Jun", "Nor", "Pel", "Ros", "Sam"),
    *("Tam", "Ulf", "Wen", "Zan", "Ark", "Bran", "Cor", "Dul", "Erl", "Fro", "Gil", "Hur", "Ist", "Kol", "Lum", "Mis"),
)
ENDINGS = (
    *("ton", "wick", "dale", "mere", "ford", "holm", "gate", "ley", "by", "stad", "burg", "vik", "nes", "rup", "heim", "lund"),
    *("berg", "dorf", "hausen", "feld", "ow", "itz", "ova", "ino", "ara", "eda", "oni", "usk", "yan", "ekt", "amo", "ilo"),
)
WORDS = tuple((stem, ending) for stem in STEMS for ending in ENDINGS)


def is_heldout(text: str, share: float = 0.2) -> bool:
    """Whether a template or a word belongs to the held-out part: decided by its own hash, so it never changes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32 < share


def templates(heldout: bool) -> list[tuple[str, str]]:
    """All (task, request with {role} slots) of one part."""
    found = []
    for task, (roles, _) in TASKS.items():
        for opener, verb, order, closer in itertools.product(OPENERS, VERBS, itertools.permutations(roles), CLOSERS):
            phrases = " ".join(f"{role} {{{role}}}" for role in order)
            template = f"{opener}{verb} a {task} {phrases}.{closer}"
            if is_heldout(template) == heldout:
                found.append((task, template))
    return found


def conversations(seed: int, heldout: bool) -> Iterator[list[dict[str, str]]]:
    """Endless conversations of one part: OpenAI messages, one fifth of them with a second turn."""
    rng = random.Random(f"{seed}/{heldout}")
    pool = templates(heldout)
    words = [word for word in WORDS if is_heldout("".join(word)) == heldout]
    while True:
        task, template = rng.choice(pool)
        roles, frame = TASKS[task]
        *values, new = _distinct(rng, words, len(roles) + 1)
        slots = dict(zip(roles, values, strict=True))
        messages = [
            {"role": "user", "content": template.format(**slots)},
            {"role": "assistant", "content": frame.format(**slots)},
        ]
        if rng.random() < 0.2:
            ask, answer = FOLLOW_UP
            names = {"new": new, "first": slots[roles[0]], "second": slots[roles[1]]}
            messages += [
                {"role": "user", "content": ask.format(**names)},
                {"role": "assistant", "content": answer.format(**names)},
            ]
        yield messages


def _distinct(rng: random.Random, words: list[tuple[str, str]], count: int) -> list[str]:
    """Words that share neither stem nor ending, so that half a word says which one it is."""
    chosen: list[tuple[str, str]] = []
    while len(chosen) < count:
        stem, ending = rng.choice(words)
        if all(stem != a and ending != b for a, b in chosen):
            chosen.append((stem, ending))
    return [stem + ending for stem, ending in chosen]
