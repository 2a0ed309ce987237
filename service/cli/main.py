"""The command line `triptych`: runs its commands, and turns errors into messages and exit codes.

Usage errors print one line and exit 2. Slow imports are inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.model import names
from triptych.model.checkpoint import hub, hub_names
from triptych.model.checkpoint.adapter_folder import is_adapter
from triptych.model.errors import ConfigError, EngineError, GrammarError
from triptych.model.system import log_lines
from triptych.model.system.child_process import ENGINE, ConnectedChild
from triptych.model.system.cpu_sets import bind_each_thread
from triptych.model.system.cpu_threads import set_threads
from triptych.service.cli import completion
from triptych.service.cli.model_arguments import folder, named, show_downloads
from triptych.service.cli.parser import SAMPLING, make_parser
from triptych.service.settings import sources
from triptych.service.settings.option import Option
from triptych.service.settings.option_table import BY_NAME, OPTIONS
from triptych.service.settings.parsers import byte_size
from triptych.service.settings.resolve import embedded_model_settings, models_or_embedded

if TYPE_CHECKING:
    from triptych.model.llm import LLM


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    _open_standard_files()
    arguments = argparse.Namespace(verbose=False)
    try:
        parser = make_parser()
        arguments, unknown = parser.parse_known_args(argv)
        if arguments.command is None and not unknown:
            parser.print_help(sys.stderr)
            sys.exit(2)
        if unknown:
            raise ConfigError(_unknown(unknown[0], arguments))
        code = _COMMANDS[arguments.command](arguments)
    except ConfigError as error:
        if arguments.verbose:
            raise
        _tell(f"triptych: {error}", argv)
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
    except OSError as error:
        if arguments.verbose or error.filename is None:
            raise
        _tell(f"triptych: {os.fsdecode(error.filename)}: {error.strerror}", argv)
        code = 2
    sys.exit(code)


def _tell(text: str, argv: Sequence[str] | None) -> None:
    """Print an error; a service that logs JSON logs it, also where its settings could not be read."""
    if not log_lines.is_asked_for(sys.argv[1:] if argv is None else argv, os.environ):
        print(text, file=sys.stderr)
        return
    log_lines.begin("json")
    logging.getLogger("triptych").error(text)


def _unknown(flag: str, arguments: argparse.Namespace) -> str:
    """Say that a flag is not known, and what to do."""
    name, command = flag.partition("=")[0], " ".join(filter(None, ("triptych", arguments.command)))
    if name in arguments.flags:
        return f"{name} belongs after the command: {command} {flag} ..."
    return f"{flag} is not known{sources.nearest(name, arguments.flags) or f' (see {command} --help)'}"


def _open_standard_files() -> None:
    """Open /dev/null for each closed standard file, because libuv aborts if a socket gets its number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is this one
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _serve(arguments: argparse.Namespace) -> int:
    file = os.environ.get("TRIPTYCH_CONFIG") if arguments.config is None else arguments.config
    if file is not None and not file.strip():  # an intended file may hold the keys, so do not start without it
        raise ConfigError(
            "--config (TRIPTYCH_CONFIG): found an empty text, expected the path of a file; or leave it out"
        )
    content = sources.from_file(Path(file)) if file else sources.FileSettings()
    settings = content.settings | sources.from_environment(os.environ)
    sources.forget_secrets(os.environ)
    settings |= sources.from_arguments(arguments, OPTIONS)
    models = {name: {"path": path} for name, path in (named(text) for text in arguments.models)}
    if len(models) < len(arguments.models):
        raise ConfigError("two models have the same name: rename one with NAME=PATH")
    if models and (content.models or content.groups):
        raise ConfigError(f"models are given by {file} and by {arguments.models[0]}: give all of them in one place")
    for model in content.models.values():
        names.locate(model["path"])  # raises for a bad name before anything starts
    groups = None if models else content.groups
    served = models or models_or_embedded(content.models, settings)
    note = ""
    if "runtime" not in settings and find_spec("ray") is None:
        settings["runtime"] = "local"
        note = "Ray is not installed, so the local runtime serves, without replicas (pip install 'triptych[ray]')"
    if settings.get("runtime") != "local":
        return _run(served, settings, groups, None)
    log_lines.begin(settings.get("log_format", "auto"))
    set_threads(settings.get("threads"))
    bind_each_thread(settings.get("cpu_binding") == "threads")
    engine = ConnectedChild(ENGINE)  # imports torch in the meantime
    try:
        return _run(served, settings, groups, engine, note)
    finally:
        engine.close()


