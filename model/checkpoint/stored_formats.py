"""Which stored number format a config.json names.

compressed-tensors, "int-quantized": int8 (W8A8), symmetric with a scale for each row; each token's activations as well.
compressed-tensors, "float-quantized": float8_e4m3fn with a scale for the tensor, each row or each block.
fp8: float8_e4m3fn with a scale for each block (DeepSeek, Qwen3-FP8) or for the tensor (AutoFP8).
fbgemm_fp8: float8_e4m3fn with a scale for each row.

Which projections are stored so is for their tensors to say. Scales of fp8 activations, found by calibration, and bounds
of them are not needed: where activations are quantised, each token gets a scale of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from model.config.formats import FLOAT, INT8_ROWS, NumberKind, Storage
from model.errors import ConfigError

# What describes how the numbers were found, or which projections are left out: their tensors say that too.
_HARMLESS = (
    "version",
    "global_compression_ratio",
    "ignore",
    "config_groups",
    "targets",
    "weights",
    "input_activations",
    "ignored_layers",
    "modules_to_not_convert",
)
_HOW_FOUND = ("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")
_SETTINGS = {"quant_method": "compressed-tensors", "quantization_status": ("compressed", "frozen")}
_ABSENT = {"quant_method": None, "strategy": None, "dynamic": False, "type": "int"}  # the meaning of what is not there
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


def storage_of(quantization: Any, names: Collection[str] = ()) -> Storage:
    """The format that `quantization_config` names; raises `ConfigError` naming the first setting that is not served.

    `names` are the stored tensors'.
    """
    if quantization is None:
        return FLOAT
    if not isinstance(quantization, Mapping):
        raise ConfigError(f"quantization_config must be an object, found {quantization!r}")
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise ConfigError(
            f"quantization_config.quant_method: {method!r} is not served, only {_either(tuple(_METHODS))}"
        )
    return _METHODS[method](quantization, names)


def fp8_storage(block: tuple[int, int], scale: str = "weight_scale") -> Storage:
    """Weights as float8_e4m3fn, of which blocks of so many outputs and inputs (0: all) share a scale."""
    cut = {(0, 0): "by tensor", (1, 0): "by row"}.get(block, f"by blocks of {block[0]} x {block[1]}")
    return Storage(f"fp8 {cut}", NumberKind.FLOAT8, scale, block, _PASSED_OVER)


def _compressed_tensors(quantization: Mapping[str, Any], names: Collection[str]) -> Storage:
    where = "quantization_config"
    form = quantization.get("format", "int-quantized")
    if not isinstance(form, str) or form not in _COMPRESSED:
        raise ConfigError(f"{where}.format: {form!r} is not served, only {_either(tuple(_COMPRESSED))}")
    _expect(where, quantization, {**_SETTINGS, "format": form}, known=("kv_cache_scheme",))
    if (cache := quantization.get("kv_cache_scheme")) is not None:
        _expect(f"{where}.kv_cache_scheme", cache, _FP8_CACHE)
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"{where}.config_groups must be an object of groups, found {groups!r}")
    found: dict[Storage, str] = {}
    for name, group in groups.items():
        place = f"{where}.config_groups.{name}"
        _expect(place, group, {"output_activations": None, "format": form})
        found[_COMPRESSED[form](place, group)] = name
    if len(found) > 1:
        several = " and ".join(f"{storage.name} ({name})" for storage, name in found.items())
        raise ConfigError(f"{where}.config_groups: {several} in one checkpoint are not served")
    return next(iter(found))


def _int8_group(where: str, group: Mapping[str, Any]) -> Storage:
    _expect(f"{where}.weights", group.get("weights"), _PER_ROW)
    _expect(f"{where}.input_activations", group.get("input_activations"), _PER_TOKEN)
    return INT8_ROWS


def _fp8_group(where: str, group: Mapping[str, Any]) -> Storage:
    weights, activations = group.get("weights"), group.get("input_activations")
    expected = {**_8_BITS, "type": "float", "dynamic": False, "strategy": ("tensor", "channel", "block")}
    if not isinstance(weights, Mapping) or weights.get("strategy") != "block":
        expected |= _WHOLE
    _expect(f"{where}.weights", weights, expected, known=("group_size", "block_structure"))
    if activations is not None:
        strategies = {"strategy": ("tensor", "token", "group"), "dynamic": (True, False)}
        known = ("group_size", "block_structure")
        _expect(f"{where}.input_activations", activations, {**_8_BITS, "type": "float", **strategies}, known=known)
    assert isinstance(weights, Mapping)
    if weights["strategy"] == "block":
        return fp8_storage(_block(f"{where}.weights.block_structure", weights.get("block_structure")))
    return fp8_storage((0, 0) if weights["strategy"] == "tensor" else (1, 0))


_COMPRESSED: dict[str, Callable[[str, Mapping[str, Any]], Storage]] = {
    "int-quantized": _int8_group,
    "float-quantized": _fp8_group,
}


def _fp8(quantization: Mapping[str, Any], names: Collection[str]) -> Storage:
    where = "quantization_config"
    settings = {"quant_method": "fp8", "activation_scheme": ("dynamic", "static"), "fmt": "e4m3"}
    known = ("weight_block_size", "kv_cache_scheme", "scale_fmt")  # ue8m0 scales are powers of two, stored as floats
    _expect(where, quantization, settings, known=known)
    if (cache := quantization.get("kv_cache_scheme")) not in (None, "static", "dynamic"):
        raise ConfigError(f"{where}.kv_cache_scheme: {cache!r} is not served, only 'static' or 'dynamic'")
    inverse = any(name.endswith(".weight_scale_inv") for name in names)  # so called, but multiplied with all the same
    block = quantization.get("weight_block_size")
    cut = (0, 0) if block is None else _block(f"{where}.weight_block_size", block)
    return fp8_storage(cut, "weight_scale_inv" if inverse else "weight_scale")


def _fbgemm_fp8(quantization: Mapping[str, Any], names: Collection[str]) -> Storage:
    _expect("quantization_config", quantization, {"quant_method": "fbgemm_fp8"}, known=("activation_scale_ub",))
    return fp8_storage((1, 0))


_METHODS: dict[str, Callable[[Mapping[str, Any], Collection[str]], Storage]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
}


def _block(where: str, found: Any) -> tuple[int, int]:
    """Return how many outputs and inputs share a scale, which memory is taken for while weights are read."""
    whole = isinstance(found, list) and len(found) == 2 and all(type(size) is int for size in found)
    if not whole or not all(0 < size <= _LARGEST_BLOCK for size in found):
        raise ConfigError(f"{where} must be two numbers from 1 to {_LARGEST_BLOCK}, found {found!r}")
    return found[0], found[1]


def _expect(where: str, found: Any, expected: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Raise `ConfigError` unless settings have the values expected (a tuple: one of them), and no other means anything.

    `known` are settings that the caller looks at.
    """
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where} must be an object, found {found!r}")
    for key, value in expected.items():
        served = value if isinstance(value, tuple) else (value,)
        actual = found.get(key, _ABSENT.get(key, served[0]))
        if actual not in served:
            raise ConfigError(f"{where}.{key}: {actual!r} is not served, only {_either(served)}")
    known = {*expected, *known, *_HARMLESS, *_HOW_FOUND}
    unknown = sorted(key for key, value in found.items() if key not in known and value not in (None, False, {}, []))
    if unknown:
        raise ConfigError(f"{where} has unknown settings: {', '.join(unknown)}")


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(map(repr, values))
