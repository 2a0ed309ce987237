"""The step pacer divides one process's computing time among all engines in it. Arithmetic only; stdlib.

The engines of a process compute one step at a time. Before each step they state what they want (`StepDemand`), and the
pacer says which of them takes the next step and how much it may compute (`Turn`). What a step cost is learnt from the
steps themselves: for each engine the seconds of a step that only decodes, and for its other work (prompts; sources and
texts, whose tokens belong together) a curve of seconds over tokens (`model.engine.step_cost`).

While something decodes, work is of two kinds:

    decoding     the next tokens of engines that have streamed requests (of all engines while nothing is streamed).
                 These engines share their time by model weight, whatever one step of each costs.
    background   everything else: prompts, sources, texts to encode, decode steps of models that nobody streams. It is
                 paid out of a credit in seconds, to which every decode step adds what it cost itself, times
                 `SLOWDOWN - 1`. Background work runs when the credit covers it, the model with the least time so far
                 first. So a stream is slowed down `SLOWDOWN` times, and what comes between two of its tokens is hardly
                 longer than that unless it cannot be split (a source; a layer of a text). And nothing starves: work
                 of `c` seconds begins after about `c / (SLOWDOWN - 1)` seconds of decoding and the work before it.

Several models that stream share the credit's rate, as if background work were one more model. A queue of an engine
raises the slowdown of its own streams, because a batch that is kept small for the sake of its pace lets the queue grow.
Without anything that decodes, a step takes all that its engine wants within `MAX_STEP_SECONDS`: cancellations and
deadlines are looked at between steps, and an engine that is silent for long is taken for one that hangs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from model.engine.scheduling.step_budget import DECODES_ONLY, StepBudget, StepDemand
from model.engine.step_cost import DecodeCost, WorkCost

SLOWDOWN = 2.2
MAX_SLOWDOWN = 8.0
MAX_STEP_SECONDS = 2.0
FIRST_TOKENS = 64  # of a step without decodes while its cost is not known: seconds, of billions of weights on a CPU
MIN_TOKENS = 16  # the smallest piece that a prompt is cut into
MIN_GPU_TOKENS = 256  # the same on a GPU, which computes so many in the time of a few
_WAITING_PER_SLOWDOWN = 8  # so many waiting sequences are worth another decode step's time
_MAX_DEBT = 0.25  # seconds that a step may have cost too much before the rest is forgotten
_MIN_CHARGE = 1e-4  # seconds
_MIN_PAUSE = 0.004  # seconds of texts that are encoded at once, where so many wait: single ones cost more
_MAX_PAUSE = 1.1  # background work between two decode steps, times what one of them earns

EngineKey = tuple[str, str]  # model, task ("generate" or "encode")


@dataclass(frozen=True, slots=True)
class Turn:
    """The engine that computes next, and within which budget."""

    engine: EngineKey
    budget: StepBudget


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computed."""

    seconds: float
    decodes: int = 0
    prompt_tokens: int = 0
    whole_tokens: int = 0


@dataclass(slots=True)
class _Prefill:
    """What prompts and whole inputs cost."""

    prompt: WorkCost = field(default_factory=WorkCost)
    whole: WorkCost = field(default_factory=WorkCost)

    def min_seconds(self, demand: StepDemand, min_chunk_tokens: int) -> float:
        """Seconds of the smallest worthwhile piece of what is wanted; 0 while they are not known."""
        if demand.whole_tokens:
            least, wanted = self.whole.seconds(demand.whole_tokens), self.whole.seconds(demand.all_whole_tokens)
            return max(least, min(wanted, _MIN_PAUSE)) if not demand.prompt_tokens else least
        return self.prompt.seconds(min(self.prompt.worthwhile_tokens(min_chunk_tokens), demand.prompt_tokens))

    def tokens_within(self, seconds: float, demand: StepDemand, min_chunk_tokens: int) -> tuple[int, int]:
        """Tokens of prompts and of whole inputs that so many seconds pay for; whole inputs go first."""
        whole = 0
        if demand.whole_tokens:
            whole = max(self.whole.tokens_within(seconds, 1), demand.whole_tokens) if self.whole.is_known else 1
            seconds -= self.whole.seconds(min(whole, demand.all_whole_tokens))
        return self.prompt.tokens_within(seconds, min_chunk_tokens), whole

    def seconds(self, demand: StepDemand, prompt: int, whole: int) -> float:
        """What a step within these limits is expected to cost."""
        taken = min(max(whole, demand.whole_tokens), demand.all_whole_tokens) if whole else 0
        return self.prompt.seconds(min(prompt, demand.prompt_tokens)) + self.whole.seconds(taken)


