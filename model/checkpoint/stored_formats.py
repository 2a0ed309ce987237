"""Which stored number format a config.json names.

Served is what compressed-tensors calls "int-quantized" with 8 bits (W8A8): symmetric weights with a scale for each row,
activations quantised token by token when they come. Which projections are stored so is for their tensors to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.config.formats import Storage
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
)
_HOW_FOUND = ("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")
_SETTINGS = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
}
_ABSENT = {"quant_method": None, "strategy": None, "dynamic": False}  # what a setting means that is not there
_GROUP = {"output_activations": None, "format": "int-quantized"}
_SYMMETRIC = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "block_structure": None}
_WEIGHTS = {**_SYMMETRIC, "strategy": "channel", "dynamic": False}
_ACTIVATIONS = {**_SYMMETRIC, "strategy": "token", "dynamic": True}


def storage_of(quantization: Any) -> Storage:
    """The format that `quantization_config` names; raises `ConfigError` naming the first setting that is not served."""
    if quantization is None:
        return Storage.FLOAT
    _expect("quantization_config", quantization, _SETTINGS)
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"quantization_config.config_groups must be an object of groups, found {groups!r}")
    for name, group in groups.items():
        where = f"quantization_config.config_groups.{name}"
        _expect(where, group, _GROUP)
        _expect(f"{where}.weights", group.get("weights"), _WEIGHTS)
        _expect(f"{where}.input_activations", group.get("input_activations"), _ACTIVATIONS)
    return Storage.INT8_ROWS


def _expect(where: str, found: Any, expected: Mapping[str, Any]) -> None:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where} must be an object, found {found!r}")
    for key, value in expected.items():
        actual = found.get(key, _ABSENT.get(key, value))
        if actual != value:
            raise ConfigError(f"{where}.{key}: {actual!r} is not served, only {value!r}")
    known = {*expected, *_HARMLESS, *_HOW_FOUND}
    unknown = sorted(key for key, value in found.items() if key not in known and value not in (None, False, {}, []))
    if unknown:
        raise ConfigError(f"{where} has unknown settings: {', '.join(unknown)}")
