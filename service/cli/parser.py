"""The flags of each command of `triptych`. This module imports nothing slow."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from triptych.model.api.engine_config import INTEGERS
from triptych.model.api.sampling_bounds import check_value
from triptych.model.api.sampling_params import SAMPLING as PARAMETERS
from triptych.model.errors import ConfigError
from triptych.service.cli.completion import SHELLS
from triptych.service.settings import sources
from triptych.service.settings.key_lines import LINE_OPTIONS
from triptych.service.settings.option_table import BY_NAME, OPTIONS

_MODEL = (
    "an embedded model, the path of a checkpoint folder or GGUF file, or ORGANISATION/NAME[:QUANTIZATION] of the Hub"
)
SAMPLING = {name: column for name, column in PARAMETERS.items() if column.row.flag}  # flags of `generate`


class _CommandParser(argparse.ArgumentParser):
    """A parser that raises errors as `ConfigError`, in one line, and takes no beginning of a flag for the flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = difflib.get_close_matches(str(value), action.choices, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(action.choices)}"
            raise ConfigError(f"invalid choice: {value!r} is no command; {hint}")
        super()._check_value(action, value)


class _Help(argparse.Action):
    """Prints the help, without the flags in `hidden`."""

    def __init__(self, option_strings: list[str], dest: str, hidden: Sequence[str] = (), help: str = "") -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)
        self._hidden = hidden

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for action in parser._actions:
            if set(action.option_strings) & set(self._hidden):
                action.help = argparse.SUPPRESS
        parser.print_help()
        parser.exit()


class _Version(argparse.Action):
    """Prints the version, which takes long to read for a parser that is not asked for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"triptych {version('triptych')}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Build the parser. Its result has `command`, the command's name, and `flags`, all flags of that command."""
    parser = _CommandParser(
        prog="triptych", description="Serve decoder-only, encoder-decoder and encoder-only Transformers."
    )
    _add_verbose(parser, default=False)
    parser.set_defaults(flags=["--help", "--verbose", "--version"])
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_CommandParser)
    _add_serve(commands)
    _add_serve_config(commands)
    _add_download(commands)
    _add_run(commands)
    _add_generate(commands)
    _add_transcribe(commands)
    _add_encode(commands)
    _add_batch(commands)
    _add_inspect(commands)
    _add_check(commands)
    _add_quantize(commands)
    _add_models(commands)
    _add_launch(commands)
    _add_ps(commands)
    _add_doctor(commands)
    _add_key(commands)
    _add_completion(commands)
    return parser


_EXAMPLES = """\
examples:
  triptych serve                                        the embedded models
  triptych serve /models/llama small=./small.gguf       a folder, and a GGUF file under a name
  triptych serve org/name:Q4_K_M                        a GGUF file of the Hub
  triptych serve org/name --host 0.0.0.0 --api-key KEY  open to other machines, with a key
  triptych serve --models-dir /models                   each folder in /models, loaded when it is asked for
  triptych serve --config triptych.yaml                 models and settings from a file
"""


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="start the HTTP service",
        description="Start the HTTP service. Every option is also a variable and a key of the --config file.",
        usage="triptych serve [[NAME=]MODEL ...] [OPTION ...]",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="[NAME=]MODEL",
        help=f"{_MODEL} (default: those in the --config file; else none with --models-dir; else the embedded models)",
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="file of settings and models (TRIPTYCH_CONFIG)")
    rare = sources.add_arguments(parser, OPTIONS, grouped=True)
    parser.add_argument("-h", "--help", action=_Help, hidden=rare, help="show the most used options and exit")
    parser.add_argument("--help-all", action=_Help, help="show all options and exit")
    _add_verbose(parser)
    parser.set_defaults(flags=_flags(parser))


def _add_serve_config(commands: Any) -> None:
    text = "convert a file of `triptych serve --config` for Ray's `serve deploy` and KubeRay"
    parser = commands.add_parser("serve-config", help=text, description=text)
    parser.add_argument("file", metavar="FILE.yaml")
    parser.add_argument(
        "--num-cpus", type=float, metavar="N", help="CPUs that a replica requests from Ray (default: none)"
    )
    _add_verbose(parser)
    parser.set_defaults(flags=_flags(parser))


