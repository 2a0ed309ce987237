"""Simulated engines whose steps take virtual seconds, and a loop in which a pacer divides the time between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from triptych.model.engine.scheduling.scheduled_step import StepBudget, StepDemand
from triptych.model.engine.step_pacer import (
    EngineKey,
    StepPacer,
    StepWork,
)

MAX_TOKENS = 2048  # of one step


class Simulated(Protocol):
    def demand(self) -> StepDemand: ...

    def step(self, budget: StepBudget) -> StepWork: ...


@dataclass
class Streams:
    """An engine with endless decoding sequences and with prompts that arrive."""

    sequences: int
    decode: float  # seconds of a step that only decodes
    fixed: float = 0.0  # seconds that prompts add to a step
    per_token: float = 1e-4
    streams: bool = True
    prompts: list[int] = field(default_factory=list)  # remaining tokens of each

    def demand(self) -> StepDemand:
        return StepDemand(self.sequences, self.streams, len(self.prompts), sum(self.prompts))

    def step(self, budget: StepBudget) -> StepWork:
        left = MAX_TOKENS if budget.prompt_tokens is None else budget.prompt_tokens
        tokens = 0
        while self.prompts and tokens < left:
            taken = min(self.prompts[0], left - tokens)
            tokens += taken
            self.prompts[0] -= taken
            if not self.prompts[0]:
                self.prompts.pop(0)
        decodes = self.sequences if budget.decodes else 0
        seconds = self.decode * bool(decodes) + (self.fixed + self.per_token * tokens) * bool(tokens)
        return StepWork(seconds, decodes, tokens)


@dataclass
class Texts:
    """A client that keeps a fixed list of texts encoded and counts those done. A text may pause between layers."""

    lengths: list[int]
    fixed: float = 0.0005
    per_token: float = 3e-5
    layers: int = 1
    waiting: list[int] = field(default_factory=list)
    paused: int = 0  # remaining layers of the first text
    done: int = 0

    def demand(self) -> StepDemand:
        self.waiting = self.waiting or list(self.lengths)
        layer = -(-self.waiting[0] // self.layers)
        return StepDemand(
            0, False, len(self.waiting), 0, layer, layer * self.paused or min(sum(self.waiting), MAX_TOKENS)
        )

    def step(self, budget: StepBudget) -> StepWork:
        left = MAX_TOKENS if budget.whole_tokens is None else budget.whole_tokens
        if self.paused or self.waiting[0] > left:
            self.paused = self.paused or self.layers
            layers = min(self.paused, max(1, left * self.layers // self.waiting[0]))
            tokens = -(-self.waiting[0] * layers // self.layers)
            self.paused -= layers
            if not self.paused:
                self.waiting.pop(0)
                self.done += 1
            return StepWork(self.fixed + self.per_token * tokens, 0, 0, tokens)
        tokens = 0
        while self.waiting and (not tokens or tokens + self.waiting[0] <= left):
            tokens += self.waiting.pop(0)
            self.done += 1
        return StepWork(self.fixed + self.per_token * tokens, 0, 0, tokens)


@dataclass
class Translations:
    """Clients that send the next source once one is answered; counts the answers."""

    clients: int
    source: int
    output: int
    decode: float = 0.003
    fixed: float = 0.0005
    per_token: float = 2e-5
    streams: bool = False
    running: list[int] = field(default_factory=list)
    waiting: int | None = None
    done: int = 0

    def demand(self) -> StepDemand:
        waiting = self.clients - len(self.running)
        source = self.source if waiting else 0
        return StepDemand(len(self.running), self.streams, waiting, waiting, source, source * waiting)

    def step(self, budget: StepBudget) -> StepWork:
        decodes = len(self.running) if budget.decodes else 0
        waiting = self.clients - len(self.running)
        if decodes:
            left = [tokens - 1 for tokens in self.running]
            self.running = [tokens for tokens in left if tokens]
            self.done += len(left) - len(self.running)
        room = MAX_TOKENS if budget.whole_tokens is None else budget.whole_tokens
        begun = min(waiting, max(1, room // self.source)) if room else 0
        self.running += [self.output] * begun
        tokens = self.source * begun
        seconds = self.decode * bool(decodes) + (self.fixed + self.per_token * tokens) * bool(tokens)
        return StepWork(seconds, decodes, begun, tokens)


@dataclass
class Shares:
    """The results of a simulation."""

    seconds: float = 0.0
    used: dict[EngineKey, float] = field(default_factory=lambda: defaultdict(float))
    steps: list[tuple[EngineKey, StepWork]] = field(default_factory=list)
    tokens: dict[EngineKey, list[float]] = field(default_factory=lambda: defaultdict(list))  # end times of decode steps

    def of(self, engine: EngineKey) -> float:
        """Return the engine's share of the time."""
        return self.used[engine] / self.seconds

    def between_tokens(self, engine: EngineKey, quantile: float = 0.99) -> float:
        """Return the seconds between two tokens of a stream, at a quantile."""
        at = self.tokens[engine]
        gaps = sorted(after - before for before, after in pairwise(at))
        return gaps[int(quantile * len(gaps))]


def simulate(
    engines: Mapping[EngineKey, Simulated],
    seconds: float = 10.0,
    pacer: StepPacer | None = None,
    prompts: Iterable[tuple[float, EngineKey, int]] = (),
) -> Shares:
    """Simulate this many seconds; `prompts` are (seconds, engine, tokens) that arrive at `Streams`."""
    pacer = pacer or StepPacer()
    coming = sorted(prompts)
    shares = Shares()
    while shares.seconds < seconds:
        while coming and coming[0][0] <= shares.seconds:
            _, engine, tokens = coming.pop(0)
            streams = engines[engine]
            assert isinstance(streams, Streams)
            streams.prompts.append(tokens)
        turn = pacer.next({engine: one.demand() for engine, one in engines.items()})
        if turn is None:
            shares.seconds += 1e-3
            continue
        work = engines[turn.engine].step(turn.budget)
        assert work.seconds > 0, "a turn was given to an engine that could not use it"
        shares.seconds += work.seconds
        shares.used[turn.engine] += work.seconds
        shares.steps.append((turn.engine, work))
        if work.decodes:
            shares.tokens[turn.engine].append(shares.seconds)
        pacer.observe(turn.engine, work)
    return shares
