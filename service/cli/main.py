"""`triptych`: serve, generate, encode, inspect. Usage and configuration errors are one line and exit 2.

Everything heavy is imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from model.api.sampling_bounds import check_value
from model.errors import ConfigError, EngineError
from service.settings import option_table

if TYPE_CHECKING:
    from model.llm import LLM

_MODEL = "[NAME=]PATH of a Hugging Face checkpoint folder, or the name of an embedded model"
_SAMPLING: dict[str, tuple[Callable[[str], Any], float, str]] = {  # flags of `generate`: type, default, meaning
    "max_tokens": (int, 128, ""),
    "temperature": (float, 0.0, "0 is greedy "),
    "top_k": (int, 0, "0 is off "),
    "top_p": (float, 1.0, ""),
    "min_p": (float, 0.0, ""),
    "seed": (int, 0, ""),
    "repetition_penalty": (float, 1.0, ""),
}


class _Parser(argparse.ArgumentParser):
    """argparse, with errors of one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> None:
    """The console script."""
    _open_standard_files()
    arguments = argparse.Namespace(verbose=False)
    try:
        arguments, unknown = _parser().parse_known_args(argv)
        if unknown:
            raise ConfigError(f"{unknown[0]} is not known{option_table.nearest(unknown[0], arguments.flags)}")
        code = arguments.command(arguments)
    except ConfigError as error:
        if arguments.verbose:
            raise
        print(f"triptych: {error}", file=sys.stderr)
        code = 2
    except EngineError as error:
        if arguments.verbose:
            raise
        print(f"triptych: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _open_standard_files() -> None:
    """What the caller has closed becomes /dev/null: a socket would get its number, and libuv aborts at one of those."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the least number that is free is this one
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="triptych", description="Serve decoder-only, encoder-decoder and encoder-only Transformers.")
    _add_verbose(parser, default=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    _add_serve(commands)
    _add_serve_config(commands)
    _add_generate(commands)
    _add_encode(commands)
    _add_inspect(commands)
    return parser


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="start the HTTP service", description="Start the HTTP service.")
    parser.add_argument(
        "models",
        nargs="*",
        metavar="[NAME=]PATH",
        help="checkpoint folders (default: those in the file of --config, else the embedded models)",
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="settings and models of a file (TRIPTYCH_CONFIG)")
    option_table.add_arguments(parser, option_table.OPTIONS)
    _add_verbose(parser)
    parser.set_defaults(command=_serve, flags=_flags(parser))


def _add_serve_config(commands: Any) -> None:
    text = "print what `serve deploy` and KubeRay take, made of a file for `serve --config`"
    parser = commands.add_parser("serve-config", help=text, description=text)
    parser.add_argument("file", metavar="FILE.yaml")
    parser.add_argument("--num-cpus", type=float, metavar="N", help="CPUs that a replica asks Ray for (default: none)")
    _add_verbose(parser)
    parser.set_defaults(command=_serve_config, flags=_flags(parser))


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser("generate", help="continue or translate a text, offline")
    parser.add_argument("model", metavar="[NAME=]PATH", nargs="?", help=f"{_MODEL} (default: code)")
    parser.add_argument("prompt", metavar="PROMPT")
    for name, (parse, default, text) in _SAMPLING.items():
        flag, shown = "--" + name.replace("_", "-"), f"{text}(default: {default:g})"
        parser.add_argument(flag, type=_bounded(name, parse), default=default, help=shown)
    structure = parser.add_mutually_exclusive_group()
    structure.add_argument("--json", action="store_true", help="hold the output to a JSON object")
    structure.add_argument("--json-schema", metavar="FILE|JSON", help="hold the output to a JSON schema")
    structure.add_argument("--regex", metavar="PATTERN", help="hold the output to a pattern that all of it matches")
    structure.add_argument(
        "--choice", action="append", metavar="TEXT", help="hold the output to one of such texts (repeatable)"
    )
    parser.add_argument(
        "--stop", type=_stop, action="append", default=[], metavar="TEXT", help="end before this text (repeatable)"
    )
    _add_engine(parser)
    _add_verbose(parser)
    parser.set_defaults(command=_generate, flags=_flags(parser))


def _bounded(name: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse`, and the bounds of this sampling parameter."""

    def read(text: str) -> Any:
        value = parse(text)
        try:
            check_value(name, value)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    read.__name__ = parse.__name__  # which argparse shows
    return read


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {2**31 - 1}, found {text!r}")
    return int(text)


def _stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected a text that is not empty")
    return text


def _add_encode(commands: Any) -> None:
    parser = commands.add_parser("encode", help="texts to vectors, offline, one JSON line each")
    parser.add_argument("--model", metavar="[NAME=]PATH", help=f"{_MODEL} (default: embed)")
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    _add_engine(parser)
    _add_verbose(parser)
    parser.set_defaults(command=_encode, flags=_flags(parser))


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="the anatomy of a checkpoint")
    parser.add_argument("model", metavar="[NAME=]PATH", nargs="?", help=f"{_MODEL} (default: all embedded models)")
    parser.add_argument(
        "--context", type=_positive, default=1024, help="tokens that a decode step attends to (default: 1024)"
    )
    parser.add_argument("--memory", default="1GiB", help="KV memory to fill with sequences (default: 1GiB)")
    parser.add_argument("--json", action="store_true", help="the same as JSON, one line a model")
    parser.add_argument("--attention", metavar="TEXT", help="write a page of every head's attention over the text")
    parser.add_argument("--out", default="attention.html", metavar="FILE", help="where (default: attention.html)")
    _add_verbose(parser)
    parser.set_defaults(command=_inspect, flags=_flags(parser))


