"""Which stored number format a config.json names.

compressed-tensors, "int-quantized": int8 (W8A8), symmetric with a scale for each row; each token's activations as well.
compressed-tensors, "float-quantized": float8_e4m3fn with a scale for the tensor, each row or each block.
compressed-tensors, "pack-quantized", GPTQ, AWQ, torchao: integers of 4 or 8 bits in groups (`integer_formats`).
bitsandbytes; compressed-tensors, "mxfp4-pack-quantized" and "nvfp4-pack-quantized": codes of floats (`coded_layouts`).
mxfp4: the same of gpt-oss, by names of its own.
fp8: float8_e4m3fn with a scale for each block (DeepSeek, Qwen3-FP8) or for the tensor (AutoFP8).
fbgemm_fp8: float8_e4m3fn with a scale for each row.

Which projections are stored so is for their tensors to say. Scales of fp8 activations, found by calibration, and bounds
of them are not needed: where activations are quantised, each token gets a scale of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from triptych.model.checkpoint.coded_layouts import bitsandbytes, e2m1, mxfp4
from triptych.model.checkpoint.integer_formats import awq, compressed, gptq, targeted, torchao
from triptych.model.checkpoint.layouts import Layout
from triptych.model.checkpoint.quantization_settings import WHERE, either, expect
from triptych.model.config.formats import FLOAT, INT8_ROWS, QUANTIZED_LAYERS, NumberKind, Storage
from triptych.model.errors import ConfigError

OURS = "triptych"  # the key of what only this program reads
_SETTINGS = {"quant_method": "compressed-tensors", "quantization_status": ("compressed", "frozen")}
_8_BITS = {"num_bits": 8, "symmetric": True}
_WHOLE = {"group_size": None, "block_structure": None}
_PER_ROW = {**_8_BITS, **_WHOLE, "type": "int", "strategy": "channel", "dynamic": False}
_PER_TOKEN = {**_8_BITS, **_WHOLE, "type": "int", "strategy": "token", "dynamic": True}
_FP8_CACHE = {**_8_BITS, **_WHOLE, "type": "float", "strategy": "tensor", "dynamic": False}
_LARGEST_BLOCK = 1024  # published ones have 128
_PASSED_OVER = (
    "*.input_scale",
    "*.output_scale",
    "*.activation_scale",
    "*.input_scale_ub",
    "*.k_scale",
    "*.v_scale",
    "*.q_scale",
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the projections of a checkpoint are stored that are not floats."""

    storage: Storage = FLOAT  # of those that have its tensors, unless they have a layout
    layouts: Mapping[str, Layout] = field(default_factory=dict)  # of packed integers, by stored name


def quantization_of(settings: Any, names: Collection[str] = ()) -> Quantization:
    """Return what `quantization_config` says; raises `ConfigError` naming the first setting that is not served.

    `names` are the stored tensors'.
    """
    if settings is None:
        return Quantization()
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{WHERE} must be an object, found {settings!r}")
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_8bit") or settings.get("load_in_4bit")):  # as it was once written
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in _METHODS:
        raise ConfigError(f"{WHERE}.quant_method: {method!r} is not served, only {either(tuple(_METHODS))}")
    found = _METHODS[method](settings, names)
    if isinstance(found, Storage):
        return Quantization(found)
    if isinstance(found, Quantization):
        return found
    return Quantization(layouts=found)


def made_for(settings: Any) -> str:
    """Return the setting `quantization` to serve a folder of `triptych quantize` with; raises `ConfigError`."""
    ours = settings.get(OURS, {}) if isinstance(settings, Mapping) else {}
    expect(f"{WHERE}.{OURS}", ours, {"quantization": ("none", *QUANTIZED_LAYERS)})
    return str(ours.get("quantization", "none"))


def fp8_storage(block: tuple[int, int], scale: str = "weight_scale") -> Storage:
    """Weights as float8_e4m3fn; a block of `block` outputs and inputs (0: all) shares a scale."""
    cut = {(0, 0): "by tensor", (1, 0): "by row"}.get(block, f"by blocks of {block[0]} x {block[1]}")
    return Storage(f"fp8 {cut}", NumberKind.FLOAT8, scale, block, _PASSED_OVER)


def _compressed_tensors(settings: Mapping[str, Any], names: Collection[str]) -> Quantization:
    form = settings.get("format", "int-quantized")
    if not isinstance(form, str) or form not in (*_COMPRESSED, _MIXED):
        raise ConfigError(f"{WHERE}.format: {form!r} is not served, only {either((*_COMPRESSED, _MIXED))}")
    expect(WHERE, settings, {**_SETTINGS, "format": form}, known=("kv_cache_scheme", "sparsity_config", OURS))
    if sparsity := settings.get("sparsity_config"):  # dense: it says which weights happen to be zero
        expect(f"{WHERE}.sparsity_config", sparsity, {"format": "dense"}, known=sparsity)
    if (cache := settings.get("kv_cache_scheme")) is not None:
        expect(f"{WHERE}.kv_cache_scheme", cache, _FP8_CACHE)
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"{WHERE}.config_groups must be an object of groups, found {groups!r}")
    found: dict[str, Storage | Layout] = {}
    for name, group in groups.items():
        place = f"{WHERE}.config_groups.{name}"
        own = group.get("format") if isinstance(group, Mapping) and form == _MIXED else form
        expect(place, group, {"output_activations": None, "format": (own, None)})
        if not isinstance(own, str) or own not in _COMPRESSED:
            raise ConfigError(f"{place}.format: {own!r} is not served, only {either(tuple(_COMPRESSED))}")
        found[name] = _COMPRESSED[own](place, group)
    storages = {one: name for name, one in found.items() if isinstance(one, Storage)}
    if len(storages) > 1:
        several = " and ".join(f"{storage.name} ({name})" for storage, name in storages.items())
        raise ConfigError(f"{WHERE}.config_groups: {several} in one checkpoint are not served")
    layouts = targeted(
        {name: (one, groups[name].get("targets")) for name, one in found.items() if not isinstance(one, Storage)},
        names,
    )
    return Quantization(next(iter(storages), FLOAT), layouts)