@dataclass(slots=True)
class _Costs:
    """What the steps of one engine cost.

    Beside decodes prefill may take longer or less than alone: a GPU's decode steps are replayed, those with prompts are
    not; a CPU reads the weights for both.
    """

    decode: DecodeCost = field(default_factory=DecodeCost)
    alone: _Prefill = field(default_factory=_Prefill)
    beside: _Prefill = field(default_factory=_Prefill)

    def prefill(self, beside_decodes: bool) -> _Prefill:
        return self.beside if beside_decodes else self.alone


class _FairClock:
    """Virtual time of those that take turns: seconds used, divided by weight; the least goes first.

    One that had nothing to do for a while starts where the others stand: time that was not used is not saved up.
    """

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._active: set[str] = set()

    def first(self, active: Iterable[str]) -> str:
        """Whose turn it is among those that want one."""
        wanting = list(dict.fromkeys(active))
        standing = min((self._used[one] for one in wanting if one in self._active), default=0.0)
        for one in wanting:
            if one not in self._active:
                self._used[one] = max(self._used.get(one, 0.0), standing)
        self._active = set(wanting)
        return min(wanting, key=self._used.__getitem__)

    def charge(self, one: str, seconds: float) -> None:
        self._used[one] = self._used.get(one, 0.0) + seconds


