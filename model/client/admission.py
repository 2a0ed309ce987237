"""Admission control: bounds one model's queue by the time that its work takes. No torch.

A request is refused before any work, and never dropped afterwards. Its tokens count as waiting until its first output;
sequences beyond `max_num_seqs` wait too. A new request is refused if it would wait for more than `max_queue_seconds`
(`work_rates`). The bounds on requests and tokens limit the memory of a queue. A request that could run at once, within
`max_num_seqs`, is never refused.

The front sends a few inputs of a call of `encode` to the engine at a time, by the rate at which they are computed, and
holds back the others, which are counted separately. The engine computes inputs in order of arrival. So a call of any
size takes little room in the queue, and inputs of other calls are computed between its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from triptych.model.api.engine_config import BatchLimits, EngineConfig
from triptych.model.api.request import EncodeOutput, EncodeRequest
from triptych.model.api.stats import Demand, EngineStats, ModelInfo, StepStats
from triptych.model.client.work_rates import WorkRates
from triptych.model.errors import QueueFullError

_SHARE_STEPS = 2  # steps that one call's inputs in the queue may fill: while one is computed, the next is ready
_SHARE_SECONDS = 0.2  # of computing that they may fill
_FIRST_SHARE = 4  # before a call's rate is known, its inputs fill 1 / 4 of a step
_MAX_HELD_TOKENS = 1 << 21  # of all held inputs: about 80 MB
_FILLED_SEQUENCES, _FILLED_STEPS = 4, 8  # times `max_num_seqs`, and steps: up to there calls of `encode` fill the queue
_FULL_CACHE = 0.9  # used share of the KV cache above which the cache limits the running sequences


class Admission:
    """Counts one model's unfinished requests and their tokens, and refuses new ones if the queue is full."""

    def __init__(self, config: EngineConfig) -> None:
        """Use the limits of a CPU until `loaded` sets those of the loaded model."""
        self._block_size = config.block_size
        self._rates = WorkRates()
        self._set_limits(config.limits())
        self._sequences: dict[str, int] = {}  # number of sequences, by id of every unfinished request; 0: to encode
        self._waiting: dict[str, int] = {}  # tokens, by id of every such request without an output
        self._started: dict[str, int] = {}  # `WorkRates.steps` at the first output, by id of those that have one
        self._num_sequences = 0  # the sum of `_sequences`
        self._num_inputs = 0  # to encode
        self._tenants: Counter[str] = Counter()  # unfinished sequences of each, and inputs with the engine
        self._owners: dict[str, str] = {}  # the tenant of every unfinished request
        self._waiting_tokens = 0  # the sum of `_waiting`
        self._held_tokens = 0

    def loaded(self, info: ModelInfo) -> None:
        """Replace the limits: some depend on the device, which is known once the model is loaded."""
        self._set_limits(info.limits)
        self._rates.loaded(info)

    def _set_limits(self, limits: BatchLimits) -> None:
        self._max_running = self._slots = limits.max_num_seqs
        self._step_tokens = limits.max_num_batched_tokens
        self._max_sequences = limits.max_num_seqs + limits.max_queued_requests
        self._max_waiting_tokens = max(1, limits.max_queued_tokens)
        self._max_seconds = limits.max_queue_seconds
        self._filled_sequences = min(self._max_sequences, (1 + _FILLED_SEQUENCES) * limits.max_num_seqs)
        self._filled_tokens = min(self._max_waiting_tokens, _FILLED_STEPS * self._step_tokens)

    def admit(self, tokens: Mapping[str, int], *, sequences: Mapping[str, int] | None = None, tenant: str = "") -> None:
        """Admit all of a tenant's requests to generate (id -> prompt tokens), or none; raises `QueueFullError`.

        With no unfinished request any number of sequences is admitted, so that no request is refused forever.
        """
        number = sequences or dict.fromkeys(tokens, 1)
        total = sum(number.values())
        self.check_room(total, tenant)
        self._begin()
        self._tenants[tenant] += total
        self._owners.update(dict.fromkeys(tokens, tenant))
        self._num_sequences += total
        self._waiting_tokens += sum(tokens.values())
        self._sequences.update(number)
        self._waiting.update(tokens)

    def check_room(self, sequences: int = 1, tenant: str = "") -> None:
        """Raise `QueueFullError` if `admit` would refuse this many sequences, or `hold` an input (`sequences` is 0).

        A tenant below its share of the running sequences is never refused: the engine admits it before others.

        Only work that already waits decides, not the new prompt. So the answer is known before tokenisation, and long
        prompts are admitted as often as short ones.
        """
        running = self._num_sequences + sequences if sequences else self._num_inputs + 1
        if running <= self._max_running or not self._sequences or self._has_share_left(sequences, tenant):
            return
        seconds = self.wait_seconds(sequences)
        late = {"queue_seconds": seconds - self._max_seconds} if seconds > self._max_seconds else {}
        unfinished = self._num_sequences + self._num_inputs
        if (over := unfinished + max(1, sequences) - self._max_sequences) > 0:
            late["queue_requests"] = seconds * over / max(over, unfinished - self._max_running)
        if (over := self._waiting_tokens + 1 - self._max_waiting_tokens) > 0:
            late["queue_tokens"] = seconds * over / self._waiting_tokens
        if late:
            reason = max(late, key=late.__getitem__)
            raise QueueFullError(reason, late[reason])

    def _has_share_left(self, sequences: int, tenant: str) -> bool:
        """Return whether a tenant would be within its share of the sequences that may run."""
        number = len({*self._tenants, tenant})
        return number > 1 and self._tenants[tenant] + max(1, sequences) <= self._max_running // number

    def wait_seconds(self, sequences: int = 1) -> float:
        """Estimate the seconds until the first step of a new request with this many sequences (0: of an input).

        All waiting tokens are computed first. Sequences beyond those that can run wait until others have ended.
        """
        seconds = self._rates.prefill_seconds(self._waiting_tokens)
        over = self._num_sequences + sequences - self._slots
        return seconds + self._rates.decode_seconds(over, self._slots) if sequences and over > 0 else seconds

    def observe(self, step: StepStats) -> None:
        """Learn the rates of work from a step."""
        self._rates.observe(step, time.monotonic())

    def set_stats(self, stats: EngineStats) -> None:
        """Update how many sequences can run: as many as do now, if a full KV cache keeps others waiting."""
        full = stats.waiting and stats.used_blocks > _FULL_CACHE * stats.total_blocks
        self._slots = max(1, stats.running) if full else self._max_running

    def hold(self, tokens: Sequence[int], tenant: str = "") -> None:
        """Admit the inputs of one call, given the tokens of each, and hold back all of them; raises `QueueFullError`.

        A call is admitted if a single input would be. A long call is refused if the held inputs of others are too many.
        """
        self.check_room(0, tenant)
        total = sum(tokens)
        fits = len(tokens) <= _SHARE_STEPS * self._max_running and total <= _SHARE_STEPS * self._step_tokens
        if not fits and self._held_tokens >= _MAX_HELD_TOKENS:
            over = self._held_tokens + 1 - _MAX_HELD_TOKENS
            raise QueueFullError("queue_tokens", self._rates.prefill_seconds(over))
        self._held_tokens += total

    def has_share(self, sequences: int, tokens: int, rate: float | None) -> bool:
        """Return whether a call with `sequences` inputs in the queue may add one, which makes `tokens` tokens in all.

        A call may always have one input in the queue. It may have more while the queue has room: as many as are
        computed in `_SHARE_SECONDS` at `rate` tokens a second (None: not known yet), and at most two steps' worth.
        """
        if not sequences:
            return True
        most = self._step_tokens // _FIRST_SHARE if rate is None else _SHARE_SECONDS * rate
        if sequences >= _SHARE_STEPS * self._max_running or tokens > min(most, _SHARE_STEPS * self._step_tokens):
            return False
        unfinished = self._num_inputs + self._num_sequences
        return unfinished < self._filled_sequences and self._waiting_tokens < self._filled_tokens

    def take_held(self, request_id: str, tokens: int, tenant: str = "") -> None:
        """Count a held input as one in the queue, because it is sent to the engine."""
        self._begin()
        self._tenants[tenant] += 1
        self._owners[request_id] = tenant
        self._held_tokens -= tokens
        self._num_inputs += 1
        self._waiting_tokens += tokens
        self._sequences[request_id] = 0
        self._waiting[request_id] = tokens

    def let_go(self, tokens: int) -> None:
        """Stop counting held inputs, which will not be sent."""
        self._held_tokens -= tokens

    def num_waiting(self, requests: Iterable[str]) -> int:
        """Return how many of the requests have no output yet."""
        return sum(request_id in self._waiting for request_id in requests)

    @property
    def waiting_tokens(self) -> int:
        """The tokens of prompts and inputs that have no output yet."""
        return self._waiting_tokens

    def demand(self, stats: EngineStats) -> Demand:
        return Demand(self.saturation(stats), self.waiting_tokens + self._held_tokens, self.wait_seconds())

    def saturation(self, stats: EngineStats) -> float:
        """Return the load as a fraction of what can run at once, by sequences or by tokens, whichever is larger.

        Above 1 some requests wait. Tokens are those in KV blocks plus those that wait; layers with a window
        have a fraction of their own. Without a KV cache it is the waiting tokens over those of 8 steps.
        """
        tokens = self.waiting_tokens
        if not stats.total_blocks:
            return tokens / (_FILLED_STEPS * self._step_tokens)
        token_load = stats.used_blocks / stats.total_blocks + tokens / (stats.total_blocks * self._block_size)
        sequences = self._num_sequences + self._num_inputs
        return max(token_load, *stats.window_usage.values(), sequences / self._max_running)

    def mark_started(self, request_id: str, cached_tokens: int = 0) -> None:
        """Stop counting a request's tokens as waiting: it has an output. `cached_tokens`: found in the prefix cache."""
        tokens = self._waiting.pop(request_id, None)
        if tokens is not None:
            self._waiting_tokens -= tokens
            self._started[request_id] = self._rates.steps
            self._rates.found(cached_tokens)

    def release(self, request_id: str) -> None:
        """Stop counting a finished request; an unknown id is ignored."""
        self._waiting_tokens -= self._waiting.pop(request_id, 0)
        sequences = self._sequences.pop(request_id, None)
        if sequences is None:
            return
        owner = self._owners.pop(request_id, "")
        self._tenants[owner] -= max(1, sequences)
        if self._tenants[owner] <= 0:
            del self._tenants[owner]
        self._num_sequences -= sequences
        self._num_inputs -= not sequences
        began = self._started.pop(request_id, None)
        if began is not None:
            self._rates.ended(self._rates.steps - began)

    def _begin(self) -> None:
        """Start the clock of the rates if there was no work before."""
        if not self._sequences:
            self._rates.begin(time.monotonic())


