"""Files and batches of an application with `--state-dir`."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from starlette.types import ASGIApp

from triptych.service.batches.calls import AUDIO_ROUTES
from triptych.service.batches.metrics import BatchMetrics
from triptych.service.batches.runner import BatchRunner
from triptych.service.batches.store import Store, Tables
from triptych.service.core.errors import no_room, unavailable
from triptych.service.lifecycle.state import Service
from triptych.service.settings.api_keys import KeyRing
from triptych.service.settings.tenant import NO_TENANT, Tenant

T = TypeVar("T")
logger = logging.getLogger(__name__)

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
        if service.state_folder is None:
            return None
        folder = service.state_folder.path / service.settings.batches_dir
        folder.mkdir(mode=0o700, exist_ok=True)
        return cls(app, folder, service, keys)

    async def run(self, act: Callable[[Tables], T]) -> T:
        """Return what `act` makes of the tables once it is committed; raises a 503 if the folder fails."""
        with state_errors():
            return await self.store.run(act)

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


@contextmanager
def state_errors() -> Iterator[None]:
    """Raise a 503 for a full or unreadable disk."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        logger.error("the state folder cannot be used: %s", error)
        raise unavailable("the state folder cannot be read or written: see the log", "state_unavailable") from None


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

    def slots(self, endpoint: str) -> int:
        """Return a part of the sequences that the largest model runs, or of the places for audio files.

        So other requests find free ones.
        """
        most = max((info.max_num_seqs for info in self._service.client.models.values()), default=_DEFAULT_SLOTS)
        slots = min(most * 3 // 4, _MAX_SLOTS)
        if endpoint in AUDIO_ROUTES:
            slots = min(slots, self._service.limits.max_audio_requests // 2)
        return max(1, slots)
