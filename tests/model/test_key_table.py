"""docs/keys.md is the page that the code generates."""

from __future__ import annotations

import pytest

from tests.model.key_table import PAGE, library_files, page
from triptych.model.text.tokenizer_builder import CLASSES
from triptych.model.text.tokenizer_files import SENTENCEPIECE_NAMES


def test_the_page_is_what_the_code_does() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.model.key_table`"


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_class_is_read_from_the_files_of_the_library(name: str) -> None:
    theirs, ours = set(library_files(name)), set(CLASSES[name].files)
    if name in ("Gemma", "Siglip2", "XGLM"):  # the library's class has tokenizer.json alone
        assert not theirs and ours == {*SENTENCEPIECE_NAMES}
    elif name == "Qwen3_5":  # the library's class names a file that no folder has
        assert ours == set(library_files("Qwen2"))
    elif ours == {*SENTENCEPIECE_NAMES}:
        assert len(theirs) == 1 and theirs <= ours
    else:
        assert theirs == ours
