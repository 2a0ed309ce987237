"""The number of replicas that the service may have under Ray Serve, and how fast it changes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Scaling:
    """Bounds the number of replicas; between the bounds the autoscaler keeps their mean saturation near `target`."""

    min_replicas: int = 1
    max_replicas: int = 1
    target: float = 0.7  # saturation: what runs and waits over what a replica can run at once
    up_delay_s: float = 5.0  # the load must ask for more replicas for so long
    down_delay_s: float = 120.0  # and for fewer
    surge: bool = False  # a redeploy starts a replica's successor before it stops the replica

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            found = f"{self.min_replicas}-{self.max_replicas}"
            raise ConfigError(f"replicas must be N or MIN-MAX with 1 <= MIN <= MAX, found {found}")
        if not 0 < self.target <= 1:
            raise ConfigError(f"scale_target must be above 0 and at most 1, found {self.target}")
        if not (0 <= self.up_delay_s < math.inf and 0 <= self.down_delay_s < math.inf):
            raise ConfigError("scale_up_delay and scale_down_delay must be finite and not negative")
