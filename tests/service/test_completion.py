"""Help in groups, suggestions for commands, and completion in shells, all made from the table of options."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from triptych.model.errors import ConfigError
from triptych.service.cli import completion
from triptych.service.cli.parser import make_parser
from triptych.service.settings import option_groups
from triptych.service.settings.option_table import OPTIONS


def shown(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        make_parser().parse_args(arguments)
    return capsys.readouterr().out


def test_each_option_is_in_a_group() -> None:
    assert {option.group for option in OPTIONS} == set(option_groups.ALL)


def test_the_short_help_has_the_common_options_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = (shown("serve", flag, capsys=capsys) for flag in ("--help", "--help-all"))
    flags = {option.name: f"--{option.name.replace('_', '-')}"[:-1] for option in OPTIONS}  # a list's lacks the s
    for option in OPTIONS:
        assert option.variable in whole or flags[option.name][2:] in whole, option.name
        assert (f"; {option.variable})" in " ".join(short.split())) is option.common, option.name
    assert "examples:\n  triptych serve  " in short and "--help-all" in short
    assert f"\n{option_groups.KEYS}:\n" in short and f"\n{option_groups.LIMITS}:\n" not in short
    assert all(f"\n{title}:\n" in whole for title in option_groups.ALL)
    assert len(short.splitlines()) < 100


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("serv", "did you mean serve?"), ("transcibe", "did you mean transcribe?"), ("bake", "known are serve, ")],
)
def test_an_unknown_command_has_a_suggestion(typed: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"'{typed}' is no command; ") as error:
        make_parser().parse_args([typed])
    assert hint in str(error.value)


TYPED = {
    "triptych ser": ["serve", "serve-config"],
    "triptych serve --runtime ": ["ray", "local"],
    "triptych serve --device c": ["cpu", "cuda"],
    "triptych serve --max-model": ["--max-model-len"],
    "triptych serve assi": ["assistant"],
    "triptych -v completion ": ["bash", "zsh", "fish", "--help", "--verbose"],
    "triptych serve --port ": [],
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes() -> None:
    tries = "\n".join("try " + (line + '""' if line.endswith(" ") else line) for line in TYPED)
    program = (
        completion.script("bash", make_parser())
        + 'try() { COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); COMPREPLY=(); _triptych; echo "${COMPREPLY[@]}"; }\n'
        + tries
    )
    run = subprocess.run(["bash", "-u"], input=program, capture_output=True, text=True, timeout=30)
    assert run.stderr == ""
    found = dict(zip(TYPED, map(str.split, run.stdout.splitlines()), strict=True))
    assert {line: sorted(words) for line, words in found.items()} == {line: sorted(w) for line, w in TYPED.items()}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_each_command_and_flag_is_completed(shell: str) -> None:
    """Where the shell is installed it reads the script too."""
    script = completion.script(shell, make_parser())
    for option in OPTIONS:
        flag = option.flag if shell == "zsh" else f"-l {option.flag[2:]}"
        assert flag in script or flag[:-1] in script or flag.replace("-l ", "-l no-").replace("--", "--no-") in script
    if shutil.which(shell) is not None:
        run = subprocess.run([shell, "-n", "/dev/stdin"], input=script, capture_output=True, text=True, timeout=30)
        assert (run.returncode, run.stderr) == (0, "")