class Encoding:
    """One call of `encode`: decides when each input is sent, and collects the outputs."""

    def __init__(self, requests: Sequence[EncodeRequest], admission: Admission) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outputs: dict[str, EncodeOutput] = {}  # by request id
        self._number = len(requests)
        self._admission = admission
        self._held = deque(requests)
        self._tenant = requests[0].tenant if requests else ""
        self._sent: dict[str, int] = {}  # tokens of each input in the engine's queue, by request id
        self._sent_tokens = 0
        self._began = time.monotonic()
        self._computed_tokens = 0

    def begin(self) -> list[EncodeRequest]:
        """Admit the inputs and return those to send at once; raises `QueueFullError`."""
        self._admission.hold([request.source.num_positions for request in self._held], self._tenant)
        return self._next()

    def add(self, output: EncodeOutput) -> list[EncodeRequest]:
        """Record an input's output, and return the inputs to send now."""
        self.outputs[output.request_id] = output
        tokens = self._sent.pop(output.request_id, 0)
        self._sent_tokens -= tokens
        self._computed_tokens += tokens
        if len(self.outputs) == self._number and not self.done.done():
            self.done.set_result(None)
        return self._next()

    def has_sent(self, request_id: str) -> bool:
        """Return whether an input was sent and has no output yet."""
        return request_id in self._sent

    def close(self) -> None:
        """Drop the inputs that were not sent."""
        self._admission.let_go(sum(request.source.num_positions for request in self._held))
        self._held.clear()

    def _next(self) -> list[EncodeRequest]:
        found = []
        seconds = time.monotonic() - self._began
        rate = self._computed_tokens / seconds if self._computed_tokens and seconds else None
        while self._held:
            request, tokens = self._held[0], self._held[0].source.num_positions
            if request.request_id in self.outputs:  # cancelled, or too late
                self._admission.let_go(tokens)
            elif self._admission.has_share(len(self._sent), self._sent_tokens + tokens, rate):
                self._admission.take_held(request.request_id, tokens, self._tenant)
                self._sent[request.request_id] = tokens
                self._sent_tokens += tokens
                found.append(request)
            else:
                break
            self._held.popleft()
        return found
