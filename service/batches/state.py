"""Files and batches of an application with `--state-dir`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from starlette.types import ASGIApp

from triptych.service.batches.metrics import BatchMetrics
from triptych.service.batches.runner import BatchRunner
from triptych.service.batches.store import Store
from triptych.service.core.errors import no_room
from triptych.service.http import in_process
from triptych.service.http.in_process import InnerReply
from triptych.service.lifecycle.state import Service
from triptych.service.settings.tenant import Tenant

_MAX_UPLOADS = 8  # at a time
_MAX_SLOTS, _DEFAULT_SLOTS = 64, 16  # lines that are sent at a time


class Batches:
    """What the routes of files and batches use."""

    def __init__(self, folder: Path, service: Service, find_tenant: Callable[[str], Tenant | None]) -> None:
        """`find_tenant` returns the holder of a key by its id. Raises `ConfigError`."""
        self.store = Store(folder, service.settings.max_state_bytes)
        self.sender = _Sender(service, find_tenant)
        self.runner = BatchRunner(self.store, self.sender, service.limits, BatchMetrics(service.metrics))
        self._uploads = 0

    def begin_upload(self) -> None:
        """Count an upload; raises a 429 if there are too many. `end_upload` follows."""
        if self._uploads >= _MAX_UPLOADS:
            raise no_room(f"{_MAX_UPLOADS} files are being uploaded", "uploads")
        self._uploads += 1

    def end_upload(self) -> None:
        self._uploads -= 1

    async def close(self) -> None:
        """Finish all writes."""
        self.runner.file_thread.close()
        await asyncio.to_thread(self.store.close)


class _Sender:
    """Sends lines to the application itself."""

    def __init__(self, service: Service, find_tenant: Callable[[str], Tenant | None]) -> None:
        self.app: ASGIApp | None = None
        self._service = service
        self.tenant = find_tenant

    def slots(self) -> int:
        """Return how many sequences the largest model runs, within bounds."""
        most = max((info.max_num_seqs for info in self._service.client.models.values()), default=_DEFAULT_SLOTS)
        return min(most, _MAX_SLOTS)

    async def post(self, path: str, body: bytes, tenant: Tenant, media_type: str) -> InnerReply:
        assert self.app is not None
        return await in_process.post(self.app, path, body, tenant, media_type)
