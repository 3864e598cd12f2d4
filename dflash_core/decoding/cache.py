"""The target while decoding a batch: its key-value cache holds exactly the committed tokens of every request.

    forward(new tokens of each request) -> logits, tapped states        keep(how many of them were committed)

Requests commit different numbers of tokens. What a request did not commit is masked, and columns that no request needs are cut
off; a request alone has no gaps, so its cache is cropped exactly. Requests that ended are taken out of the batch.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_core.modeling.target import Taps, decoder_of

FULL, WINDOWED = "full_attention", {"sliding_attention", "chunked_attention"}


class DecodingTarget:
    """The whole target with a key-value cache, tapped."""

    def __init__(self, model: Any, layer_ids: Sequence[int], *, device: str, taps: Taps | None = None) -> None:
        """`taps`: those that the model has already. Raises ValueError for a target that cannot be decoded here."""
        self.model, self.device = model, device
        kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or [FULL])
        if unknown := kinds - WINDOWED - {FULL}:
            raise ValueError(
                f"{type(model).__name__} has layers of kind {', '.join(sorted(unknown))}: their state cannot be taken back after a "
                "rejected draft, so this target can be trained for but not decoded here; measure it on a server (--endpoint)"
            )
        self.windowed = bool(kinds & WINDOWED)
        named = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"  # the older name, which later versions do not know
        self._taps = taps or Taps(decoder_of(model), layer_ids)

    def start(self, rows: int) -> None:
        """Empties the cache, for a batch of `rows` requests. Raises ValueError for a batch of a target with windows."""
        if self.windowed and rows > 1:
            raise ValueError(f"evaluation.batch_size {rows}: the target has sliding windows, which gaps would shift; set it to 1")
        self._cache = DynamicCache()
        self._valid = torch.zeros(rows, 0, dtype=torch.bool)
        self._lengths = torch.zeros(rows, dtype=torch.long)
        self._new = 0

    @torch.no_grad()
    def forward(self, ids: Sequence[Sequence[int]], *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """(logits [B, n, V] fp32, target_hidden [B, n, K*H]) of the next tokens of each request, n the most of any.

        `last_only`: logits [B, 1, V] of each request's last token alone.
        """
        counts = torch.tensor([len(row) for row in ids])
        self._new = int(counts.max())
        inputs = torch.tensor([[*row, *[0] * (self._new - len(row))] for row in ids])
        columns = torch.arange(self._new)
        self._valid = torch.cat([self._valid, columns < counts.unsqueeze(1)], dim=1)
        last = (counts - 1).unique()
        out = self.model(
            input_ids=inputs.to(self.device),
            position_ids=(self._lengths.unsqueeze(1) + columns).to(self.device),
            attention_mask=None if bool(self._valid.all()) else self._valid.long().to(self.device),
            use_cache=True,
            logits_to_keep=last.to(self.device) if last_only else 0,
            **{self._cache_name: self._cache},
        )
        logits = out.logits.float()
        if last_only:
            logits = logits[torch.arange(len(counts)), torch.searchsorted(last, counts - 1)].unsqueeze(1)
        return logits, self._taps.take()

    def keep(self, counts: Sequence[int]) -> None:
        """Of each request's tokens in the last forward pass, the first so many were committed; the others are forgotten."""
        total = self._valid.shape[1]
        before = total - self._new
        committed = torch.tensor(counts)
        self._valid[:, before:] = torch.arange(self._new) < committed.unsqueeze(1)
        self._lengths += committed
        used = int(self._valid.any(0).nonzero().max()) + 1
        if used < total:
            self._cache.crop(used - total)
            self._valid = self._valid[:, :used]

    def select(self, rows: Sequence[int]) -> None:
        """Only these requests go on."""
        chosen = torch.tensor(rows)
        self._cache.batch_select_indices(chosen)  # on the CPU, from where any layer's device takes it
        self._valid, self._lengths = self._valid[chosen], self._lengths[chosen]