def _run(
    models: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    groups: Mapping[str, sources.FileSettings] | None,
    engine: ConnectedChild | None,
    note: str = "",
) -> int:
    from triptych.service.cli import serve  # takes a second, so it comes after all usage errors

    return serve.serve(models, settings, groups, engine, note)


def _serve_config(arguments: argparse.Namespace) -> int:
    import yaml

    from triptych.service.runtimes.ray_serve.config_file import serve_config

    made = serve_config(Path(arguments.file), arguments.num_cpus)
    print(f"# Made from {arguments.file} by `triptych serve-config`.")
    print(yaml.safe_dump(made, sort_keys=False, allow_unicode=True), end="")
    return 0


def _download(arguments: argparse.Namespace) -> int:
    settings = sources.from_environment(os.environ) | sources.from_arguments(arguments, (BY_NAME["pickle"],))
    wanted = [str(hub_names.parse(name)) for name in arguments.models]
    show_downloads()
    for name in wanted:
        print(hub.pinned(name, pickle=settings.get("pickle", True)), flush=True)
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    grammar, llm = _grammar(arguments), _llm(arguments, "code")
    given = {name: value for name in ("max_tokens", *SAMPLING) if (value := getattr(arguments, name)) is not None}
    params = {**given, "stop": tuple(arguments.stop), "grammar": grammar}
    languages = {name: getattr(arguments, name) for name in ("source_language", "target_language")}
    for _, output in llm.stream([arguments.prompt], params, **languages):
        print(output.text, end="", flush=True)
    print()
    return 0


def _transcribe(arguments: argparse.Namespace) -> int:
    sound = _read_audio(arguments.file)
    llm = _llm(arguments, "")
    from triptych.service.cli.transcribe import run

    return run(arguments, sound, llm)


def _read_audio(path: str) -> bytes:
    """Return the bytes of a file; raises `ConfigError`."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or 'cannot be read'}") from None


def _llm(arguments: argparse.Namespace, default: str) -> LLM:
    path, engine = folder(named(arguments.model or default)[1]), _engine(arguments)
    from triptych.model.system.child_process import SPIN_COUNT

    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # OpenMP reads it when the next import loads torch
    from triptych.model.llm import LLM

    return LLM(path, engine)


def _grammar(arguments: argparse.Namespace) -> str:
    """Return the grammar that constrains the output; empty: none."""
    from triptych.model.text import grammar

    if arguments.json:
        return grammar.json_grammar({"type": "object"})
    try:
        if arguments.json_schema is not None:
            return grammar.json_grammar(_schema(arguments.json_schema))
        if arguments.regex is not None:
            return grammar.regex_grammar(arguments.regex)
        if arguments.grammar is not None:
            return grammar.written_grammar(_grammar_text(arguments.grammar))
    except GrammarError as error:
        flag = next(name for name in ("json_schema", "regex", "grammar") if getattr(arguments, name) is not None)
        raise ConfigError(f"--{flag.replace('_', '-')}: {error}") from None
    return grammar.choice_grammar(arguments.choice) if arguments.choice else ""


def _grammar_text(given: str) -> str:
    """Return the text of a grammar, given itself or as a file's path."""
    if "\n" in given or ":" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--grammar: {given} cannot be read: {error}") from None


def _schema(given: str) -> dict[str, Any]:
    """Return a JSON schema, given itself or as a file's path."""
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
        name, path = named(arguments.model or "embed")
        from triptych.service.cli import inspection

        inspection.write_attention(name, folder(path), arguments.attention, Path(arguments.out))
        return 0
    _refuse_of_others(arguments)
    if arguments.pod is not None:
        return _inspect_pod(arguments)
    memory = Option("memory", byte_size, None, "").read(arguments.memory or "1GiB", "--memory")
    wanted = (
        dict([named(arguments.model)])
        if arguments.model
        else {n: m["path"] for n, m in embedded_model_settings().items()}
    )
    from triptych.service.cli import adapter_report, inspection

    for name, path in wanted.items():
        if is_adapter(found := folder(path)):
            (adapter_report.print_json if arguments.json else adapter_report.show)(name, found)
            continue
        report = inspection.print_json if arguments.json else inspection.show
        report(name, found, context=arguments.context or 1024, memory=memory)
    return 0


