"""Language models of models that also read images: every served kind against `transformers`, and older folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.checkpoints import BERT, copied, randomise, saved
from tests.model.decoder_rows import CLIP, LLAMA, QWEN2_VL, QWEN3_VL, QWEN_VISION, with_images
from tests.model.parity import decoder_logits, decoder_prompts, difference
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.families import config_from_raw, read_settings
from triptych.model.network.weights import load_model

_SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}


def _text(kind: str, **changes: Any) -> dict[str, Any]:
    return dict(model_type=kind, **LLAMA, **changes)


# `decoder_rows` has rows for the others.
WITH_IMAGES: dict[str, Callable[[], Any]] = {
    "aya_vision": with_images("AyaVision", _text("cohere2", logit_scale=0.5), _SIGLIP),
    "cohere2_vision": with_images("Cohere2Vision", _text("cohere2"), _SIGLIP),
    "deepseek_vl": with_images("DeepseekVL", _text("llama"), _SIGLIP),
    "got_ocr2": with_images("GotOcr2", _text("qwen2"), dict(CLIP, model_type="", output_channels=8)),
    "idefics2": with_images("Idefics2", _text("mistral")),
    "idefics3": with_images("Idefics3", _text("llama")),
    "internvl": with_images(
        "InternVL", _text("qwen2"), dict(CLIP, model_type="", patch_size=[8, 8], image_size=[16, 16])
    ),
    "llava_next": with_images("LlavaNext", _text("granite", logits_scaling=2.0), CLIP),
    "llava_next_video": with_images("LlavaNextVideo", _text("llama"), CLIP),
    "llava_onevision": with_images("LlavaOnevision", _text("qwen2"), _SIGLIP),
    "qwen2_vl": with_images("Qwen2VL", QWEN2_VL, dict(QWEN_VISION, embed_dim=16, hidden_size=32)),
    "qwen3_vl": with_images("Qwen3VL", QWEN3_VL, dict(QWEN_VISION, deepstack_visual_indexes=[0])),
    "video_llava": with_images("VideoLlava", _text("llama"), CLIP),
    "vipllava": with_images("VipLlava", _text("llama"), dict(CLIP, num_hidden_layers=12)),
}


def _compared(model: Any, folder: Path) -> float:
    """Return the difference of our logits of the folder from a model's."""
    ours = decoder_logits(load_model(read_checkpoint(folder), SdpaBackend()), decoder_prompts())
    with torch.inference_mode():
        theirs = torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in decoder_prompts()])
    return difference(ours, theirs)


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_the_language_model_equals_transformers(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = WITH_IMAGES[kind]().eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    assert read_checkpoint(tmp_path).config.model_type == kind
    assert _compared(model, tmp_path) < 1e-4


def test_settings_of_the_language_model_may_stand_next_to_those_of_images(tmp_path: Path) -> None:
    """The published folders of Qwen2-VL and Qwen2.5-VL have them there."""
    folder = copied("qwen2-5-vl", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    old = dict(rope_scaling=dict(type="mrope", mrope_section=rope["mrope_section"]), rope_theta=rope["rope_theta"])
    flat = {**text, **raw, **old, "vision_token_id": 5, "model_type": "qwen2_5_vl"}
    (folder / "config.json").write_text(json.dumps(flat))
    assert _compared(saved("qwen2-5-vl").reference, folder) < 1e-4
    assert read_settings({**flat, "tilt": 1})[1] == ("tilt",)


@pytest.mark.parametrize("kind", ["mistral3", "internvl"])
def test_a_whole_that_says_nothing_of_its_output_ties_it_as_its_class_does(kind: str, tmp_path: Path) -> None:
    """The class of the language model alone ties nothing."""
    import transformers

    name, text, vision = {
        "mistral3": ("Mistral3", "mistral", dict(CLIP, model_type="pixtral", head_dim=8)),
        "internvl": ("InternVL", "qwen2", dict(CLIP, model_type="", patch_size=[8, 8], image_size=[16, 16])),
    }[kind]
    said = _text(text)
    del said["tie_word_embeddings"]
    config = getattr(transformers, f"{name}Config")(text_config=said, vision_config=vision)
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.pop("tie_word_embeddings"), raw["text_config"].pop("tie_word_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert _compared(model, tmp_path) < 1e-4


def test_experts_may_have_their_inputs_first(tmp_path: Path) -> None:
    """The published folders of Qwen3-VL have them so, and `transformers` decides by the sizes."""
    folder = copied("qwen3-vl-moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    turned = {name: one.mT.contiguous() if ".experts." in name else one for name, one in tensors.items()}
    assert any(turned[name].shape != one.shape for name, one in tensors.items())
    save_file(turned, folder / "model.safetensors")
    assert _compared(saved("qwen3-vl-moe").reference, folder) < 1e-4


def _sized(text: dict[str, Any]) -> ModelConfig:
    return config_from_raw(dict(model_type="llava", text_config=text, vision_config={}, tie_word_embeddings=False))


@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "granite", "cohere2"]
)
def test_sizes_that_a_language_model_leaves_out_are_those_of_its_type(kind: str) -> None:
    """Older folders have only what differs: LLaVA 1.5 gives neither its width nor its number of layers."""
    import transformers

    whole = transformers.AutoConfig.for_model(kind).to_dict()
    said = {key: value for key, value in whole.items() if not isinstance(value, dict | list)}
    said.pop("use_bidirectional_attention", None)
    assert _sized({"model_type": kind}) == _sized(said)


def test_a_model_that_reads_prompts_in_both_directions_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="'paligemma' is not served: it reads prompts in both directions"):
        config_from_raw(dict(model_type="paligemma", text_config=dict(model_type="gemma")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            {"model_type": "lfm2"},
            r"text_config\.model_type of a llava, 'lfm2' is not served: layers of short convolutions",
        ),
        (dict(model_type="bert", **BERT), r"is an encoder \('bert'"),
        (None, "config.json of a llava lacks 'text_config'"),
    ],
)
def test_other_language_models_are_refused_by_name(text: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _sized(text)
