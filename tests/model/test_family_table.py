"""README.md and docs/families.md have the tables that the code generates."""

from __future__ import annotations

from tests.model.family_table import PAGE, README, page, summary


def test_the_docs_have_the_tables() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.model.family_table`"
    assert summary() in README.read_text(), "run `python -m tests.model.family_table`"