def _add_engine(parser: argparse.ArgumentParser) -> None:
    option_table.add_arguments(parser, (option_table.BY_NAME["device"], option_table.BY_NAME["dtype"]))


def _add_verbose(parser: argparse.ArgumentParser, default: Any = argparse.SUPPRESS) -> None:
    """Before the command or behind it."""
    text = "show tracebacks of configuration errors"
    parser.add_argument("-v", "--verbose", action="store_true", default=default, help=text)


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]


def _serve(arguments: argparse.Namespace) -> int:
    file = arguments.config or os.environ.get("TRIPTYCH_CONFIG")
    found = option_table.from_file(Path(file)) if file else option_table.FileSettings()
    settings = found.settings | option_table.from_environment(os.environ)
    settings |= option_table.from_arguments(arguments, option_table.OPTIONS)
    models = {name: {"path": path} for name, path in (_named(text) for text in arguments.models)}
    if len(models) < len(arguments.models):
        raise ConfigError("two models have the same name: give them others with NAME=PATH")
    if models and (found.models or found.groups):
        raise ConfigError(f"{file} has models and {arguments.models[0]} is one more: name all of them in one place")
    from service.cli import serve  # after what a mistake could be in, as it takes a second

    if models:
        return serve.serve(models, settings)
    return serve.serve(found.models or _embedded(), settings, found.groups)


def _serve_config(arguments: argparse.Namespace) -> int:
    import yaml

    from service.runtimes.ray_serve.config_file import serve_config

    made = serve_config(Path(arguments.file), arguments.num_cpus)
    print(f"# Made of {arguments.file} by `triptych serve-config`.")
    print(yaml.safe_dump(made, sort_keys=False, allow_unicode=True), end="")
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    from model.api.request import SamplingParams

    params = SamplingParams(
        **{name: getattr(arguments, name) for name in _SAMPLING},
        stop=tuple(arguments.stop),
        grammar=_grammar(arguments),
    )
    llm = _llm(arguments, "code")
    for _, output in llm.stream([arguments.prompt], params):
        print(output.text, end="", flush=True)
    print()
    return 0


def _llm(arguments: argparse.Namespace, default: str) -> LLM:
    folder, engine = Path(_named(arguments.model or default)[1]), _engine(arguments)
    from model.system.child_process import SPIN_COUNT

    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # OpenMP reads it as torch loads: with the next import
    from model.llm import LLM

    return LLM(folder, engine)


def _grammar(arguments: argparse.Namespace) -> str:
    """What the output is held to; empty: nothing."""
    from model.text import grammar

    if arguments.json:
        return grammar.json_grammar({"type": "object"})
    if arguments.json_schema is not None:
        return grammar.json_grammar(_schema(arguments.json_schema))
    if arguments.regex is not None:
        try:
            return grammar.regex_grammar(arguments.regex)
        except grammar.GrammarError as error:
            raise ConfigError(f"--regex cannot be followed: {error}") from None
    return grammar.choice_grammar(arguments.choice) if arguments.choice else ""


def _schema(given: str) -> dict[str, Any]:
    """A JSON schema as text, or of a file."""
    import json

    try:
        text = given if given.lstrip().startswith("{") else Path(given).read_text(encoding="utf-8")
        found = json.loads(text)
    except OSError as error:
        raise ConfigError(f"--json-schema {given}: {error.strerror}") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError("--json-schema: expected a JSON object or a file with one")
    return found


def _encode(arguments: argparse.Namespace) -> int:
    import json

    llm = _llm(arguments, "embed")
    for text, vector in zip(arguments.texts, llm.encode(arguments.texts), strict=True):
        print(json.dumps({"text": text, "embedding": [round(float(value), 7) for value in vector]}))
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    if arguments.attention is not None:
        name, path = _named(arguments.model or "embed")
        from service.cli import inspection

        inspection.write_attention(name, Path(path), arguments.attention, Path(arguments.out))
        return 0
    memory = option_table.Option("memory", option_table.byte_size, None, "").read(arguments.memory, "--memory")
    wanted = dict([_named(arguments.model)]) if arguments.model else {n: m["path"] for n, m in _embedded().items()}
    from service.cli import inspection

    for name, path in wanted.items():
        report = inspection.print_json if arguments.json else inspection.show
        report(name, Path(path), context=arguments.context, memory=memory)
    return 0


def _engine(arguments: argparse.Namespace) -> Any:
    from model.api.engine_config import EngineConfig

    return EngineConfig(
        **option_table.from_arguments(arguments, (option_table.BY_NAME["device"], option_table.BY_NAME["dtype"]))
    )


def _named(text: str) -> tuple[str, str]:
    """Name and folder of `[NAME=]PATH`; without a name the folder's own, and embedded models by theirs alone."""
    name, equals, path = text.partition("=")
    if not equals:
        embedded = _embedded()
        if text in embedded and not Path(text).exists():
            return text, embedded[text]["path"]
        name, path = Path(text).resolve().name, text
    if not name or not path:
        raise ConfigError(f"expected [NAME=]PATH, found {text!r}")
    if not Path(path).is_dir():
        raise ConfigError(
            f"{path}: no such folder; expected a Hugging Face checkpoint folder or one of {', '.join(_embedded())}"
        )
    return name, path


def _embedded() -> dict[str, dict[str, Any]]:
    from model.pretrained import embedded_models

    return {name: {"path": str(path)} for name, path in embedded_models().items()}


if __name__ == "__main__":
    main()
