"""Attention maps: distributions over the visible tokens, in the shapes of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from triptych.model.errors import ConfigError
from triptych.model.inspection.attention_maps import MAX_TOKENS, attention_maps
from triptych.model.pretrained import embedded_models

MODELS = embedded_models()
TEXT = "the third of march at noon"


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("code", ["decoder"]), ("normalize", ["encoder", "decoder", "cross"]), ("embed", ["encoder"])],
)
def test_every_row_is_a_distribution_over_what_may_be_seen(name: str, kinds: list[str]) -> None:
    maps = attention_maps(MODELS[name], TEXT)
    assert [one.name for one in maps] == kinds
    for one in maps:
        assert one.weights.shape[2:] == (len(one.queries), len(one.keys))
        torch.testing.assert_close(one.weights.sum(-1), torch.ones(one.weights.shape[:3]))
        future = one.weights.triu(1).abs().max().item()
        assert (future == 0) == (one.name == "decoder")


def test_the_answer_of_an_encoder_decoder_is_what_its_decoder_read() -> None:
    _, decoder, cross = attention_maps(MODELS["normalize"], TEXT)
    assert decoder.queries[0] == "<pad>"
    assert "".join(decoder.queries[1:]) == "03-03 12:00"
    assert "".join(cross.keys) == f"{TEXT}</s>"


def test_a_text_of_too_many_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"attention is shown for 1 to {MAX_TOKENS}"):
        attention_maps(MODELS["normalize"], "word " * (MAX_TOKENS + 1))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    for file in MODELS["code"].iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ConfigError, match="reads no text: the folder has no tokenizer"):
        attention_maps(tmp_path, TEXT)
