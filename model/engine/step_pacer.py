"""The step pacer divides one process's compute time among all its engines. Arithmetic only; stdlib.

The engines of a process compute one step at a time. Before each step they state their demands (`StepDemand`), and the
pacer chooses the engine of the next step and its budget (`Turn`). It learns costs from the steps themselves: for each
engine the seconds of a decode step, and for prefill a curve of seconds over tokens (`triptych.model.engine.step_cost`),
one for prompts and one for whole inputs (sources and texts to encode, whose tokens cannot be split).

While any engine decodes, work is of two kinds:

    decoding     decode steps of engines with streamed requests (of all engines while nothing is streamed). These
                 engines share time by model weight, whatever a step of each costs.
    background   everything else: prompts, sources, texts to encode, decode steps of models without streams. It is paid
                 from a credit in seconds, to which every decode step adds its own cost times `SLOWDOWN - 1`.
                 Background work runs when the credit covers it; the model with the least time so far goes first. So a
                 stream is slowed down `SLOWDOWN` times, and the work between two of its tokens is hardly longer than
                 that, unless it cannot be split (a layer of a source or of a text; on a GPU a source). And nothing
                 starves: work of `c` seconds begins after about `c / (SLOWDOWN - 1)` seconds of decoding and the work
                 queued before it.

Several models that stream share the rate of the credit, as if background work were one more model. Waiting requests of
an engine raise the slowdown of its own streams, because a batch kept small for its pace lets the queue grow. While
nothing decodes, a step takes all of its engine's demand within `MAX_STEP_SECONDS`: cancellations and deadlines are
checked between steps, and an engine that is silent for long counts as hung.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from triptych.model.engine.scheduling.scheduled_step import DECODES_ONLY, StepBudget, StepDemand
from triptych.model.engine.step_cost import DecodeCost, WorkCost

SLOWDOWN = 2.2
MAX_SLOWDOWN = 8.0
MAX_STEP_SECONDS = 2.0
FIRST_TOKENS = 64  # of a step of unknown cost without decodes; with billions of weights on a CPU they take seconds
MIN_TOKENS = 16  # the smallest prefill chunk
MIN_GPU_TOKENS = 256  # the same on a GPU, where fewer take as long
_WAITING_PER_SLOWDOWN = 8  # waiting sequences that raise the slowdown by 1
_MAX_DEBT = 0.25  # seconds; the bound on negative credit after a step that was costlier than expected
_MIN_CHARGE = 1e-4  # seconds
_MIN_ENCODE_SECONDS = 0.002  # of texts encoded together, if enough wait: one at a time costs more
_FILLING = 8  # how much sooner prompts of background work run than its decode steps while its batch is half full
_MOST_WAITING = 8  # waiting sequences for each one that decodes, which count for that
_MOST_PLANNED = 2  # steps that are not observed yet
_MAX_PAUSE = 1.1  # background work between two decode steps, as a multiple of the credit of one

EngineKey = tuple[str, str]  # model, task ("generate" or "encode")


@dataclass(frozen=True, slots=True)
class Turn:
    """The engine of the next step and its budget."""

    engine: EngineKey
    budget: StepBudget


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work and the duration of a step."""

    seconds: float
    decodes: int = 0
    prompt_tokens: int = 0
    whole_tokens: int = 0


@dataclass(slots=True)
class _PrefillCosts:
    """The costs of prompts and of whole inputs."""

    prompt: WorkCost = field(default_factory=WorkCost)
    whole: WorkCost = field(default_factory=WorkCost)

    def min_seconds(self, demand: StepDemand, min_chunk_tokens: int) -> float:
        """Return the seconds of the smallest worthwhile part of the demand; 0 while they are unknown."""
        if demand.whole_tokens:
            minimum, all_waiting = self.whole.seconds(demand.whole_tokens), self.whole.seconds(demand.all_whole_tokens)
            return max(minimum, min(all_waiting, _MIN_ENCODE_SECONDS)) if not demand.prompt_tokens else minimum
        return self.prompt.seconds(min(self.prompt.worthwhile_tokens(min_chunk_tokens), demand.prompt_tokens))

    def tokens_within(self, seconds: float, demand: StepDemand, min_chunk_tokens: int) -> tuple[int, int]:
        """Return the tokens of prompts and of whole inputs that fit into `seconds`; whole inputs go first."""
        whole = 0
        if demand.whole_tokens:
            whole = max(self.whole.tokens_within(seconds, 1), demand.whole_tokens) if self.whole.is_known else 1
            seconds -= self.whole.seconds(min(whole, demand.all_whole_tokens))
        return self.prompt.tokens_within(seconds, min_chunk_tokens), whole

    def seconds(self, demand: StepDemand, prompt: int, whole: int) -> float:
        """Return the expected cost of a step with at most these tokens of prompts and of whole inputs."""
        whole = min(max(whole, demand.whole_tokens), demand.all_whole_tokens) if whole else 0
        return self.prompt.seconds(min(prompt, demand.prompt_tokens)) + self.whole.seconds(whole)


