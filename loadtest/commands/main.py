"""The command line `python -m triptych.loadtest COMMAND`.

Usage errors print one line and exit 2. A missed SLO, a regression, or a server that does not serve exits 1. An
interrupted run writes its results so far and exits 130.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from triptych.loadtest.errors import ServerError, UsageError
from triptych.loadtest.results.slo import Limit
from triptych.loadtest.runs import flags
from triptych.loadtest.settings import Settings

# -- What the command lines of `loadtest` and `lab` share: one-line usage errors, defaults in the help, exit codes.


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


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    argv = sys.argv[1:] if argv is None else list(argv)
    run_command("loadtest", lambda: _parser(argv).parse_args(argv))


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = Parser(prog="python -m triptych.loadtest", description="Apply load to a service.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    _add_run(commands)
    _add_sweep(commands)
    _add_compare(commands)
    _add_report(commands)
    if "interference" in argv[:1]:  # its module reads a plan
        import_module("triptych.loadtest.commands.interference").add_command(commands)
    else:
        commands.add_parser("interference", help="what workloads cost each other")
    return parser


def _add_run(commands: Any) -> None:
    parser = commands.add_parser("run", help="apply one load to a server", description="Apply one load to a server.")
    flags.add(parser)
    group = parser.add_argument_group("several workloads at the same time")
    group.add_argument("--plan", type=Path, default=None, metavar="FILE", help="a TOML file of workloads")
    group.add_argument("--only", default="", metavar="NAME,...", help="workloads of the plan; none: all")
    parser.set_defaults(command=_run)


def _add_sweep(commands: Any) -> None:
    text = "Raise the load step by step until the server saturates, then find the highest that keeps the SLO."
    parser = commands.add_parser("sweep", help="find the knee", description=text)
    flags.add(parser)
    group = parser.add_argument_group("sweep (each point takes --duration)")
    group.add_argument("--over", choices=("rate", "concurrency"), default="rate", help="the load to raise")
    group.add_argument("--points", default="", metavar="X,Y,...", help="first loads; none: doubled from --from")
    group.add_argument("--from", dest="first", type=flags.above_zero, default=1.0, metavar="X", help="first load")
    group.add_argument("--to", type=flags.above_zero, default=1024.0, metavar="X", help="highest load")
    group.add_argument(
        "--bisect",
        type=flags.whole,
        default=4,
        metavar="N",
        help="points between the last within and the first beyond the SLO",
    )
    parser.set_defaults(command=_sweep)


def _add_compare(commands: Any) -> None:
    text = "Ratios of B to A with bootstrap intervals; exit 1 where B is worse beyond the tolerance."
    parser = commands.add_parser("compare", help="compare two results", description=text)
    parser.add_argument("a", metavar="A.json", help="run.json, sweep.json or mix.json of the baseline")
    parser.add_argument("b", metavar="B.json", help="result to compare with it; of sweeps and mixes, the common parts")
    parser.add_argument(
        "--tolerance", type=flags.amount, default=0.05, metavar="SHARE", help="ratio that counts as equal"
    )
    parser.set_defaults(command=_compare)


def _add_report(commands: Any) -> None:
    parser = commands.add_parser(
        "report", help="write the HTML page of a result", description="Write the HTML page of a result."
    )
    parser.add_argument("result", metavar="FILE", help="run.json, sweep.json or mix.json")
    parser.add_argument("--out", default="report.html", metavar="FILE", help="path of the page")
    parser.set_defaults(command=_report)


def _prepare(arguments: argparse.Namespace) -> tuple[Settings, list[Limit], str, Path | None]:
    """Return what `run` and `sweep` both need: settings, limits, key, tokenizer."""
    from triptych.loadtest.results import slo

    key = api_key(arguments)
    tokenizer = Path(arguments.tokenizer) if arguments.tokenizer else None
    return flags.settings(arguments), slo.parse(arguments.slo), key, tokenizer


def _run(arguments: argparse.Namespace) -> int:
    if arguments.plan is not None:
        return _run_plan(arguments)
    if arguments.only:
        raise UsageError(f"--only: found {arguments.only!r} without --plan, expected a plan with it")
    from triptych.loadtest.generator.worker import due
    from triptych.loadtest.results import tables
    from triptych.loadtest.runs import output, run
    from triptych.loadtest.runs.progress import Progress
    from triptych.loadtest.server.target_server import Server

    settings, limits, key, tokenizer = _prepare(arguments)
    due(settings)  # raises for an invalid schedule before anything is sent
    progress = Progress(quiet=arguments.quiet)
    with Server(settings.url, key) as server:
        subject = run.probe(server, settings, tokenizer, progress)
        folder = output.folder(arguments.out, "run")
        measured = run.measure(subject, subject.settings, limits, key, progress)
    console = tables.console()
    tables.run(measured.document, console)
    output.write_run(measured, folder)
    output.print_end(measured.document, folder, console)
    return 130 if measured.interrupted else _verdict(measured.document) if limits else 0


def _run_plan(arguments: argparse.Namespace) -> int:
    from triptych.loadtest.results import tables
    from triptych.loadtest.runs import output, plan
    from triptych.loadtest.runs.progress import Progress
    from triptych.loadtest.server.target_server import Server

    plan.check_beside(arguments)
    works = plan.read(arguments.plan, arguments).chosen(arguments.only)
    progress = Progress(quiet=arguments.quiet)
    with Server(arguments.url.rstrip("/"), api_key(arguments)) as server:
        loads = plan.probe(server, works, progress)
        folder = output.folder(arguments.out, "mix")
        mixed = plan.measure(loads, api_key(arguments), progress)
    console = tables.console()
    tables.mix(mixed.document, console)
    output.write_mix(mixed, folder)
    output.print_end(plan.without_columns(mixed.document), folder, console)
    return 130 if mixed.interrupted else _verdict(mixed.document) if mixed.document["slo"] else 0


def _verdict(document: dict[str, Any]) -> int:
    """Return the exit code; only a valid run can meet an SLO."""
    return 0 if document["valid"] and all(one["met"] for one in document["slo"]) else 1


def _sweep(arguments: argparse.Namespace) -> int:
    from triptych.loadtest.results import tables
    from triptych.loadtest.runs import output, run, sweep
    from triptych.loadtest.runs.progress import Progress
    from triptych.loadtest.server.target_server import Server

    plan = sweep.Plan.parse(arguments.over, arguments.points, arguments.first, arguments.to, arguments.bisect)
    _set_load(arguments, plan.loads[0], sweep.ARRIVALS[plan.over])
    settings, limits, key, tokenizer = _prepare(arguments)
    progress = Progress(quiet=arguments.quiet)
    with Server(settings.url, key) as server:
        subject = run.probe(server, settings, tokenizer, progress)
        folder = output.folder(arguments.out, "sweep")
        found = sweep.Sweep(subject, limits, key, progress, plan)
        document = found.run()
    console = tables.console()
    tables.sweep(document, console)
    output.write_sweep(document, found.requests, folder)
    output.print_end(sweep.without_columns(document), folder, console)
    return 130 if document["interrupted"] else 0 if not limits or sweep.keeps_slo(document) else 1


def _set_load(arguments: argparse.Namespace, load: float, kinds: Sequence[str]) -> None:
    """Set the first load of a sweep; raises `UsageError` if a load is given, or arrivals without a load."""
    for name in ("rate", "concurrency", "ramp_to", "stages"):
        if (found := getattr(arguments, name)) is not None:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag}: found {found}, expected --points or --from: a sweep sets its loads itself")
    if arguments.arrivals not in (None, *kinds):
        wanted = f"{', '.join(kinds)} with --over {arguments.over}"
        raise UsageError(f"--arrivals: found {arguments.arrivals}, expected {wanted}")
    if arguments.over == "rate":
        arguments.rate = load
    else:
        arguments.arrivals, arguments.concurrency = "closed", int(load)


def _compare(arguments: argparse.Namespace) -> int:
    from triptych.loadtest.results import compare, tables
    from triptych.loadtest.runs import output

    a, b = (output.read(path, "run", "sweep", "mix") for path in (arguments.a, arguments.b))
    document = compare.compare(a, b, arguments.tolerance)
    console = tables.console()
    tables.compare(document["rows"], console)
    for warning in document["warnings"]:
        console.print(f"[yellow]note[/] {warning}")
    output.print_end(document, None, console)
    return 1 if document["regressions"] else 0


def _report(arguments: argparse.Namespace) -> int:
    from triptych.loadtest.results import page
    from triptych.loadtest.runs import output

    document = output.read(arguments.result, "run", "sweep", "mix")
    try:
        Path(arguments.out).write_text(page.page(document), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out: {arguments.out}: {error.strerror}") from None
    print(arguments.out)
    return 0
