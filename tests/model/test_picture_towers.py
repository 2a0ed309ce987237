"""Towers and what makes rows of their outputs: equal to `get_image_features` of `transformers`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model.checkpoints import loaded, native_backends, saved
from tests.model.picture_models import PICTURE_MODELS, SQUARES, pixels_for_reference

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
