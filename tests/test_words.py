"""Words that the project's prose does without: `WORDS` lists them.

`UNREAD` lists the folders and files that have not been read for them yet. It only shrinks.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = re.compile(
    r"\b(behind(?! (a |the |any |Ray's |another )?(reverse )?(prox|nginx|HAProxy))|besides?|so many|as far as|nobody"
    r"|whoever|is none that|of which|say drafts|st[ao]o?nd still|c[ao]mes? again)\b",
    re.IGNORECASE,
)
PROSE = (".py", ".md", ".c", ".h", ".toml", ".yaml", ".html", ".sh", "Makefile", "Dockerfile")
UNREAD = (
    "docs/archive/",
    "loadtest/workload/prompts.py",  # a list of English words
    # Names of cases, and a message of C that a test compares.
    "tests/model/guard_pages.c",
    "tests/model/test_folder_kinds.py",
    "tests/model/test_guard_pages.py",
    "tests/model/test_json_schemas.py",
)


def files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in listed if name.endswith(PROSE) and name != "tests/test_words.py"]


def found(name: str) -> list[str]:
    lines = (ROOT / name).read_text().splitlines()
    return [f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if WORDS.search(line)]


def is_unread(name: str) -> bool:
    return name in UNREAD or f"{name.rpartition('/')[0]}/" in UNREAD


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository")
def test_prose_uses_plain_words() -> None:
    assert [line for name in files() if not is_unread(name) for line in found(name)] == []
