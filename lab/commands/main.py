"""The command line `python -m lab COMMAND`; errors and exit codes are those of `python -m triptych.loadtest`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from triptych.loadtest.commands.main import Parser, run_command

_COMMANDS = (
    ("offline", "lab.commands.offline", "engines without a server"),
    ("speculation", "lab.commands.speculation", "what drafts gain and cost"),
    ("served", "lab.commands.served", "other servers, over HTTP"),
    ("adapters", "lab.commands.adapters", "LoRA adapters, over HTTP"),
    ("quality", "lab.commands.quality", "what narrow numbers cost"),
    ("overhead", "lab.commands.overhead", "what the service adds to the engine"),
    ("front", "lab.commands.front", "what the service costs a token, at any rate"),
    ("requests", "lab.commands.requests", "what a request costs the service"),
    ("bodies", "lab.commands.bodies", "what streams notice of bodies that cost much"),
    ("faults", "lab.faults.command", "what clients see when something goes wrong"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    argv = sys.argv[1:] if argv is None else list(argv)
    run_command("lab", lambda: _parser(argv).parse_args(argv))


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser; only the module of the named command is imported, as most load torch."""
    parser = Parser(prog="python -m lab", description="Measure engines and the service, and inject faults.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for name, module, text in _COMMANDS:
        if name in argv[:1]:
            import_module(module).add_command(commands)
        else:
            commands.add_parser(name, help=text)
    return parser
