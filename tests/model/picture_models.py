"""Tiny random models that read pictures in prompts, with the pictures and prompts that tests send them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.model.decoder_rows import RECURRENT, random_model
from triptych.model.api.request import ImageSpan, Source, image_source

IMAGE = 0  # the token at each place of a picture; no random prompt has it
_TOKENS = dict(image_token_id=IMAGE, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
_ROPE = dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.75, mrope_section=[2, 2, 2])
_QWEN: dict[str, Any] = dict(
    text_config=dict(RECURRENT, max_position_embeddings=512, rope_parameters=dict(_ROPE, mrope_interleaved=True)),
    vision_config=dict(
        **dict(depth=3, hidden_size=24, intermediate_size=40, num_heads=2, patch_size=4, out_hidden_size=32),
        **dict(spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=36),
    ),
    **_TOKENS,
)
_AREA = dict(image_processor_type="Qwen2VLImageProcessor", patch_size=4, merge_size=2)
_AREA |= dict(size=dict(shortest_edge=256, longest_edge=4096), image_mean=[0.5] * 3, image_std=[0.25] * 3)

PICTURE_MODELS: dict[str, Callable[[], Any]] = {
    "qwen3-5-pictures": random_model("Qwen3_5ForConditionalGeneration", _QWEN),
}
PROCESSORS: dict[str, dict[str, Any]] = {"qwen3-5-pictures": _AREA}


def write_processor(kind: str, folder: Path) -> None:
    """Write how the pictures of a kind are prepared into its folder, if it reads any."""
    if kind in PROCESSORS:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]))


def picture(height: int, width: int, seed: int = 0, cell: int = 8) -> Source:
    """Return a random picture; a square of `cell` pixels a side is a row of the prompt."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)
    return image_source(pixels.numpy().tobytes(), (3, height, width), height * width // cell**2)


def with_pictures(parts: Sequence[Sequence[int] | Source]) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """Return a prompt of texts and pictures, and where these are."""
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for part in parts:
        if isinstance(part, Source):
            spans.append(ImageSpan(len(ids), part))
            ids += [IMAGE] * part.num_positions
        else:
            ids += part
    return tuple(ids), tuple(spans)


def pictures_for_reference(spans: Sequence[ImageSpan], ids: Sequence[int]) -> dict[str, Tensor]:
    """Return the pictures as `Qwen3_5ForConditionalGeneration` takes them."""
    patches, grids = [], []
    for span in spans:
        channels, height, width = span.source.shape
        pixels = torch.frombuffer(bytearray(span.source.features), dtype=torch.uint8).view(span.source.shape)
        cut = ((pixels / 255 - 0.5) / 0.25).view(channels, height // 8, 2, 4, width // 8, 2, 4)
        cut = cut.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None].expand(-1, -1, -1, -1, -1, 2, -1, -1)
        patches.append(cut.reshape(height * width // 16, -1))
        grids.append([1, height // 4, width // 4])
    kinds = torch.tensor([[int(token == IMAGE) for token in ids]], dtype=torch.int32)
    return dict(pixel_values=torch.cat(patches), image_grid_thw=torch.tensor(grids), mm_token_type_ids=kinds)
