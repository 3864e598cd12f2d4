"""The real Qwen3 tokenizer with real templates, where DFLASH_TEST_ASSETS names the assets."""

import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def qwen(assets_dir: Path) -> Callable[[str], Any]:
    """`qwen("Qwen-Qwen3-0.6B")`: Qwen3's tokenizer with the template of that file."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    packed = (assets_dir / "tokenizers" / "qwen3_tokenizer.json.xz").read_bytes()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(lzma.decompress(packed).decode()), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )

    def with_template(name: str) -> Any:
        tokenizer.chat_template = (assets_dir / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
        return tokenizer

    return with_template