def _add_download(commands: Any) -> None:
    text = "download models of the Hub into the cache, and print their names with their commits"
    parser = commands.add_parser("download", help=text, description=text)
    parser.add_argument("models", nargs="+", metavar="ORGANISATION/NAME[:QUANTIZATION][@REVISION]")
    sources.add_arguments(parser, (BY_NAME["pickle"],))
    _add_verbose(parser)
    parser.set_defaults(flags=_flags(parser))


def _add_run(commands: Any) -> None:
    text = "chat in the terminal with a model of a running service, or of a folder"
    parser = commands.add_parser(
        "run",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. With PROMPT, or text on standard input, one reply is printed.",
    )
    shown = f"a model of the service at --url; else {_MODEL} (default: the first that chats)"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=shown)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="one message; text on standard input follows it")
    parser.add_argument("--url", help="the service (default: http://127.0.0.1:8000 if it answers; TRIPTYCH_URL)")
    parser.add_argument("--api-key", metavar="KEY", help="a key of the service (default: TRIPTYCH_API_KEY)")
    parser.add_argument("--system", metavar="TEXT", help="instruction for the model")
    for name in ("max_tokens", "temperature", "top_p", "seed"):
        parse = int if name in ("max_tokens", "seed") else float
        parser.add_argument(_flag(name), type=_bounded(name, parse), metavar="N", help="as in `generate`")
    _add_engine(parser)
    _add_verbose(parser)
    parser.set_defaults(flags=_flags(parser))


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser("generate", help="generate text offline, without a server")
    parser.add_argument("model", metavar="[NAME=]PATH", nargs="?", help=f"{_MODEL} (default: code)")
    parser.add_argument("prompt", metavar="PROMPT")
    text = "maximum number of tokens to generate (default: the folder's, else until the end or a full context)"
    parser.add_argument("--max-tokens", type=_bounded("max_tokens", int), help=text)
    for name, column in SAMPLING.items():
        default = f"the folder's, else {column.default:g}" if column.row.folder else f"{column.default:g}"
        text = f"{column.row.help.rstrip('.')} (default: {default})"
        parser.add_argument(_flag(name), type=_bounded(name, column.type), help=text)
    for side, text in (("source", "of the prompt"), ("target", "of the output")):
        shown = f"language {text}, as a code of the tokenizer (NLLB, mBART, M2M-100)"
        parser.add_argument(f"--{side}-language", metavar="CODE", help=shown)
    structure = parser.add_mutually_exclusive_group()
    structure.add_argument("--json", action="store_true", help="constrain the output to a JSON object")
    structure.add_argument("--json-schema", metavar="FILE|JSON", help="constrain the output to a JSON schema")
    structure.add_argument("--regex", metavar="PATTERN", help="constrain the output to match a regular expression")
    structure.add_argument("--grammar", metavar="FILE|TEXT", help="constrain the output to a grammar in GBNF or Lark")
    structure.add_argument(
        "--choice", action="append", metavar="TEXT", help="constrain the output to one of these texts (repeatable)"
    )
    parser.add_argument(
        "--stop", type=_stop, action="append", default=[], metavar="TEXT", help="stop before this text (repeatable)"
    )
    _add_engine(parser)
    _add_verbose(parser)
    parser.set_defaults(flags=_flags(parser))


