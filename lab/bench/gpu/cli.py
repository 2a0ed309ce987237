"""The command line `python -m lab.bench.gpu COMMAND...`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from lab.bench.gpu.cases import COMMANDS
from lab.bench.gpu.supervisor import Supervisor, Task


def main(arguments: list[str] | None = None) -> None:
    """Run the commands, or write the page, and exit."""
    told = "\n".join(f"  {name:12} {what}" for name, what in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench.gpu",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="The GPU benchmark: runs one or several commands within a deadline.",
        epilog=f"commands:\n{told}\n  report     report.md and report.html of one or more folders: report DIR...",
    )
    parser.add_argument("commands", nargs="+", metavar="COMMAND", help="see below")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="output folder (out/gpu)")
    parser.add_argument(
        "--before", type=Path, nargs="*", default=[], help="folders of earlier runs, whose caches are used"
    )
    parser.add_argument("--resume", action="store_true", help="skip cases with a result there or in --out")
    parser.add_argument("--minutes", type=float, default=8.5, help="the deadline (8.5), without packing caches")
    parser.add_argument("--only", default="", help="cases whose name contains this, or one of A|B|C")
    parser.add_argument("--cache-dir", type=Path, default=Path("build/gpu-caches"), help="folder of compiler caches")
    parser.add_argument(
        "--part", type=_part, metavar="K/N", help="every N-th case from the K-th on, without the machine's figures"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, also on a CPU, to test the benchmark")
    options = parser.parse_args(arguments)
    if options.commands[0] == "report":
        from lab.bench.gpu.report import write

        for path in write([Path(name) for name in options.commands[1:]] or [options.out]):
            print(path)
        return
    if unknown := [name for name in options.commands if name not in COMMANDS]:
        parser.error(f"no such command: {', '.join(unknown)}; there are {', '.join(COMMANDS)} and report")
    task = Task(
        options.commands,
        options.out,
        options.minutes,
        options.tiny,
        options.only,
        options.before,
        options.resume,
        options.cache_dir,
        part=options.part,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the child is ended
    if "headline" in options.commands:
        from lab.bench.gpu.headline import check_in_parallel

        task.folder.mkdir(parents=True, exist_ok=True)
        task = check_in_parallel(task)
    sys.exit(Supervisor(task).run())


def _part(text: str) -> tuple[int, int]:
    """Read `K/N`."""
    which, parts = map(int, text.split("/"))
    return which, parts
