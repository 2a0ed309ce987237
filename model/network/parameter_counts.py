"""Counts a network's parameters by its parts."""

from __future__ import annotations

from collections import Counter

from model.attention.reference import ReferenceBackend
from model.config.model import ModelConfig
from model.network.build import build_model

_SUBLAYERS = {
    "attn": "attention",
    "relative": "attention",
    "cross": "cross attention",
    "mlp": "MLP",
    "bias": "position bias",
}


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """The number of parameters of every part of a model, by the part's name in words; tied matrices count once."""
    counts: Counter[str] = Counter()
    for name, parameter in build_model(config, ReferenceBackend()).named_parameters():
        counts[part_of(name)] += parameter.numel()
    return dict(counts)


def part_of(name: str) -> str:
    """The part that a parameter belongs to, in words."""
    path = name.split(".")
    if path[0] not in ("encoder", "decoder"):
        return {"tokens": "token table", "patches": "patch embedding"}.get(path[0], path[0])
    if path[1] != "layers":
        return f"{path[0]} " + {"bias": "position bias", "final_norm": "norms"}.get(path[1], "embeddings")
    sublayer = path[3]
    if "norm" in name or sublayer.endswith(("_in", "_out")):
        return f"{path[0]} norms"
    return f"{path[0]} {_SUBLAYERS[sublayer]}"