@dataclass(slots=True)
class _EngineCosts:
    """The costs of one engine's steps.

    Prefill in a step with decodes may cost more or less than alone: on a GPU decode steps are replayed CUDA graphs,
    mixed steps are not; a CPU reads the weights once for both.
    """

    decode: DecodeCost = field(default_factory=DecodeCost)
    alone: _PrefillCosts = field(default_factory=_PrefillCosts)
    mixed: _PrefillCosts = field(default_factory=_PrefillCosts)

    def prefill(self, with_decodes: bool) -> _PrefillCosts:
        return self.mixed if with_decodes else self.alone


class _FairQueue:
    """Weighted fair queueing: the active key with the least virtual time (seconds used / weight) is next.

    A key that was inactive resumes at the least virtual time of the others: unused time is not saved up.
    """

    def __init__(self) -> None:
        self._virtual_time: dict[str, float] = {}
        self._active: set[str] = set()

    def first(self, active: Iterable[str]) -> str:
        """Return the key whose turn it is among the active ones."""
        keys = list(dict.fromkeys(active))
        least = min((self._virtual_time[key] for key in keys if key in self._active), default=0.0)
        for key in keys:
            if key not in self._active:
                self._virtual_time[key] = max(self._virtual_time.get(key, 0.0), least)
        self._active = set(keys)
        return min(keys, key=self._virtual_time.__getitem__)

    def charge(self, key: str, seconds: float) -> None:
        """Add to a key's virtual time; `seconds` are divided by its weight already."""
        self._virtual_time[key] = self._virtual_time.get(key, 0.0) + seconds

    def remove(self, key: str) -> None:
        self._virtual_time.pop(key, None)
        self._active.discard(key)


