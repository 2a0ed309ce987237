"""The command line `triptych`: serve, serve-config, download, generate, encode, inspect, quantize.

Usage errors print one line and exit 2. Slow imports are inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from model.api.engine_config import QUANTIZATIONS
from model.api.sampling_bounds import check_value
from model.checkpoint import hub
from model.errors import ConfigError, EngineError
from model.gguf.container import is_gguf
from model.gguf.container import model_name as gguf_name
from model.system.child_process import ENGINE, ConnectedChild
from service.observability.metrics_folder import shared_folder
from service.settings import sources
from service.settings.option_table import BY_NAME, OPTIONS, Option
from service.settings.parsers import byte_size
from service.settings.resolve import embedded_model_settings, models_or_embedded

if TYPE_CHECKING:
    from model.llm import LLM

_MODEL = "[NAME=]PATH of a Hugging Face checkpoint folder, hf:ORGANISATION/NAME, or the name of an embedded model"
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
    """Reports errors as `ConfigError`, in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    _open_standard_files()
    arguments = argparse.Namespace(verbose=False)
    try:
        arguments, unknown = _parser().parse_known_args(argv)
        if unknown:
            raise ConfigError(f"{unknown[0]} is not known{sources.nearest(unknown[0], arguments.flags)}")
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
    """Open /dev/null for each closed standard file: libuv aborts if a socket gets its number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="triptych", description="Serve decoder-only, encoder-decoder and encoder-only Transformers.")
    _add_verbose(parser, default=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    _add_serve(commands)
    _add_serve_config(commands)
    _add_download(commands)
    _add_generate(commands)
    _add_encode(commands)
    _add_inspect(commands)
    _add_quantize(commands)
    _add_models(commands)
    return parser


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="start the HTTP service", description="Start the HTTP service.")
    parser.add_argument(
        "models",
        nargs="*",
        metavar="[NAME=]PATH",
        help="checkpoint folders (default: those in the file of --config, else, without --models-dir, the embedded "
        "models)",
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="file of settings and models (TRIPTYCH_CONFIG)")
    sources.add_arguments(parser, OPTIONS)
    _add_verbose(parser)
    parser.set_defaults(command=_serve, flags=_flags(parser))


def _add_serve_config(commands: Any) -> None:
    text = "convert a file for `serve --config` for `serve deploy` and KubeRay"
    parser = commands.add_parser("serve-config", help=text, description=text)
    parser.add_argument("file", metavar="FILE.yaml")
    parser.add_argument(
        "--num-cpus", type=float, metavar="N", help="CPUs that a replica requests from Ray (default: none)"
    )
    _add_verbose(parser)
    parser.set_defaults(command=_serve_config, flags=_flags(parser))


def _add_download(commands: Any) -> None:
    text = "download models of the Hub into the cache, and print their names with their commits"
    parser = commands.add_parser("download", help=text, description=text)
    parser.add_argument("models", nargs="+", metavar="hf:ORGANISATION/NAME[@REVISION]")
    sources.add_arguments(parser, (BY_NAME["pickle"],))
    _add_verbose(parser)
    parser.set_defaults(command=_download, flags=_flags(parser))


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser("generate", help="generate text offline, without a server")
    parser.add_argument("model", metavar="[NAME=]PATH", nargs="?", help=f"{_MODEL} (default: code)")
    parser.add_argument("prompt", metavar="PROMPT")
    for name, (parse, default, text) in _SAMPLING.items():
        flag, shown = "--" + name.replace("_", "-"), f"{text}(default: {default:g})"
        parser.add_argument(flag, type=_bounded(name, parse), default=default, help=shown)
    for side, text in (("source", "of the prompt"), ("target", "of the output")):
        shown = f"language {text}, as a code of the tokenizer (NLLB, mBART, M2M-100)"
        parser.add_argument(f"--{side}-language", metavar="CODE", help=shown)
    structure = parser.add_mutually_exclusive_group()
    structure.add_argument("--json", action="store_true", help="constrain the output to a JSON object")
    structure.add_argument("--json-schema", metavar="FILE|JSON", help="constrain the output to a JSON schema")
    structure.add_argument("--regex", metavar="PATTERN", help="constrain the output to match a regular expression")
    structure.add_argument(
        "--choice", action="append", metavar="TEXT", help="constrain the output to one of these texts (repeatable)"
    )
    parser.add_argument(
        "--stop", type=_stop, action="append", default=[], metavar="TEXT", help="stop before this text (repeatable)"
    )
    _add_engine(parser)
    _add_verbose(parser)
    parser.set_defaults(command=_generate, flags=_flags(parser))


def _bounded(name: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser that also checks the bounds of a sampling parameter."""

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
        raise argparse.ArgumentTypeError("expected a non-empty text")
    return text


