"""Which tensors of a checkpoint become integers, and what is written for each.

Layers become what `--quantization` keeps of them, and a folder says that it is to be served so: whatever stays floats
in it (a head, a matrix whose inputs do not fill words) is then rounded while it is loaded, to the same integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from triptych.model.attention.reference import ReferenceBackend
from triptych.model.checkpoint.folder import Checkpoint
from triptych.model.checkpoint.tensor_files import TensorSource
from triptych.model.errors import ConfigError
from triptych.model.families import family_for
from triptych.model.families.table.rules import LinearRule
from triptych.model.linear.base import linears
from triptych.model.linear.native import NativeLinear
from triptych.model.native.library import Kind
from triptych.model.network.build import build_model, tensor_shapes
from triptych.model.network.native_stack import native_linears
from triptych.model.network.weights import plan_tensors
from triptych.model.quantization.safetensors_file import Described

_WORD = 32  # bits


@dataclass(frozen=True, slots=True)
class Projection:
    """A stored matrix that becomes integers."""

    source: TensorSource
    stem: str  # its name without "weight"
    target: str  # the projection of the network that it is (a part of)
    kind: Kind
    group: int  # inputs that share a scale; 0: all of an output's
    transposed: bool  # in the checkpoint: [inputs, outputs]
    expert: int | None = None  # of a layer's experts; None: it is of none

    @property
    def bits(self) -> int:
        return 4 if self.kind is Kind.INT4 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        first, second = self.source.shape
        return (second, first) if self.transposed else (first, second)

    @property
    def packed(self) -> bool:
        """Whether integers lie in words of 32 bits ("pack-quantized"), rather than in bytes ("int-quantized")."""
        return self.group > 0

    @property
    def fills_words(self) -> bool:
        return not self.packed or self.shape[1] % (_WORD // self.bits) == 0

    def tensors(self) -> dict[str, Described]:
        """Return what is written for it: integers, scales and, for packed words, its shape."""
        outputs, inputs = self.shape
        scales = -(-inputs // self.group) if self.group else 1
        found = {"scale": Described(f"{self.stem}.weight_scale", "F32", (outputs, scales))}
        if not self.packed:
            return {"integers": Described(f"{self.stem}.weight", "I8", (outputs, inputs)), **found}
        words = Described(f"{self.stem}.weight_packed", "I32", (outputs, inputs * self.bits // _WORD))
        return {"integers": words, **found, "shape": Described(f"{self.stem}.weight_shape", "I64", (2,))}


def find_projections(
    checkpoint: Checkpoint, tensors: Mapping[str, TensorSource], form: str, dtype: torch.dtype
) -> dict[str, Projection]:
    """Return the matrices of layers that `--quantization` of this name keeps as integers, by stored name.

    Raises `ConfigError` for a model that is not quantised so, and if the tensors do not fit the network.
    """
    config = checkpoint.config
    if config.stored_as:
        stored_as = next(iter(config.stored_as.values()))
        raise ConfigError(
            f"{checkpoint.path.name} is quantised already: its projections are stored as {stored_as.name}"
        )
    network = build_model(config, ReferenceBackend(), native_linears(config, dtype, None, quantization=form))
    plan_tensors(config, tensors, tensor_shapes(network), checkpoint.described_by)
    kept = {
        linear.spec.name: linear
        for linear in linears(network)
        if isinstance(linear, NativeLinear) and linear.kind in (Kind.INT4, Kind.INT8) and linear.spec.name != "head"
    }
    family, found = family_for(config), dict[str, Projection]()
    stored = {family.canonical(name): name for name in tensors}
    for rule in family.rules(config):
        if not isinstance(rule, LinearRule) or rule.target not in kept:
            continue
        name = stored.get(f"{rule.source}.weight", "")
        stem, dot, tensor = name.rpartition(".")
        linear = kept[rule.target]
        if dot and tensor == "weight":
            expert = None
            if linear.spec.experts > 1 and rule.rows is not None:
                expert = rule.rows[0] // linear.spec.outputs_of_expert
            transposed = rule.transpose and rule.target not in config.in_order
            projection = Projection(tensors[name], stem, rule.target, linear.kind, linear.group, transposed, expert)
            if projection.fills_words:
                found[name] = projection
    if not found:
        raise ConfigError(
            f"{form}: the native kernels compute no layer of {config.model_type}, so none becomes integers"
        )
    return found


def describe(projections: Mapping[str, Projection], tensors: Mapping[str, TensorSource], form: str) -> dict[str, Any]:
    """`quantization_config` of the folder, in the words of compressed-tensors; `triptych` is ours."""
    one = next(iter(projections.values()))
    weights: dict[str, Any] = {
        **{"num_bits": one.bits, "type": "int", "symmetric": True, "dynamic": False},
        **{"strategy": "group" if one.group else "channel", "group_size": one.group or None},
    }
    activations = None
    if not one.packed:  # W8A8
        activations = {**weights, "strategy": "token", "dynamic": True}
    name = "pack-quantized" if one.packed else "int-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    stems = {name.removesuffix(".weight") for name, tensor in tensors.items() if name.endswith(".weight")}
    left = {stem for stem in stems if len(tensors[f"{stem}.weight"].shape) == 2} - {
        one.stem for one in projections.values()
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": name}},
        "ignore": sorted(left | {"lm_head"}),
        "kv_cache_scheme": None,
        "triptych": {"quantization": form},
    }
