"""How many replicas the work asks for: the policy of Serve's autoscaler. Runs in Serve's controller; imports no Ray.

A replica reports its saturation: what runs and waits there over what it can run at once, in sequences or in tokens of
KV cache, whichever is fuller (`AsyncEngine.demand`). The sum over replicas is the work in units of full replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from model.errors import ConfigError

SATURATION = "saturation"


@dataclass(frozen=True, slots=True)
class Scaling:
    """How many replicas there are: `least` to `most`, as many as keep the mean saturation near `target`."""

    least: int = 1
    most: int = 1
    target: float = 0.7
    up_delay_s: float = 5.0  # the work has to ask for more for so long
    down_delay_s: float = 120.0  # and for less
    surge: bool = False  # a redeploy starts a replica's successor before it ends, and not after

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"replicas must be N or LEAST-MOST from 1 up, found {self.least}-{self.most}")
        if not 0 < self.target <= 1:
            raise ConfigError(f"scale_target must be above 0 and at most 1, found {self.target}")
        if not (0 <= self.up_delay_s < math.inf and 0 <= self.down_delay_s < math.inf):
            raise ConfigError("scale_up_delay and scale_down_delay must not be negative, and finite")


class Context(Protocol):
    """The part of `ray.serve.config.AutoscalingContext` that the policy reads."""

    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class SaturationPolicy:
    """Serve applies the bounds and the delays to what this returns."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """(desired replicas, state to keep)."""
        reported = (context.aggregated_metrics or {}).get(SATURATION, {})
        if not reported:
            return context.target_num_replicas, {}
        return sum(reported.values()) / self._target, {}
