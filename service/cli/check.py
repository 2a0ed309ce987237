"""The command `triptych check`: a table of what a model's chat template and the service make of each other."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict
from pathlib import Path

from triptych.model.errors import ConfigError
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.chat.render_pool import RenderWorker
from triptych.service.chat.template_check import Check, TemplateCheck
from triptych.service.chat.template_files import TemplateFiles, read_template, template_files
from triptych.service.chat.template_probe import probed_template
from triptych.service.cli.model_arguments import folder, named

_SECONDS = 20.0  # that a conversation may take to render
_NO_TOKENS = {"bos_token": "", "eos_token": ""}  # of a template that is checked without a tokenizer
_WIDTH = 72  # characters of a line of reasons


def run(arguments: argparse.Namespace) -> int:
    """Run the command: print all checks, and return 1 if one failed, else 0. Raises `ConfigError`."""
    name, checks = _checks(arguments.model, arguments.template)
    failed = [check for check in checks if check.result == "no"]
    if arguments.json:
        print(json.dumps({"ok": not failed, "name": name, "checks": [asdict(check) for check in checks]}))
        return int(bool(failed))
    for check in checks:
        first, *more = textwrap.wrap(check.reason, _WIDTH) or [""]
        print(f"{check.name:<38}{check.result:<16}{first}".rstrip())
        for line in more:
            print(f"{'':<54}{line}")
    print(f"\n{name}: {len(checks)} checks, {len(failed)} failed")
    return int(bool(failed))


def _checks(model: str | None, file: str | None) -> tuple[str, list[Check]]:
    """Return the name of what is checked, and the checks."""
    own = None if file is None else Path(file)
    if model is not None:
        name, path = named(model)
        place = folder(path)
        files, tokenizer = template_files(place, own), Tokenizer.from_folder(place)
        if tokenizer is None:
            raise ConfigError(f"{name}: it has no tokenizer, which chats need")
    elif own is not None:
        name, files, tokenizer = "", TemplateFiles({"default": read_template(own)}, _NO_TOKENS), None
    else:
        raise ConfigError("check: expected a MODEL, or --template FILE, or both")
    if files is None:
        raise ConfigError(f"{name}: it has no chat template, so it serves no chats; --template FILE tries one")
    name = name if own is None else own.name
    chat, worker = probed_template(files, name), RenderWorker(_SECONDS)
    try:
        return name, list(TemplateCheck(chat, worker, tokenizer).all())
    finally:
        worker.close()