def _refuse_of_others(arguments: argparse.Namespace) -> None:
    """Refuse options that only another way of inspecting reads: of `--pod` without it, and of plans with it."""
    has_pod = arguments.pod is not None
    others = ("context", "memory") if has_pod else ("load", "prompt_tokens", "output_tokens")
    for name in others:
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {'does not go with' if has_pod else 'needs'} --pod")


def _inspect_pod(arguments: argparse.Namespace) -> int:
    from triptych.service.cli import pod_fit

    pod = pod_fit.Pod.parse(arguments.pod)
    tokens = (arguments.prompt_tokens or 256, arguments.output_tokens or 128)
    load = pod_fit.Load.parse(arguments.load or "1/s", *tokens)
    name, path = named(arguments.model or "code")
    pod_fit.prepare(pod)
    return pod_fit.report(name, str(folder(path)), pod, load, as_json=arguments.json)


def _check(arguments: argparse.Namespace) -> int:
    from triptych.service.cli import check

    return check.run(arguments)


def _quantize(arguments: argparse.Namespace) -> int:
    path = folder(named(arguments.model)[1])
    from triptych.service.cli import quantize

    return quantize.run(arguments, path)


def _engine(arguments: argparse.Namespace) -> Any:
    from triptych.model.api.engine_config import EngineConfig

    return EngineConfig(**sources.from_arguments(arguments, (BY_NAME["device"], BY_NAME["dtype"])))


def _chat(arguments: argparse.Namespace) -> int:
    from triptych.service.cli import run

    def find(text: str) -> tuple[str, str]:
        name, path = named(text)
        return name, str(folder(path))

    return run.run(arguments, find, "chat" if "chat" in embedded_model_settings() else "assistant")


def _models(arguments: argparse.Namespace) -> int:
    from triptych.service.cli import models

    return models.run(arguments)


def _launch(arguments: argparse.Namespace) -> int:
    from triptych.service.cli import launch

    return launch.run(arguments)


def _ps(arguments: argparse.Namespace) -> int:
    from triptych.service.cli import models

    return models.ps(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from triptych.service.cli import doctor

    return doctor.run(arguments)


def _key(arguments: argparse.Namespace) -> int:
    from triptych.service.settings.key_lines import new_key, read_line

    key, hashed = new_key()
    words = [arguments.name, str(hashed), *arguments.options]
    read_line(
        words, f"triptych key {arguments.name[:64]}"
    )  # raises for a name or an option that a service would refuse
    print(" ".join(words))
    sys.stdout.flush()
    print(f"The key of {arguments.name}, which is shown this once: {key}", file=sys.stderr)
    return 0


def _completion(arguments: argparse.Namespace) -> int:
    print(completion.script(arguments.shell, make_parser()), end="")
    return 0


def _batch(arguments: argparse.Namespace) -> int:
    models = {name: {"path": path} for name, path in (named(text) for text in arguments.model)}
    file, settings = Path(arguments.file), sources.from_arguments(arguments, (BY_NAME["device"], BY_NAME["dtype"]))
    with file.open("rb"):  # raises before anything slow is imported
        pass
    from triptych.service.cli.batch import run

    return run(file, models or embedded_model_settings(), settings, Path(arguments.output))


_COMMANDS = {
    "serve": _serve,
    "serve-config": _serve_config,
    "download": _download,
    "run": _chat,
    "generate": _generate,
    "transcribe": _transcribe,
    "batch": _batch,
    "encode": _encode,
    "inspect": _inspect,
    "check": _check,
    "quantize": _quantize,
    "models": _models,
    "launch": _launch,
    "ps": _ps,
    "doctor": _doctor,
    "key": _key,
    "completion": _completion,
}

if __name__ == "__main__":
    main()
