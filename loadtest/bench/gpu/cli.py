"""`python -m loadtest.bench.gpu COMMAND...`"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from loadtest.bench.gpu.cases import COMMANDS
from loadtest.bench.gpu.supervisor import Supervisor, Task


def main(arguments: list[str] | None = None) -> None:
    """Run the commands, or make the page; leaves with the exit code."""
    told = "\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.gpu",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="The GPU bench: one command or several after each other, within one deadline.",
        epilog=f"commands:\n{told}\n  report     report.md and report.html of one or more folders: report DIR...",
    )
    parser.add_argument("commands", nargs="+", metavar="COMMAND", help="see below")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="the folder for all of it (out/gpu)")
    parser.add_argument("--before", type=Path, nargs="*", default=[], help="folders of earlier runs: their caches")
    parser.add_argument("--resume", action="store_true", help="leave out cases that have a result there or in --out")
    parser.add_argument("--minutes", type=float, default=8.5, help="the deadline (8.5); packing caches comes after it")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--cache-dir", type=Path, default=Path("build/gpu-caches"), help="where compilers keep theirs")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, on a CPU too: tries the bench itself")
    options = parser.parse_args(arguments)
    if options.commands[0] == "report":
        from loadtest.bench.gpu.report import write

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
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the child ends with us
    sys.exit(Supervisor(task).run())
