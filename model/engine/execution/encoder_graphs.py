"""Records batches to encode as CUDA graphs and replays them.

Batches with equally many rows run the same kernels whatever the texts are, so a batch is recorded for some numbers of
tokens and of texts (`BatchSize`), or of images or windows of sound, which all have as many rows. To encode a batch, its
integers go to a fixed address in one copy, and the smallest size that holds it is replayed. The rows after the last
input are a segment without keys: nothing reads them. As in `triptych.model.engine.execution.cuda_graphs`, kernels read
lengths on the device.

Only batches whose launches cost more than their computation are recorded (`most_tokens`). Larger ones, and inputs with
adapters or unread tokens, are launched kernel by kernel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from triptych.model.api.request import Source
from triptych.model.attention.base import AttentionMetadata, DeviceLengths
from triptych.model.config.layer import ExpertsConfig
from triptych.model.config.model import ModelConfig
from triptych.model.engine.execution.cuda_graphs import Recorder
from triptych.model.engine.execution.sources import blank_source, features_of
from triptych.model.network.inputs import StackInput, positions_of
from triptych.model.network.parameter_counts import parameters_by_part
from triptych.model.network.transformer import Transformer
from triptych.model.system.background_work import Work
from triptych.model.system.kernel_faults import EXPERTS
from triptych.model.vision.processing import ImageProcessing

MOST_TOKENS = 4096
SINGLE = (16, 32, 64, 128, 256, 512)  # tokens of the batches with one text
SEVERAL = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, MOST_TOKENS)
LAUNCH_SECONDS = 250e-6  # of a layer that is launched kernel by kernel, on the host
OPERATIONS = 300e12  # that a GPU computes in a second at these sizes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class BatchSize:
    """The size of a recorded batch, and the layout of its integers in one row of int64."""

    tokens: int  # T
    segments: int  # B texts at most

    @property
    def integers(self) -> int:
        """The length of the row: four numbers for each token, then B + 2 starts and B + 1 lengths in 32 bits."""
        return 4 * self.tokens + self.segments + 2

    def split(self, row: Tensor) -> BatchFields:
        """Return the fields of a row of `integers` as views."""
        ids, positions, types, contexts = row[: 4 * self.tokens].view(4, -1)
        starts, lengths, _ = row[4 * self.tokens :].view(torch.int32).split((self.segments + 2, self.segments + 1, 1))
        return BatchFields(ids, positions, types, contexts, starts, lengths)


@dataclass(frozen=True, slots=True)
class BatchFields:
    """The fields of a batch, as the network reads them. The last segment is the padding."""

    ids: Tensor  # [T]
    positions: Tensor  # [T]
    types: Tensor  # [T]
    contexts: Tensor  # [T] the length of each row's text
    starts: Tensor  # [B + 2] int32, of the segments
    lengths: Tensor  # [B + 1] int32 keys of each segment


class EncoderGraphs:
    """The recorded batches of one model's encoder, or of a decoder that embeds."""

    def __init__(
        self,
        model: Transformer,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        record: Recorder,
        images: ImageProcessing | None = None,
    ) -> None:
        """`images` says how pixels are scaled."""
        self._model = model
        self._device = model.device
        self._record = record
        self._images = images
        tokens, rows = min(most_tokens(model.config), max_num_tokens), model.config.source_positions
        self.sizes = batch_sizes(tokens, max_num_seqs) if rows is None else source_sizes(tokens, max_num_seqs, rows)
        most = max((size.integers for size in self.sizes), default=0)
        # One row for all sizes: they never run at the same time.
        self._row = torch.zeros(most, dtype=torch.int64, device=self._device)
        self._features: Tensor | None = None  # pixels or frames of the largest size
        if rows is not None and self.sizes:
            blank = [blank_source(model.config)] * self.sizes[-1].segments
            self._features = features_of(blank, self._device, images)
        self._recorded: dict[BatchSize, tuple[Tensor, Callable[[], object]]] = {}

    def record_each(self) -> Work[None]:
        """Record every size in a part, the largest first, so that the smaller ones fit into its memory."""
        began = time.monotonic()
        for size in reversed(self.sizes):
            self._recorded[size] = self._recording(size)
            yield None
        logger.info("recorded %d batches to encode in %.1f s", len(self._recorded), time.monotonic() - began)

    def size_of(self, sources: Sequence[Source]) -> BatchSize | None:
        """Return the smallest recorded size that holds these texts; None: there is none."""
        tokens, segments = sum(source.num_positions for source in sources), len(sources)
        return next((size for size in self.sizes if size.tokens >= tokens and size.segments >= segments), None)

    def run(self, size: BatchSize, sources: Sequence[Source]) -> Tensor:
        """Return the hidden states `[tokens, d]` of texts that fit into `size`; they are valid until the next run."""
        padding = self._model.config.source_padding
        row = pack_texts(size, sources, pinned=self._device.type == "cuda", padding=padding)
        self._row[: size.integers].copy_(row, non_blocking=True)
        if self._features is not None:
            self._features[: len(sources)].copy_(features_of(sources, self._device, self._images))
        hidden, replay = self._recorded[size]
        replay()
        return hidden[: sum(source.num_positions for source in sources)]

    @torch.inference_mode()
    def _recording(self, size: BatchSize) -> tuple[Tensor, Callable[[], object]]:
        row = self._row[: size.integers]
        row.copy_(pack_texts(size, []))
        inputs, model = self._inputs(size, row), self._model
        # The class's methods: other ranks would have to be told of a call of `model` itself.
        return self._record(
            lambda: Transformer.decode(model, inputs) if model.encoder is None else Transformer.encode(model, inputs)
        )

    def _inputs(self, size: BatchSize, row: Tensor) -> StackInput:
        fields, config = size.split(row), self._model.config
        longest = config.source_positions or min(size.tokens, config.max_positions or size.tokens)
        metadata = AttentionMetadata(
            q_lens=(size.tokens,),
            kv_lens=(size.tokens,),
            causal=self._model.encoder is None,
            device=self._device,
            device_lengths=DeviceLengths(fields.starts, fields.lengths, longest, longest, cu_seqlens_k=fields.starts),
        )
        features = None if self._features is None else self._features[: size.segments]
        has_types = next(iter(config.stacks.values())).token_types > 0
        return StackInput(
            fields.ids,
            fields.positions,
            metadata,
            token_types=fields.types if has_types else None,
            pixels=features if config.image is not None else None,
            frames=features if config.audio is not None else None,
            contexts=fields.contexts,
        )


