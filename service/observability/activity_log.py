"""A log line every ten seconds while the engines work; none while they are idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from model.api.stats import StepStats
from service.core.engine_client import EngineClient

INTERVAL_S = 10.0

logger = logging.getLogger(__name__)


class ActivityLog:
    """Logs what the engines have done since its last line."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._tokens: Counter[str] = Counter()
        self._began = time.monotonic()
        client.on_step(self._observe)

    def _observe(self, step: StepStats) -> None:
        self._tokens[step.model] += step.num_tokens

    async def report(self) -> None:
        """Log forever; cancelled at shutdown."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if line := self.line(time.monotonic()):
                logger.info(line)

    def line(self, now: float) -> str:
        """Return the state of each busy model and its tokens a second since the last line; empty if all were idle."""
        seconds, self._began = max(now - self._began, 1e-9), now
        parts = []
        for name, stats in self._client.stats().items():
            if not (self._tokens[name] or stats.running or stats.waiting):
                continue
            text = f"{name}: {stats.running} running, {stats.waiting} waiting"
            if stats.total_blocks:
                text += f", KV {stats.used_blocks / stats.total_blocks:.0%}"
            if stats.prefix_queries:
                text += f", prefix hits {stats.prefix_hits / stats.prefix_queries:.0%}"
            parts.append(f"{text}, {self._tokens[name] / seconds:.0f} tokens/s")
        self._tokens.clear()
        return "; ".join(parts)
