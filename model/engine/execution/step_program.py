"""Computes the logits of a packed step. Every rank of a model runs the same program from the same plan.

    block copies -> (encoder over new sources -> cross keys and values) -> decoder over packed tokens -> logits

Rank 0 plans a step and sends the plan to the others (`triptych.model.parallel.messages.Step`). Every rank has the whole
hidden states. Only rank 0 samples. Tokens that the next step needs travel with that step, from device to device, so no
host waits for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from triptych.model.api.request import Source
from triptych.model.attention.base import AttentionMetadata, DeviceLengths
from triptych.model.cache.kv_cache import KVCache, StateSpan
from triptych.model.engine.execution.batch import NO_SLOT, BatchLayout, StepBatch
from triptych.model.engine.execution.cuda_graphs import DecodeGraphs
from triptych.model.engine.execution.encoder_graphs import EncoderGraphs
from triptych.model.engine.execution.mixed_graphs import MixedGraphs, MixedStep
from triptych.model.engine.execution.pictures import PicturePart, PictureStore
from triptych.model.engine.execution.sources import source_input
from triptych.model.engine.execution.static_row import fill_placeholders
from triptych.model.engine.execution.step_logits import StepLogits, step_logits
from triptych.model.network.inputs import CrossInput, StackInput
from triptych.model.network.lora import AdapterRuns, LoraAdapter
from triptych.model.network.stack import StackPass
from triptych.model.network.transformer import Transformer
from triptych.model.parallel.group import Group
from triptych.model.system.devices import device_tensor, to_device

if TYPE_CHECKING:
    from triptych.model.parallel.messages import Step
    from triptych.model.parallel.step_ring import Place


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: its packed integers on the host, and what to compute."""

    layout: BatchLayout
    row: Tensor  # int64, as `layout` divides it
    num_segments: int  # without the padding that a replayed step may have
    replayed: bool  # from a recorded graph
    num_known: int = 0  # tokens sampled by the previous step, if this one needs any of them
    uneven: bool = False  # a few decoding sequences have nearly all keys
    logit_rows: tuple[int, ...] | None = None  # rows of hidden states that need logits; None: all
    copies: tuple[tuple[int, int, int], ...] = ()  # pool, target and source of each block to copy first
    sources: tuple[Source, ...] = ()  # to encode first
    source_slots: tuple[int, ...] = ()  # [P * S] of their S positions in each pool
    scored: tuple[tuple[int, int], ...] = ()  # ranges of rows that score prompts
    states: tuple[tuple[int, int, int, int], ...] = ()  # the fields of each `StateSpan` of recurrent layers
    needed: bytes = b""  # the part of each row of logits that the sampler needs (`step_logits`)
    kept_layers: tuple[int, ...] = ()  # layers whose queries of cross attention are kept; on one rank only
    mixed: MixedStep | None = None  # the recorded step with prompts to replay; on one rank only
    adapters: AdapterRuns | None = None  # of the rows; on one rank only
    source_adapters: tuple[LoraAdapter | None, ...] = ()  # of each source; empty: none has one
    pictures: tuple[PicturePart, ...] = ()  # whose rows replace tokens' vectors; on one rank only
    coordinates: Tensor | None = None  # [3, T] positions of rows, if these have coordinates; on one rank only
    key_ends: Tensor | None = None  # [T] keys that each row sees, if not those up to itself; on one rank only

    def message(self, row: Place | bytes) -> Step:
        """Return the plan as a message for the other ranks, which find its integers at `row`."""
        from triptych.model.parallel.messages import Step  # needs msgspec, which one rank does without

        return Step(
            astuple(self.layout),
            row,
            self.num_segments,
            self.replayed,
            self.num_known,
            self.uneven,
            self.logit_rows,
            self.copies,
            self.sources,
            self.source_slots,
            self.scored,
            self.states,
            self.needed,
        )

    @classmethod
    def of(cls, message: Step, row: Tensor) -> StepPlan:
        """Return the plan that rank 0 sent; `row` are its integers."""
        return cls(
            BatchLayout(*message.layout),
            row,
            message.num_segments,
            message.replayed,
            message.num_known,
            message.uneven,
            message.logit_rows,
            message.copies,
            message.sources,
            message.source_slots,
            message.scored,
            message.states,
            message.needed,
        )

    def check_ids(self, vocabulary: int, source_vocabulary: int) -> None:
        """Raise `IndexError` for a token id outside the vocabulary, before it breaks the group of ranks."""
        step = self.layout.split(self.row)
        ids, placeholders = step.ids.numpy(), step.placeholders.numpy()
        wrong = ((ids >= vocabulary) | ((ids < 0) & (placeholders == NO_SLOT))).any()
        if wrong:
            raise IndexError(f"a token id is outside the vocabulary of {vocabulary}")
        if any(source.token_ids and not _within(source.token_ids, source_vocabulary) for source in self.sources):
            raise IndexError(f"a token id is outside the vocabulary of {source_vocabulary}")


