"""Sources on the device: their encodings, and where in a source the tokens of an output are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from triptych.model.api.request import (
    Alignment,
    AlignmentMethod,
    Source,
    SourceKind,
    audio_source,
    image_source,
    token_source,
)
from triptych.model.cache.kv_cache import KVCache
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.engine.scheduling.scheduled_step import ScheduledSequence
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.network.alignment import head_weights, mean_of_heads, warp
from triptych.model.network.inputs import StackInput, packed_input
from triptych.model.system.devices import device_tensor, to_device
from triptych.model.vision.processing import ImageProcessing

# -- Converts sources to the network's input: packed token ids, or pixels or frames with their positions.


def source_input(
    sources: Sequence[Source],
    device: torch.device,
    *,
    causal: bool = False,
    images: ImageProcessing | None = None,
    padding: int | None = None,
) -> StackInput:
    """Pack sources of one kind, one segment each; `images` says how pixels are scaled.

    `causal` is for a decoder that encodes, `padding` the token that has no position.
    """
    if sources[0].kind is SourceKind.IMAGE:
        assert images is not None
        inputs = packed_input([range(source.num_positions) for source in sources], device, causal=causal)
        if len({source.shape for source in sources}) > 1:
            return replace(inputs, pixels=[_pixels([source], device, images)[0] for source in sources])
        return replace(inputs, pixels=features_of(sources, device, images))
    if sources[0].kind is SourceKind.AUDIO:
        inputs = packed_input([range(source.num_positions) for source in sources], device, causal=causal)
        return replace(inputs, frames=features_of(sources, device))
    types = None
    if any(any(source.token_type_ids) for source in sources):
        types = [source.token_type_ids or (0,) * source.num_positions for source in sources]
    texts = [source.token_ids for source in sources]
    return packed_input(texts, device, causal=causal, token_types=types, padding=padding)


def blank_source(config: ModelConfig, tokens: int = 1) -> Source:
    """Return an empty source for a model: `tokens` tokens of id 0, a black image, or a window of silence."""
    if config.only_images and (image := config.image) is not None:
        shape = (image.channels, image.size, image.size)
        return image_source(bytes(math.prod(shape)), shape, image.num_tokens)
    if (audio := config.audio) is not None:
        frames = bytes(4 * audio.num_mel_bins * audio.num_frames)
        return audio_source(frames, (audio.num_mel_bins, audio.num_frames), audio.num_positions)
    return token_source((0,) * tokens)


def features_of(sources: Sequence[Source], device: torch.device, images: ImageProcessing | None = None) -> Tensor:
    """Return normalised images `[B, C, S, S]`, or log-mel energies `[B, mel bins, frames]`."""
    if sources[0].kind is SourceKind.IMAGE:
        assert images is not None
        return _pixels(sources, device, images)
    raw = torch.frombuffer(bytearray(b"".join(source.features for source in sources)), dtype=torch.float32)
    return to_device(raw, device).view(len(sources), *sources[0].shape)


def _pixels(sources: Sequence[Source], device: torch.device, images: ImageProcessing) -> Tensor:
    """Return normalised images `[B, C, S, S]`."""
    raw = torch.frombuffer(bytearray(b"".join(source.features for source in sources)), dtype=torch.uint8)
    pixels = to_device(raw, device).view(len(sources), *sources[0].shape)
    scale, shift = (device_tensor(values, device, torch.float32) for values in (images.scale, images.shift))
    return pixels * scale[:, None, None] + shift[:, None, None]


# -- Aligns a prompt with its source by the weights of cross attention (times of words in speech). Each step keeps the
# queries of the alignment heads for its rows of the prompt. Once the prompt is computed, their weights over the
# source's keys, which are in the cache, are computed at once.


def kept_layers(steps: Sequence[ScheduledSequence]) -> tuple[int, ...]:
    """Return the layers whose queries a step must keep, in order."""
    asked = (step.sequence.request.alignment for step in steps)
    return tuple(sorted({layer for alignment in asked if alignment is not None for layer, _ in alignment.heads}))


def keep_queries(steps: Sequence[ScheduledSequence], queries: Mapping[int, Tensor]) -> None:
    """Add the queries of its rows, `[rows, heads, D]`, to each sequence with an alignment.

    They replace those that a failed step kept for the same rows.
    """
    first = 0
    for step in steps:
        alignment, rows = step.sequence.request.alignment, slice(first, first + step.num_tokens)
        if alignment is not None:
            kept = step.sequence.cross_queries
            while sum(map(len, kept)) > step.start:
                kept.pop()
            kept.append(torch.stack([queries[layer][rows, head] for layer, head in alignment.heads], dim=1))
        first += step.num_tokens


def align(sequence: SequenceState, cache: KVCache, decoder: StackConfig) -> list[int]:
    """Return the position in the source at which each row in [first, end) of a computed prompt begins."""
    alignment = sequence.request.alignment
    assert alignment is not None
    queries = torch.cat(sequence.cross_queries)[: sequence.num_prompt_tokens]  # [T, heads, D]
    sequence.cross_queries.clear()
    rows = slice(alignment.first, alignment.end)
    weights = _weights(alignment, queries, sequence, cache, decoder)
    if alignment.method is AlignmentMethod.TRANSFORMERS:
        return warp(mean_of_heads((one[rows] for one in weights), alignment.median_filter_width))
    return warp(mean_of_heads(weights, alignment.median_filter_width)[rows])


def _weights(
    alignment: Alignment, queries: Tensor, sequence: SequenceState, cache: KVCache, decoder: StackConfig
) -> Iterator[Tensor]:
    """Yield each head's weights `[T, F]`; consecutive heads of a layer read its keys once."""
    layer, keys = -1, queries
    for place, (index, head) in enumerate(alignment.heads):
        config, pages = decoder.layers[index].cross, cache.pages[index]
        assert config is not None
        if index != layer:
            table = device_tensor(sequence.source_tables[pages.pool], cache.device, torch.int64)
            layer, keys = index, pages.read(table[None], sequence.source_length)[0][0]  # [S, K, D]
        key = keys[:, head * config.num_kv_heads // config.num_heads]
        crops_first = alignment.method is AlignmentMethod.OPENAI
        positions = alignment.num_positions
        yield head_weights(queries[:, place], key, config.scale, positions=positions, crops_first=crops_first)
