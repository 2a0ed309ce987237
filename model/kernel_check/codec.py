"""Checks as JSON and back: dataclasses, enums, tuples and dtypes by their names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from triptych.model.config.attention import (
    AlibiConfig,
    AttentionConfig,
    BucketBiasConfig,
    GatedDeltaConfig,
    NormConfig,
    NormKind,
    NormSpan,
    RopeScaling,
    RotaryConfig,
)
from triptych.model.config.layer import Activation
from triptych.model.kernel_check.attention_checks import AttentionCheck, PreparationCheck, RecurrenceCheck
from triptych.model.kernel_check.check import Check, LaunchCheck
from triptych.model.kernel_check.product_checks import ExpertsCheck, ProductCheck, SamplingCheck
from triptych.model.kernel_check.product_problems import ExpertsShape, Fp8Shape, IntegerShape
from triptych.model.kernel_check.step_checks import RowProductCheck, StaticRowCheck, StepCheck

_TYPES: dict[str, type[Any]] = {
    one.__name__: one
    for one in (
        *(LaunchCheck, AttentionCheck, PreparationCheck, RecurrenceCheck),
        *(ProductCheck, ExpertsCheck, SamplingCheck),
        *(StepCheck, RowProductCheck, StaticRowCheck, Activation),
        *(IntegerShape, Fp8Shape, ExpertsShape),
        *(AttentionConfig, GatedDeltaConfig, RotaryConfig, AlibiConfig, BucketBiasConfig, NormConfig),
        *(NormKind, NormSpan, RopeScaling),
    )
}
_TYPE = "type"


def encode(checks: Sequence[Check]) -> bytes:
    """Return checks as JSON."""
    return json.dumps([_encoded(check) for check in checks]).encode()


def decode(data: bytes | bytearray) -> list[Check]:
    """Return what `encode` was given."""
    found: list[Check] = [_decoded(one) for one in json.loads(data)]
    return found


def _encoded(value: object) -> object:
    if isinstance(value, Enum):
        return {_TYPE: type(value).__name__, "value": value.value}
    if is_dataclass(value):
        return {_TYPE: type(value).__name__} | {
            field.name: _encoded(getattr(value, field.name)) for field in fields(value)
        }
    if isinstance(value, torch.dtype):
        return {_TYPE: "dtype", "value": str(value).removeprefix("torch.")}
    return [_encoded(one) for one in value] if isinstance(value, tuple) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_decoded, value))
    if not isinstance(value, dict):
        return value
    given = dict(value)
    name = given.pop(_TYPE)
    if name == "dtype":
        return getattr(torch, given["value"])
    return _TYPES[name](**{key: _decoded(one) for key, one in given.items()})