def pack_texts(
    size: BatchSize, sources: Sequence[Source], *, pinned: bool = False, padding: int | None = None
) -> Tensor:
    """Pack texts that fit into `size` into a row of integers on the host; `pinned`: a device copies from it.

    `padding` is a token without a position.
    """
    row = torch.zeros(size.integers, dtype=torch.int64, pin_memory=pinned)
    flat, tokens, count = row.numpy(), size.tokens, len(sources)
    # As `BatchSize.split`, without a dozen views of torch, which take most of the time of a short text.
    ids, positions, types, contexts = flat[: 4 * tokens].reshape(4, tokens)
    of_segments = flat[4 * tokens :].view(np.int32)
    starts, lengths = of_segments[: size.segments + 2], of_segments[size.segments + 2 : -1]
    counts = np.array([source.num_positions for source in sources], dtype=np.int32)
    lengths[:count] = counts
    starts[1 : count + 1] = counts.cumsum()
    total = int(starts[count])
    starts[count + 1 : -1] = total
    starts[-1] = tokens
    read = np.fromiter(chain.from_iterable(one.token_ids for one in sources), np.int64)
    ids[: len(read)] = read  # of images and sound there are none
    contexts[:total] = counts.repeat(counts)
    positions[:total] = positions_of(ids[:total], counts, padding)
    for source, start in zip(sources, starts.tolist(), strict=False):
        if source.token_type_ids:
            types[start : start + len(source.token_type_ids)] = source.token_type_ids
    return row


def can_record_batches(model: Transformer) -> bool:
    """Whether a model encodes, and no launch of its encoder depends on lengths that the host knows.

    A decoder that generates is left out: it embeds rarely, and recording takes time and memory.
    """
    config = model.config
    stack = next(iter(config.stacks.values()))
    encodes = config.encoder is not None or not config.can_generate
    experts = any(isinstance(layer.feed_forward, ExpertsConfig) for layer in stack.layers)
    waits = bool(stack.recurrences) or stack.convolution is not None or (experts and EXPERTS in model.linear.faults)
    return encodes and model.backend.graph_safe and not waits and config.vision is None


def most_tokens(config: ModelConfig) -> int:
    """Return how many tokens the largest recorded batch has: launching it takes as long as computing it."""
    name, stack = next(iter(config.stacks.items()))
    counts = parameters_by_part(config, each_use=True)
    multiplied = sum(counts.get(f"{name} {part}", 0) for part in ("attention", "MLP"))
    tokens = stack.num_layers * LAUNCH_SECONDS * OPERATIONS / max(1, 2 * multiplied)
    return min(MOST_TOKENS, int(tokens))


def batch_sizes(most: int, max_num_seqs: int) -> list[BatchSize]:
    """Return the sizes to record, in the order of their tokens: for one text, for a few long and for many short ones.

    A launch of attention has programs for every segment there may be, so there are not more than texts of 16 tokens.
    """
    sizes = {BatchSize(tokens, 1) for tokens in SINGLE if tokens <= most}
    for tokens in SEVERAL:
        if tokens <= most:
            several = {max(8, tokens // 128), max(8, tokens // 16)}
            sizes |= {BatchSize(tokens, min(segments, max_num_seqs)) for segments in several}
    return sorted(sizes)


def source_sizes(most: int, max_num_seqs: int, rows: int) -> list[BatchSize]:
    """Return the sizes to record of images or windows of sound of `rows` rows each."""
    counts = sorted({min(1 << bit, max_num_seqs) for bit in range(6)})
    return [BatchSize(rows * count, count) for count in counts if rows * count <= most]