def _add_encode(commands: Any) -> None:
    parser = commands.add_parser("encode", help="encode texts as vectors offline, one JSON line each")
    parser.add_argument("--model", metavar="[NAME=]PATH", help=f"{_MODEL} (default: embed)")
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    _add_engine(parser)
    _add_verbose(parser)
    parser.set_defaults(command=_encode, flags=_flags(parser))


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="show the architecture, memory and cost of a checkpoint")
    parser.add_argument("model", metavar="[NAME=]PATH", nargs="?", help=f"{_MODEL} (default: all embedded models)")
    parser.add_argument(
        "--context", type=_positive, default=1024, help="tokens that a decode step attends to (default: 1024)"
    )
    parser.add_argument("--memory", default="1GiB", help="memory of the KV cache to plan for (default: 1GiB)")
    parser.add_argument("--json", action="store_true", help="print JSON, one line a model")
    parser.add_argument("--attention", metavar="TEXT", help="write an HTML page of all attention weights over a text")
    parser.add_argument("--out", default="attention.html", metavar="FILE", help="its path (default: attention.html)")
    _add_verbose(parser)
    parser.set_defaults(command=_inspect, flags=_flags(parser))


def _add_quantize(commands: Any) -> None:
    text = "write a folder with a checkpoint's projections as integers, which serves itself on a CPU"
    parser = commands.add_parser("quantize", help=text, description=text)
    parser.add_argument("model", metavar="IN", help=_MODEL)
    parser.add_argument("out", metavar="OUT", help="the new folder")
    formats = [name for name in QUANTIZATIONS if name not in ("none", "fp8")]
    parser.add_argument("--format", required=True, choices=formats, help="as in `serve --quantization`")
    parser.add_argument(
        "--texts",
        metavar="FILE",
        help="texts divided by blank lines: scales of 4 bits are searched by what these make of errors (default: by "
        "errors of weights)",
    )
    sources.add_arguments(parser, (BY_NAME["dtype"],))
    _add_verbose(parser)
    parser.set_defaults(command=_quantize, flags=_flags(parser))


def _add_models(commands: Any) -> None:
    text = "list, load and unload the models of a running service, as an operator"
    parser = commands.add_parser("models", help=text, description=text)
    parser.add_argument("action", choices=("list", "load", "unload"))
    parser.add_argument("name", nargs="?", metavar="NAME", help="the model to load or unload")
    parser.add_argument("path", nargs="?", metavar="PATH", help="load: a folder below --models-dir, or hf:ORG/NAME")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the service (default: http://127.0.0.1:8000)")
    parser.add_argument("--admin-key", metavar="KEY", help="an admin key (default: the first of TRIPTYCH_ADMIN_KEYS)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="load: an engine setting of the model, such as dtype=float32 (repeatable)",
    )
    parser.add_argument("--pin", action="store_true", help="load: keep it when it is idle or memory is needed")
    parser.add_argument("--drain", type=float, metavar="SECONDS", help="unload: for its running requests")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is done")
    _add_verbose(parser)
    parser.set_defaults(command=_models, flags=_flags(parser))


def _add_engine(parser: argparse.ArgumentParser) -> None:
    sources.add_arguments(parser, (BY_NAME["device"], BY_NAME["dtype"]))


def _add_verbose(parser: argparse.ArgumentParser, default: Any = argparse.SUPPRESS) -> None:
    """Add `-v`, which is accepted before and after the command."""
    text = "show tracebacks of configuration errors"
    parser.add_argument("-v", "--verbose", action="store_true", default=default, help=text)


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]


def _serve(arguments: argparse.Namespace) -> int:
    file = arguments.config or os.environ.get("TRIPTYCH_CONFIG")
    content = sources.from_file(Path(file)) if file else sources.FileSettings()
    settings = content.settings | sources.from_environment(os.environ)
    settings |= sources.from_arguments(arguments, OPTIONS)
    models = {name: {"path": path} for name, path in (_named(text) for text in arguments.models)}
    if len(models) < len(arguments.models):
        raise ConfigError("two models have the same name: rename one with NAME=PATH")
    if models and (content.models or content.groups):
        raise ConfigError(f"models are given by {file} and by {arguments.models[0]}: give all of them in one place")
    groups = None if models else content.groups
    served = models or models_or_embedded(content.models, settings)
    if settings.get("runtime") != "local":
        return _run(served, settings, groups, None)
    with shared_folder() if settings.get("front_processes", 1) > 1 else nullcontext():
        engine = ConnectedChild(ENGINE)  # it imports torch meanwhile
        try:
            return _run(served, settings, groups, engine)
        finally:
            engine.close()


def _run(
    models: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    groups: Mapping[str, sources.FileSettings] | None,
    engine: ConnectedChild | None,
) -> int:
    from service.cli import serve  # takes a second, so after all usage errors

    return serve.serve(models, settings, groups, engine)


