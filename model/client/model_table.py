"""The models of one engine as the front knows them: served, being loaded or being unloaded. No torch.

A name is in use from the call that loads it until the engine says that its memory is given back. What takes requests
is `served`; whatever an engine process loads when it is started again is made of that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from model.api.engine_config import BatchLimits, EngineConfig
from model.api.messages import FailureKind, LoadFailure, ModelSpec
from model.api.stats import Demand, EngineStats, ModelInfo
from model.errors import (
    ConfigError,
    EngineDeadError,
    LoadFailedError,
    MemoryShortageError,
    ModelNotLoadedError,
    QueueFullError,
)
from model.text.tokenizer import Tokenizer

# -- Admission control bounds the requests and tokens that wait for one model. Stdlib only. The front counts requests
# synchronously as they arrive: a request is refused before any work, never dropped afterwards. A request's tokens count
# as waiting until its first output; sequences beyond `max_num_seqs` wait by definition. Inputs to encode that are held
# back until the engine has computed others of their call are counted apart.

_MAX_RETRY_SECONDS = 60.0
_SHARE_STEPS = 2  # that the inputs of one call may fill in the queue: while one is computed, the next is ready
_SHARE_SECONDS = 0.2  # for which they may fill it
_FIRST_SHARE = 4  # before a call's rate is known it fills 1 / 4 of a step
_MAX_HELD_TOKENS = 1 << 21  # of inputs that are held back: about 80 MB
_RATE_WINDOW = 64  # ends of requests from which their rate is computed


class Admission:
    """Counts the requests and tokens that one model has admitted and not yet finished."""

    def __init__(self, config: EngineConfig) -> None:
        """Uses the limits for a CPU until `set_limits` brings those of the loaded model."""
        self._block_size = config.block_size
        self.set_limits(config.limits())
        self._sequences: dict[str, int] = {}  # number of sequences, by id of every unfinished request
        self._waiting: dict[str, int] = {}  # tokens, by id of every such request without an output
        self._num_sequences = 0  # the sum of `_sequences`
        self._waiting_tokens = 0  # the sum of `_waiting`
        self._held_tokens = 0
        self._ends: deque[float] = deque(maxlen=_RATE_WINDOW)  # times at which requests ended

    def set_limits(self, limits: BatchLimits) -> None:
        """Replace the limits; some depend on the device, which is known once the model is loaded."""
        self._max_running = limits.max_num_seqs
        self._step_tokens = limits.max_num_batched_tokens
        self._max_sequences = limits.max_num_seqs + limits.max_queued_requests
        self._max_waiting_tokens = max(1, limits.max_queued_tokens)

    def admit(self, tokens: Mapping[str, int], *, sequences: Mapping[str, int] | None = None) -> None:
        """Admit all requests (id -> prompt tokens) or none; raises `QueueFullError`.

        With no unfinished request any number of sequences is admitted, so that no request is refused forever.
        """
        number = sequences or dict.fromkeys(tokens, 1)
        self.check_room(sum(number.values()))
        self._num_sequences += sum(number.values())
        self._waiting_tokens += sum(tokens.values())
        self._sequences.update(number)
        self._waiting.update(tokens)

    def check_room(self, sequences: int = 1) -> None:
        """Raise `QueueFullError` where `admit` would refuse this number of sequences.

        The token bound looks at the tokens that wait already, not at the new prompt's. So the answer is known before
        tokenisation, and long prompts are admitted as often as short ones; the last one may exceed the bound.
        """
        admitted = self._num_sequences
        if admitted and admitted + sequences > self._max_sequences:
            raise QueueFullError("queue_requests", self._retry_after(sequences))
        if self.waiting_tokens >= self._max_waiting_tokens:
            raise QueueFullError("queue_tokens", self._retry_after(1))

    def hold(self, tokens: Sequence[int]) -> None:
        """Admit the inputs of one call, given the tokens of each; all are held at first; raises `QueueFullError`.

        A call is admitted where a single input is. What is held back is bounded, by what others hold already.
        """
        self.check_room()
        total = sum(tokens)
        fits = len(tokens) <= _SHARE_STEPS * self._max_running and total <= _SHARE_STEPS * self._step_tokens
        if not fits and self._held_tokens >= _MAX_HELD_TOKENS:
            raise QueueFullError("queue_tokens", self._retry_after(len(tokens)))
        self._held_tokens += total

    def has_share(self, sequences: int, tokens: int, rate: float | None) -> bool:
        """Return whether a call that has `sequences` inputs in the queue may add one, for `tokens` in all.

        It may always have one; others while the queue has room, for the time that others may have to wait for them at
        `rate` tokens a second (None: not known yet), and for two steps at most.
        """
        if not sequences:
            return True
        most = self._step_tokens // _FIRST_SHARE if rate is None else _SHARE_SECONDS * rate
        if sequences >= _SHARE_STEPS * self._max_running or tokens > min(most, _SHARE_STEPS * self._step_tokens):
            return False
        return self._num_sequences < self._max_sequences and self._waiting_tokens < self._max_waiting_tokens

    def take_held(self, request_id: str, tokens: int) -> None:
        """Count an input that was held as one in the queue."""
        self._held_tokens -= tokens
        self._num_sequences += 1
        self._waiting_tokens += tokens
        self._sequences[request_id] = 1
        self._waiting[request_id] = tokens

    def let_go(self, tokens: int) -> None:
        """Stop counting inputs that were held."""
        self._held_tokens -= tokens

    @property
    def has_requests(self) -> bool:
        """Whether any admitted request has not ended."""
        return bool(self._sequences)

    @property
    def waiting_tokens(self) -> int:
        """The tokens of prompts and inputs that have no output yet."""
        return self._waiting_tokens

    def demand(self, stats: EngineStats) -> Demand:
        return Demand(self.saturation(stats), self.waiting_tokens + self._held_tokens)

    def saturation(self, stats: EngineStats) -> float:
        """The load as a fraction of what can run at once, by sequences or by tokens, whichever is larger.

        Above 1 some requests wait. Tokens are those in KV blocks plus those that wait; layers with a window
        have a fraction of their own. Without a KV cache it is the waiting tokens over their bound.
        """
        tokens = self.waiting_tokens
        if not stats.total_blocks:
            return tokens / self._max_waiting_tokens
        token_load = stats.used_blocks / stats.total_blocks + tokens / (stats.total_blocks * self._block_size)
        return max(token_load, *stats.window_usage.values(), self._num_sequences / self._max_running)

    def mark_started(self, request_id: str) -> None:
        """Stop counting a request's tokens as waiting: it has an output."""
        self._waiting_tokens -= self._waiting.pop(request_id, 0)

    def release(self, request_id: str) -> None:
        """Stop counting a finished request; an unknown id is ignored."""
        self.mark_started(request_id)
        sequences = self._sequences.pop(request_id, None)
        if sequences is not None:
            self._num_sequences -= sequences
            self._ends.append(time.monotonic())

    def _retry_after(self, sequences: int) -> float:
        """Estimate the seconds until this number of sequences fits, from the rate at which requests finished lately."""
        if len(self._ends) < 2:
            return 1.0
        rate = len(self._ends) / max(time.monotonic() - self._ends[0], 1e-3)
        return min(_MAX_RETRY_SECONDS, max(1.0, sequences / rate))


