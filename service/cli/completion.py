"""The command `triptych completion`: prints a script that completes commands, flags and values in bash, zsh or fish.

Everything comes from the parser, whose flags come from the table of options.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.model.pretrained import named_models

SHELLS = ("bash", "zsh", "fish")
_WORD = re.compile(r"[a-z0-9][\w.-]*")
_FILES = ("FILE", "FILE.yaml", "FILE|JSON", "FILE|TEXT", "OUT")
_FOLDERS = ("DIR",)
_ZSH_END = (  # a file of $fpath is itself the function at its first call
    'if [[ "$funcstack[1]" == "_triptych" ]]; then',
    '    _triptych "$@"',
    "else",
    "    compdef _triptych triptych",
    "fi",
)
_HELP_CHARACTERS = 70  # of a flag's help


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...] = ()
    file: str = ""  # "file" or "folder": its value is such a path


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its flags, and the words that can follow it."""

    help: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...]


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script for a shell of `SHELLS`."""
    commands = _commands(parser)
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def _commands(parser: argparse.ArgumentParser) -> dict[str, Command]:
    group = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in group._choices_actions}
    return {
        name: Command(
            helps.get(name, ""),
            tuple(_flag(action) for action in one._actions if action.option_strings),
            tuple(word for action in one._actions if not action.option_strings for word in _words(action)),
        )
        for name, one in group.choices.items()
    }


def _flag(action: argparse.Action) -> Flag:
    metavar = str(action.metavar or "")
    file = "folder" if metavar in _FOLDERS else "file" if metavar in _FILES else ""
    return Flag(tuple(action.option_strings), _first(action.help or ""), action.nargs != 0, _values(action), file)


def _values(action: argparse.Action) -> tuple[str, ...]:
    """Return the values of a flag: its choices, or the words in a description such as `auto|cpu|cuda[:N]`."""
    if action.choices:
        return tuple(map(str, action.choices))
    words = re.sub(r"\[[^]]*\]", "", str(action.metavar or "")).split("|")
    return tuple(word for word in words if _WORD.fullmatch(word)) if len(words) > 1 else ()


def _words(action: argparse.Action) -> tuple[str, ...]:
    """Return the values of a positional argument, of a model the names that need no path."""
    if action.choices:
        return tuple(map(str, action.choices))
    return tuple(named_models()) if action.dest in ("model", "models") else ()


def _first(text: str) -> str:
    """Return the beginning of a help text, on one line and without what a shell would read."""
    plain = re.sub(r"[^\w ,.;()/=<>+-]", "", " ".join(text.split()))
    return plain if len(plain) <= _HELP_CHARACTERS else plain[:_HELP_CHARACTERS].rpartition(" ")[0] + " ..."


def _bash(commands: dict[str, Command]) -> str:
    return "\n".join(
        [
            "# bash completion for triptych:  source <(triptych completion bash)",
            "_triptych() {",
            '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
            '    local command="" word',
            '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
            '        case "$word" in',
            f"            {'|'.join(commands)}) command=$word; break ;;",
            "        esac",
            "    done",
            '    case "$command $previous" in',
            *_bash_values(commands),
            "    esac",
            '    case "$command" in',
            f'        "") COMPREPLY=($(compgen -W "{" ".join([*commands, "--help", "--version"])}" -- "$current")) ;;',
            *(
                f'        {name}) COMPREPLY=($(compgen -W "{" ".join([*_names(one), *one.words])}" -- "$current")) ;;'
                for name, one in commands.items()
            ),
            "    esac",
            "}",
            "complete -o bashdefault -o default -F _triptych triptych",
            "",
        ]
    )


def _bash_values(commands: dict[str, Command]) -> Iterator[str]:
    """Yield a case for each flag with a value; other values than words and paths complete to nothing."""
    for name, command in commands.items():
        for flag in command.flags:
            if not flag.takes_value:
                continue
            pattern = "|".join(f'"{name} {one}"' for one in flag.names)
            kind = {"file": "-f", "folder": "-d"}.get(flag.file, f'-W "{" ".join(flag.values)}"')
            yield f'        {pattern}) COMPREPLY=($(compgen {kind} -- "$current")); return ;;'


def _names(command: Command) -> list[str]:
    return [name for flag in command.flags for name in flag.names if name.startswith("--")]


def _zsh(commands: dict[str, Command]) -> str:
    lines = [
        "#compdef triptych",
        "# zsh completion for triptych:  triptych completion zsh > a folder of $fpath/_triptych",
        "_triptych() {",
        "    local -a commands",
        "    commands=(",
        *(f"        '{name}:{_first(command.help)}'" for name, command in commands.items()),
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe -t commands 'command' commands",
        "        return",
        "    fi",
        "    local command=$words[2]",
        "    shift words",
        "    (( CURRENT-- ))",
        "    case $command in",
    ]
    for name, command in commands.items():
        lines += [f"        {name})", "            _arguments \\"]
        lines += [f"                '{spec}' \\" for flag in command.flags for spec in _zsh_specs(flag)]
        words = f"compadd -- {' '.join(command.words)}; " if command.words else ""
        lines += [f"                '*:word:{{{words}_files}}'", "            ;;"]
    ending = ["    esac", "}", *_ZSH_END]
    return "\n".join([*lines, *ending, ""])


def _zsh_specs(flag: Flag) -> Iterator[str]:
    value = {"file": ":file:_files", "folder": ":folder:_files -/"}.get(flag.file, f":value:({' '.join(flag.values)})")
    for name in flag.names:
        yield f"*{name}[{flag.help}]{value if flag.takes_value else ''}"


def _fish(commands: dict[str, Command]) -> str:
    lines = ["# fish completion for triptych:  triptych completion fish | source"]
    for name, command in commands.items():
        lines.append(f"complete -c triptych -n __fish_use_subcommand -f -a {name} -d '{_first(command.help)}'")
        seen = f"complete -c triptych -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{seen} -a '{' '.join(command.words)}'"] if command.words else []
        for flag in command.flags:
            names = " ".join(f"-l {one[2:]}" if one.startswith("--") else f"-s {one[1:]}" for one in flag.names)
            value = " -r" if flag.takes_value else ""
            if flag.takes_value and not flag.file:
                value = f" -x -a '{' '.join(flag.values)}'"
            lines.append(f"{seen} {names}{value} -d '{flag.help}'")
    return "\n".join([*lines, ""])
