"""Counts a network's parameters by its parts."""

from __future__ import annotations

from collections import Counter

from triptych.model.attention.reference import ReferenceBackend
from triptych.model.config.layer import ExpertsConfig
from triptych.model.config.model import ModelConfig
from triptych.model.network.build import build_model

_SUBLAYERS = {
    "attn": "attention",
    "delta": "attention",
    "relative": "attention",
    "cross": "cross attention",
    "mlp": "MLP",
    "embedding": "layer embeddings",
    "bias": "position bias",
}
_OF_STACK = {  # outside its layers
    "relative": "position table",
    "convolution": "convolution",
    "layer_embeddings": "layer embeddings",
}


def parameters_by_part(config: ModelConfig, *, each_use: bool = False) -> dict[str, int]:
    """Return the number of parameters of every part of a model, by the part's name in words; tied matrices count once.

    With `each_use` the weights that layers share count once for each of these layers, and of experts those of a token.
    """
    counts: Counter[str] = Counter()
    repeated = {"head.weight"} if config.head is not None and config.head.repeats_table else set()
    for name, parameter in build_model(config, ReferenceBackend()).named_parameters():
        if name in repeated:
            continue
        counts[part_of(name)] += _multiplied(config, name, parameter.numel()) if each_use else parameter.numel()
    return dict(counts)


def _multiplied(config: ModelConfig, name: str, count: int) -> int:
    """Return how many numbers of the parameter `name`, which has `count`, a token is multiplied with, in all layers."""
    path = name.split(".")
    if path[0] in config.stacks and path[1] == "layers" and path[3] == "mlp" and path[4] in ("up", "down"):
        feed_forward = config.stacks[path[0]].distinct_layers[int(path[2])].feed_forward
        if isinstance(feed_forward, ExpertsConfig):
            count = count // feed_forward.count * feed_forward.per_token
    return count * _uses(config, name)


def _uses(config: ModelConfig, name: str) -> int:
    """Return how many layers compute with the parameter `name`; 1 for one that is no layer's."""
    path = name.split(".")
    if path[0] not in config.stacks or path[1] != "layers":
        return 1
    return config.stacks[path[0]].weights_of.count(int(path[2]))


def part_of(name: str) -> str:
    """Return the part that a parameter belongs to, in words."""
    path = name.split(".")
    if path[0] not in ("encoder", "decoder", "vision", "tower"):
        names = {"tokens": "token table", "source_tokens": "encoder's token table", "patches": "patch embedding"}
        names |= {"audio": "convolutions", "joint": "space of texts and images", "pictures": "patches and merger"}
        return names.get(path[0], path[0])
    if path[1:3] == ["layer_embeddings", "tokens"]:
        return f"{path[0]} layer token table"
    if path[1] != "layers":
        return f"{path[0]} " + {"bias": "position bias", "final_norm": "norms", **_OF_STACK}.get(path[1], "embeddings")
    if "norm" in name:
        return f"{path[0]} norms"
    return f"{path[0]} {_SUBLAYERS.get(path[3], 'norms')}"  # with learned scales of sublayers and channels
