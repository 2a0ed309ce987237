"""Towers and what makes rows of their outputs: equal to `get_image_features` of `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.checkpoints import copied, loaded, native_backends, saved
from tests.model.picture_models import PICTURE_MODELS, SQUARES, pixels_for_reference
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.network.native_stack import NativeStack
from triptych.model.network.weights import load_model

SIZES = [(16, 40), (8, 8), (40, 24)]


def pictures(kind: str) -> list[Tensor]:
    """Return some normalised pictures of sizes that a kind reads."""
    torch.manual_seed(0)
    side = SQUARES.get(kind)
    return [torch.randn(3, *((side, side) if side else size)) for size in SIZES]


def expected(kind: str, given: list[Tensor]) -> list[Tensor]:
    """Return the rows of each picture."""
    model = saved(kind).reference
    with torch.inference_mode():
        whole = model.get_image_features(**pixels_for_reference(kind, given))
    found = whole.pooler_output
    if (deep := getattr(whole, "deepstack_features", None)) is not None:  # rows of other layers follow
        parts = [one if isinstance(one, Tensor) else torch.cat(list(one)) for one in (found, *deep)]
        found = [torch.cat(parts, dim=1)]
    rows = [one.flatten(0, -2) for one in (found if isinstance(found, tuple | list) else [found])]
    lengths = [one.shape[1] * one.shape[2] // 64 for one in given]
    return list(torch.cat(rows).split(lengths))


@pytest.mark.parametrize("kind", PICTURE_MODELS)
def test_rows_are_the_features_of_transformers(kind: str) -> None:
    given = pictures(kind)
    for backend in (None, *native_backends()):
        model = loaded(kind, backend) if backend is not None else loaded(kind)
        for one, rows in zip(given, expected(kind, given), strict=True):
            with torch.inference_mode():
                whole = model.begin_picture(one)
                whole.advance(1)
                found = whole.finish()
            assert found.shape == rows.shape
            assert (found.float() - rows).abs().max() < 1e-4
            assert rows.std() > 1e-2


@pytest.mark.parametrize("kind", PICTURE_MODELS)
def test_c_computes_the_tower(kind: str) -> None:
    """Check what quantised folders need: all of their layers in C."""
    pictures_config = read_checkpoint(saved(kind).path).config.pictures
    assert pictures_config is not None
    assert NativeStack.unsupported(pictures_config.tower) is None


@pytest.mark.parametrize("kind", ["llava", "mistral3", "gemma3-pictures", "idefics3"])
@pytest.mark.parametrize("before", ["", "model."])
def test_towers_are_read_by_the_names_of_older_versions(kind: str, before: str, tmp_path: Path) -> None:
    folder = copied(kind, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("vision_tower.") and kind != "mistral3":
            name = name.replace("vision_tower.", "vision_tower.vision_model.")
        if before and not name.startswith("model."):
            name = name.replace("language_model.lm_head.", "lm_head.").replace(
                "language_model.model.", "language_model."
            )
            name = name if name.startswith("lm_head.") else before + name
        renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors")
    checkpoint = read_checkpoint(folder)
    assert checkpoint.warnings == []
    given = pictures(kind)[0]
    with torch.inference_mode():
        found = load_model(checkpoint, SdpaBackend()).begin_picture(given).finish()
        assert torch.equal(found, loaded(kind).begin_picture(given).finish())
