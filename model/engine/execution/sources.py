"""Converts sources to the network's input: packed token ids, or pixels or frames with their positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from model.api.source import Source, SourceKind, audio_source, image_source, token_source
from model.config.model import ModelConfig
from model.media.images import ImageProcessing
from model.network.inputs import StackInput, packed_input
from model.system.transfer import device_tensor, to_device


def source_input(
    sources: Sequence[Source], device: torch.device, *, causal: bool = False, images: ImageProcessing | None = None
) -> StackInput:
    """Pack sources of one kind, one segment each; `images` says how pixels are scaled.

    `causal` is for a decoder that encodes.
    """
    if sources[0].kind is SourceKind.IMAGE:
        assert images is not None
        inputs = packed_input([range(source.num_positions) for source in sources], device, causal=causal)
        return replace(inputs, pixels=_pixels(sources, device, images))
    if sources[0].kind is SourceKind.AUDIO:
        inputs = packed_input([range(source.num_positions) for source in sources], device, causal=causal)
        return replace(inputs, frames=_frames(sources, device))
    types = None
    if any(any(source.token_type_ids) for source in sources):
        types = [source.token_type_ids or (0,) * source.num_positions for source in sources]
    return packed_input([source.token_ids for source in sources], device, causal=causal, token_types=types)


def blank_source(config: ModelConfig, tokens: int = 1) -> Source:
    """Return an empty source for a model: `tokens` tokens of id 0, a black image, or a window of silence."""
    if (image := config.image) is not None:
        shape = (image.channels, image.size, image.size)
        return image_source(bytes(math.prod(shape)), shape, image.num_tokens)
    if (audio := config.audio) is not None:
        frames = bytes(4 * audio.num_mel_bins * audio.num_frames)
        return audio_source(frames, (audio.num_mel_bins, audio.num_frames), audio.num_positions)
    return token_source((0,) * tokens)


def _frames(sources: Sequence[Source], device: torch.device) -> Tensor:
    """Return log-mel energies `[B, mel bins, frames]`."""
    raw = torch.frombuffer(bytearray(b"".join(source.features for source in sources)), dtype=torch.float32)
    return to_device(raw, device).view(len(sources), *sources[0].shape)


def _pixels(sources: Sequence[Source], device: torch.device, images: ImageProcessing) -> Tensor:
    """Return normalised images `[B, C, S, S]`."""
    raw = torch.frombuffer(bytearray(b"".join(source.features for source in sources)), dtype=torch.uint8)
    pixels = to_device(raw, device).view(len(sources), *sources[0].shape)
    scale, shift = (device_tensor(values, device, torch.float32) for values in (images.scale, images.shift))
    return pixels * scale[:, None, None] + shift[:, None, None]
