"""The output and the error file of a batch while they are written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from triptych.service.batches.lines import checked, unrun_line
from triptych.service.batches.records import Batch
from triptych.service.batches.store import Store


class OutputFiles:
    """The output and the error file of a batch while they are written."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._paths = {ok: store.new_upload() for ok in (True, False)}
        self._files = {ok: path.open("xb") for ok, path in self._paths.items()}

    def add(self, results: list[tuple[int, int, bytes]]) -> None:
        for _, ok, data in results:
            self._files[bool(ok)].write(data + b"\n")

    def add_unrun(self, batch: Batch, lines: Iterator[tuple[int, bytes]], done: set[int], status: str) -> int:
        """Write an error for each line that has no result; return their number."""
        why = "the batch was cancelled" if status == "cancelled" else "the completion window ended"
        unrun = 0
        for number, raw in lines:
            if number not in done:
                message = f"this request was not executed: {why}"
                custom_id = checked(raw).custom_id
                line = unrun_line(batch.id, number, custom_id, f"batch_{status}", message)
                self._files[False].write(line + b"\n")
                unrun += 1
        return unrun

    def complete(self) -> tuple[Path | None, Path | None]:
        """Sync the files; return the paths of those that are not empty."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        output, errors = (self._paths[ok] if self._files[ok].tell() else None for ok in (True, False))
        return output, errors

    def discard(self) -> None:
        """Remove the files also where their transaction, which was undone, had named them."""
        for path in self._paths.values():
            self._store.discard(path)

    def close(self) -> None:
        """Remove what no batch has."""
        for ok, file in self._files.items():
            with suppress(OSError):  # of a full disk, for bytes that are not written yet
                file.close()
            self._paths[ok].unlink(missing_ok=True)
