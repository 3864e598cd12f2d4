"""A target whose layers are spread over several devices, one run of neighbouring layers each.

    ids -> embedding (first device) -> layers 0..a (first) -> layers a+1..b (second) -> ... -> norm, head (first)

Each module brings what it is given to its own device, so the model's own forward pass stays as it is; caches lie where their
layers are. Only one device works at a time: this is for targets that do not fit on one, not for speed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn


def spread(model: Any, decoder: Any, devices: Sequence[str]) -> Any:
    """Moves `model`, whose layers are `decoder.layers`, onto `devices`; returns it. All that is no layer goes to the first."""
    layers = list(decoder.layers)
    decoder.layers = nn.ModuleList()
    model.to(devices[0])
    decoder.layers = nn.ModuleList(layers)
    places = {layer: devices[number * len(devices) // len(layers)] for number, layer in enumerate(layers)}
    for module in (*decoder.children(), model.get_output_embeddings()):
        if module is not None and module is not decoder.layers:
            places[module] = devices[0]
    for module, device in places.items():
        module.to(device)
        module.register_forward_pre_hook(partial(_bring, device), with_kwargs=True)
    return model


def _bring(device: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return moved(args, device), moved(kwargs, device)


def moved(value: Any, device: str) -> Any:
    """Tensors of a value on `device`, through tuples, lists and dictionaries; anything else, as a cache, as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple | list):
        return type(value)(moved(each, device) for each in value)
    if isinstance(value, dict):
        return {key: moved(each, device) for key, each in value.items()}
    return value
