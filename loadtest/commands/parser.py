"""What the command lines of `loadtest` and `lab` share: one-line usage errors, defaults in the help, exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from loadtest.errors import ServerError, UsageError


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, and shows defaults in the help."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **arguments})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults except None, which the help text explains."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default in (None, "", False, [])
        return action.help if silent else super()._get_help_string(action)


def run_command(program: str, parse: Callable[[], argparse.Namespace]) -> NoReturn:
    """Parse the command line, run its command, and exit.

    Usage errors print one line and exit 2, a server that does not serve exits 1, an interrupt 130.
    """
    try:
        arguments = parse()
        code = arguments.command(arguments) or 0
    except UsageError as error:
        print(f"{program}: {error}", file=sys.stderr)
        code = 2
    except ServerError as error:
        print(f"{program}: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def api_key(arguments: argparse.Namespace) -> str:
    """Return the key of the flag, or of the environment."""
    return str(arguments.api_key or os.environ.get("TRIPTYCH_API_KEY", ""))
