"""The docs' list of often downloaded models says what the families say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from triptych.model.errors import ConfigError
from triptych.model.families import FAMILIES, WHOLES, read_settings
from triptych.model.families.not_served import NOT_SERVED

DOCS = Path(__file__).parents[2] / "docs" / "downloaded.md"


def test_served_types_are_those_that_the_list_calls_served() -> None:
    text = DOCS.read_text()
    rows = re.findall(r"^\| (.+?) \| `(.+?)` \| (.+?) \|$", text, re.MULTILINE)
    assert sum(len(names.split(", ")) for names, _, _ in rows) >= 100
    for names, model_type, verdict in rows:
        assert verdict.startswith(("served", "refused: ", "refused by ")), names
        if verdict.startswith("served"):
            assert model_type in FAMILIES or model_type in WHOLES, names
        elif model_type in NOT_SERVED:
            assert verdict == f"refused: {NOT_SERVED[model_type]}", names
            with pytest.raises(ConfigError, match=re.escape(f"{model_type!r} is not served: {NOT_SERVED[model_type]}")):
                read_settings({"model_type": model_type})
        elif model_type in FAMILIES:
            assert re.search("tokenizer|position_embedding_type|own code", verdict), f"{names}: its type is served"


def test_types_are_served_or_not() -> None:
    assert not NOT_SERVED.keys() & {*FAMILIES, *WHOLES}
