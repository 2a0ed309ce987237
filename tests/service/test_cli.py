"""The console script as a person types it: in processes of its own, or in this one, which has torch loaded."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest

from tests.model.checkpoints import native_backends
from tests.service.processes import ROOT
from triptych import __main__ as entry
from triptych.model.errors import ConfigError, EngineDeadError
from triptych.model.system.child_process import start_child
from triptych.service.cli import main, quantize, serve
from triptych.service.settings.resolve import resolve_config


def triptych(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "triptych.service.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def triptych_here(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `triptych` gives, without a process: for what every command goes through alike."""
    with (
        mock.patch.dict(os.environ, environment),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as end,
    ):
        main.main(arguments)
    return subprocess.CompletedProcess(arguments, int(end.value.code or 0), out.getvalue(), err.getvalue())


def test_help_shows_defaults_and_variables() -> None:
    run = triptych("serve", "--help")
    assert run.returncode == 0
    text = " ".join(run.stdout.split())
    assert "--port PORT port to listen on (default: 8000; TRIPTYCH_PORT)" in text


HELP = [("--help",), *((name, "--help") for name in ("serve", "generate", "encode", "inspect", "download", "quantize"))]
MISTAKES = [("serve", "/no/such"), ("generate", "code", "x", "--dtype", "int3"), ("inspect", "nothing")]


def test_every_command_is_on_its_page() -> None:
    rows = [line for line in (ROOT / "docs" / "command-line.md").read_text().splitlines() if line.startswith("| `")]
    named = {word for row in rows for word in re.findall(r"`(?:triptych )?([a-z-]+)", row.split(" | ")[0])}
    assert main._COMMANDS.keys() - named == set()


