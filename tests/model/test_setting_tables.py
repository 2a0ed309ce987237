"""The docs have the tables of settings files that the code generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.model.checkpoint.generation_config import SETTINGS, SPEECH_SETTINGS
from triptych.model.checkpoint.json_files import Table, Use
from triptych.model.checkpoint.processors import AUDIO_SETTINGS, IMAGE_SETTINGS

DOCS = Path(__file__).parents[2] / "docs"
TABLES = {
    "keys of `generation_config.json`": ("checkpoints.md", SETTINGS),
    "keys of an image processor": ("checkpoints.md", IMAGE_SETTINGS),
    "further keys of Whisper's `generation_config.json`": ("speech.md", SPEECH_SETTINGS),
    "keys of a feature extractor": ("speech.md", AUDIO_SETTINGS),
}


def rows(title: str, table: Table) -> str:
    """Return the table as the docs have it, with a row for each use."""
    keys = {use: ", ".join(f"`{key}`" for key in sorted(table) if table[key].use is use) for use in Use}
    lines = [f"| {use} | {names} |" for use, names in keys.items() if names]
    return "\n".join([f"| {title} | |", "|---|---|", *lines, ""])


@pytest.mark.parametrize("title", TABLES)
def test_the_docs_have_the_table(title: str) -> None:
    name, table = TABLES[title]
    expected = rows(title, table)
    assert expected in (DOCS / name).read_text(), f"docs/{name} must hold:\n{expected}"
