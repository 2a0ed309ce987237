"""Folders with rare settings of pictures: logits equal those of `transformers` for the same file, or it is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.support import Running, running
from tests.model.checkpoints import prompt, randomise, saved
from tests.model.config_variants import quiet
from tests.model.picture_models import PROCESSORS, picture, pixels_for_reference, with_pictures
from triptych.model.api.request import Request
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.vision.pictures import PictureProcessing, Way

TIES = "text_config.tie_word_embeddings"
PIXTRAL = "vision_config.rope_parameters"
GEMMA4 = "gemma4-dense-pictures"
QWEN, QWEN2_5, DEEP = "qwen3-5-pictures", "qwen2-5-vl-pictures", "qwen3-vl-pictures"


def folder_of(kind: str, changes: dict[str, Any], folder: Path, **processor: Any) -> Any:
    """Write a random model whose config.json has other values at dotted keys (DROP: none); return the reference."""
    raw = json.loads((saved(kind).path / "config.json").read_text())
    for key, value in changes.items():
        *parts, last = key.split(".")
        at = raw
        for part in parts:
            at = at[part]
        at.pop(last, None)
        if value != "DROP":
            at[last] = value
    base = saved(kind).reference
    with quiet():
        try:
            model = type(base)(type(base.config).from_dict(json.loads(json.dumps(raw)))).float().eval()
        except Exception:  # what the reference does not take either
            model = base
        torch.manual_seed(0)
        if model is not base:
            randomise(model, std=0.2)
        model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSORS[kind], **processor}))
    return model


def side_of(processing: PictureProcessing) -> tuple[int, int]:
    """Return the height and width of a picture that the folder prepares."""
    cell = processing.patch * processing.merge
    fixed = {Way.SQUARE: processing.size, Way.TILES: processing.tile}.get(processing.way)
    return (2 * cell, 5 * cell) if fixed is None else (fixed, fixed)


@torch.inference_mode()
def worst(kind: str, run: Running, model: Any, processing: PictureProcessing) -> float:
    """Return the largest difference of logits over a prompt with two pictures and what follows it."""
    cell, config = processing.patch * processing.merge, run.runner.model.config.pictures
    assert config is not None
    shown = [picture(*side_of(processing), seed, cell) for seed in (1, 2)]
    row_end = 7 if processing.row_end else None
    ids, images = with_pictures([prompt(4), shown[0], prompt(3), shown[1], prompt(5)], row_end, config.token_id, cell)
    params = SamplingParams(max_tokens=3, ignore_eos=True, suppress_tokens=(config.token_id,))
    run.engine.add(Request("r", kind, ids, params, images=images))
    whole = [*ids, *run.run().ids("r")]
    pixels = [torch.frombuffer(bytearray(one.features), dtype=torch.uint8).view(one.shape) for one in shown]
    given = pixels_for_reference(kind, [(one / 255 - 0.5) / 0.25 for one in pixels], processing.patch, processing.merge)
    if kind.startswith(("qwen", "gemma")):
        kinds = torch.tensor([[int(token == config.token_id) for token in whole]], dtype=torch.int32)
        given["token_type_ids" if kind.startswith("gemma3") else "mm_token_type_ids"] = kinds
    with quiet():
        expected = model(input_ids=torch.tensor([whole]), **given).logits[0]
    rows = run.runner.rows["r"]
    assert len(rows) == len(whole) - 1
    return max((row - expected[place]).abs().max().item() for place, row in rows)


@pytest.mark.parametrize(
    ("kind", "changes", "processor"),
    [
        ("llava", {"vision_feature_layer": 1}, {}),
        ("llava", {"vision_feature_layer": -1, "projector_hidden_act": "silu"}, {}),
        ("llava", {TIES: True}, {}),
        ("llava", {"tie_word_embeddings": "DROP", TIES: "DROP"}, {}),
        ("llava", {"image_token_index": 5, "image_seq_length": 7}, {}),
        ("llava-siglip", {"vision_config.vision_use_head": False, "vision_config.layer_norm_eps": 0.01}, {}),
        ("llava-pixtral", {PIXTRAL: {"rope_type": "default", "rope_theta": 77.0}}, {}),
        ("llava-pixtral", {PIXTRAL: "DROP", "vision_config.rope_theta": 77.0, "vision_config.head_dim": None}, {}),
        ("mistral3", {"spatial_merge_size": 3}, {}),
        ("mistral3", {"multimodal_projector_bias": True, "vision_feature_layer": -2}, {}),
        ("mistral3", {"tie_word_embeddings": "DROP"}, {}),  # its class ties, whatever the text says
        ("gemma3-pictures", {"mm_tokens_per_image": 4, "text_config.sliding_window": 3}, {}),
        ("gemma3-pictures", {"text_config.final_logit_softcapping": 2.0, "vision_config.hidden_act": "relu"}, {}),
        ("idefics3", {"scale_factor": 3, "vision_config.image_size": 18}, {}),
        ("smolvlm", {"scale_factor": 1, "tie_word_embeddings": True}, {}),
        (QWEN, {"vision_config.spatial_merge_size": 1}, {"merge_size": 1}),
        (QWEN, {"vision_config.num_position_embeddings": 4, "vision_config.hidden_act": "gelu"}, {}),
        (QWEN, {"text_config.rope_parameters.mrope_section": [6, 0, 0]}, {}),
        (DEEP, {"vision_config.deepstack_visual_indexes": [1]}, {}),
        (DEEP, {"vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": 55.0}}, {}),
        (QWEN2_5, {"vision_config.window_size": 20, "vision_config.fullatt_block_indexes": [2, 1]}, {}),
        (QWEN2_5, {"vision_config.fullatt_block_indexes": []}, {}),
        (QWEN2_5, {TIES: True}, {}),
        (
            GEMMA4,
            {"vision_config.pooling_kernel_size": 3, "vision_config.position_embedding_size": 210},
            {"pooling_kernel_size": 3},
        ),
        (GEMMA4, {"vision_config.standardize": False, "vision_config.num_key_value_heads": 2}, {}),
        (GEMMA4, {PIXTRAL: {"rope_type": "default", "rope_theta": 33.0}, "tie_word_embeddings": False}, {}),
    ],
)
def test_rare_settings_are_computed_as_by_the_library(
    kind: str, changes: dict[str, Any], processor: dict[str, Any], tmp_path: Path
) -> None:
    model = folder_of(kind, changes, tmp_path, **processor)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.pictures is not None, checkpoint.warnings
    assert worst(kind, running(kind, folder=tmp_path, picture_rows=400), model, checkpoint.pictures) < 1e-4


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("llava", {"vision_feature_layer": [-2, -1]}, r"vision_feature_layer must be .* found \[-2, -1\]"),
        ("llava", {"vision_feature_layer": 0}, "vision_feature_layer must be"),
        ("llava", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy = 'full' is not served"),
        ("llava-siglip", {"vision_feature_select_strategy": "default"}, "'default' is not served for a siglip"),
        ("llava", {"image_token_index": 97}, "image_token_id must be one of the 97 tokens, found 97"),
        ("idefics3", {"image_token_id": "DROP"}, "image_token_id must be one of the 97 tokens, found 128257"),
        (QWEN, {"image_token_id": -1}, "image_token_id must be one of the 97 tokens, found -1"),
        (QWEN, {"vision_config.in_channels": 1}, "pictures of 3 channels are read, found 1"),
        (
            "llava-pixtral",
            {PIXTRAL: {"rope_type": "linear", "factor": 2.0}},
            "rope_type must be 'axial', found 'linear'",
        ),
        ("gemma3-pictures", {"mm_tokens_per_image": 9}, "mm_tokens_per_image = 9 divides no square"),
        (DEEP, {"vision_config.deepstack_visual_indexes": [2, 0]}, "must be layers in their order"),
        (GEMMA4, {"vision_config.position_embedding_size": 139}, "140 patches a side, vision_config has 139"),
        (GEMMA4, {PIXTRAL: {"rope_type": "linear", "factor": 2.0}}, "rope_type must be 'axial', found 'linear'"),
        (QWEN2_5, {"vision_config.window_size": 7}, "window_size and fullatt_block_indexes must be"),
    ],
)
def test_settings_of_pictures_that_are_not_served_are_named(
    kind: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder_of(kind, changes, tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.pictures is None and checkpoint.config.can_generate
    assert any(re.search(f"^pictures are not read: .*{words}", one) for one in checkpoint.warnings)
