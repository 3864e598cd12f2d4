"""fp32 greedy decoding with drafts gives the target's own text: every block size, alone and in batches."""

import pytest

from dflash_core.decoding.cache import DecodingTarget
from dflash_core.decoding.speculate import decode
from dflash_core.modeling.target import load_model
from tests.decoding.texts import LAYERS, NEVER, Oracle, alone, prompt_of
from tests.fakes import save_target

pytestmark = pytest.mark.slow
TIE = 1e-4


def test_a_hundred_prompts_of_every_block_size(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Drafts are right by two thirds, so rounds end everywhere. A text may differ only where the margin is below 1e-4."""
    path = save_target(tmp_path_factory.mktemp("varied"), initializer_range=0.3, seed=2)
    model = load_model(str(path), dtype="float32", device="cpu", attention="auto")
    target = DecodingTarget(model, LAYERS, device="cpu")
    prompts = [prompt_of(seed, 2 + seed % 23) for seed in range(100)]
    alone_texts = [decode(target, [prompt], limits=[24], stop_ids=NEVER)[0] for prompt in prompts]
    assert alone_texts[7].tokens == alone(target, prompts[7], 24)
    known = [[*prompt, *text.tokens] for prompt, text in zip(prompts, alone_texts, strict=True)]
    ties = []
    for block_size in range(2, 17):
        for batch_size in (1, 8):
            oracle = Oracle(known, block_size - 1, wrong=0.3, seed=block_size)
            for start in range(0, 100, batch_size):
                some = slice(start, start + batch_size)
                texts = decode(target, prompts[some], limits=[24] * len(prompts[some]), stop_ids=NEVER, proposer=oracle)
                for number, (text, own) in enumerate(zip(texts, alone_texts[some], strict=True), start):
                    if text.tokens != own.tokens:
                        place = next(i for i, (a, b) in enumerate(zip(text.tokens, own.tokens, strict=True)) if a != b)
                        assert own.margins[place] < TIE, (block_size, batch_size, number, place)
                        ties.append((block_size, batch_size, number, place, own.margins[place]))
    print(f"differences at ties: {ties or 'none'}")
