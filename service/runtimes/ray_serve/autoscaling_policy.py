"""The autoscaling policy of the replicas, which runs in Ray Serve's controller. Imports no Ray.

Each replica reports its saturation: running and waiting work over its capacity, in sequences or in tokens of KV cache,
whichever is higher (`AsyncEngine.demand`). The sum over replicas is the load in units of full replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

SATURATION = "saturation"


class Context(Protocol):
    """Declares what the policy reads of `ray.serve.config.AutoscalingContext`."""

    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class SaturationPolicy:
    """Requests as many replicas as bring their mean saturation to `target`; Serve applies bounds and delays."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """Return the desired number of replicas and the state to keep (none)."""
        reported = (context.aggregated_metrics or {}).get(SATURATION, {})
        if not reported:
            return context.target_num_replicas, {}
        return sum(reported.values()) / self._target, {}
