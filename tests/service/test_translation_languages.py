"""How requests name the languages of a translation, by a model's tokenizer and config.json."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from triptych.service.core.errors import ApiError
from triptych.service.core.models import ServedModel
from triptych.service.planning.translation import Translation, translation

T5 = ("summarization", "translation_en_to_de", "translation_en_to_fr", "translation_zh_Hans_to_pt_BR")


def model(*tokens: str, tasks: tuple[str, ...] = (), pair: tuple[str, str] | None = None) -> ServedModel:
    """Return a model whose tokenizer has these tokens, and adds no language tokens to texts."""
    tokenizer = SimpleNamespace(
        source_languages=None, pair_of_languages=pair, token_id=lambda text: 7 if text in tokens else None
    )
    checkpoint = SimpleNamespace(tasks=dict.fromkeys(tasks))
    found: Any = SimpleNamespace(name="m", checkpoint=checkpoint, require_tokenizer=lambda _: tokenizer)
    return cast(ServedModel, found)


MADLAD, MARIAN = model("<2de>", "<2en>"), model(">>fr<<", pair=("en", "ROMANCE"))


@pytest.mark.parametrize(
    ("served", "source", "target", "expected"),
    [
        (model(tasks=T5), "en", "fr", Translation(task="translation_en_to_fr")),
        (model(tasks=T5), "zh_Hans", "pt_BR", Translation(task="translation_zh_Hans_to_pt_BR")),
        (model(tasks=T5), None, None, Translation()),
        (model(tasks=("translation",)), None, None, Translation(task="translation")),
        (MADLAD, "en", "de", Translation(prefix="<2de> ")),
        (MARIAN, "en", "fr", Translation(prefix=">>fr<< ")),
        (MARIAN, "en", "ROMANCE", Translation()),
        (model(pair=("en", "de")), "en", "de", Translation()),
        (model(), None, None, Translation()),
    ],
)
def test_languages_that_a_model_has(
    served: ServedModel, source: str | None, target: str | None, expected: Translation
) -> None:
    assert translation(served, source, target) == expected


@pytest.mark.parametrize(
    ("served", "source", "target", "param"),
    [
        (model(tasks=T5), "de", "en", "source_language"),
        (model(tasks=T5), "en", "pt_BR", "target_language"),
        (model(tasks=T5), None, "de", "source_language"),
        (MADLAD, "xx", "de", "source_language"),
        (MADLAD, "en", "xx", "target_language"),
        (MARIAN, "en", "xx", "target_language"),
        (MARIAN, "xx", "fr", "source_language"),
        (model(pair=("en", "de")), "de", "en", "source_language"),
        (model(), "en", None, "source_language"),
        (model(), "en", "de", "target_language"),
    ],
)
def test_others_are_named(served: ServedModel, source: str | None, target: str | None, param: str) -> None:
    with pytest.raises(ApiError) as error:
        translation(served, source, target)
    assert (error.value.status, error.value.param) == (400, param)