def _serve_config(arguments: argparse.Namespace) -> int:
    import yaml

    from service.runtimes.ray_serve.config_file import serve_config

    made = serve_config(Path(arguments.file), arguments.num_cpus)
    print(f"# Made from {arguments.file} by `triptych serve-config`.")
    print(yaml.safe_dump(made, sort_keys=False, allow_unicode=True), end="")
    return 0


def _download(arguments: argparse.Namespace) -> int:
    import logging

    settings = sources.from_environment(os.environ) | sources.from_arguments(arguments, (BY_NAME["pickle"],))
    others = [name for name in arguments.models if not hub.is_hub_name(name)]
    if others:
        raise ConfigError(f"{others[0]}: expected hf:ORGANISATION/NAME or hf:ORGANISATION/NAME@REVISION")
    logging.basicConfig(format="%(message)s")
    logging.getLogger(hub.__name__).setLevel(logging.INFO)  # progress
    for name in arguments.models:
        print(hub.pinned(name, pickle=settings.get("pickle", True)), flush=True)
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    from model.api.request import SamplingParams

    params = SamplingParams(
        **{name: getattr(arguments, name) for name in _SAMPLING},
        stop=tuple(arguments.stop),
        grammar=_grammar(arguments),
    )
    llm = _llm(arguments, "code")
    languages = {name: getattr(arguments, name) for name in ("source_language", "target_language")}
    for _, output in llm.stream([arguments.prompt], params, **languages):
        print(output.text, end="", flush=True)
    print()
    return 0


def _llm(arguments: argparse.Namespace, default: str) -> LLM:
    folder, engine = _folder(_named(arguments.model or default)[1]), _engine(arguments)
    from model.system.child_process import SPIN_COUNT

    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # OpenMP reads it when the next import loads torch
    from model.llm import LLM

    return LLM(folder, engine)


def _grammar(arguments: argparse.Namespace) -> str:
    """Return the grammar that constrains the output; empty: none."""
    from model.text import grammar

    if arguments.json:
        return grammar.json_grammar({"type": "object"})
    if arguments.json_schema is not None:
        return grammar.json_grammar(_schema(arguments.json_schema))
    if arguments.regex is not None:
        try:
            return grammar.regex_grammar(arguments.regex)
        except grammar.GrammarError as error:
            raise ConfigError(f"--regex is not supported: {error}") from None
    return grammar.choice_grammar(arguments.choice) if arguments.choice else ""


def _schema(given: str) -> dict[str, Any]:
    """Read a JSON schema from its text or from a file."""
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

        inspection.write_attention(name, _folder(path), arguments.attention, Path(arguments.out))
        return 0
    memory = Option("memory", byte_size, None, "").read(arguments.memory, "--memory")
    wanted = (
        dict([_named(arguments.model)])
        if arguments.model
        else {n: m["path"] for n, m in embedded_model_settings().items()}
    )
    from service.cli import inspection

    for name, path in wanted.items():
        report = inspection.print_json if arguments.json else inspection.show
        report(name, _folder(path), context=arguments.context, memory=memory)
    return 0


def _quantize(arguments: argparse.Namespace) -> int:
    folder = _folder(_named(arguments.model)[1])
    from service.cli import quantize

    return quantize.run(arguments, folder)


def _engine(arguments: argparse.Namespace) -> Any:
    from model.api.engine_config import EngineConfig

    return EngineConfig(**sources.from_arguments(arguments, (BY_NAME["device"], BY_NAME["dtype"])))


def _models(arguments: argparse.Namespace) -> int:
    from service.cli import models

    return models.run(arguments)


def _folder(path: str) -> Path:
    """The folder of a path, or of a model of the Hub after downloading it."""
    return hub.local_folder(path) if hub.is_hub_name(path) else Path(path)


def _named(text: str) -> tuple[str, str]:
    """Split `[NAME=]PATH`; the default name is the folder's or repository's; an embedded model needs only its name."""
    name, equals, path = text.partition("=")
    if not equals:
        embedded = embedded_model_settings()
        if text in embedded and not Path(text).exists():
            return text, embedded[text]["path"]
        name, path = hub.model_name(text) if hub.is_hub_name(text) else _path_name(Path(text)), text
    if not name or not path:
        raise ConfigError(f"expected [NAME=]PATH, found {text!r}")
    if not hub.is_hub_name(path) and not Path(path).is_dir() and not is_gguf(Path(path)):
        names = ", ".join(embedded_model_settings())
        raise ConfigError(
            f"{path}: no such folder; expected a Hugging Face checkpoint folder, a GGUF file, hf:ORGANISATION/NAME "
            f"or one of {names}"
        )
    return name, path


def _path_name(path: Path) -> str:
    return gguf_name(path) if is_gguf(path) else path.resolve().name


if __name__ == "__main__":
    main()
