"""The encode engine: packed batches of inputs under a token budget, in the order of arrival, for one model.

The tokens of an input are never split, since attention is bidirectional. A batch takes inputs from the front of the
queue until the budget is used; no input overtakes another. Inputs beyond the budget are computed a few layers at a
step; on a CPU several together, because products of few rows cost more per row. The vectors are the last hidden
states of the encoder, or of the decoder in a decoder-only model. No KV cache is used. `SentenceHead` and
`VocabularyHead` turn hidden states into results.

On a GPU the host runs ahead: it packs and launches a batch while the device computes the previous one, and then
collects the results of that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from triptych.model.api.messages import Abort
from triptych.model.api.request import (
    EncodeOutput,
    EncodeRequest,
    EncodeTask,
    FinishReason,
    SourceKind,
)
from triptych.model.api.stats import StepStats
from triptych.model.attention.base import AttentionMetadata
from triptych.model.checkpoint.sentence_transformers import SentenceSettings
from triptych.model.engine.encode_results import ArrivingResults, LaunchedBatch, PausedBatch
from triptych.model.engine.execution.encoder_graphs import EncoderGraphs
from triptych.model.engine.execution.sources import blank_source, source_input
from triptych.model.engine.fault_isolation import run_isolated
from triptych.model.engine.label_head import LabelHead
from triptych.model.engine.output_heads import EncodeResult, SentenceHead, VocabularyHead
from triptych.model.engine.scheduling.fair_shares import place_in_turn
from triptych.model.engine.scheduling.scheduled_step import (
    UNLIMITED,
    StepBudget,
    StepDemand,
)
from triptych.model.network.adapters import Adapters
from triptych.model.network.inputs import CrossInput, StackInput, packed_input, with_unread_rows
from triptych.model.network.lora import AdapterRuns
from triptych.model.network.transformer import Transformer
from triptych.model.vision.processing import ImageProcessing

_OF_LABELS = (EncodeTask.LOGITS, EncodeTask.SCORES)
_PAUSED_TOKENS = 256  # of inputs that pause together; more rows cost hardly less per row


class EncodeEngine:
    """Batches and computes the encode requests of one model."""

    def __init__(
        self,
        name: str,
        model: Transformer,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        sentences: SentenceSettings,
        images: ImageProcessing | None = None,
        adapters: Adapters | None = None,
        graphs: EncoderGraphs | None = None,
        overlap: bool = False,
    ) -> None:
        """`overlap`: run ahead, that is, launch a batch before the previous one's results arrive."""
        self.name = name
        self.model = model
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._head = SentenceHead(model, sentences, device)
        self._vocabulary = VocabularyHead(model, sentences, device)
        self._labels = LabelHead(model, device)
        self._images = images
        self._adapters = adapters
        self._graphs = graphs
        self._overlap = overlap
        self._waiting: deque[EncodeRequest] = deque()
        self._are_several = False  # several tenants have waiting inputs
        self._background: deque[EncodeRequest] = deque()  # computed in steps of their own
        self._batch: list[EncodeRequest] = []  # the inputs being launched or collected; empty between steps
        self._pending: LaunchedBatch | None = None
        self._last_collect_time = 0.0
        self._waiting_tokens = 0
        self._paused: PausedBatch | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._background or self._paused or self._pending)

    @property
    def has_foreground(self) -> bool:
        return bool(self._waiting or self._paused)

    @property
    def has_background(self) -> bool:
        return bool(self._background)

    @property
    def waits_for_grammars(self) -> bool:
        return False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._background)

    def demand(self, background: bool | None = None) -> StepDemand:
        """Return what the next step could compute. One of L layers of an input counts as 1/L of its tokens.

        A pending batch is no demand: without another turn of this engine, `finish_pending` collects it.
        """
        if background:
            if not self._background:
                return StepDemand()
            first = self._length(self._background[0])
            return StepDemand(whole_tokens=first, all_whole_tokens=max(self.max_num_batched_tokens, first))
        if self._paused is not None:
            length, stack_pass = self._paused.num_tokens, self._paused.stack_pass
            left = self._layer_tokens(length, self._num_layers if stack_pass is None else stack_pass.layers_left)
            return StepDemand(
                waiting=len(self._waiting), whole_tokens=self._layer_tokens(length, 1), all_whole_tokens=left
            )
        if not self._waiting:
            return StepDemand()
        first = self._length(self._waiting[0])
        min_tokens = self._layer_tokens(first, 1) if self.model.can_pause else first
        max_tokens = min(self._waiting_tokens, max(self.max_num_batched_tokens, first))
        return StepDemand(waiting=len(self._waiting), whole_tokens=min_tokens, all_whole_tokens=max_tokens)

    def add(self, request: EncodeRequest) -> None:
        if request.is_background:
            self._background.append(request)
            return
        if self._waiting and (self._are_several or self._waiting[-1].tenant != request.tenant):
            self._are_several = True
            place = place_in_turn([(one.tenant, self._length(one)) for one in self._waiting], request.tenant)
            self._waiting.insert(place, request)
        else:
            self._are_several = False
            self._waiting.append(request)
        self._waiting_tokens += self._length(request)

    def abort(self, request_id: str, reason: FinishReason) -> list[EncodeOutput]:
        """Drop a waiting or paused input; idempotent. A launched one ends with its results."""
        return self.abort_all([Abort(self.name, request_id, None, reason)])

    def abort_all(self, aborts: Sequence[Abort]) -> list[EncodeOutput]:
        """Drop the named inputs in one pass."""
        if not self._waiting and not self._background and self._paused is None:
            return []
        reasons = {abort.request_id: abort.reason for abort in aborts}
        found = [request for request in self._unanswered if request.request_id in reasons]
        self._drop(found, FinishReason.CANCELLED)
        return [EncodeOutput(one.request_id, finish_reason=reasons[one.request_id]) for one in found]

    def recover(self) -> list[EncodeOutput]:
        """Reset the engine after an exception: end every input with an error."""
        ended = [*(self._pending.requests if self._pending is not None else ()), *self._batch, *self._unanswered]
        self._batch, self._paused, self._pending = [], None, None
        self._waiting, self._background = deque(), deque()
        self._waiting_tokens = 0
        return [EncodeOutput(request.request_id, finish_reason=FinishReason.ERROR) for request in ended]

    def finish_pending(self) -> tuple[list[EncodeOutput], StepStats | None]:
        """Wait for the pending batch, if there is one; return its outputs and statistics."""
        return self._collect_pending() if self._pending is not None else ([], None)

    def check_deadlines(self) -> list[EncodeOutput]:
        """Drop the inputs whose deadline has passed."""
        now = time.monotonic()
        late = [request for request in self._unanswered if request.deadline is not None and request.deadline <= now]
        return self._drop(late, FinishReason.DEADLINE)

    def step(self, budget: StepBudget = UNLIMITED) -> tuple[list[EncodeOutput], StepStats | None]:
        """Encode one batch within the budget from the front of the queue; at least one layer of one input.

        With `overlap` the batch is launched, and the previous one collected.
        """
        outputs = self.check_deadlines()
        began = time.monotonic()
        queue = self._background if self._takes_background(budget) else self._waiting
        if self._paused is not None and queue is self._waiting:
            return self._resume(outputs, began, budget)
        pauses = queue is self._waiting and self._pauses(budget)
        if self._pending is not None and (pauses or not queue):
            collected, stats = self._collect_pending()
            return outputs + collected, stats
        if pauses:
            assert budget.whole_tokens is not None
            self._paused = PausedBatch(self._next_paused(budget.whole_tokens), began)
            return self._resume(outputs, began, budget)
        batch = self._next_batch(queue, budget)
        if not batch:
            return outputs, None
        self._batch = batch
        parts = run_isolated(batch, lambda part: ArrivingResults(self._encode(part)), self.probe)
        self._batch, before = [], self._pending
        self._pending = LaunchedBatch(parts, began, sum(map(self._length, batch)))
        if before is None and self._overlap:
            return outputs, None
        collected, stats = self._collect_pending() if before is None else self._collect(before)
        return outputs + collected, stats

    def _takes_background(self, budget: StepBudget) -> bool:
        """Return whether a step computes background inputs, which never share a step with others."""
        if budget.background is None:
            return not (self._waiting or self._paused)
        return budget.background

    def _collect_pending(self) -> tuple[list[EncodeOutput], StepStats]:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return self._collect(pending)

    def _collect(self, batch: LaunchedBatch) -> tuple[list[EncodeOutput], StepStats]:
        """Wait for a launched batch; return its outputs and statistics."""
        self._batch = batch.requests
        outputs = batch.outputs()
        self._batch = []
        now, tokens = time.monotonic(), batch.num_tokens
        began, self._last_collect_time = max(batch.began, self._last_collect_time), now
        return outputs, StepStats(self.name, "encode", now - began, tokens, len(outputs), num_whole_tokens=tokens)

    def _pauses(self, budget: StepBudget) -> bool:
        """Return whether the next inputs exceed the budget, so that their layers are divided over steps."""
        most = budget.whole_tokens if self._waiting and self.model.can_pause else None
        if most is None:
            return False
        return self._length(self._waiting[0]) > most or (
            not self._overlap and min(self._waiting_tokens, self._most_paused(most)) > most
        )

    def _most_paused(self, budget: int) -> int:
        """Return the most tokens of inputs that pause together: one layer of them must be within the budget."""
        return 0 if self._overlap else min(budget * self._num_layers, _PAUSED_TOKENS, self.max_num_batched_tokens)

    def _next_paused(self, budget: int) -> list[EncodeRequest]:
        """Remove the inputs to pause, at least one and all of one path, from the front of the queue."""
        first, left = self._waiting[0], self._most_paused(budget)
        batch: list[EncodeRequest] = []
        while self._waiting and len(batch) < self.max_num_seqs:
            request = self._waiting[0]
            alike = _path(request) == _path(first) and self._reads_decoder(request) == self._reads_decoder(first)
            if batch and (not alike or self._length(request) > left):
                break
            batch.append(self._waiting.popleft())
            left -= self._length(request)
        self._waiting_tokens -= sum(map(self._length, batch))
        return sorted(batch, key=self._length, reverse=True)  # which balances the load of the threads

    def _resume(
        self, outputs: list[EncodeOutput], began: float, budget: StepBudget
    ) -> tuple[list[EncodeOutput], StepStats]:
        """Compute as many layers of the paused inputs as the budget allows, at least one.

        If that raises, each input is computed alone and whole.
        """
        assert self._paused is not None
        paused = self._paused
        layers = [0]  # computed in this step

        def run(part: Sequence[EncodeRequest]) -> list[EncodeResult]:
            if part is not paused.requests:
                return self._encode([one for one in part if id(one) not in paused.dropped])
            found, layers[0] = self._run_layers(paused, budget.whole_tokens)
            return found

        parts = run_isolated(paused.requests, run, self.probe)
        for part, results in parts:
            answered = [one for one in part if id(one) not in paused.dropped]
            if results is None:
                outputs += [EncodeOutput(one.request_id, finish_reason=FinishReason.ERROR) for one in answered]
            elif results:
                outputs += ArrivingResults(results).outputs(answered, paused.began)
        if parts[0][0] is not paused.requests or parts[0][1] is None or parts[0][1]:
            self._paused = None
        tokens = self._layer_tokens(paused.num_tokens, layers[0] or self._num_layers)
        seconds = time.monotonic() - began
        return outputs, StepStats(self.name, "encode", seconds, tokens, len(paused.requests), num_whole_tokens=tokens)

    @property
    def _unanswered(self) -> list[EncodeRequest]:
        """The paused and the waiting inputs, the oldest first."""
        paused = self._paused.unanswered if self._paused is not None else ()
        return [*paused, *self._waiting, *self._background]

    @property
    def _num_layers(self) -> int:
        return max(1, self.model.config.text_stack.num_layers)

    def _layer_tokens(self, length: int, layers: int) -> int:
        """Convert layers of an input of `length` tokens to the tokens through all layers of equal cost, rounded up."""
        return -(-length * layers // self._num_layers)

    def _drop(self, requests: Sequence[EncodeRequest], reason: FinishReason) -> list[EncodeOutput]:
        if requests:
            dropped = set(map(id, requests))
            self._waiting, self._background = (
                deque(request for request in queue if id(request) not in dropped)
                for queue in (self._waiting, self._background)
            )
            self._waiting_tokens = sum(map(self._length, self._waiting))
            if self._paused is not None:
                self._paused.dropped |= dropped
                if not self._paused.unanswered:
                    self._paused = None
        return [EncodeOutput(request.request_id, finish_reason=reason) for request in requests]

    def _next_batch(self, queue: deque[EncodeRequest], budget: StepBudget) -> list[EncodeRequest]:
        """Remove inputs within the budget, but at least one, from the front of a queue."""
        batch: list[EncodeRequest] = []
        left = self.max_num_batched_tokens
        if budget.whole_tokens is not None:
            left = min(left, budget.whole_tokens)
        while queue and len(batch) < self.max_num_seqs:
            if batch and self._length(queue[0]) > left:
                break
            batch.append(queue.popleft())
            left -= self._length(batch[-1])
        if queue is self._waiting:
            self._waiting_tokens -= sum(map(self._length, batch))
        return batch

    def _length(self, request: EncodeRequest) -> int:
        return request.source.num_positions

    @torch.inference_mode()
    def _encode(self, batch: Sequence[EncodeRequest]) -> list[EncodeResult]:
        if not batch:
            return []
        paths = dict.fromkeys(map(_path, batch))
        if len(paths) > 1:
            of_path = {path: self._encode([one for one in batch if _path(one) == path]) for path in paths}
            return [of_path[_path(request)].pop(0) for request in batch]
        lengths = [self._length(request) for request in batch]
        # Longest first, which balances the load of the threads.
        order = sorted(range(len(batch)), key=lengths.__getitem__, reverse=True)
        hidden = self._hidden([batch[i] for i in order])  # [T, d]
        if self._head.can_pool_together(batch):
            vectors = self._head.pool_together([batch[i] for i in order], hidden.float()).unbind()
            of_input = dict(zip(order, vectors, strict=True))
            return [EncodeResult(of_input[i]) for i in range(len(batch))]
        segments = dict(zip(order, hidden.split([lengths[i] for i in order]), strict=True))
        return self._results(batch, self._decoded(batch, [segments[i] for i in range(len(batch))]))

    def _hidden(self, batch: Sequence[EncodeRequest]) -> Tensor:
        """Return the hidden states `[T, d]` of inputs with one path, from a recorded batch if one is large enough."""
        sources = [request.source for request in batch]
        plain = _path(batch[0])[:2] == _PLAIN and not any(one.model in self.model.lora for one in batch)
        if self._graphs is not None and plain and (size := self._graphs.size_of(sources)):
            return self._graphs.run(size, sources)
        inputs = self._pack(batch)
        if self._by_vision(batch[0]):
            return self.model.encode_images(inputs)
        return self.model.decode(inputs) if self.model.encoder is None else self.model.encode(inputs)

    def _by_vision(self, request: EncodeRequest) -> bool:
        """Return whether the stack for images reads an input."""
        return request.source.kind is SourceKind.IMAGE and self.model.vision is not None

    @torch.inference_mode()
    def _run_layers(self, paused: PausedBatch, budget: int | None) -> tuple[list[EncodeResult], int]:
        """Compute as many layers as a budget of tokens allows; return the results, if they were the last ones.

        Results are only those of unanswered inputs. Also return how many layers were computed.
        """
        stack_pass = paused.stack_pass
        if stack_pass is None:
            paused.stack_pass = stack_pass = self.model.begin(self._pack(paused.requests))
        total = stack_pass.layers_done + stack_pass.layers_left
        layers = total if budget is None else max(1, budget * total // paused.num_tokens)
        layers = min(layers, stack_pass.layers_left)
        stack_pass.advance(layers)
        if stack_pass.layers_left:
            return [], layers
        hidden = stack_pass.finish().split([self._length(request) for request in paused.requests])
        if self._reads_decoder(paused.requests[0]) and not paused.decodes:
            paused.stack_pass = self.model.begin_decoder(*self._decoder_input(paused.requests, hidden))
            paused.decodes = True
            return [], layers
        left = [
            (one, states) for one, states in zip(paused.requests, hidden, strict=True) if id(one) not in paused.dropped
        ]
        return self._results([one for one, _ in left], [states for _, states in left]), layers

    def _decoded(self, batch: Sequence[EncodeRequest], hidden: list[Tensor]) -> list[Tensor]:
        """Replace the encoder's states by the decoder's if a classifier reads them; the decoder reads the input too."""
        at = [index for index, request in enumerate(batch) if self._reads_decoder(request)]
        if at:
            requests = [batch[index] for index in at]
            inputs, cross = self._decoder_input(requests, [hidden[index] for index in at])
            states = self.model.decode(inputs, None, cross).split([self._length(request) for request in requests])
            for index, state in zip(at, states, strict=True):
                hidden[index] = state
        return hidden

    def _reads_decoder(self, request: EncodeRequest) -> bool:
        return self._labels.reads_decoder and request.task in _OF_LABELS

    def _decoder_input(
        self, requests: Sequence[EncodeRequest], hidden: Sequence[Tensor]
    ) -> tuple[StackInput, CrossInput]:
        """Return the decoder's input: a first token, then the input without its last one; and the encoder's states."""
        shifted = [(self._begin(ids), *ids[:-1]) for ids in (request.source.token_ids for request in requests)]
        lengths = tuple(map(len, shifted))
        metadata = AttentionMetadata(lengths, lengths, causal=False, device=self.device)
        adapters = self._lora_runs(requests)  # as many rows as the inputs have
        inputs = replace(packed_input(shifted, self.device, causal=True), adapters=adapters)
        return inputs, CrossInput(metadata, torch.cat(list(hidden)).to(self.model.dtype), adapters=adapters)

    def _begin(self, ids: Sequence[int]) -> int:
        """Return the decoder's start token, or the last token of a source that is not padding: its language (mBART)."""
        config = self.model.config
        assert config.classifier is not None and config.decoder_start_token_id is not None
        if not config.classifier.wraps:
            return config.decoder_start_token_id
        return next((token for token in reversed(ids) if token != config.pad_token_id), ids[-1])

    def probe(self) -> None:
        """Run the smallest possible forward pass."""
        self._encode([EncodeRequest("", self.name, blank_source(self.model.config), EncodeTask.TOKENS)])

    def _pack(self, batch: Sequence[EncodeRequest]) -> StackInput:
        causal = self.model.encoder is None and not self._by_vision(batch[0])
        sources, padding = [request.source for request in batch], self.model.config.source_padding
        inputs = source_input(sources, self.device, causal=causal, images=self._images, padding=padding)
        if self._adapters is not None:
            chosen = self._adapters.of_segments([one.adapter for one in batch], map(self._length, batch))
            inputs = replace(inputs, adapters=chosen)
        elif self.model.lora:
            inputs = replace(inputs, adapters=self._lora_runs(batch))
        if not any(request.unread for request in batch):
            return inputs
        lengths = [(self._length(request), self._length(request) - request.unread) for request in batch]
        return with_unread_rows(inputs, lengths, self.device)

    def _lora_runs(self, batch: Sequence[EncodeRequest]) -> AdapterRuns | None:
        """Return the adapters of the inputs' rows; None if no input has one."""
        found = (self.model.lora.get(one.model) for one in batch)
        return AdapterRuns.of_segments(found, map(self._length, batch))

    def _results(self, batch: Sequence[EncodeRequest], hidden: Sequence[Tensor]) -> list[EncodeResult]:
        """Turn the inputs' hidden states `[L, d]` into the results of their tasks.

        Products with the vocabulary are computed for all inputs together.
        """
        results: dict[int, EncodeResult] = {}
        for tasks, compute in (
            ((EncodeTask.FILL_MASK,), self._vocabulary.fill),
            ((EncodeTask.SPARSE,), self._vocabulary.sparse),
            (_OF_LABELS, self._labels),
        ):
            at = [index for index, request in enumerate(batch) if request.task in tasks]
            if at:
                found = compute([batch[index] for index in at], [hidden[index] for index in at])
                results |= zip(at, found, strict=True)
        return [
            results[index] if index in results else EncodeResult(self._head(request, hidden[index].float()))
            for index, request in enumerate(batch)
        ]


_PLAIN = (False, False)  # without unread tokens and adapter


def _path(request: EncodeRequest) -> tuple[bool, bool, SourceKind]:
    """Return the way an input's layers are computed; a batch has inputs of one path only."""
    return request.unread > 0, request.adapter is not None, request.source.kind
