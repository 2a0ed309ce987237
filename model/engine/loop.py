"""The one loop that steps all engines of a process: commands in, a step of the engine whose turn it is, one frame of
events out.

`StepPacer` decides whose turn it is. The loop runs in a thread or as the main loop of a child process; it knows neither
text nor sockets. State that may be corrupt serves nobody: what raises in one model's engine ends that model's
sequences, and it begins anew with an empty pool. A model that raises again and again, or whose smallest pass raises
too, ends the loop with a `failure` frame.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from model.api.messages import Abort, Channel, Commands, Events
from model.api.request import EncodeOutput, FinishReason, TokenOutput
from model.api.stats import EngineStats, StepStats
from model.engine.builder import LoadedModel, load
from model.engine.scheduling.step_budget import StepBudget, StepDemand
from model.engine.step_pacer import (
    MIN_GPU_TOKENS,
    MIN_TOKENS,
    EngineKey,
    StepPacer,
    StepWork,
)
from model.errors import ConfigError, EngineDeadError
from model.system.fault_limit import FaultLimit

HEARTBEAT_SECONDS = 1.0
PREPARING_SECONDS = 0.002  # between looks at grammars being compiled, with nothing else to do
DEADLINE_SECONDS = 0.02  # between looks at the deadlines of engines that have no turn
MAX_FAULTS = 3  # that a model recovers from within `FAULT_SECONDS`
FAULT_SECONDS = 60.0

Outputs = Sequence[TokenOutput | EncodeOutput]

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What computes a step when it is its turn: generation or encoding for one model."""

    @property
    def has_work(self) -> bool:
        """Whether any request is in it."""

    @property
    def only_prepares(self) -> bool:
        """Whether all that is left to do waits for something that is prepared elsewhere."""

    def demand(self) -> StepDemand:
        """What the next step could compute."""

    def step(self, budget: StepBudget) -> tuple[Outputs, StepStats | None]:
        """Compute a step, or launch it and finish the one before; what was finished."""

    def finish_pending(self) -> tuple[Outputs, StepStats | None]:
        """Finish a step that was launched."""

    def check_deadlines(self) -> Outputs:
        """End the requests whose deadline has passed."""


