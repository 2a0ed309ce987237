"""Records steps with prompts as CUDA graphs and replays them, for models that compute faster than the host launches.

A mixed step has D decoding sequences, then up to `PROMPTS` prompts (or parts of them, or sequences with drafts) of
together P tokens. It is recorded for some D and P. Rows of sequences that are not there have no keys and no slot to
write to; the rows after the last prompt are a segment of their own. All else is as in
`triptych.model.engine.execution.cuda_graphs`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from triptych.model.attention.base import AttentionMetadata, DeviceLengths
from triptych.model.cache.kv_cache import KVCache
from triptych.model.config.model import ModelConfig
from triptych.model.engine.execution.batch import BatchLayout, pack
from triptych.model.engine.execution.cuda_graphs import Recorder
from triptych.model.engine.execution.encoder_graphs import most_tokens
from triptych.model.engine.execution.static_row import fill_row
from triptych.model.engine.scheduling.scheduled_step import ScheduledSequence
from triptych.model.network.inputs import StackInput
from triptych.model.network.transformer import Transformer
from triptych.model.parallel.rank0 import Rank0Transformer
from triptych.model.system.background_work import Work
from triptych.model.system.devices import to_device

PROMPTS = 8
_DECODES = (0, 8, 32, 64, 128, 256)
_MOST_UNEVEN = 8192  # keys of one sequence among short ones, which then take as long as launching the step
_TOKENS = (16, 64, 128, 256, 512, 1024)  # the first for sequences with drafts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MixedSize:
    """The size of a recorded step with prompts."""

    decodes: int  # D
    tokens: int  # P of all prompts

    @property
    def segments(self) -> int:
        """Segments of the step: decoding sequences, prompts, and the rows after them."""
        return self.decodes + PROMPTS + 1


@dataclass(frozen=True, slots=True)
class MixedStep:
    """A step in a recorded size."""

    size: MixedSize
    decodes: int
    tokens: int


class MixedGraphs:
    """The recorded steps with prompts of one model over its KV cache."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        record: Recorder,
    ) -> None:
        self._model = model
        self._cache = cache
        self._longest = max_model_len
        self._record = record
        self.sizes = mixed_sizes(most_tokens(model.config), max_num_seqs)
        width, pools = -(-max_model_len // cache.block_size), len(cache.pools)
        self._layouts = {
            size: BatchLayout(size.decodes + size.tokens, size.segments, width, 0, pools, prompt_tokens=size.tokens)
            for size in self.sizes
        }
        most = max((sum(layout.sizes) for layout in self._layouts.values()), default=0)
        # One row for all sizes: they never run at the same time.
        self._row = torch.zeros(most, dtype=torch.int64, device=cache.device)
        self._recorded: dict[MixedSize, tuple[Tensor, Callable[[], object]]] = {}

    def record_each(self) -> Work[None]:
        """Record every size in a part, the largest first, so that the smaller ones fit into its memory."""
        began = time.monotonic()
        for size in sorted(self.sizes, key=lambda size: size.decodes + size.tokens, reverse=True):
            self._recorded[size] = self._recording(size)
            yield None
        logger.info("recorded %d steps with prompts in %.1f s", len(self._recorded), time.monotonic() - began)

    def fitted(self, steps: Sequence[ScheduledSequence], *, uneven: bool = False) -> MixedStep | None:
        """Return the smallest recorded size that holds this step, whose decodes come first; None: there is none.

        `uneven`: a few decodes have nearly all keys. The recorded step does not divide them.
        """
        lengths = [step.num_tokens for step in steps]
        decodes = lengths.count(1)
        if len(lengths) - decodes > PROMPTS:
            return None
        if uneven and max(step.start for step in steps[:decodes]) > _MOST_UNEVEN:
            return None
        tokens = sum(lengths) - decodes
        fitting = (size for size in self.sizes if size.decodes >= decodes and size.tokens >= tokens)
        return next((MixedStep(size, decodes, tokens) for size in fitting), None)

    def layout(self, step: MixedStep, needed: BatchLayout) -> BatchLayout:
        """Return the layout of a step, padded to its recorded size, with tables of the needed length."""
        return replace(self._layouts[step.size], blocks=needed.blocks)

    def run(self, step: MixedStep, layout: BatchLayout, row: Tensor, tokens: Tensor | None) -> Tensor:
        """Return the hidden states of a step packed by `layout`, without those of padding.

        They are valid until the next run. `tokens` are those that the previous step sampled; None if this step needs
        none of them.
        """
        fill_row(self._row, self._layouts[step.size], to_device(row, self._cache.device), layout, tokens)
        hidden, replay = self._recorded[step.size]
        replay()
        prompts = hidden[step.size.decodes :][: step.tokens]
        return torch.cat((hidden[: step.decodes], prompts)) if step.decodes else prompts

    @torch.inference_mode()
    def _recording(self, size: MixedSize) -> tuple[Tensor, Callable[[], object]]:
        layout = self._layouts[size]
        row = self._row[: sum(layout.sizes)]
        row.copy_(pack(layout, [], self._cache.block_size, {}))
        inputs = self._inputs(size, layout, row)
        return self._record(lambda: Transformer.decode(self._model, inputs, self._cache))

    def _inputs(self, size: MixedSize, layout: BatchLayout, row: Tensor) -> StackInput:
        step = layout.split(row)
        lengths = DeviceLengths(
            step.cu_seqlens,
            step.kv_lens,
            size.tokens,
            self._longest,
            singles=size.decodes,
            max_single_kv_len=self._longest,
        )
        q_lens = (1,) * size.decodes + (size.tokens,) + (0,) * PROMPTS
        first, *others = (
            AttentionMetadata(q_lens, (self._longest,) * len(q_lens), True, self._cache.device, tables, slots, lengths)
            for tables, slots in zip(step.tables, step.slots, strict=True)
        )
        return StackInput(step.ids, step.positions, first, other_pools=tuple(others), contexts=step.contexts)


def can_record_prompts(model: Transformer) -> bool:
    """Whether steps with prompts of a model that can record decode steps have launches that depend on no lengths."""
    decoder, alone = model.decoder, not isinstance(model, Rank0Transformer)
    return decoder is not None and alone and model.encoder is None and not decoder.config.recurrences


def num_mixed(config: ModelConfig, max_num_seqs: int) -> int:
    """Return how many steps with prompts are recorded."""
    return len(mixed_sizes(most_tokens(config), max_num_seqs))


def mixed_sizes(most: int, max_num_seqs: int) -> list[MixedSize]:
    """Return the sizes to record, of up to `most` rows, in the order in which `fitted` tries them."""
    decodes = sorted({min(count, max_num_seqs) for count in _DECODES})
    sizes = [MixedSize(*size) for size in product(decodes, _TOKENS) if sum(size) <= most]
    return sorted(sizes, key=lambda size: (size.decodes + size.tokens, size.decodes))
