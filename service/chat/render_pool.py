"""Worker processes that render chat templates (`triptych.service.chat.render_main`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.service.sandbox.process_pool import Worker, WorkerError, WorkerPool

_CHAT_WORKERS = 4

# A rendering that failed. `kind`: raised (by the template itself), syntax, failed, memory, length, or a worker's kind.
RenderError = WorkerError


class RenderWorker(Worker):
    """One process with an empty environment, which starts on first use; not thread-safe."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds, "triptych.service.chat.render_main")

    def render(self, template: str, variables: Mapping[str, Any], limit: int) -> str:
        """Render a template to at most `limit` characters; raises `RenderError`."""
        return str(self.ask({"template": template, "variables": variables, "limit": limit})["text"])

    def names(self, template: str) -> frozenset[str]:
        """Return the variables that a template reads and does not define; raises `RenderError`."""
        return frozenset(self.ask({"template": template})["names"])


class RenderPool:
    """Processes that render templates concurrently outside the event loop, each within `seconds`."""

    def __init__(self, seconds: float, workers: int = _CHAT_WORKERS) -> None:
        self._pool = WorkerPool(lambda: RenderWorker(seconds), seconds, workers, "triptych-chat")

    async def render(self, template: str, variables: Mapping[str, Any], limit: int) -> str:
        """Render a template to at most `limit` characters; raises `RenderError`, `busy` if no worker became free."""
        return await self._pool.run(lambda worker: worker.render(template, variables, limit))

    def close(self) -> None:
        """Wait for renderings in flight and end all processes; a later `render` starts new ones."""
        self._pool.close()
