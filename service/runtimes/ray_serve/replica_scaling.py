"""The autoscaling policy of the replicas. Imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

# The policy runs in Ray Serve's controller. Each replica reports its saturation: running and waiting work over its
# capacity, in sequences or in tokens of KV cache, whichever is higher (`AsyncEngine.demand`). The sum over replicas is
# the load in units of full replicas.

SATURATION = "saturation"


class AutoscalingContext(Protocol):
    """The fields of `ray.serve.config.AutoscalingContext` that the policy reads."""

    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class SaturationPolicy:
    """A policy that brings the mean saturation of replicas to `target`; Serve applies bounds and delays."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the desired number of replicas, and an empty state."""
        reported = (context.aggregated_metrics or {}).get(SATURATION, {})
        if not reported:
            return context.target_num_replicas, {}
        return sum(reported.values()) / self._target, {}
