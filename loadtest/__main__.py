"""`python -m loadtest COMMAND`: today `offline`, an engine without a server."""

from __future__ import annotations

import argparse

from loadtest import offline


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description="Measure engines and services.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    offline.add_command(commands)
    arguments = parser.parse_args()
    arguments.command(arguments)


if __name__ == "__main__":
    main()