_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FrontModel:
    """One model and the work that it has."""

    spec: ModelSpec
    tokenizer: Tokenizer | None
    admission: Admission
    stats: EngineStats
    optional: bool = False  # loaded later than the first ones, so an engine may restart without it
    info: ModelInfo | None = None  # once it is loaded
    drained: asyncio.Event = field(default_factory=asyncio.Event)  # while it is unloaded: it has no requests left

    def has_loaded(self, info: ModelInfo) -> None:
        self.info = info
        self.admission.set_limits(info.limits)
        logger.info("loaded %s in %.1f s", info.name, info.load_seconds)


class ModelTable:
    """Models by name, and who waits for them to come or go."""

    def __init__(self, specs: Sequence[ModelSpec], tokenizers: Mapping[str, Tokenizer | None]) -> None:
        self.served = {
            spec.name: self._model(spec, tokenizers.get(spec.name), optional=False) for spec in specs
        }  # also while their engine is started
        self._loading: dict[str, tuple[FrontModel, asyncio.Future[ModelInfo]]] = {}
        self._unloading: dict[str, tuple[FrontModel, asyncio.Future[None]]] = {}

    def _model(self, spec: ModelSpec, tokenizer: Tokenizer | None, *, optional: bool) -> FrontModel:
        return FrontModel(spec, tokenizer, Admission(spec.engine), EngineStats(spec.name), optional)

    def __getitem__(self, name: str) -> FrontModel:
        """Return a model that takes requests; raises `ModelNotLoadedError`."""
        found = self.served.get(name)
        if found is None:
            raise ModelNotLoadedError(f"no model named {name} is loaded")
        return found

    def release(self, request_id: str) -> None:
        """Stop counting a request that has ended."""
        for model in self.served.values():
            model.admission.release(request_id)
        for model, _ in self._unloading.values():
            model.admission.release(request_id)
            if not model.admission.has_requests:
                model.drained.set()

    def mark_started(self, name: str, request_id: str) -> None:
        """Note that a request has an output."""
        if name in self.served:
            self.served[name].admission.mark_started(request_id)

    def set_stats(self, stats: EngineStats) -> None:
        if stats.model in self.served:
            self.served[stats.model].stats = stats

    def begin_load(self, spec: ModelSpec, tokenizer: Tokenizer | None) -> asyncio.Future[ModelInfo]:
        """Reserve the model's name; what is returned ends as `load` does. Raises `ConfigError` if it is in use."""
        for names, state in ((self.served, "served"), (self._loading, "being loaded")):
            if spec.name in names:
                raise ConfigError(f"a model named {spec.name} is {state} already")
        future = asyncio.get_running_loop().create_future()
        self._loading[spec.name] = (self._model(spec, tokenizer, optional=True), future)
        return future

    async def wait_unloaded(self, name: str) -> None:
        """Return once no model of this name is being unloaded; then it can be loaded."""
        while name in self._unloading:
            await asyncio.shield(self._unloading[name][1])

    def begin_unload(self, name: str) -> tuple[FrontModel, asyncio.Future[None]]:
        """Take no more requests for a model; the future ends once it is gone. Raises `ModelNotLoadedError`."""
        model = self[name]
        return model, self._leave(self.served.pop(name))

    def give_up(self, name: str) -> bool:
        """Expect no more that a model is loaded; False if it has been already."""
        if name not in self._loading:
            return False
        self._leave(self._loading.pop(name)[0])
        return True

    def _leave(self, model: FrontModel) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        self._unloading[model.spec.name] = (model, future)
        if not model.admission.has_requests:
            model.drained.set()
        return future

    def loaded(self, info: ModelInfo) -> None:
        """A model is loaded, at the start or later. A load that was given up is no longer awaited."""
        if info.name in self._loading:
            model, future = self._loading.pop(info.name)
            self.served[info.name] = model
            _resolve(future, info)
        if info.name in self.served:
            self.served[info.name].has_loaded(info)

    def load_failed(self, failure: LoadFailure) -> None:
        """A model could not be loaded, or was lost while it was served: it is served no more."""
        if failure.model in self._loading:
            _, future = self._loading.pop(failure.model)
            if not future.done():
                future.set_exception(_error(failure))
        elif self.served.pop(failure.model, None) is not None:
            logger.error("%s is served no more: %s", failure.model, failure.message)

    def unloaded(self, name: str) -> None:
        """A model's memory is given back."""
        if name in self._unloading:
            logger.info("unloaded %s", name)
            _resolve(self._unloading.pop(name)[1], None)

    def lost(self, error: EngineDeadError) -> None:
        """The engine is gone: what was to be loaded has failed, what was to be unloaded is gone with it."""
        for _, loading in self._loading.values():
            if not loading.done():
                loading.set_exception(error)
        for _, unloading in self._unloading.values():
            _resolve(unloading, None)
        self._loading.clear()
        self._unloading.clear()
        for model in self.served.values():
            model.stats = EngineStats(model.spec.name)

    def specs(self) -> Iterator[tuple[ModelSpec, bool]]:
        """What an engine is started with, and whether it may be started without."""
        for model in self.served.values():
            yield model.spec, model.optional


def _resolve(future: asyncio.Future[_Result], result: _Result) -> None:
    if not future.done():
        future.set_result(result)


def _error(failure: LoadFailure) -> Exception:
    if failure.kind is FailureKind.MEMORY:
        return MemoryShortageError(failure.message, failure.needed_bytes, failure.available_bytes)
    return ConfigError(failure.message) if failure.kind is FailureKind.CONFIG else LoadFailedError(failure.message)