class EngineLoop:
    """Engines of all models of one process over one channel."""

    def __init__(self, channel: Channel, loaded: Callable[[], object] = lambda: None) -> None:
        """`loaded` is called once, when all models are loaded and before the front hears of it."""
        self.channel = channel
        self._loaded = loaded
        self.models: dict[str, LoadedModel] = {}
        self._faults: dict[str, FaultLimit] = {}
        self._engines: dict[EngineKey, Engine] = {}
        self._pacer = StepPacer()
        self._latest: EngineKey | None = None  # which computed last
        self._tended = 0.0

    def run(self) -> None:
        """Serve until told to close or until the front is gone."""
        try:
            self._serve()
        except EOFError:
            return
        except EngineDeadError as error:
            logger.error("the engine loop broke: %s", error)
            self._fail(str(error), invalid=False)
        except ConfigError as error:
            self._fail(str(error), invalid=True)
        except Exception as error:
            logger.exception("the engine loop broke")
            self._fail(f"{type(error).__name__} in the engine", invalid=False)
        finally:
            for model in self.models.values():
                model.close()

    def _serve(self) -> None:
        while True:
            commands = self.channel.receive(self._patience)
            events = Events()
            if commands is None and not self._has_work:
                self._check_idle(events)
            while commands is not None:  # all that has come: no request and no abort waits for more than a step
                if commands.close:
                    return
                self._apply(commands, events)
                commands = self.channel.receive(0)
            self._step(events)
            for model in self.models.values():
                model.check()
            events.stats = [self._stats(model) for model in self.models.values()]
            self.channel.send(events)

    @property
    def _patience(self) -> float:
        """Seconds to wait for commands before the next round."""
        busy = [engine for engine in self._engines.values() if engine.has_work]
        if not busy:
            return HEARTBEAT_SECONDS
        return PREPARING_SECONDS if all(engine.only_prepares for engine in busy) else 0

    @property
    def _has_work(self) -> bool:
        return any(engine.has_work for engine in self._engines.values())

    def _apply(self, commands: Commands, events: Events) -> None:
        if commands.load:
            self._load(commands)
            self._loaded()
            events.ready = True
        for request in commands.generate:
            try:
                engine = self.models[request.model].generate
                assert engine is not None, f"{request.model} does not generate"
                engine.add(request)
            except Exception:
                logger.exception("%s could not take a request", request.model)
                ids = (request.request_id,)
                events.tokens += (
                    TokenOutput(*ids, i, finish_reason=FinishReason.ERROR) for i in range(request.params.n)
                )
        for encode in commands.encode:
            try:
                self.models[encode.model].encode.add(encode)
            except Exception:
                logger.exception("%s could not take an input", encode.model)
                events.encoded.append(EncodeOutput(encode.request_id, finish_reason=FinishReason.ERROR))
        self._abort(commands.abort, events)

    def _load(self, commands: Commands) -> None:
        for spec in commands.load:
            self.models[spec.name] = load(spec)
            self.channel.send(Events(loaded=[self.models[spec.name].info]))
        for name, model in self.models.items():
            self._engines[name, "encode"] = model.encode
            if model.generate is not None:
                self._engines[name, "generate"] = model.generate
        gpu = any(model.info.device != "cpu" for model in self.models.values())
        weights = {spec.name: spec.engine.model_weight for spec in commands.load}
        self._pacer = StepPacer(weights, MIN_GPU_TOKENS if gpu else MIN_TOKENS)

    def _abort(self, aborts: Iterable[Abort], events: Events) -> None:
        for abort in aborts:
            model = self.models[abort.model]
            with self._contained(model, events):
                events.encoded += model.encode.abort(abort.request_id, abort.reason)
                if model.generate is not None:
                    events.tokens += model.generate.abort(abort.request_id, abort.index, abort.reason)

    def _step(self, events: Events) -> None:
        """Let the engine whose turn it is compute a step; look after the others' deadlines and grammars."""
        turn = self._pacer.next({key: engine.demand() for key, engine in self._engines.items() if engine.has_work})
        if self._latest is not None and (turn is None or turn.engine != self._latest):
            # Its step is over before another computes.
            self._run(self._latest, lambda engine: engine.finish_pending(), events)
        if turn is not None:
            self._latest, budget = turn.engine, turn.budget
            self._run(turn.engine, lambda engine: engine.step(budget), events)
        now = time.monotonic()
        if turn is None or now - self._tended >= DEADLINE_SECONDS:
            self._tended = now
            for key, engine in self._engines.items():
                if engine.has_work:
                    self._run(key, lambda engine: (engine.check_deadlines(), None), events)

    def _run(self, key: EngineKey, act: Callable[[Engine], tuple[Outputs, StepStats | None]], events: Events) -> None:
        """Let an engine act, and report what came of it."""
        with self._contained(self.models[key[0]], events):
            outputs, stats = act(self._engines[key])
            events.tokens += [output for output in outputs if isinstance(output, TokenOutput)]
            events.encoded += [output for output in outputs if isinstance(output, EncodeOutput)]
            if stats is not None:
                events.steps.append(stats)
                prompts = stats.num_tokens - stats.num_decodes - stats.num_whole_tokens
                self._pacer.observe(key, StepWork(stats.seconds, stats.num_decodes, prompts, stats.num_whole_tokens))

    @contextmanager
    def _contained(self, model: LoadedModel, events: Events) -> Iterator[None]:
        """Let what raises in the block cost this model its requests and nobody else anything.

        Raises what the model's smallest pass raises, and the model's own error when it comes too often.
        """
        try:
            yield
        except Exception as error:
            name = model.info.name
            if isinstance(error, EngineDeadError) or self._faults.setdefault(name, _limit()).record_fault():
                raise
            logger.exception("the engine of %s broke; all that it computes ends, and it begins anew", name)
            if model.generate is not None:
                events.tokens += model.generate.recover()
            events.encoded += model.encode.recover()

    def _stats(self, model: LoadedModel) -> EngineStats:
        stats = model.generate.stats() if model.generate is not None else EngineStats(model.info.name)
        stats.waiting += model.encode.num_waiting
        return stats

    def _check_idle(self, events: Events) -> None:
        """The cheap invariants, in production too: with nothing to do, every block is free.

        Looked at when there was nothing to do for a heartbeat: it takes a millisecond and more, and whoever got a last
        token or sends the next request would wait for it.
        """
        for model in self.models.values():
            if model.generate is not None:
                with self._contained(model, events):
                    model.generate.check_invariants()

    def _fail(self, message: str, *, invalid: bool) -> None:
        try:
            self.channel.send(Events(failure=message, invalid=invalid))
        except EOFError:
            logger.warning("nobody is left to be told: %s", message)


def _limit() -> FaultLimit:
    return FaultLimit(MAX_FAULTS, FAULT_SECONDS)
