"""Workers that render chat templates; why in processes stands in `service.sandbox.chat_main`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.sandbox.process_pool import Worker, WorkerError, WorkerPool

_WORKER = Path(__file__).with_name("chat_main.py")
_WORKERS = 4

# No text came of a template. `kind`: raised (by the template itself), syntax, failed, memory, length, or any worker's.
RenderError = WorkerError


class RenderWorker(Worker):
    """One process without an environment, started when it is needed. Not for two threads at once."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds, [sys.executable, "-I", str(_WORKER)], {})

    def render(self, template: str, variables: Mapping[str, Any], limit: int) -> str:
        """The text, of at most `limit` characters; raises `RenderError`."""
        return str(self.ask({"template": template, "variables": variables, "limit": limit})["text"])


class RenderPool:
    """Renders off the event loop, several at a time; each within `seconds`."""

    def __init__(self, seconds: float, workers: int = _WORKERS) -> None:
        self._pool = WorkerPool(lambda: RenderWorker(seconds), seconds, workers, "triptych-chat")

    async def render(self, template: str, variables: Mapping[str, Any], limit: int) -> str:
        """As `RenderWorker.render`; `busy` when no worker was free in time."""
        return await self._pool.run(lambda worker: worker.render(template, variables, limit))

    def close(self) -> None:
        """Wait for what renders and end all processes; a later `render` starts new ones."""
        self._pool.close()
