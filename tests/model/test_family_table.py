"""docs/families.md has the tables that the code generates."""

from __future__ import annotations

from tests.model.family_table import PAGE, page


def test_the_page_has_the_tables() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.model.family_table`"