def _int8_group(where: str, group: Mapping[str, Any]) -> Storage | Layout:
    """Return the storage of rows with one scale per row and per token, or the layout of groups or zero points."""
    weights = group.get("weights")
    if isinstance(weights, Mapping) and (weights.get("strategy") == "group" or weights.get("symmetric") is False):
        return compressed(where, group, "int-quantized")
    expect(f"{where}.weights", weights, _PER_ROW)
    expect(f"{where}.input_activations", group.get("input_activations"), _PER_TOKEN)
    return INT8_ROWS


def _packed_group(where: str, group: Mapping[str, Any]) -> Layout:
    return compressed(where, group, "pack-quantized")


def _fp8_group(where: str, group: Mapping[str, Any]) -> Storage:
    weights, activations = group.get("weights"), group.get("input_activations")
    expected = {**_8_BITS, "type": "float", "dynamic": False, "strategy": ("tensor", "channel", "block")}
    if not isinstance(weights, Mapping) or weights.get("strategy") != "block":
        expected |= _WHOLE
    expect(f"{where}.weights", weights, expected, known=("group_size", "block_structure"))
    if activations is not None:
        strategies = {"strategy": ("tensor", "token", "group"), "dynamic": (True, False)}
        known = ("group_size", "block_structure")
        expect(f"{where}.input_activations", activations, {**_8_BITS, "type": "float", **strategies}, known=known)
    assert isinstance(weights, Mapping)
    if weights["strategy"] == "block":
        return fp8_storage(_block(f"{where}.weights.block_structure", weights.get("block_structure")))
    return fp8_storage((0, 0) if weights["strategy"] == "tensor" else (1, 0))


_MIXED = "mixed-precision"  # each group has a format of its own
_COMPRESSED: dict[str, Callable[[str, Mapping[str, Any]], Storage | Layout]] = {
    "pack-quantized": _packed_group,
    "int-quantized": _int8_group,
    "float-quantized": _fp8_group,
    "mxfp4-pack-quantized": lambda where, group: e2m1(where, group, "mxfp4"),
    "nvfp4-pack-quantized": lambda where, group: e2m1(where, group, "nvfp4"),
}


def _fp8(quantization: Mapping[str, Any], names: Collection[str]) -> Storage:
    settings: dict[str, Any] = {
        **{"quant_method": "fp8", "activation_scheme": ("dynamic", "static"), "fmt": ("e4m3", "float8_e4m3fn")},
        **{"scale_fmt": (None, "float", "ue8m0"), "expert_dtype": "fp8"},  # ue8m0: powers of two, stored as floats
    }
    known = ("weight_block_size", "kv_cache_scheme", "modules_to_convert", "dequantize")  # tensors say the same
    expect(WHERE, quantization, settings, known=known)
    if (cache := quantization.get("kv_cache_scheme")) not in (None, "static", "dynamic"):
        raise ConfigError(f"{WHERE}.kv_cache_scheme: {cache!r} is not served, only 'static' or 'dynamic'")
    inverse = any(name.endswith(".weight_scale_inv") for name in names)  # so called, but multiplied with all the same
    block = quantization.get("weight_block_size")
    cut = (0, 0) if block is None else _block(f"{WHERE}.weight_block_size", block)
    return fp8_storage(cut, "weight_scale_inv" if inverse else "weight_scale")


def _fbgemm_fp8(quantization: Mapping[str, Any], names: Collection[str]) -> Storage:
    expect(WHERE, quantization, {"quant_method": "fbgemm_fp8"}, known=("activation_scale_ub",))
    return fp8_storage((1, 0))


_Method = Callable[[Mapping[str, Any], Collection[str]], Storage | Quantization | Mapping[str, Layout]]
_METHODS: dict[str, _Method] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": gptq,
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
    "mxfp4": mxfp4,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
}


def _block(where: str, found: Any) -> tuple[int, int]:
    """Return how many outputs and inputs share a scale, which memory is taken for while weights are read."""
    whole = isinstance(found, list) and len(found) == 2 and all(type(size) is int for size in found)
    if not whole or not all(0 < size <= _LARGEST_BLOCK for size in found):
        raise ConfigError(f"{where} must be two numbers from 1 to {_LARGEST_BLOCK}, found {found!r}")
    return found[0], found[1]