def test_help_and_a_mistake_import_nothing_heavy() -> None:
    """So they stay under 0.3 s; a test of the time itself would fail on a busy box. One process does all of them."""
    code = f"""
import sys
before = set(sys.modules)
from triptych.service.cli import main as cli
for arguments in {HELP + MISTAKES!r}:
    try:
        cli.main(arguments)
    except SystemExit as end:
        assert (end.code or 0) == (0 if "--help" in arguments else 2), arguments
    names = {{name.partition(".")[0] for name in set(sys.modules) - before}} - sys.stdlib_module_names
    assert names == {{"triptych"}}, (arguments, names)
print("done", file=sys.stderr)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stderr.endswith("done\n"), run.stderr


def test_the_version_is_printed() -> None:
    run = triptych_here("--version")
    assert (run.returncode, run.stdout) == (0, f"triptych {version('triptych')}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "/no/such/folder"), "/no/such/folder: no such folder"),
        (("serve", "--prot", "1"), "--prot is not known; did you mean --port?"),
        (("encode", "--modle", "embed", "x"), "--modle is not known; did you mean --model?"),
        (("serve", "--por", "1"), "--por is not known; did you mean --port?"),
        (("serve", "--por=1"), "--por=1 is not known; did you mean --port?"),
        (("serve", "--trust-remote-code"), "--trust-remote-code is not known (see triptych serve --help)"),
        (("serve", "--port", "x"), "--port: found 'x', expected a whole number"),
        (("serve", "code", "code"), "two models have the same name"),
        (("generate", "code", "x", "--dtype", "int3"), "--dtype: found 'int3'"),
        (("inspect", "nothing"), "nothing: no such folder"),
        (("inspect", "--context", "0"), "--context: expected a whole number from 1 to 2147483647, found '0'"),
        (("inspect", "--context", "-5"), "--context: expected a whole number from 1"),
        (("serve", "--host", "", "--runtime", "local", "--port", "0"), "host must be an address, found none"),
        *(
            (("generate", "code", "x", flag), f"argument {flag.partition('=')[0]}: {message}")
            for flag, message in (
                ("--max-tokens=0", "max_tokens must be 1 to 2147483647, found 0"),
                ("--max-tokens=x", "invalid int value: 'x'"),
                ("--temperature=-1", "temperature must be 0 to 100, found -1.0"),
                ("--temperature=nan", "temperature must be 0 to 100, found nan"),
                ("--top-p=0", "top_p must be above 0 and at most 1, found 0.0"),
                ("--repetition-penalty=0", "repetition_penalty must be 0.01 to 100, found 0.0"),
                ("--stop=", "expected a non-empty text"),
            )
        ),
        (("serve", "--kv-cache-memory", "9" * 400), "--kv-cache-memory: found '9999"),
        (("bake",), "invalid choice: 'bake'"),
        (("--vresion",), "--vresion is not known; did you mean --version?"),
        (("-x",), "-x is not known"),
        (("--port=9", "serve"), "--port belongs after the command: triptych serve --port=9"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_2(arguments: tuple[str, ...], message: str) -> None:
    run = triptych_here(*arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert run.stderr.count("\n") == 1
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("name", ["", " a", "a\nb", "a\x1b[2J", "it's", 'a"b', "a\\b", "a" * 201])
def test_a_name_that_would_break_lines_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model name .* rename the model with NAME=PATH"):
        resolve_config({name: {"path": "code"}}, {})
    assert resolve_config({"mañana 2/x:y@1+b": {"path": "code"}}, {}).models[0].name == "mañana 2/x:y@1+b"


def test_an_interrupt_while_modules_are_imported_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "triptych.service.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "triptych.service.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == 130


def test_the_engine_gets_no_signals_before_it_ignores_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(*_: object, **__: object) -> set[int]:
        return set(signal.pthread_sigmask(signal.SIG_BLOCK, []))

    monkeypatch.setattr("subprocess.Popen", blocked)
    found: object = start_child("module", descriptors=[])
    assert found == blocked() | {signal.SIGINT, signal.SIGTERM} != blocked()


@pytest.mark.parametrize("name", ["/secret/model", b"/secret/model"])
def test_a_path_that_may_not_be_read_is_one_line(name: str | bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def looks(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", name)

    monkeypatch.setitem(main._COMMANDS, "inspect", looks)
    run = triptych_here("inspect", "/secret/model")
    assert (run.returncode, run.stderr) == (2, "triptych: /secret/model: Permission denied\n")
    with pytest.raises(PermissionError):
        main.main(("-v", "inspect", "/secret/model"))


def test_without_a_command_the_help_is_shown() -> None:
    run = triptych_here()
    assert run.returncode == 2 and "serve " in run.stderr and not run.stdout


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_files_that_the_caller_has_closed_are_no_sockets(closed: tuple[int, ...]) -> None:
    """Nor does `serve` end at once, or by SIGABRT at its end."""
    code = (
        "import os, sys\nfrom triptych.service.cli import main as cli\n"
        "try: cli.main(['serve', '--port', 'x'])\n"
        "except SystemExit as end: told = end.code, [os.get_inheritable(n) and os.path.realpath(f'/proc/self/fd/{n}')"
        " for n in range(3)], sys.stdin.readable(), sys.stdout.write('x'), sys.stderr.isatty()\n"
        "os.write(int(sys.argv[1]), repr(told).encode())"
    )
    read, write = os.pipe()
    with os.fdopen(read) as told:
        command = [sys.executable, "-c", code, str(write)]
        null = subprocess.DEVNULL
        process = subprocess.Popen(
            command,
            stdin=null,
            stdout=null,
            stderr=null,
            pass_fds=(write,),
            preexec_fn=lambda: [*map(os.close, closed)],
        )
        os.close(write)
        assert told.read() == repr((2, ["/dev/null"] * 3, True, 1, False))
        assert process.wait(30) == 0


@pytest.mark.parametrize("of_file", ["models: {a: /a}", "groups: {text: {models: {a: /a}}}"])
@pytest.mark.parametrize("by_variable", [False, True])
def test_models_are_named_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_file: str, by_variable: bool
) -> None:
    file = tmp_path / "triptych.yaml"
    file.write_text(of_file)
    monkeypatch.setattr(serve, "serve", lambda *given: 0)
    if by_variable:
        run = triptych_here("serve", "code", TRIPTYCH_CONFIG=str(file))
    else:
        run = triptych_here("serve", "code", "--config", str(file))
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert f"models are given by {file} and by code: give all of them in one place" in run.stderr


@pytest.mark.parametrize("arguments", [("-v", "serve", "/no/such"), ("serve", "/no/such", "-v")])
def test_a_traceback_is_shown_when_asked_for(arguments: tuple[str, ...]) -> None:
    run = triptych(*arguments)
    assert run.returncode != 0
    assert "Traceback" in run.stderr


def test_engine_errors_print_one_line_and_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.model.llm.LLM.stream", mock.Mock(side_effect=EngineDeadError("it is gone")))
    run = triptych_here("generate", "code", "x")
    assert (run.returncode, run.stderr.splitlines()[-1]) == (1, "triptych: it is gone")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), {}),
        (("--max-tokens", "5", "--temperature", "0"), {"max_tokens": 5, "temperature": 0.0}),
        (("--num-beams", "3"), {"num_beams": 3}),
    ],
)
def test_generate_leaves_to_the_folder_what_no_flag_says(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], expected: dict[str, float]
) -> None:
    stream = mock.Mock(return_value=iter(()))
    monkeypatch.setattr("triptych.model.llm.LLM.stream", stream)
    assert triptych_here("generate", "code", "x", *flags).returncode == 0
    assert stream.call_args.args[1] == {"stop": (), "grammar": "", **expected}


def test_generate_streams_a_normalised_date() -> None:
    run = triptych("generate", "normalize", "the third of march twenty twenty four at half past nine")
    assert run.stdout == "2024-03-03 09:30\n", run.stderr


@pytest.mark.usefixtures("packed_here")
def test_encode_prints_a_json_line_for_each_text() -> None:
    run = triptych_here("encode", "a cat", "a dog")
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["text"] for line in lines] == ["a cat", "a dog"]
    assert all(len(line["embedding"]) == 384 for line in lines)


@pytest.mark.skipif(not native_backends(), reason="there is no GCC here")
def test_quantize_writes_a_folder_and_says_what_it_lost(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = triptych_here("quantize", "normalize", str(out), "--format", "int4")
    assert (run.returncode, run.stderr) == (0, "")
    assert f"{out}: 6.5 MB of weights became 2.1 MB\n48 matrices lost 8." in run.stdout
    again = triptych_here("quantize", "normalize", str(out), "--format", "int4")
    assert again.returncode == 2
    assert again.stderr == f"triptych: {out} is there already: give the name of a new folder\n"
    assert "int4 in groups of 64" in triptych_here("quantize", str(out), str(out) + "2", "--format", "int8").stderr


@pytest.mark.skipif(not native_backends(), reason="there is no GCC here")
def test_quantize_leaves_nothing_when_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> None:
        assert [path.name.partition("ut.")[0] for path in tmp_path.iterdir()] == [".o"]  # half written
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(quantize._ProgressPrinter, "report", end)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as ended:
            main.main(("quantize", "normalize", str(tmp_path / "out"), "--format", "int4"))
        assert ended.value.code == 143
        assert not list(tmp_path.iterdir())
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_inspect_shows_the_anatomy_of_every_embedded_model() -> None:
    run = triptych_here("inspect", COLUMNS="120")
    assert run.returncode == 0, run.stderr
    for text in ("decoder-only, llama", "encoder-decoder, marian", "encoder-only, bert, 22,713,216 parameters"):
        assert text in run.stdout


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (("--regex", "[0-9]{4}/[0-9]{2}"), r"\d{4}/\d{2}"),
        (("--choice", "yes", "--choice", "no"), "yes|no"),
        (("--json-schema", '{"enum": ["a", "b"]}'), '"(a|b)"'),
        (("--json", "--max-tokens", "200"), r"\{.*"),
    ],
)
def test_generate_holds_the_output_to(flags: tuple[str, ...], pattern: str) -> None:
    run = triptych_here("generate", "normalize", "the third of march twenty twenty four", *flags)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(pattern, run.stdout.strip())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--regex", "("), "--regex: the group has no ')' (character 1)"),
        (("--regex", "a\\"), "--regex: the pattern ends with a backslash (character 2)"),
        (("--json-schema", "[]"), "--json-schema []: No such file"),
        (("--json-schema", "{"), "--json-schema: expected a JSON object"),
        (("--json", "--regex", "a"), "not allowed with argument --json"),
    ],
)
def test_invalid_output_constraints_are_refused(flags: tuple[str, ...], message: str) -> None:
    run = triptych_here("generate", "normalize", "x", *flags)
    assert run.returncode == 2
    assert message in run.stderr and run.stderr.count("\n") == 1


@pytest.mark.parametrize(("given", "expected"), [(None, "2000"), ("77", "77")])
def test_threads_spin_briefly_from_before_torch_loads(given: str | None, expected: str) -> None:
    code = """
