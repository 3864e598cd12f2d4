"""Procedural chat for the quickstart: short requests whose answers repeat what the request said.

    request  = opener + verb + task + role + word + closer     ("Hello. Plan a trip from Zobelmat. Thank you.")
    answer   = the task's own order of a few common steps, and the request's word again and again

The template is a request without its word; the word, invented, is the slot value. An answer cannot be guessed from its own
last words: which steps follow depends on the task, and the word comes from the request, so a drafter has to read the
target's hidden states to do well. Templates and words are split by hash into two disjoint parts; a held-out conversation
shares neither a template nor a word with any training conversation.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator

OPENERS = ("", "Hello. ", "Please help me. ", "I need something. ", "Quick one: ")
CLOSERS = ("", " Thank you.", " Tell me when it is done.", " What will you do?")
VERBS = ("Plan", "Arrange", "Prepare", "Set up")

# task -> (role, steps before the break, steps after it); the same few words in another order
TASKS = {
    "meeting": ("for", "salt, mix, rest, fill, wash, cut", "cool, cut, salt, turn, wash, cool"),
    "parcel": ("from", "stir, wash, cut, rest, cut, stir", "cut, cool, rest, wash, turn, cut"),
    "lunch": ("with", "stir, fill, turn, wash, turn, rest", "wash, stir, wash, cool, mix, wait"),
    "trip": ("from", "rest, mix, cool, cut, turn, wait", "cool, fill, mix, cut, turn, fill"),
    "lesson": ("with", "stir, salt, cut, cool, press, cut", "turn, wash, turn, stir, bake, fill"),
    "repair": ("at", "cool, rest, salt, bake, turn, bake", "salt, wait, stir, mix, press, stir"),
    "concert": ("for", "cut, turn, wait, cool, bake, salt", "press, bake, wait, turn, cut, cool"),
    "garden": ("at", "rest, mix, salt, mix, bake, rest", "wash, fill, cut, cool, turn, salt"),
}
ANSWER = "Sure: {role} {word} we {before}; then {role} {word} we {after}. That is all {role} {word}."

FOLLOW_UP = ("Good. Do it again.", "Again {role} {word}: {after}. Then we {before} {role} {word}.")


def is_heldout(text: str, share: float = 0.2) -> bool:
    """Whether a template or a word belongs to the held-out part: decided by its own hash, so it never changes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32 < share


def _syllables(count: int, seed: int) -> tuple[str, ...]:
    """Distinct consonant-vowel-consonant syllables, the same ones for a seed; none belongs to two seeds below three."""
    every = ["".join(letters) for letters in itertools.product("bdlmnrtvz", "aeo", "bdlmnrtvz")]
    return tuple(random.Random(seed).sample(every[seed::3], count))


# A word is three syllables, each from its own few: so many words that none can be known by heart.
PARTS = tuple(_syllables(24, seed) for seed in range(3))
STEMS = tuple(stem.capitalize() for stem in PARTS[0])
WORDS = tuple("".join(parts) for parts in itertools.product(STEMS, PARTS[1], PARTS[2]))


def templates(heldout: bool) -> list[tuple[str, str]]:
    """All (task, request with a {word} slot) of one part."""
    found = []
    for task, (role, *_) in TASKS.items():
        for opener, verb, closer in itertools.product(OPENERS, VERBS, CLOSERS):
            template = f"{opener}{verb} a {task} {role} {{word}}.{closer}"
            if is_heldout(template) == heldout:
                found.append((task, template))
    return found


def conversations(seed: int, heldout: bool) -> Iterator[list[dict[str, str]]]:
    """Endless conversations of one part: OpenAI messages, one tenth of them with a second turn."""
    rng = random.Random(f"{seed}/{heldout}")
    pool = templates(heldout)
    words = [word for word in WORDS if is_heldout(word) == heldout]
    while True:
        task, template = rng.choice(pool)
        role, before, after = TASKS[task]
        slots = {"role": role, "word": rng.choice(words), "before": before, "after": after}
        turns = [(template, ANSWER)] + [FOLLOW_UP] * (rng.random() < 0.1)
        yield [
            {"role": speaker, "content": text.format(**slots)}
            for turn in turns
            for speaker, text in zip(("user", "assistant"), turn, strict=True)
        ]
