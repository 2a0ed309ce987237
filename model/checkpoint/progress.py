"""Shows how a download or the reading of weights proceeds: a bar on a terminal, else a log line every few seconds."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Any

LINE_SECONDS = 5.0  # between two log lines
_BAR_SECONDS = 0.1  # between two drawings of a bar
_WIDTH = 24  # characters of the bar
_MEGABYTE = 1e6

logger = logging.getLogger(__name__)


class Meter:
    """The progress of one download, or of what `verb` says is done with bytes.

    The library of downloads counts bytes in several bars; the one with the largest total holds.
    """

    def __init__(self, name: str, verb: str = "downloaded") -> None:
        self._name = name
        self._verb = verb
        self._on_terminal = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._began: tuple[float, float] | None = None  # when, and how many bytes were there already
        self._total = 0.0
        self._shown = time.monotonic()
        self._drawn = False

    def update(self, done: float, total: float) -> None:
        """Take the number of bytes done, and show it if it is time to."""
        with self._lock:
            now = time.monotonic()
            if total < self._total or not total:
                return
            self._total = total
            if self._began is None:
                self._began = now, done
            ended = done >= total
            if now - self._shown < (_BAR_SECONDS if self._on_terminal else LINE_SECONDS) and not (
                ended and self._drawn
            ):
                return
            self._shown = now
            self._show(
                describe(done, total, now - self._began[0], done - self._began[1], self._verb), done / total, ended
            )

    def close(self) -> None:
        """Leave the bar's line, if one was drawn."""
        with self._lock:
            if self._drawn:
                print(file=sys.stderr, flush=True)
            self._drawn = False

    def _show(self, text: str, share: float, ended: bool) -> None:
        if not self._on_terminal:
            if not ended:
                logger.info("%s: %s", self._name, text)
            return
        full = min(_WIDTH, int(share * _WIDTH))
        bar = "#" * full + "." * (_WIDTH - full)
        print(f"\r\x1b[K{self._name} [{bar}] {text}", end="", file=sys.stderr, flush=True)
        self._drawn = True


def describe(done: float, total: float, seconds: float, received: float, verb: str = "downloaded") -> str:
    """Say how many bytes are there, how fast they come, and how long the rest takes."""
    text = f"{done / _MEGABYTE:,.0f} of {total / _MEGABYTE:,.0f} MB {verb}"
    rate = received / seconds if seconds > 0 else 0.0
    if rate <= 0:
        return text
    left = int((total - done) / rate)
    return f"{text}, {rate / _MEGABYTE:.1f} MB/s, {left // 60}:{left % 60:02} left"


def bar_class(meter: Meter) -> type[Any]:
    """Return the class of progress bars to give to the library: they report to the meter and draw nothing."""
    from tqdm import tqdm

    class ReportingBar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            settings.pop("name", None)  # of the library's own bars
            settings |= {"mininterval": _BAR_SECONDS, "miniters": 1, "disable": False}
            super().__init__(*arguments, **settings)

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self.unit == "B":
                meter.update(self.n, self.total or 0)

        def clear(self, nolock: bool = False) -> None:
            """Nothing was drawn."""

        def close(self) -> None:
            self.disable = True  # or it would write a line to the terminal

    return ReportingBar
