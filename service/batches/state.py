"""Files and batches of an application with `--state-dir`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.types import ASGIApp

from triptych.service.batches.metrics import BatchMetrics
from triptych.service.batches.runner import BatchRunner
from triptych.service.batches.store import Store
from triptych.service.core.errors import no_room
from triptych.service.lifecycle.state import Service
from triptych.service.settings.api_keys import KeyRing
from triptych.service.settings.tenant import NO_TENANT, Tenant

_MAX_UPLOADS = 8  # at a time
_MAX_SLOTS, _DEFAULT_SLOTS = 64, 16  # lines that are sent at a time


class Batches:
    """What the routes of files and batches use."""

    def __init__(self, app: ASGIApp, folder: Path, service: Service, keys: KeyRing | None) -> None:
        """Keep files and batches in `folder`; lines are sent to `app`. Raises `ConfigError`."""
        self.store = Store(folder, service.settings.max_state_bytes)
        metrics = BatchMetrics(service.metrics)
        self.runner = BatchRunner(app, self.store, _Room(service, keys), service.limits, metrics)
        self._uploads = 0
        service.at_drain(self.runner.stop)

    @classmethod
    def of(cls, app: ASGIApp, service: Service, keys: KeyRing | None) -> Batches | None:
        """Return the batches of a service with a state folder, else None."""
        return None if service.state_folder is None else cls(app, service.state_folder.path, service, keys)

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


class _Room:
    """What the service allows batches."""

    def __init__(self, service: Service, keys: KeyRing | None) -> None:
        self._service = service
        self._keys = keys

    def tenant(self, owner: str) -> Tenant | None:
        """Return the holder of a key; None if the key is not valid any more."""
        if self._keys is None:
            return None if owner else NO_TENANT
        return self._keys.holder(owner) if owner else None  # it was made when the service had no keys

    def slots(self) -> int:
        """Return a part of the sequences that the largest model runs: other requests find free places."""
        most = max((info.max_num_seqs for info in self._service.client.models.values()), default=_DEFAULT_SLOTS)
        return max(1, min(most * 3 // 4, _MAX_SLOTS))
