"""Lays a request's sampling fields over those of a model's folder. Stdlib only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.model.api.parameters import Beams
from triptych.model.api.sampling_bounds import GREEDY_BELOW
from triptych.model.api.sampling_params import SAMPLING

BEAM_FIELDS = ("num_beams", *(name for name, column in SAMPLING.items() if column.row.beams is Beams.ONLY))
_LENGTHS = ("max_tokens", "max_length", "min_length")  # how they count is for `start` to say


def over_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any], start: int) -> dict[str, Any]:
    """Return fields of `SamplingParams`: the given ones, else the folder's.

    `start` tokens come before the output; the folder's `min_length` counts them. Beams are searched where the request
    or the folder says so, and not where the request gives a temperature.
    """
    chosen = {name: value for name, value in defaults.items() if name not in (*_LENGTHS, *BEAM_FIELDS)}
    if "min_length" in defaults:
        chosen["min_tokens"] = max(0, defaults["min_length"] - start)
    chosen |= given
    if chosen.get("temperature", 0.0) < GREEDY_BELOW:
        chosen["temperature"] = 0.0
    beams = beams_of(defaults, given.get("num_beams"), given.get("temperature"))
    if beams > 1:
        chosen = {name: defaults[name] for name in BEAM_FIELDS if name in defaults} | chosen | {"num_beams": beams}
    return chosen


def beams_of(defaults: Mapping[str, Any], num_beams: int | None, temperature: float | None) -> int:
    """Return the number of beams for a request with these fields."""
    if num_beams is not None:
        return num_beams
    return 1 if temperature else int(defaults.get("num_beams", 1))


def length_of(defaults: Mapping[str, Any], start: int, *, whole: bool) -> int | None:
    """Return how many tokens the folder lets follow `start` tokens; None where it does not say.

    `whole`: its `max_length` counts, not only its `max_new_tokens`.
    """
    if "max_tokens" in defaults:
        return int(defaults["max_tokens"])
    return int(defaults["max_length"]) - start if whole and "max_length" in defaults else None