class StepPacer:
    """Divides the time of a process among its engines, a step at a time."""

    def __init__(self, weights: Mapping[str, float] | None = None, min_chunk_tokens: int = MIN_TOKENS) -> None:
        """`weights`: of each model, 1 where it is not named; `min_chunk_tokens`: the smallest piece of a prompt."""
        self._weights = dict(weights or {})
        self._least_tokens = min_chunk_tokens
        self._costs: defaultdict[EngineKey, _Costs] = defaultdict(_Costs)
        self._streams = _FairClock()
        self._background = _FairClock()  # of models
        self._within = defaultdict[str, _FairClock](_FairClock)  # of the kinds of background work of a model
        self._credit = 0.0  # seconds that background work may take
        self._credit_of_a_step = 0.0  # what the latest decode step earned
        self._pause = 0.0  # seconds of background work since that step
        self._anything_decodes = False
        self._planned = defaultdict[EngineKey, deque[float]](lambda: deque(maxlen=2))  # charges of steps under way

    def next(self, demands: Mapping[EngineKey, StepDemand]) -> Turn | None:
        """The engine that computes now, and how much; None if no engine wants anything."""
        demands = {engine: demand for engine, demand in demands.items() if demand.decodes or demand.prefills}
        decoding = [engine for engine, demand in demands.items() if demand.decodes]
        self._anything_decodes = bool(decoding)
        if not decoding:
            return self._undisturbed(demands) if demands else None
        streaming = [engine for engine in decoding if demands[engine].streams] or decoding
        return self._paid(demands, streaming) or self._decode(demands, streaming)

    def observe(self, engine: EngineKey, work: StepWork) -> None:
        """Learn from a step; what it cost more or less than was expected is settled with the credit."""
        costs = self._costs[engine]
        if not (work.prompt_tokens or work.whole_tokens):
            costs.decode.observe(work.seconds)
            return
        if work.decodes:
            costs.decode.observe_mixed()
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

    def _undisturbed(self, demands: Mapping[EngineKey, StepDemand]) -> Turn:
        """A step while nothing decodes: bounded by `MAX_STEP_SECONDS` alone."""
        self._credit = 0.0
        engine, _ = self._next_background(demands, [])
        costs, demand = self._costs[engine].alone, demands[engine]
        prompt, whole = (
            cost.tokens_within(MAX_STEP_SECONDS, self._least_tokens, explore=False) if cost.is_known else FIRST_TOKENS
            for cost in (costs.prompt, costs.whole)
        )
        self._plan(engine, costs.seconds(demand, prompt, whole))
        return Turn(engine, StepBudget(True, prompt, whole))

    def _decode(self, demands: Mapping[EngineKey, StepDemand], streaming: list[EngineKey]) -> Turn:
        """The next tokens of the streams whose model has had the least time."""
        engine = self._next_stream(streaming)
        self._earn(engine, demands, streaming)
        return Turn(engine, DECODES_ONLY)

    def _next_stream(self, streaming: list[EngineKey]) -> EngineKey:
        model = self._streams.first(engine[0] for engine in streaming)
        return next(engine for engine in streaming if engine[0] == model)

    def _earn(self, engine: EngineKey, demands: Mapping[EngineKey, StepDemand], streaming: list[EngineKey]) -> None:
        """Let a decode step of a streaming engine count, and add what it earns to the credit."""
        seconds, weight = self._costs[engine].decode.seconds or 0.0, self._weight(engine)
        self._streams.charge(engine[0], seconds / weight)
        slowdown = min(SLOWDOWN + demands[engine].waiting / _WAITING_PER_SLOWDOWN, MAX_SLOWDOWN)
        others = max((self._weight(one) for one, _ in _flows(demands, streaming)), default=weight)
        self._credit_of_a_step = seconds * (slowdown - 1.0) * others / weight / len(streaming)
        self._credit += self._credit_of_a_step
        self._pause = 0.0

    def _paid(self, demands: Mapping[EngineKey, StepDemand], streaming: list[EngineKey]) -> Turn | None:
        """Background work whose turn it is, if the credit covers the least of it."""
        flows = _flows(demands, streaming)
        if not flows or any(self._costs[engine].decode.seconds is None for engine in streaming):
            return None
        engine, kind = self._next_background(demands, streaming)
        costs, demand = self._costs[engine], demands[engine]
        if engine in streaming and (costs.decode.is_due or engine != self._next_stream(streaming)):
            return None  # its prompts go with its decodes, in their turn
        prefill = costs.prefill(engine in streaming)
        least = costs.decode.seconds or 0.0 if kind == "decode" else prefill.min_seconds(demand, self._least_tokens)
        self._credit = min(self._credit, least + self._credit_of_a_step)  # what is left over is not lost
        longest = _MAX_PAUSE * self._credit_of_a_step
        if self._credit < least or (self._pause and self._pause + least > longest):
            return None
        if kind == "decode":
            self._credit -= least
            self._pause += least
            self._charge(engine, kind, least)
            return Turn(engine, DECODES_ONLY)
        seconds = min(self._credit, max(least, longest - self._pause))
        prompt, whole = prefill.tokens_within(seconds, demand, self._least_tokens)
        self._plan(engine, prefill.seconds(demand, prompt, whole))
        if engine in streaming:
            self._earn(engine, demands, streaming)
        return Turn(engine, StepBudget(engine in streaming, prompt, whole))

    def _next_background(
        self, demands: Mapping[EngineKey, StepDemand], streaming: list[EngineKey]
    ) -> tuple[EngineKey, str]:
        """Whose turn it is: the model that has had the least time, and of its work the kind that has."""
        flows = _flows(demands, streaming)
        model = self._background.first(engine[0] for engine, _ in flows)
        mine = {f"{engine[1]} {kind}": (engine, kind) for engine, kind in flows if engine[0] == model}
        return mine[self._within[model].first(mine)]

    def _plan(self, engine: EngineKey, seconds: float) -> None:
        """Charge prompts and inputs with what they are expected to cost, until the step was observed."""
        self._credit -= seconds
        self._pause += seconds
        self._charge(engine, "prefill", seconds)
        self._planned[engine].append(seconds)

    def _charge(self, engine: EngineKey, kind: str, seconds: float) -> None:
        seconds = max(seconds, _MIN_CHARGE)  # who cannot use a turn does not get all others too
        self._background.charge(engine[0], seconds / self._weight(engine))
        self._within[engine[0]].charge(f"{engine[1]} {kind}", seconds)

    def _weight(self, engine: EngineKey) -> float:
        return self._weights.get(engine[0], 1.0)


def _flows(demands: Mapping[EngineKey, StepDemand], streaming: list[EngineKey]) -> list[tuple[EngineKey, str]]:
    """All background work that is wanted: an engine, and "decode" or "prefill"."""
    decodes = [(engine, "decode") for engine, one in demands.items() if one.decodes and engine not in streaming]
    return decodes + [(engine, "prefill") for engine, one in demands.items() if one.prefills]