import os, sys
class Spy:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.exit("spins " + os.environ.get("GOMP_SPINCOUNT", "as OpenMP likes"))
sys.meta_path.insert(0, Spy())
from triptych.service.cli.main import main
main(["encode", "a text"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {} if given is None else {"GOMP_SPINCOUNT": given}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert run.stderr.splitlines()[-1] == f"spins {expected}"


def test_without_ray_the_note_of_it_is_a_json_line_where_the_log_is_json(tmp_path: Path) -> None:
    code = (
        "import importlib.util as util, sys; find = util.find_spec\n"
        "util.find_spec = lambda name, package=None: None if name == 'ray' else find(name, package)\n"
        "from triptych.service.cli import main; main.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "serve", "--log-format", "json", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert "Ray is not installed" in lines[0]["message"]
    assert (done.returncode, lines[-1]["level"]) == (2, "ERROR")


@pytest.mark.parametrize(
    "how", ["--log-format json", "--log-format=json", "variable", "file", "plain", "variable, plain"]
)
@pytest.mark.parametrize("wrong", ["--bogus", "--port=x", "/no/such/folder"])
def test_an_error_of_the_settings_is_json_where_json_is_asked_for(
    how: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [wrong]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    if how.startswith("--"):
        arguments += how.split()
    if how.startswith("variable"):
        monkeypatch.setenv("TRIPTYCH_LOG_FORMAT", "json")
    if how.endswith("plain"):
        arguments += ["--log-format", "plain"]
    if how == "file":
        (tmp_path / "c.yaml").write_text("port: 8000\nlog_format: json  # for the collector\n")
        arguments += ["--config", str(tmp_path / "c.yaml")]
    with pytest.raises(SystemExit) as ended:
        main.main(["serve", *arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    if how.endswith("plain"):
        assert said.startswith("triptych: ")
    else:
        assert json.loads(said)["message"].startswith("triptych: ")
