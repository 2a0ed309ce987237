"""Settings of models that are loaded while the service runs: from where, in how much memory, for how long."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from model.api.engine_config import EngineConfig
from model.errors import ConfigError

LOAD_SOURCES = ("models-dir", "hub", "any")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Says which models may be loaded while the service runs, and when they are unloaded. Raises `ConfigError`."""

    models_dir: str = ""  # a folder of models' folders, each of which is served by its name; empty: none
    load_from: tuple[str, ...] = ("models-dir", "hub")  # what POST /models/load may name; any: every folder
    keep_alive_s: float = math.inf  # how long a model that is not pinned may be idle before it is unloaded
    memory: int | None = None  # bytes of all models of a replica, with their KV caches; None: what the machine has
    pin: bool = True  # models given at the start are neither unloaded when idle nor evicted
    load_timeout_s: float = 1800.0  # of one load, its download included
    max_download: int = 100 * 10**9  # bytes of one model of the Hub
    engine: EngineConfig = field(default_factory=EngineConfig)  # of a model without settings of its own

    def __post_init__(self) -> None:
        for source in self.load_from:
            if source not in LOAD_SOURCES:
                raise ConfigError(f"load_from must list some of {', '.join(LOAD_SOURCES)}, found {source!r}")
        if not self.keep_alive_s > 0:
            raise ConfigError(f"keep_alive must be positive, found {self.keep_alive_s:g}")
        if not 0 < self.load_timeout_s < math.inf:
            raise ConfigError(f"load_timeout must be positive and finite, found {self.load_timeout_s:g}")
        for name in ("memory", "max_download"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{'model_memory' if name == 'memory' else name} must be positive, found {value}")
