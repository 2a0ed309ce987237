"""Files, batches and results, as the database has them."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

Json = dict[str, Any]

DAY_SECONDS = 86_400
RETENTION_SECONDS = 30 * DAY_SECONDS  # of files, unless they say less, and of batches after their end

ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")


def now() -> int:
    """Return the seconds since 1970: the dates of files and batches must outlive this process."""
    return int(time.time())


@dataclass(slots=True)
class StoredFile:
    """A file of one owner."""

    id: str
    owner: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str


@dataclass(slots=True)
class Usage:
    """Tokens of the replies of a batch."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(slots=True)
class Batch:
    """A batch of one owner."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    metadata: dict[str, str] | None = None
    output_seconds: int = RETENTION_SECONDS  # from the making of an output file until it expires
    model: str | None = None  # that all lines name
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: Usage = field(default_factory=Usage)
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[Json] = field(default_factory=list)
    times: dict[str, int] = field(default_factory=dict)

    def enter(self, status: str) -> None:
        """Change the status, and note the time."""
        self.status = status
        self.times.setdefault(f"{status}_at", now())

    @property
    def is_active(self) -> bool:
        return self.status in ACTIVE


@dataclass(frozen=True, slots=True)
class Result:
    """The reply to one line, as a line of an output file without its end."""

    line: int
    ok: bool
    data: bytes
    usage: Usage = field(default_factory=Usage)


def dumped(batch: Batch) -> str:
    """Return a batch as the database keeps it."""
    return json.dumps(asdict(batch))


def loaded(text: str) -> Batch:
    values = json.loads(text)
    return Batch(**{**values, "usage": Usage(**values["usage"])})