def _add_transcribe(commands: Any) -> None:
    text = "transcribe an audio file offline, without a server"
    parser = commands.add_parser("transcribe", help=text, description=text)
    parser.add_argument("model", metavar="[NAME=]PATH", help=_MODEL)
    parser.add_argument("file", metavar="FILE", help="WAV, FLAC, MP3 or Ogg; MP4, WebM and AAC with the extra `audio`")
    parser.add_argument("--language", metavar="CODE", help="language of the speech (default: detected)")
    parser.add_argument("--translate", action="store_true", help="translate to English")
    parser.add_argument(
        "--format",
        choices=("text", "srt", "vtt"),
        default="text",
        help="text (default), printed while it is decoded, or subtitles",
    )
    parser.add_argument("--parallel", action="store_true", help="decode all windows of the audio at once")
    parser.add_argument("--prompt", metavar="TEXT", default="", help="text before the audio, for style and names")
    _add_engine(parser)
    _add_verbose(parser)
    parser.set_defaults(flags=_flags(parser))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _bounded(name: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser that also checks the bounds of a sampling parameter."""

    def read(text: str) -> Any:
        value = parse(text)
        try:
            check_value(name, value)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    read.__name__ = parse.__name__  # argparse shows it in errors
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
    parser.set_defaults(flags=_flags(parser))


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="show the architecture, memory and cost of a checkpoint")
    parser.add_argument("model", metavar="[NAME=]PATH", nargs="?", help=f"{_MODEL} (default: all embedded models)")
    parser.add_argument(
        "--context", type=_positive, default=None, help="tokens that a decode step attends to (default: 1024)"
    )
    parser.add_argument("--memory", default=None, help="memory of the KV cache to plan for (default: 1GiB)")
    parser.add_argument("--json", action="store_true", help="print JSON, one line a model")
    parser.add_argument(
        "--pod",
        metavar="memory=4Gi,cpu=2",
        help="load and measure the model on that many CPUs, and say whether it fits; exits 1 if it does not",
    )
    parser.add_argument("--load", metavar="N/s", default=None, help="--pod: requests a second (default: 1/s)")
    parser.add_argument("--prompt-tokens", type=_positive, default=None, help="--pod: of a request (default: 256)")
    parser.add_argument("--output-tokens", type=_positive, default=None, help="--pod: of a request (default: 128)")
    parser.add_argument("--attention", metavar="TEXT", help="write an HTML page of all attention weights over a text")
    parser.add_argument("--out", default="attention.html", metavar="FILE", help="its path (default: attention.html)")
    _add_verbose(parser)
    parser.set_defaults(flags=_flags(parser))


def _add_check(commands: Any) -> None:
    text = "check a model's chat template: what it writes is read back, whole and streamed, and held by grammars"
    exits = "Exits 1 if a check fails, 2 if the template or the tokenizer cannot be read. Weights are not read."
    parser = commands.add_parser("check", help=text, description=f"{text}. {exits}")
    parser.add_argument("model", metavar="MODEL", nargs="?", help=f"{_MODEL}; only its tokenizer with --template")
    parser.add_argument("--template", metavar="FILE", help="a Jinja file that is checked in place of the model's own")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_verbose(parser)
    parser.set_defaults(flags=_flags(parser))


def _add_quantize(commands: Any) -> None:
    text = "write a checkpoint folder with integer weights, to be served on a CPU"
    parser = commands.add_parser("quantize", help=text, description=text)
    parser.add_argument("model", metavar="IN", help=_MODEL)
    parser.add_argument("out", metavar="OUT", help="the new folder")
    parser.add_argument("--format", required=True, choices=INTEGERS, help="as in `serve --quantization`")
    parser.add_argument(
        "--texts",
        metavar="FILE",
        help="calibration texts, separated by blank lines: 4-bit scales then minimize the error of outputs on them "
        "(default: the error of the weights)",
    )
    sources.add_arguments(parser, (BY_NAME["dtype"],))
    _add_verbose(parser)
    parser.set_defaults(flags=_flags(parser))


def _add_models(commands: Any) -> None:
    text = "list, load and unload the models of a running service"
    parser = commands.add_parser("models", help=text, description=text)
    parser.add_argument("action", choices=("list", "load", "unload"))
    parser.add_argument("name", nargs="?", metavar="NAME", help="the model to load or unload")
    parser.add_argument("path", nargs="?", metavar="PATH", help="load: a folder below --models-dir, or hf:ORG/NAME")
    parser.add_argument("--url", help="the service (default: TRIPTYCH_URL, else http://127.0.0.1:8000)")
    parser.add_argument("--admin-key", metavar="KEY", help="an admin key (default: the first of TRIPTYCH_ADMIN_KEYS)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="load: an engine setting of the model, such as dtype=float32 (repeatable)",
    )
    parser.add_argument("--pin", action="store_true", help="load: keep the model when it is idle or memory is needed")
    parser.add_argument("--drain", type=float, metavar="SECONDS", help="unload: how long running requests may continue")
    parser.add_argument("--no-wait", action="store_true", help="return at once, before the model is loaded or unloaded")
    _add_verbose(parser)
    parser.set_defaults(flags=_flags(parser))


def _add_launch(commands: Any) -> None:
    text = "point a coding agent at a running service: check what it needs, and print or run its command"
    parser = commands.add_parser("launch", help=text, description=f"{text}. Exits 1 if the model cannot serve it.")
    parser.add_argument("agent", choices=("claude", "codex", "opencode", "aider"))
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model of the service (default: one with tools)")
    parser.add_argument("--exec", action="store_true", help="run the agent")
    _add_service(parser)
    parser.set_defaults(flags=_flags(parser))


def _add_ps(commands: Any) -> None:
    text = "show the models of a running service: memory, and running and waiting requests"
    parser = commands.add_parser("ps", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_service(parser)
    parser.set_defaults(flags=_flags(parser))


def _add_doctor(commands: Any) -> None:
    text = "check the machine and the settings: what would hinder or slow a service"
    parser = commands.add_parser("doctor", help=text, description=f"{text}. Exits 1 if a service would not start.")
    sources.add_arguments(parser, (BY_NAME["host"], BY_NAME["port"], BY_NAME["threads"]))
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_verbose(parser)
    parser.set_defaults(flags=_flags(parser))


def _add_key(commands: Any) -> None:
    text = "make an API key, and print its line for --api-key-file"
    more = "The line, with a hash of the key, goes to standard output, and the key itself to standard error."
    parser = commands.add_parser("key", help=text, description=f"{text}. {more}")
    parser.add_argument("name", metavar="NAME", help="its holder, in metrics, logs and usage")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help=", ".join(LINE_OPTIONS))
    _add_verbose(parser)
    parser.set_defaults(flags=_flags(parser))


def _add_completion(commands: Any) -> None:
    text = "print a script that completes commands and flags in a shell: source <(triptych completion bash)"
    parser = commands.add_parser("completion", help=text, description=text)
    parser.add_argument("shell", choices=SHELLS)
    _add_verbose(parser)
    parser.set_defaults(flags=_flags(parser))


def _add_service(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="the service (default: TRIPTYCH_URL, else http://127.0.0.1:8000)")
    parser.add_argument("--api-key", metavar="KEY", help="a key of the service (default: TRIPTYCH_API_KEY)")
    _add_verbose(parser)


def _add_batch(commands: Any) -> None:
    text = "run a file of requests offline, without a server"
    parser = commands.add_parser("batch", help=text, description=text)
    parser.add_argument("file", metavar="FILE", help="one request a line, as for /v1/batches (docs/batches.md)")
    parser.add_argument(
        *("--model", "-m"),
        metavar="[NAME=]PATH",
        action="append",
        default=[],
        help=f"{_MODEL} (repeatable; default: the embedded models)",
    )
    parser.add_argument(
        *("--output", "-o"), metavar="OUT", required=True, help="file of the replies; failures go to OUT.errors"
    )
    _add_engine(parser)
    _add_verbose(parser)
    parser.set_defaults(flags=_flags(parser))


def _add_engine(parser: argparse.ArgumentParser) -> None:
    sources.add_arguments(parser, (BY_NAME["device"], BY_NAME["dtype"]))


def _add_verbose(parser: argparse.ArgumentParser, default: Any = argparse.SUPPRESS) -> None:
    """Add `-v`; it is accepted before and after the command."""
    text = "show tracebacks of configuration errors"
    parser.add_argument("-v", "--verbose", action="store_true", default=default, help=text)


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
