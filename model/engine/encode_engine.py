"""Vectors for one model: packed batches under a token budget, first come first served.

The tokens of an input are never split (attention is bidirectional) and an input never waits for one behind it; a batch
is filled up from the front of the queue until the budget is used. An input that is longer than the budget is computed
by itself and pauses between layers. Any stack answers: an encoder by itself, a decoder with its last hidden states. No
cache is involved.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.api.request import (
    EncodeOutput,
    EncodeRequest,
    EncodeTask,
    FinishReason,
    Pooling,
)
from model.api.source import image_source, token_source
from model.api.stats import StepStats
from model.engine.execution.sources import source_input
from model.engine.fault_isolation import run_isolated
from model.engine.scheduling.step_budget import (
    UNLIMITED,
    StepBudget,
    StepDemand,
)
from model.media.images import ImageProcessing
from model.network.inputs import StackInput
from model.network.stack import StackPass
from model.network.transformer import Transformer
from model.system.transfer import to_host


@dataclass(frozen=True, slots=True)
class _Paused:
    """An input that went through some of the layers."""

    request: EncodeRequest
    rows: StackPass
    began: float


class EncodeEngine:
    """A token-budget batcher over one Transformer."""

    def __init__(
        self,
        name: str,
        model: Transformer,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        pooling: Pooling,
        normalize: bool,
        images: ImageProcessing | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.pooling = pooling
        self.normalize = normalize
        self._images = images
        self._waiting: deque[EncodeRequest] = deque()
        self._batch: list[EncodeRequest] = []  # being computed; else empty
        self._waiting_tokens = 0
        self._paused: _Paused | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._paused)

    @property
    def only_prepares(self) -> bool:
        return False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def demand(self) -> StepDemand:
        """What the next step could compute. One layer of an input counts as that share of its tokens."""
        if self._paused is not None:
            rows, length = self._paused.rows, self._length(self._paused.request)
            left = self._share(length, rows.layers_left)
            return StepDemand(waiting=len(self._waiting), whole_tokens=self._share(length, 1), all_whole_tokens=left)
        if not self._waiting:
            return StepDemand()
        first = self._length(self._waiting[0])
        most = min(self._waiting_tokens, max(self.max_num_batched_tokens, first))
        least = self._share(first, 1) if self.model.can_pause else first
        return StepDemand(waiting=len(self._waiting), whole_tokens=least, all_whole_tokens=most)

    def add(self, request: EncodeRequest) -> None:
        self._waiting.append(request)
        self._waiting_tokens += self._length(request)

    def abort(self, request_id: str, reason: FinishReason) -> list[EncodeOutput]:
        """Drop an input that waits; idempotent."""
        return self._drop([request for request in self._inputs if request.request_id == request_id], reason)

    def recover(self) -> list[EncodeOutput]:
        """Begin anew after a step that raised: end with an error what waits and what was being computed.

        Raises what the smallest pass raises: then it is not this queue that is at fault.
        """
        ended = [*self._batch, *self._inputs]
        self._batch, self._paused = [], None
        self._waiting = deque()
        self._waiting_tokens = 0
        self._probe()
        return [EncodeOutput(request.request_id, finish_reason=FinishReason.ERROR) for request in ended]

    def finish_pending(self) -> tuple[list[EncodeOutput], StepStats | None]:
        """Nothing: a step is over when `step` returns."""
        return [], None

    def check_deadlines(self) -> list[EncodeOutput]:
        """Drop the inputs whose deadline has passed."""
        now = time.monotonic()
        late = [request for request in self._inputs if request.deadline is not None and request.deadline <= now]
        return self._drop(late, FinishReason.DEADLINE)

    def step(self, budget: StepBudget = UNLIMITED) -> tuple[list[EncodeOutput], StepStats | None]:
        """Encode one batch: from the front of the queue what the budget holds, at least a layer of one input."""
        outputs = self.check_deadlines()
        began = time.monotonic()
        if self._paused is not None:
            return self._go_on(outputs, began, budget)
        batch = self._next_batch(budget)
        if not batch:
            return outputs, None
        if budget.whole_tokens is not None and self.model.can_pause and self._length(batch[0]) > budget.whole_tokens:
            return self._start_alone(batch, outputs, began, budget)
        self._batch = batch
        for part, found in run_isolated(batch, self._encode, self._probe):
            if found is None:
                outputs += [EncodeOutput(request.request_id, finish_reason=FinishReason.ERROR) for request in part]
                continue
            outputs += _outputs(part, found, began)
        self._batch = []
        tokens, seconds = sum(map(self._length, batch)), time.monotonic() - began
        return outputs, StepStats(self.name, "encode", seconds, tokens, len(batch), num_whole_tokens=tokens)

    def _start_alone(
        self, batch: list[EncodeRequest], outputs: list[EncodeOutput], began: float, budget: StepBudget
    ) -> tuple[list[EncodeOutput], StepStats | None]:
        """Begin with the only input of a batch, which goes on in later steps; one that breaks here ends here."""
        self._batch = batch
        ((_, rows),) = run_isolated(batch, lambda part: self._begin(part[0]), self._probe)
        self._batch = []
        if rows is None:
            return [*outputs, EncodeOutput(batch[0].request_id, finish_reason=FinishReason.ERROR)], None
        self._paused = _Paused(batch[0], rows, began)
        return self._go_on(outputs, began, budget)

    def _go_on(
        self, outputs: list[EncodeOutput], began: float, budget: StepBudget
    ) -> tuple[list[EncodeOutput], StepStats]:
        """Take the input that paused through as many layers as the budget holds, but at least one."""
        assert self._paused is not None
        paused, rows = self._paused, self._paused.rows
        length, total = self._length(paused.request), rows.layers_done + rows.layers_left
        layers = total if budget.whole_tokens is None else max(1, budget.whole_tokens * total // length)
        layers = min(layers, rows.layers_left)
        ((_, found),) = run_isolated([paused.request], lambda _: self._advance(paused, layers), self._probe)
        if found is None:
            outputs.append(EncodeOutput(paused.request.request_id, finish_reason=FinishReason.ERROR))
        if found:
            outputs += _outputs([paused.request], found, paused.began)
        if found is None or not rows.layers_left:
            self._paused = None
        tokens = self._share(length, layers)
        seconds = time.monotonic() - began
        return outputs, StepStats(self.name, "encode", seconds, tokens, 1, num_whole_tokens=tokens)

    @property
    def _inputs(self) -> list[EncodeRequest]:
        """All that are not answered, the oldest first."""
        return [*([self._paused.request] if self._paused is not None else ()), *self._waiting]

    def _share(self, length: int, layers: int) -> int:
        """So many layers of an input of `length` tokens, as tokens through all layers, rounded up."""
        return -(-length * layers // next(iter(self.model.config.stacks.values())).num_layers)

    def _drop(self, requests: Sequence[EncodeRequest], reason: FinishReason) -> list[EncodeOutput]:
        if requests:
            gone = set(map(id, requests))
            self._waiting = deque(request for request in self._waiting if id(request) not in gone)
            self._waiting_tokens = sum(map(self._length, self._waiting))
            if self._paused is not None and id(self._paused.request) in gone:
                self._paused = None
        return [EncodeOutput(request.request_id, finish_reason=reason) for request in requests]

    def _next_batch(self, budget: StepBudget) -> list[EncodeRequest]:
        """Inputs from the front of the queue within the budget."""
        batch: list[EncodeRequest] = []
        left = self.max_num_batched_tokens
        if budget.whole_tokens is not None:
            left = min(left, budget.whole_tokens)
        while self._waiting and len(batch) < self.max_num_seqs:
            if batch and self._length(self._waiting[0]) > left:
                break
            batch.append(self._waiting.popleft())
            left -= self._length(batch[-1])
        self._waiting_tokens -= sum(map(self._length, batch))
        return batch

    def _length(self, request: EncodeRequest) -> int:
        return request.source.num_positions

    @torch.inference_mode()
    def _encode(self, batch: Sequence[EncodeRequest]) -> list[Tensor]:
        causal = self.model.encoder is None
        lengths = [self._length(request) for request in batch]
        # Longest first: threads that take some each then end together.
        order = sorted(range(len(batch)), key=lengths.__getitem__, reverse=True)
        inputs = self._packed([batch[i] for i in order], causal)
        hidden = self.model.decode(inputs) if causal else self.model.encode(inputs)  # [T, d]
        segments = dict(zip(order, hidden.split([lengths[i] for i in order]), strict=True))
        return [self._finish(request, segments[i]) for i, request in enumerate(batch)]

    @torch.inference_mode()
    def _begin(self, request: EncodeRequest) -> StackPass:
        return self.model.begin(self._packed([request], causal=self.model.encoder is None))

    @torch.inference_mode()
    def _advance(self, paused: _Paused, layers: int) -> list[Tensor]:
        """The input's answer, if these are its last layers."""
        paused.rows.advance(layers)
        return [] if paused.rows.layers_left else [self._finish(paused.request, paused.rows.finish())]

    def _probe(self) -> None:
        """The smallest pass there is."""
        image = self.model.config.image
        if image is None:
            smallest = token_source((0,))
        else:
            shape = (image.channels, image.size, image.size)
            smallest = image_source(bytes(math.prod(shape)), shape, image.num_tokens)
        self._encode([EncodeRequest("", self.name, smallest, EncodeTask.TOKENS)])

    def _packed(self, batch: Sequence[EncodeRequest], causal: bool) -> StackInput:
        return source_input([request.source for request in batch], self.device, causal=causal, images=self._images)

    def _finish(self, request: EncodeRequest, hidden: Tensor) -> Tensor:
        """One input's answer of its hidden states `[L, d]`."""
        if request.task is EncodeTask.LOGITS:
            scores = self.model.classify(hidden).float()
            return scores if self.model.config.classifies_tokens else scores[0]
        hidden = hidden.float()
        vectors = hidden if request.task is EncodeTask.TOKENS else self._pool(hidden, request.pooling or self.pooling)
        if request.dimensions is not None:
            vectors = vectors[..., : request.dimensions]
        default = self.normalize and request.task is EncodeTask.EMBEDDING
        if default if request.normalize is None else request.normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return vectors

    def _pool(self, hidden: Tensor, pooling: Pooling) -> Tensor:
        if pooling is Pooling.MEAN:
            return hidden.mean(dim=0)
        if pooling is Pooling.LAST:
            return hidden[-1]
        if pooling is Pooling.CLS:
            return hidden[0]
        return self.model.pool(hidden[:1].to(self.model.dtype))[0].float()


def _outputs(batch: Sequence[EncodeRequest], vectors: Sequence[Tensor], began: float) -> list[EncodeOutput]:
    """The answers as bytes, brought to the host together."""
    return [
        EncodeOutput(request.request_id, data.numpy().tobytes(), tuple(data.shape), scheduled_time=began)
        for request, data in zip(batch, to_host([one.float() for one in vectors]), strict=True)
    ]
