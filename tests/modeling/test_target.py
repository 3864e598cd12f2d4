"""Taps against hooks on the whole model and against transformers' own hidden states."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_core.config import TrainingConfig
from dflash_core.modeling.census import read_census
from dflash_core.modeling.target import TapReplica, check_padding, choose_attention, load_ends, load_model, read_facts
from dflash_core.records import Batch
from tests import fakes
from tests.fakes import END_OF_TEXT, IM_END, VOCAB, make_batch


@pytest.fixture(scope="module")
def loud_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, weights that matter, every norm weight 3.0: a state after the final norm cannot pass for one before."""
    directory = fakes.save_target(tmp_path_factory.mktemp("loud"), num_hidden_layers=6, initializer_range=0.15, seed=4)
    tensors = load_file(directory / "model.safetensors")
    louder = {name: torch.full_like(value, 3.0) if "norm" in name else value for name, value in tensors.items()}
    save_file(louder, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def replica(path: Path, layer_ids: tuple[int, ...], **changes: Any) -> TapReplica:
    return TapReplica(str(path), layer_ids=layer_ids, **{"dtype": "float32", "device": "cpu", "attention": "auto", **changes})


def random_batch(lengths: list[int], *, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    rows = [(torch.randint(4, VOCAB, (n,), generator=generator).tolist(), [1] * n) for n in lengths]
    return make_batch(rows)


@pytest.mark.parametrize("layer", range(5))
def test_cut_replica_equals_the_whole_model(loud_target: Path, layer: int) -> None:
    batch = random_batch([13, 13])
    whole = AutoModelForCausalLM.from_pretrained(loud_target, dtype=torch.float32).eval()
    seen: list[torch.Tensor] = []
    whole.model.layers[layer].register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        states = whole(batch.input_ids.long(), output_hidden_states=True).hidden_states
    tapped = replica(loud_target, (layer,)).tap(batch).target_hidden
    assert torch.equal(tapped, seen[0])
    assert torch.equal(tapped, states[layer + 1])


@pytest.mark.parametrize("packed", [False, True])
def test_a_teacher_replica_also_gives_the_state_that_the_head_reads(loud_target: Path, packed: bool) -> None:
    batch = random_batch([13, 9])
    whole = AutoModelForCausalLM.from_pretrained(loud_target, dtype=torch.float32).eval()
    tapped = replica(loud_target, (0, 3), packed=packed, teacher=True).tap(batch)
    assert tapped.last_hidden is not None
    with torch.no_grad():
        for row, length in enumerate((13, 9)):
            logits = whole(batch.input_ids[row : row + 1, :length].long()).logits[0]
            torch.testing.assert_close(whole.lm_head(tapped.last_hidden[row, :length]), logits, atol=1e-4, rtol=1e-4)
    plain = replica(loud_target, (0, 3), packed=packed).tap(batch)
    assert plain.last_hidden is None
    assert torch.equal(plain.target_hidden, tapped.target_hidden)


def test_layers_stand_side_by_side_in_the_order_asked(loud_target: Path) -> None:
    batch = random_batch([9])
    together = replica(loud_target, (1, 2, 4)).tap(batch).target_hidden
    apart = [replica(loud_target, (layer,)).tap(batch).target_hidden for layer in (1, 2, 4)]
    assert together.shape == (1, 9, 3 * 32)
    assert torch.equal(together, torch.cat(apart, dim=-1))


def test_replica_keeps_neither_head_nor_later_layers(loud_target: Path) -> None:
    kept = replica(loud_target, (0, 2))
    assert len(kept._decoder.layers) == 3
    assert not any("lm_head" in name for name, _ in kept._decoder.named_modules())
    assert not kept.tap(random_batch([4])).target_hidden.requires_grad


def test_what_stands_beside_a_row_changes_nothing(loud_target: Path) -> None:
    tap = replica(loud_target, (0, 3)).tap
    batch = random_batch([7, 20])
    alone = make_batch([(batch.input_ids[0, :7].tolist(), [1] * 7)])
    padded = tap(batch).target_hidden[0, :7]
    batch.input_ids[0, 7:] = torch.randint(4, VOCAB, (13,), generator=torch.Generator().manual_seed(5))
    assert torch.equal(tap(batch).target_hidden[0, :7], padded)
    torch.testing.assert_close(tap(alone).target_hidden[0], padded, atol=1e-4, rtol=1e-4)


def test_a_row_has_the_same_states_in_any_company(loud_target: Path) -> None:
    """Eight rows of one prefix, which a mix-up of rows would hide behind: all at once, in threes, and alone, twice each."""
    batch = random_batch([3, 5, 11, 17, 29, 41, 64, 97])
    batch.input_ids[:, :3] = batch.input_ids[0, :3]
    rows = [batch.input_ids[i, :length].tolist() for i, length in enumerate(batch.lengths.tolist())]
    tap = replica(loud_target, (1, 3)).tap
    expected = [tap(make_batch([(row, [1] * len(row))])).target_hidden[0] for row in rows]
    for size in (8, 3, 1):
        for _ in range(2):
            for first in range(0, 8, size):
                part = rows[first : first + size]
                found = tap(make_batch([(row, [1] * len(row)) for row in part])).target_hidden
                for i, row in enumerate(part):
                    torch.testing.assert_close(found[i, : len(row)], expected[first + i], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(expected[6][3:5], expected[7][3:5], atol=1e-2), "the rows themselves differ"


def test_four_replicas_at_once_equal_one_after_the_other(loud_target: Path) -> None:
    replicas = [replica(loud_target, (1, 3)) for _ in range(4)]
    batches = [random_batch([5 + i % 7, 24], seed=i) for i in range(24)]
    expected = [replicas[0].tap(batch).target_hidden for batch in batches]

    def work(worker: int) -> list[tuple[int, torch.Tensor]]:
        return [(i, replicas[worker].tap(batches[i]).target_hidden) for i in range(worker, 24, 4)]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(work, range(4)):
            for i, hidden in found:
                assert torch.equal(hidden, expected[i])


# ---- what stands beside a row ----------------------------------------------------------------------------------------


def test_packed_taps_equal_each_rows_own(loud_target: Path) -> None:
    """Documents in one row, one of a single token among them, against each row by itself; padding is left at zero."""
    lengths = [7, 20, 1, 13, 1, 1, 20]
    batch = random_batch(lengths)
    packed = replica(loud_target, (0, 2, 4), packed=True).tap(batch).target_hidden
    assert packed.shape == (7, 20, 3 * 32)
    single = replica(loud_target, (0, 2, 4)).tap
    for row, length in enumerate(lengths):
        alone = single(make_batch([(batch.input_ids[row, :length].tolist(), [1] * length)])).target_hidden[0]
        change = (packed[row, :length] - alone).norm(dim=-1) / alone.norm(dim=-1)
        assert change.max() < 1e-5
        assert not packed[row, length:].any()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_taps_do_not_see_other_documents(loud_target: Path, attention: str) -> None:
    tap = replica(loud_target, (0, 4), packed=True, attention=attention).tap
    batch = random_batch([9, 14, 6])
    before = tap(batch).target_hidden
    batch.input_ids[0] = torch.randint(4, VOCAB, (14,), generator=torch.Generator().manual_seed(8))
    batch.input_ids[2] = batch.input_ids[2].flip(0)
    after = tap(batch).target_hidden
    torch.testing.assert_close(after[1], before[1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(after[0, :9], before[0, :9], atol=1e-2)


def mixes_rows(replica: TapReplica) -> None:
    """As experts of limited capacity do: every token feels all others of the batch."""
    replica._decoder.embed_tokens.register_forward_hook(lambda module, inputs, output: output + 0.1 * output.mean((0, 1)))


def stretches(replica: TapReplica) -> None:
    """As dynamic rope scaling does: a longer batch is another model."""
    replica._decoder.embed_tokens.register_forward_hook(lambda module, inputs, output: output * (1 + output.shape[1] / 100))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batching", ["padded", "equal", "packed"])
def test_a_plain_target_passes_the_probe(loud_target: Path, batching: Any, dtype: str) -> None:
    training = TrainingConfig(batching=batching, tokens_per_batch=256)
    kept = replica(loud_target, (0, 4), packed=batching == "packed", dtype=dtype)
    check_padding(kept, training, max_length=256, vocab_size=VOCAB)
    check_padding(kept, TrainingConfig(batching=batching, tokens_per_batch=1), max_length=1, vocab_size=VOCAB)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("spoil", "batching", "remedy"),
    [
        (mixes_rows, "padded", "set training.batching to equal"),
        (mixes_rows, "equal", "choose another"),
        (mixes_rows, "packed", "set training.batching to padded"),
        (stretches, "padded", "set training.batching to equal"),
        (stretches, "packed", "set training.batching to padded"),
        (stretches, "equal", None),
    ],
)
def test_a_target_that_feels_the_padding_is_refused_by_name(
    loud_target: Path, spoil: Any, batching: Any, remedy: str | None, dtype: str
) -> None:
    training = TrainingConfig(batching=batching, tokens_per_batch=256)
    spoilt = replica(loud_target, (0, 4), packed=batching == "packed", dtype=dtype)
    spoil(spoilt)
    if remedy is None:
        check_padding(spoilt, training, max_length=256, vocab_size=VOCAB)
        return
    with pytest.raises(ValueError, match=rf"target.path '{loud_target}': hidden states of a row of .* {remedy}"):
        check_padding(spoilt, training, max_length=256, vocab_size=VOCAB)


def test_the_probe_leaves_no_trace(loud_target: Path) -> None:
    """Neither in torch's own generator nor in what is tapped next."""
    kept, batch = replica(loud_target, (1,)), random_batch([9, 4])
    before, state = kept.tap(batch).target_hidden, torch.get_rng_state()
    check_padding(kept, TrainingConfig(), max_length=64, vocab_size=VOCAB)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(kept.tap(batch).target_hidden, before)


# ---- embedding, head, facts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_ends_are_the_models_own_embedding_and_head(tmp_path: Path, tied: bool) -> None:
    path = fakes.save_target(tmp_path / "target", tie_word_embeddings=tied, initializer_range=0.15)
    ends = load_ends(str(path), dtype="float32", device="cpu", attention="auto")
    tensors = load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding if tied else tensors["lm_head.weight"]
    assert torch.equal(ends.embed(torch.tensor([5, 7])), embedding[[5, 7]])
    states = torch.randn(3, 32)
    torch.testing.assert_close(ends.head(states), states @ head.T)
    assert not any(p.requires_grad for module in (ends.embed, ends.head) for p in module.parameters())
    assert torch.equal(embedding, head) == tied


def test_facts(target_dir: Path) -> None:
    facts = read_facts(str(target_dir))
    assert (facts.num_layers, facts.hidden_size, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (4, 32, 4, 2, 8)
    assert (facts.vocab_size, facts.rope_theta, facts.max_positions) == (VOCAB, 10000.0, 512)
    assert (facts.eos_ids, facts.pad_ids, facts.bos_ids) == ((IM_END,), (END_OF_TEXT,), ())


def edited(source: Path, directory: Path, file: str, **changes: Any) -> str:
    shutil.copytree(source, directory)
    path = directory / file
    value = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**value, **changes}))
    return str(directory)


def test_facts_know_every_stop_token(target_dir: Path, tmp_path: Path) -> None:
    path = edited(target_dir, tmp_path / "t", "generation_config.json", eos_token_id=[IM_END, 9, END_OF_TEXT])
    assert read_facts(path).eos_ids == (IM_END, 9, END_OF_TEXT)


def test_unsupported_rope_is_refused_by_name(target_dir: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    path = edited(target_dir, tmp_path / "t", "config.json", rope_parameters=rope)
    with pytest.raises(ValueError, match=rf"target\.path '{path}': rope_type dynamic is not supported; default, linear, llama3"):
        read_facts(path)


def test_missing_target_is_named() -> None:
    with pytest.raises(ValueError, match=r"target.path 'no_such_dir': no such directory"):
        read_facts("no_such_dir")
    with pytest.raises(ValueError, match=r"target.path '/nope': no such directory"):
        read_facts("/nope")


@pytest.mark.parametrize("read", [read_facts, read_census])
def test_a_directory_that_is_no_model_is_named(read: Callable[[str], object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^target\.path '{tmp_path}': no config of a transformers model .*[^\n]*$"):
        read(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "heron"}')
    with pytest.raises(ValueError, match=rf"^target\.path '{tmp_path}': no config of a transformers model .*heron"):
        read(str(tmp_path))


def test_attention_choice() -> None:
    assert choose_attention("auto", "cpu") == "sdpa"
    assert choose_attention("eager", "cpu") == "eager"
    with pytest.raises(ValueError, match="flash_attention_2 needs CUDA"):
        choose_attention("flash_attention_2", "cpu")


def test_models_are_frozen_and_in_the_asked_precision(target_dir: Path) -> None:
    model = load_model(str(target_dir), dtype="bfloat16", device="cpu", attention="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
