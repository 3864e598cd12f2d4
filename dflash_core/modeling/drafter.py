"""The DFlash drafter: a few Qwen3-shaped layers that denoise a block in one pass.

    target_hidden [B,T,K*H] --fc, hidden_norm--> context c --k_proj, v_proj of each layer--> context keys and values
    block ids -> target embedding -> layers( attention over [context | block], MLP ) -> norm -> target lm_head

Tensor names and arithmetic are those of z-lab's checkpoints (11 L + 3 tensors, no prefix, neither embedding nor head). The
context enters attention without input_layernorm, and its keys and values are computed once per token: training computes
them for a whole row, decoding adds those of newly committed tokens to a cache.

    training and our decoding: context, denoise        transformers' generate(assistant_model=drafter): forward, config, device
"""

from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, Qwen3Config
from transformers.modeling_outputs import BaseModelOutput

from dflash_core.modeling.attention import BlockView, attend, one_block
from dflash_core.modeling.fused import rms_norm, rotate
from dflash_core.modeling.rope import frequencies
from dflash_core.records import DrafterShape

KeyValue = tuple[Tensor, Tensor]  # [B, kv_heads, T, head_dim] each


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean of squares in fp32 (Qwen3)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Rotary(nn.Module):
    """cos and sin [B, T, head_dim] of absolute positions, NeoX halves; frequencies stay fp32 and are no parameter."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.inverse, self.factor = frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        inverse = torch.tensor(self.inverse, device=positions.device, dtype=torch.float32)
        angles = positions.unsqueeze(-1).float() * inverse  # [B, T, head_dim / 2]
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.factor, angles.sin() * self.factor


class Attention(nn.Module):
    """Grouped-query attention whose keys and values come from the context and from the block."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        hidden, dim = shape.hidden_size, shape.head_dim
        self.head_dim = dim
        self.q_proj = nn.Linear(hidden, shape.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, shape.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * dim, hidden, bias=False)
        self.q_norm = RMSNorm(dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(dim, shape.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # [B, T, heads, head_dim]

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> KeyValue:
        """Rotated keys and plain values of context or block states x [B, T, H]."""
        key = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        return rotate(key, *rotary), self._heads(self.v_proj(x)).transpose(1, 2)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], context: KeyValue, view: BlockView | None) -> Tensor:
        query = rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), *rotary)
        out = attend(query, context, self.keys_values(x, rotary), view)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """down(silu(gate) * up)."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], context: KeyValue, view: BlockView | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, context, view)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The trained model. Embedding and head are the target's, passed in by the caller."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rotary = Rotary(shape)

    def context(self, target_hidden: Tensor, *, start: int | Tensor = 0) -> list[KeyValue]:
        """Keys and values of every layer for tapped states [B, T, K*H] at positions start .. start+T-1; `start` may be [B, 1]."""
        rows, length, _ = target_hidden.shape
        states = self.hidden_norm(self.fc(target_hidden))
        rotary = self.rotary((start + torch.arange(length, device=target_hidden.device)).expand(rows, -1))
        return [cast(Layer, layer).self_attn.keys_values(states, rotary) for layer in self.layers]

    def denoise(self, embeddings: Tensor, positions: Tensor, context: list[KeyValue], view: BlockView | None = None) -> Tensor:
        """Final-normed states [B, Q, H] of block slots given their embeddings [B, Q, H] and absolute positions [B, Q].

        `view` says what each slot sees, but for windows; None: everything (one block, context up to its anchor).
        """
        rotary = self.rotary(positions)
        views = self._views(view, rows=len(embeddings), slots=embeddings.shape[1], key=context[0][0])
        for layer, key_value, own in zip(self.layers, context, views, strict=True):
            embeddings = layer(embeddings, rotary, key_value, own)
        return self.norm(embeddings)

    def _views(self, view: BlockView | None, *, rows: int, slots: int, key: Tensor) -> list[BlockView | None]:
        """What the slots see in each layer, whose context keys are like `key`."""
        shape = self.shape
        if shape.sliding_window is None:
            return [view] * shape.num_layers
        view = view or one_block(rows=rows, context_length=key.shape[2], block_size=slots, device=key.device)
        sliding = view.sliding(shape.sliding_window, causal=shape.sliding_causal)
        return [sliding if layer in shape.sliding_layers else view for layer in range(shape.num_layers)]

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        cache: Cache,
    ) -> BaseModelOutput:
        """A pass as `target.generate(assistant_model=drafter, speculation_type="dflash")` of transformers makes it.

        noise_embeds [1, S, H]: the block's, anchor first. context_hidden_states [1, n, K*H]: of the tokens committed since the
        last pass, position_ids [1, n + S] theirs and the block's. `cache` gets the context and S empty places: the caller takes
        the block's off before the next pass. Raises ValueError where `attention_mask` hides a token, since nothing may be padded, and
        for a drafter whose anchor drafts, since the caller reads the slots behind it.
        """
        if self.shape.sample_from_anchor:
            raise ValueError(
                "sample_from_anchor: generate() reads slot k as the token at anchor + k; decode this drafter with ours"
            )
        if attention_mask is not None and not bool(attention_mask.all()):
            hidden = int((attention_mask == 0).sum())
            raise ValueError(f"attention_mask hides {hidden} of {attention_mask.numel()} tokens: give the prompt without padding")
        size, dtype = noise_embeds.shape[1], self.fc.weight.dtype
        context = []
        for number, pair in enumerate(self.context(context_hidden_states.to(dtype), start=position_ids[:, :1])):
            key, value = cache.update(*(pad(part, (0, 0, 0, size)) for part in pair), number)
            context.append((key[:, :, :-size], value[:, :, :-size]))
        states = self.denoise(noise_embeds.to(dtype), position_ids[:, -size:], context)
        return BaseModelOutput(last_hidden_state=states.to(noise_embeds.dtype))

    @cached_property
    def config(self) -> Qwen3Config:
        """What transformers reads of a drafter: its block, and the layers that its cache is made for."""
        shape = self.shape
        return Qwen3Config(
            block_size=shape.block_size,
            mask_token_id=shape.mask_token_id,
            target_layer_ids=list(shape.target_layer_ids),
            num_hidden_layers=shape.num_layers,
            layer_types=["full_attention"] * shape.num_layers,
        )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.fc.weight.device


def new_drafter(shape: DrafterShape, seed: int) -> Drafter:
    """A drafter with matrices normal(0, 1 / sqrt(inputs)) and norms of one, the same for the same seed. fp32 on the CPU.

    The usual 0.02 is that for some 2,500 inputs; at a hidden size of 128 it took twice the steps to the same loss.
    """
    drafter = Drafter(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
    return drafter


def tensor_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of each of the 11 L + 3 tensors, written down apart from the modules above so that both can be compared."""
    hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_heads * dim, shape.num_kv_heads * dim
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(shape.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(shape.num_layers):
        shapes |= {f"layers.{i}.{name}.weight": size for name, size in layer.items()}
    return shapes