class StepProgram:
    """Runs the plans of one model on one rank, by CUDA graphs or kernel by kernel."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        graphs: DecodeGraphs | None = None,
        group: Group | None = None,
        encoder_graphs: EncoderGraphs | None = None,
        mixed_graphs: MixedGraphs | None = None,
        pictures: PictureStore | None = None,
    ) -> None:
        self._pictures = pictures
        self.graphs = graphs
        self._mixed_graphs = mixed_graphs
        self._encoder_graphs = encoder_graphs
        self._model = model
        self._cache = cache
        self._group = group
        # The digest and the adapter of a source, and its unfinished pass.
        self._ahead: tuple[tuple[bytes, LoraAdapter | None], StackPass] | None = None
        self.cross_queries: dict[int, Tensor] = {}  # of the latest step, [T, H, D] for each kept layer

    def encode_ahead(self, source: Source, layers: int, adapter: LoraAdapter | None = None) -> None:
        """Compute the next `layers` layers for a source, or a picture, of a later plan; on one rank only."""
        if self._pictures is not None:
            self._pictures.encode_ahead(source, layers, adapter)
            return
        if self._ahead is None or self._ahead[0] != (source.digest, adapter):
            begun = self._model.begin(self._source_input([source], [adapter]))
            self._ahead = (source.digest, adapter), begun
        self._ahead[1].advance(layers)

    def forget_ahead(self) -> None:
        self._ahead = None
        if self._pictures is not None:
            self._pictures.forget_ahead()

    def run(self, plan: StepPlan, tokens: Tensor | None) -> tuple[Tensor, StepLogits]:
        """Return hidden states `[T, d]`, valid until the next run, and the logits of `plan.logit_rows`.

        `tokens` are those that the previous step sampled; ranks other than 0 get them from rank 0.
        """
        self._copy_blocks(plan)
        if plan.sources:
            self._encode(plan)
        if plan.num_known and self._group is not None:
            if tokens is None:
                tokens = torch.empty(plan.num_known, dtype=torch.int64, device=self._cache.device)
            tokens = self._group.broadcast(tokens)
        known = tokens if plan.num_known else None
        if plan.replayed:
            assert self.graphs is not None
            hidden = self.graphs.run(plan.layout, plan.row, plan.num_segments, known, uneven=plan.uneven)
        elif plan.mixed is not None:
            assert self._mixed_graphs is not None
            hidden = self._mixed_graphs.run(plan.mixed, plan.layout, plan.row, known)
        else:
            hidden = self._launch(plan, tokens)
        rows = hidden if plan.logit_rows is None else hidden[self._tensor(plan.logit_rows)]
        if not len(rows):
            return hidden, StepLogits(rows)
        return hidden, step_logits(self._model, rows, plan.needed)

    def prompt_logits(self, plan: StepPlan, hidden: Tensor) -> Iterator[Tensor]:
        """Yield the logits of each range of rows that scores a prompt, computed on demand."""
        for first, last in plan.scored:
            yield Transformer.logits(self._model, hidden[first:last])

    def _copy_blocks(self, plan: StepPlan) -> None:
        by_pool: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for pool, target, source in plan.copies:
            by_pool[pool].append((target, source))
        for pool, blocks in by_pool.items():
            targets, sources = zip(*blocks, strict=True)
            self._cache.copy_blocks(pool, targets, sources)

    def _encode(self, plan: StepPlan) -> None:
        """Encode the new sources and write their cross keys and values to the pools."""
        adapters = plan.source_adapters or (None,) * len(plan.sources)
        encoder_output = self._encoded(plan.sources, adapters)  # [S, d]
        slots = self._tensor(plan.source_slots).view(len(self._cache.pools), -1)  # [P, S]
        runs = AdapterRuns.of_segments(adapters, (source.num_positions for source in plan.sources))
        self._model.write_encoder_output(encoder_output, self._cache, slots, runs)

    def _encoded(self, sources: tuple[Source, ...], adapters: Sequence[LoraAdapter | None]) -> Tensor:
        """Return the encoder's output `[S, d]`; a source that was started ahead needs only its last layers."""
        ahead = self._ahead
        keys = [(source.digest, adapter) for source, adapter in zip(sources, adapters, strict=True)]
        if ahead is None or ahead[0] not in keys:
            graphs = None if any(adapters) else self._encoder_graphs
            if graphs is not None and (size := graphs.size_of(sources)):
                return graphs.run(size, sources)
            return self._encode_sources(sources, adapters)
        self._ahead = None
        parts, place = [ahead[1].finish()], keys.index(ahead[0])
        if place:
            parts.insert(0, self._encode_sources(sources[:place], adapters[:place]))
        if place + 1 < len(sources):
            parts.append(self._encode_sources(sources[place + 1 :], adapters[place + 1 :]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _encode_sources(self, sources: Sequence[Source], adapters: Sequence[LoraAdapter | None]) -> Tensor:
        return Transformer.encode(self._model, self._source_input(sources, adapters))

    def _source_input(self, sources: Sequence[Source], adapters: Sequence[LoraAdapter | None]) -> StackInput:
        inputs = source_input(sources, self._cache.device, padding=self._model.config.source_padding)
        runs = AdapterRuns.of_segments(adapters, (source.num_positions for source in sources))
        return inputs if runs is None else replace(inputs, adapters=runs)

    def _launch(self, plan: StepPlan, tokens: Tensor | None) -> Tensor:
        row, host = to_device(plan.row, self._cache.device), plan.layout.split(plan.row)
        step = host if row is plan.row else plan.layout.split(row)
        if plan.num_known and tokens is not None:
            fill_placeholders(step, tokens)
        q_lens = tuple(np.diff(host.cu_seqlens.numpy()).tolist())
        metadata, *others = self._metadata(
            q_lens, tuple(host.kv_lens.tolist()), step, causal=True, uneven=plan.uneven, key_ends=plan.key_ends
        )
        inputs = StackInput(
            step.ids,
            step.positions,
            metadata,
            other_pools=tuple(others),
            contexts=step.contexts,
            states=tuple(StateSpan(*span) for span in plan.states),
            adapters=plan.adapters,
            coordinates=None if plan.coordinates is None else to_device(plan.coordinates, self._cache.device),
            given=None if self._pictures is None else self._pictures.given(plan.pictures),
        )
        cross = None
        if self._model.encoder is not None:
            metadata, *others = self._metadata(
                q_lens, tuple(host.source_lens.tolist()), step, causal=False, uneven=False
            )
            self.cross_queries = {layer: self._queries(layer, len(step.ids)) for layer in plan.kept_layers}
            cross = CrossInput(metadata, other_pools=tuple(others), queries=self.cross_queries or None)
        return Transformer.decode(self._model, inputs, self._cache, cross)

    def _metadata(
        self,
        q_lens: tuple[int, ...],
        kv_lens: tuple[int, ...],
        step: StepBatch,
        *,
        causal: bool,
        uneven: bool,
        key_ends: Tensor | None = None,
    ) -> list[AttentionMetadata]:
        """Return the metadata of self attention, or of cross attention (not causal), for each pool."""
        singles = q_lens.count(1) if max(q_lens) > 1 else 0
        lengths = DeviceLengths(
            step.cu_seqlens,
            step.kv_lens if causal else step.source_lens,
            max(q_lens),
            max(kv_lens),
            singles=singles,
            max_single_kv_len=max(kv_lens[:singles], default=0),
            uneven=uneven,
        )
        tables, slots = (step.tables, step.slots) if causal else (step.source_tables, None)
        device, pictures = self._cache.device, self._model.config.pictures
        everywhere = pictures is None or not pictures.in_windows
        return [
            AttentionMetadata(
                *(q_lens, kv_lens, causal, device, tables[pool], None if slots is None else slots[pool], lengths),
                key_ends=key_ends if everywhere or self._cache.pools[pool].window is not None else None,
            )
            for pool in range(len(tables))
        ]

    def _queries(self, layer: int, rows: int) -> Tensor:
        """Allocate memory for a layer's queries of cross attention."""
        cross = self._model.config.decoder_stack.layers[layer].cross
        assert cross is not None
        return torch.empty(rows, cross.num_heads, cross.head_dim, device=self._cache.device)

    def _tensor(self, values: tuple[int, ...]) -> Tensor:
        return device_tensor(values, self._cache.device, torch.int64)


def _within(ids: tuple[int, ...], size: int) -> bool:
    return min(ids) >= 0 and max(ids) < size
