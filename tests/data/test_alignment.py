"""Places in a text as places in its ids: what stands before is what the tokenizer makes of the text before, for both families."""

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from dflash_core.data.alignment import Alignment, encode_all, encode_one, open_encoder
from tests.data.assets import tokenizer_bytes
from tests.fakes import IM_END, make_tokenizer

PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "\n",
    "\n\n",
    " ",
    "  ",
    "user",
    "assistant",
    "Hello",
    " there",
    "<|im",
    "e\u0301",
    "\ufeff",
    "👨‍👩‍👧",
    "42",
]


@pytest.fixture(scope="module", params=["small", "qwen", "mistral"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "small":
        return make_tokenizer()
    assets: Path = request.getfixturevalue("assets_dir")
    backend = Tokenizer.from_str(tokenizer_bytes(assets, request.param))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_place_is_where_the_ids_of_the_text_before_it_end(tokenizer: Any) -> None:
    """Against the tokenizer itself, on random texts and all their places: never a wrong place, and always one at an added token."""
    encoder, generator = open_encoder(tokenizer), random.Random(0)
    for _ in range(60):
        text = "".join(generator.choices(PIECES, k=12))
        ids = tokenizer.encode(text, add_special_tokens=False)
        aligned = Alignment(encoder, text, ids)
        for place in range(1, len(text) + 1):
            alone = tokenizer.encode(text[:place], add_special_tokens=False)
            found = aligned.place(place)
            splits = any(text.startswith(token, place - k) for token in encoder.added for k in range(1, len(token)))
            if not splits:  # in the middle of an added token there is no place
                assert found == (len(alone) if ids[: len(alone)] == alone else None)
                assert aligned.before(place) == alone
            if text.endswith("<|im_end|>", 0, place):
                assert found == len(alone)


def test_ids_after_a_place_are_those_of_the_rest_alone() -> None:
    tokenizer = make_tokenizer()
    text = "Hello there<|im_end|>\nHello"
    aligned = Alignment(open_encoder(tokenizer), text, tokenizer.encode(text, add_special_tokens=False))
    for place in (3, 5, 6, 11, 21, 24):
        assert aligned.after(place) == tokenizer.encode(text[place:], add_special_tokens=False)


def test_a_token_across_the_place_has_none() -> None:
    tokenizer = make_tokenizer()
    text = "<|im_end|>: the heron"
    assert Alignment(open_encoder(tokenizer), text, tokenizer.encode(text)).place(len("<|im_end|>: ")) is None


def test_added_tokens_that_the_ids_do_not_have_leave_the_whole_text_to_compare() -> None:
    tokenizer = make_tokenizer()
    encoder = open_encoder(tokenizer)
    ids = tokenizer.encode("He said ") + tokenizer.encode("so")
    aligned = Alignment(encoder, "He said <|im_end|>", [*ids, IM_END])
    assert aligned.place(3) == len(tokenizer.encode("He "))


def test_many_texts_are_encoded_as_one_by_one(tokenizer: Any) -> None:
    texts = ["", "Hello there", "<|im_start|>user\nHi<|im_end|>\n", "e\u0301 👨‍👩‍👧"]
    encoder = open_encoder(tokenizer)
    assert encode_all(encoder, texts) == [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert [encode_one(encoder, text) for text in texts * 2] == encode_all(encoder, texts * 2)
    assert encode_all(encoder, []) == []