class StepPacer:
    """Divides the compute time of a process among its engines, a step at a time."""

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        min_chunk_tokens: int = MIN_TOKENS,
        max_step_seconds: float = MAX_STEP_SECONDS,
    ) -> None:
        """`weights`: by model, 1 by default; `min_chunk_tokens`: the smallest prefill chunk of models not in `add`.

        `max_step_seconds`: the bound on a step while nothing decodes.
        """
        self._max_step_seconds = max_step_seconds
        self._weights = dict(weights or {})
        self._min_chunks = defaultdict[str, int](lambda: min_chunk_tokens)
        self._costs: defaultdict[EngineKey, _EngineCosts] = defaultdict(_EngineCosts)
        self._streams = _FairQueue()  # of models
        self._background = _FairQueue()  # of models
        self._background_kinds = defaultdict[str, _FairQueue](_FairQueue)  # of each model's kinds of background work
        self._credit = 0.0  # seconds that background work may take
        self._step_credit = 0.0  # added by the latest decode step
        self._pause = 0.0  # seconds of background work since that step
        self._anything_decodes = False
        self._planned = defaultdict[EngineKey, deque[float]](deque)  # charges of unobserved steps
        self._filled = set[EngineKey]()  # engines that have computed prompts or sources since their last decode step

    def add(self, model: str, weight: float, min_chunk_tokens: int) -> None:
        """Set a model's weight and its smallest prefill chunk."""
        self._weights[model], self._min_chunks[model] = weight, min_chunk_tokens

    def remove(self, model: str) -> None:
        """Forget a model, whose name may be another one's later."""
        self._weights.pop(model, None)
        self._min_chunks.pop(model, None)
        self._background_kinds.pop(model, None)
        for queue in (self._streams, self._background):
            queue.remove(model)
        self._filled = {engine for engine in self._filled if engine[0] != model}
        for known in (self._costs, self._planned):
            for engine in [engine for engine in known if engine[0] == model]:
                del known[engine]

    def next(self, demands: Mapping[EngineKey, StepDemand]) -> Turn | None:
        """Return the engine of the next step and its budget; None without any demand."""
        demands = {engine: demand for engine, demand in demands.items() if demand.decodes or demand.prefills}
        decoding = [engine for engine, demand in demands.items() if demand.decodes]
        self._anything_decodes = bool(decoding)
        if not decoding:
            return self._turn_without_decodes(demands) if demands else None
        streaming = [engine for engine in decoding if demands[engine].streams] or decoding
        return self._background_turn(demands, streaming) or self._decode_turn(demands, streaming)

    def observe(self, engine: EngineKey, work: StepWork) -> None:
        """Learn the cost of a step, and charge the difference to its expected cost to the credit."""
        costs = self._costs[engine]
        if not (work.prompt_tokens or work.whole_tokens):
            costs.decode.observe(work.seconds)
            return
        if work.decodes:
            costs.decode.observe_mixed()
        self._filled.add(engine)
        prefill = costs.prefill(bool(work.decodes))
        extra = max(work.seconds - (costs.decode.seconds or 0.0) * bool(work.decodes), 0.0)
        expected = {
            "prompt": prefill.prompt.seconds(work.prompt_tokens) or 1e-6 * work.prompt_tokens,
            "whole": prefill.whole.seconds(work.whole_tokens) or 1e-6 * work.whole_tokens,
        }
        total = sum(expected.values())
        if work.prompt_tokens:
            prefill.prompt.observe(work.prompt_tokens, extra * expected["prompt"] / total)
        if work.whole_tokens:
            prefill.whole.observe(work.whole_tokens, extra * expected["whole"] / total)
        planned = self._planned[engine].popleft() if self._planned[engine] else 0.0
        if self._anything_decodes:
            self._credit = max(self._credit - extra + planned, -_MAX_DEBT)
        self._background.charge(engine[0], (extra - planned) / self._weight(engine))

    def _turn_without_decodes(self, demands: Mapping[EngineKey, StepDemand]) -> Turn:
        """Return a turn while nothing decodes, bounded in time alone."""
        self._credit = 0.0
        engine, _ = self._next_background(demands, [])
        costs, demand = self._costs[engine].alone, demands[engine]
        prompt, whole = (
            cost.tokens_within(self._max_step_seconds, self._min_chunks[engine[0]], explore=False)
            if cost.is_known
            else FIRST_TOKENS
            for cost in (costs.prompt, costs.whole)
        )
        self._plan(engine, costs.seconds(demand, prompt, whole))
        return Turn(engine, StepBudget(True, prompt, whole))

    def _decode_turn(self, demands: Mapping[EngineKey, StepDemand], streaming: list[EngineKey]) -> Turn:
        """Return a decode step of the streaming model with the least time so far."""
        engine = self._next_stream(streaming)
        self._add_credit(engine, demands, streaming)
        return Turn(engine, DECODES_ONLY)

    def _next_stream(self, streaming: list[EngineKey]) -> EngineKey:
        model = self._streams.first(engine[0] for engine in streaming)
        return next(engine for engine in streaming if engine[0] == model)

    def _add_credit(
        self, engine: EngineKey, demands: Mapping[EngineKey, StepDemand], streaming: list[EngineKey]
    ) -> None:
        """Charge a decode step of a streaming engine, and add to the credit of background work."""
        seconds, weight = self._costs[engine].decode.seconds or 0.0, self._weight(engine)
        self._streams.charge(engine[0], seconds / weight)
        slowdown = min(SLOWDOWN + demands[engine].waiting / _WAITING_PER_SLOWDOWN, MAX_SLOWDOWN)
        background_weight = max(
            (self._weight(other) for other, _ in _background_work(demands, streaming)), default=weight
        )
        self._step_credit = seconds * (slowdown - 1.0) * background_weight / weight / len(streaming)
        self._credit += self._step_credit
        self._pause = 0.0

    def _background_turn(self, demands: Mapping[EngineKey, StepDemand], streaming: list[EngineKey]) -> Turn | None:
        """Return the background work whose turn it is, if the credit covers its smallest part; else None."""
        background = _background_work(demands, streaming)
        if not background or any(self._costs[engine].decode.seconds is None for engine in streaming):
            return None
        engine, kind = self._next_background(demands, streaming)
        costs, demand = self._costs[engine], demands[engine]
        if engine in streaming and (costs.decode.is_due or engine != self._next_stream(streaming)):
            return None  # prompts of a streaming engine run in its decode steps, when their turn comes
        prefill = costs.prefill(engine in streaming)
        min_cost = (
            costs.decode.seconds or 0.0
            if kind == "decode"
            else prefill.min_seconds(demand, self._min_chunks[engine[0]])
        )
        self._credit = min(self._credit, min_cost + self._step_credit)  # bounded, but a rest of the last step's is kept
        max_pause = _MAX_PAUSE * self._step_credit
        if self._credit < min_cost or (self._pause and self._pause + min_cost > max_pause):
            return None
        if kind == "decode":
            self._credit -= min_cost
            self._pause += min_cost
            self._charge(engine, kind, min_cost, self._filling(engine, demand))
            return Turn(engine, DECODES_ONLY)
        seconds = min(self._credit, max(min_cost, max_pause - self._pause))
        prompt, whole = prefill.tokens_within(seconds, demand, self._min_chunks[engine[0]])
        self._plan(engine, prefill.seconds(demand, prompt, whole), with_decodes=engine in streaming)
        if engine in streaming:
            self._add_credit(engine, demands, streaming)
        return Turn(engine, StepBudget(engine in streaming, prompt, whole))

    def _next_background(
        self, demands: Mapping[EngineKey, StepDemand], streaming: list[EngineKey]
    ) -> tuple[EngineKey, str]:
        """Return the background work whose turn it is: the model with the least time, then its kind of work with it."""
        background = _background_work(demands, streaming)
        model = self._background.first(engine[0] for engine, _ in background)
        kinds = {f"{engine[1]} {kind}": (engine, kind) for engine, kind in background if engine[0] == model}
        return kinds[self._background_kinds[model].first(kinds)]

    def _filling(self, engine: EngineKey, demand: StepDemand) -> float:
        """Return how many times a background decode step is charged, so that waiting sequences begin first.

        It is 1 where none can begin: the batch is full, or no block is free, so that the last turn was not used.
        """
        begins = engine in self._filled and demand.prefills
        self._filled.discard(engine)
        return 1 + _FILLING * min(demand.waiting / demand.decodes, _MOST_WAITING) if begins else 1.0

    def _plan(self, engine: EngineKey, seconds: float, *, with_decodes: bool = False) -> None:
        """Charge the expected cost of prefill, which `observe` corrects. What a turn did not use is given back."""
        planned = self._planned[engine]
        if len(planned) == _MOST_PLANNED:
            unused = planned.popleft()
            self._credit += 0.0 if with_decodes else unused
        self._credit -= seconds
        self._pause += seconds
        self._charge(engine, "prefill", seconds)
        planned.append(seconds)

    def _charge(self, engine: EngineKey, kind: str, seconds: float, times: float = 1.0) -> None:
        """Charge work to its model and, multiplied by `times`, to its kind."""
        seconds = max(seconds, _MIN_CHARGE)  # else an engine that cannot use its turn would get every turn
        self._background.charge(engine[0], seconds / self._weight(engine))
        self._background_kinds[engine[0]].charge(f"{engine[1]} {kind}", seconds * times)

    def _weight(self, engine: EngineKey) -> float:
        return self._weights.get(engine[0], 1.0)


def _background_work(
    demands: Mapping[EngineKey, StepDemand], streaming: list[EngineKey]
) -> list[tuple[EngineKey, str]]:
    """Return all background work in demand: engines with "decode" or "prefill"."""
    decodes = [(engine, "decode") for engine, demand in demands.items() if demand.decodes and engine not in streaming]
    return decodes + [(engine, "prefill") for engine, demand in demands.items() if demand.prefills]
