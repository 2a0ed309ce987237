"""The command `triptych quantize`: writes a folder with integer weights, and prints its size and errors."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from triptych.model.quantization.folder import Report, quantize

_PROGRESS_SECONDS = 2.0  # between two lines of progress
_WORST = 3  # matrices listed with the largest errors


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the command. Raises `ConfigError`."""
    out = Path(arguments.out)
    before = signal.signal(signal.SIGTERM, _end)  # exits by an exception, which removes half-written files
    try:
        report = quantize(
            folder,
            out,
            arguments.format,
            texts=None if arguments.texts is None else Path(arguments.texts),
            dtype=arguments.dtype or "auto",
            progress=_ProgressPrinter().report,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    _print(report, out)
    return 0


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


class _ProgressPrinter:
    """Prints progress to standard error from time to time."""

    def __init__(self) -> None:
        self._printed = time.monotonic()

    def report(self, share: float, name: str) -> None:
        if time.monotonic() - self._printed >= _PROGRESS_SECONDS:
            self._printed = time.monotonic()
            print(f"{100 * share:3.0f} %  {name}", file=sys.stderr, flush=True)


def _print(report: Report, out: Path) -> None:
    print(f"{out}: {_gb(report.bytes_before)} of weights became {_gb(report.bytes_after)}")
    worst = sorted(report.losses, key=lambda name: -report.losses[name].relative)[:_WORST]
    print(f"{len(report.losses)} matrices lost {report.loss.relative:.2%} of their norm; those that lost most:")
    for name in worst:
        print(f"  {report.losses[name].relative:.2%}  {name}")


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
