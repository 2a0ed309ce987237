"""The engine loop steps all engines of a process: it receives commands, runs one engine's step, sends one event frame.

`StepPacer` chooses the engine and its budget. The loop runs in a thread or as the main loop of a child process; it
handles neither text nor sockets. State that may be corrupt is not used again: an exception in one model's engine ends
that model's sequences and resets the engine. A model with too many of them (`MAX_FAULTS`), or one that fails its
smallest forward pass, is lost: it is removed if another model still works. Otherwise the loop ends with a
`failure` frame.

Models come and go while others are served (`triptych.model.engine.models`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from triptych.model.api.messages import Abort, Channel, Commands, Events, FailureKind, LoadFailure, ModelSpec
from triptych.model.api.request import EncodeOutput, FinishReason, TokenOutput
from triptych.model.api.stats import EngineStats, StepStats
from triptych.model.engine.background_jobs import load_failure
from triptych.model.engine.background_share import BackgroundShare
from triptych.model.engine.builder import LoadedModel
from triptych.model.engine.models import EngineModels
from triptych.model.engine.scheduling.scheduled_step import StepBudget, StepDemand
from triptych.model.engine.step_pacer import MIN_GPU_TOKENS, MIN_TOKENS, EngineKey, StepPacer, StepWork, Turn
from triptych.model.errors import ConfigError, EngineDeadError

HEARTBEAT_SECONDS = 1.0
GRAMMAR_POLL_SECONDS = 0.002  # while all requests wait for grammars to be compiled
DEADLINE_CHECK_SECONDS = 0.02  # between checks of the engines whose turn it is not

Outputs = Sequence[TokenOutput | EncodeOutput]

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """The engine of one model's generate or encode requests, as the loop uses it."""

    @property
    def has_work(self) -> bool:
        """Whether the engine has any unfinished request."""

    @property
    def waits_for_grammars(self) -> bool:
        """Whether all unfinished requests wait for grammars to be compiled."""

    @property
    def has_foreground(self) -> bool:
        """Whether it has other work than background work."""

    @property
    def has_background(self) -> bool:
        """Whether it has background work, which gets the time that other requests leave."""

    def demand(self, background: bool | None = None) -> StepDemand:
        """Return what the next step could compute: of background work, of other work, or of both (None)."""

    def step(self, budget: StepBudget) -> tuple[Outputs, StepStats | None]:
        """Compute a step, or launch it and collect the previous one; return what was finished."""

    def finish_pending(self) -> tuple[Outputs, StepStats | None]:
        """Wait for a launched step; return its outputs."""

    def check_deadlines(self) -> Outputs:
        """End the requests whose deadline has passed."""


class _ClosedError(Exception):
    """The front has sent the command to close."""


class EngineLoop:
    """Runs the engines of all models of one process, connected to the front by one channel."""

    def __init__(self, channel: Channel, on_loaded: Callable[[], object] = lambda: None) -> None:
        """`on_loaded` is called once the first models are loaded, before the front learns of it."""
        self.channel = channel
        self._on_loaded = on_loaded
        self.models = EngineModels()
        self._engines: dict[EngineKey, Engine] = {}
        self._pacer = StepPacer()
        self._background = BackgroundShare()
        self._in_background = False  # whether the last step was one of background work
        self._last_engine: EngineKey | None = None  # which computed the last step
        self._last_deadline_check = 0.0
        self._last_sent = 0.0  # the time of the last frame

    def run(self) -> None:
        """Serve until a `close` command, or until the front ends."""
        try:
            self._serve()
        except (EOFError, _ClosedError):
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
            self.models.close()

    def _serve(self) -> None:
        while True:
            seconds = self._round(self.models.timeout(HEARTBEAT_SECONDS))
            for model, events in self.models.work(seconds):
                if model is not None:
                    self._add(model)
                self._send(events)

    def _round(self, timeout: float) -> float | None:
        """Receive commands, step an engine and send its events; return the seconds of the step.

        With nothing to do it waits for commands, at most `timeout` seconds, and returns None if none have come. Raises
        `_ClosedError` after the command to close.
        """
        commands = self.channel.receive(min(timeout, self._receive_timeout))
        events, began = Events(), time.monotonic()
        if commands is None and not self._has_work:
            if timeout < HEARTBEAT_SECONDS and began < self._last_sent + HEARTBEAT_SECONDS:
                return None
            self._check_idle(events)
        while commands is not None:  # all frames that have arrived, so that none waits for more than one step
            if commands.close:
                raise _ClosedError
            self._apply(commands, events)
            commands = self.channel.receive(0)
        began = time.monotonic()
        self._step(events)
        seconds = time.monotonic() - began
        for model in self._whole:
            with self._isolate_faults(model, events):
                model.check()
        self._send(events)
        return seconds

    @property
    def _whole(self) -> list[LoadedModel]:
        """The loaded models, without adapters."""
        return [model for model in self.models if model.adapter is None]

    def _send(self, events: Events) -> None:
        events.stats = [self._stats(model) for model in self._whole]
        self.channel.send(events)
        self._last_sent = time.monotonic()

    @property
    def _receive_timeout(self) -> float:
        """The seconds to wait for commands before the next round."""
        busy = [engine for engine in self._engines.values() if engine.has_work]
        if not busy:
            return HEARTBEAT_SECONDS
        return GRAMMAR_POLL_SECONDS if all(engine.waits_for_grammars for engine in busy) else 0

    @property
    def _has_work(self) -> bool:
        return any(engine.has_work for engine in self._engines.values())

    def _apply(self, commands: Commands, events: Events) -> None:
        if commands.start is not None:
            self._start(commands.start, set(commands.optional), events)
        for request in commands.generate:
            try:
                engine = self.models[request.model].generate
                assert engine is not None, f"{request.model} does not generate"
                engine.add(request)
            except Exception:
                logger.exception("%s could not take a request", request.model)
                events.tokens += (
                    TokenOutput(request.request_id, index, finish_reason=FinishReason.ERROR)
                    for index in range(request.params.n)
                )
        for encode in commands.encode:
            try:
                self.models[encode.model].encode.add(encode)
            except Exception:
                logger.exception("%s could not take an input", encode.model)
                events.encoded.append(EncodeOutput(encode.request_id, finish_reason=FinishReason.ERROR))
        self._abort(commands.abort, events)
        for name in commands.unload:
            self._unload(name, events)
        for spec in commands.load:
            self.models.begin_load(spec)

    def _start(self, specs: Iterable[ModelSpec], optional: set[str], events: Events) -> None:
        """Load models before any is served; raises what a load raises, unless the model is optional."""
        for spec in specs:
            try:
                model = self.models.load_now(spec)
            except Exception as error:
                if spec.name not in optional:
                    raise
                events.load_failures.append(load_failure(spec.name, error))
            else:
                self._add(model)
                self.channel.send(Events(loaded=[model.info]))
        self._on_loaded()
        events.ready = True

    def _add(self, model: LoadedModel) -> None:
        """Add the engines of a loaded model; an adapter uses those of its base."""
        if model.adapter is not None:
            return
        name = model.name
        self._engines[name, "encode"] = model.encode
        if model.generate is not None:
            self._engines[name, "generate"] = model.generate
        least = MIN_TOKENS if model.info.device == "cpu" else MIN_GPU_TOKENS
        for pacer in (self._pacer, self._background.pacer):
            pacer.add(name, model.weight, least)

    def _unload(self, name: str, events: Events) -> None:
        """End a model's requests and free it, or stop loading it; an unknown name counts as unloaded."""
        if self.models.give_up(name):
            return
        model = self.models.get(name)
        if model is None:
            events.unloaded.append(name)
            return
        if self._last_engine is not None and self._last_engine[0] == model.engine_name:
            self._run(self._last_engine, lambda engine: engine.finish_pending(), events)
        if self.models.get(name) is model:  # not lost with its last step
            self._remove(model)

    def _remove(self, model: LoadedModel) -> None:
        """Remove a model's engines, and free the model."""
        if model.adapter is not None:
            self.models.free(model)
            return
        name = model.name
        if self._last_engine is not None and self._last_engine[0] == name:
            self._last_engine = None
        for key in [key for key in self._engines if key[0] == name]:
            del self._engines[key]
        for pacer in (self._pacer, self._background.pacer):
            pacer.remove(name)
        self.models.free(model)

    def _abort(self, aborts: Iterable[Abort], events: Events) -> None:
        of_model: dict[str, list[Abort]] = {}
        for abort in aborts:
            of_model.setdefault(abort.model, []).append(abort)
        for name, named in of_model.items():
            found = self.models.get(name)
            if found is None:
                continue  # its requests ended with it
            model = self.models[found.engine_name]
            with self._isolate_faults(model, events):
                events.encoded += model.encode.abort_all(named)
                if model.generate is not None:
                    events.tokens += model.generate.abort_all(named)

    def _step(self, events: Events) -> None:
        """Step the engine whose turn it is; check all engines for deadlines and compiled grammars at intervals."""
        began = time.monotonic()
        busy = {key: engine for key, engine in self._engines.items() if engine.has_work}
        has_background = any(engine.has_background for engine in busy.values())
        contended = has_background and any(engine.has_foreground for engine in busy.values())
        turn = self._contended_turn(busy) if contended else self._turn(busy, background=has_background or None)
        if self._last_engine is not None and (turn is None or turn.engine != self._last_engine):
            # Two engines never have steps on the device at the same time.
            self._run(self._last_engine, lambda engine: engine.finish_pending(), events)
        if turn is not None:
            self._last_engine, budget = turn.engine, turn.budget
            self._in_background = budget.background is True
            self._run(turn.engine, lambda engine: engine.step(budget), events)
            if has_background:
                seconds = time.monotonic() - began
                self._background.observe(seconds, background=self._in_background, contended=contended)
        now = time.monotonic()
        if turn is None or now - self._last_deadline_check >= DEADLINE_CHECK_SECONDS:
            self._last_deadline_check = now
            for key, engine in list(self._engines.items()):
                if engine.has_work:
                    self._run(key, lambda engine: (engine.check_deadlines(), None), events)

    def _contended_turn(self, busy: Mapping[EngineKey, Engine]) -> Turn | None:
        """Return the next turn while there is background work and other work."""
        first = self._background.is_due()
        return self._turn(busy, background=first) or self._turn(busy, background=not first)

    def _turn(self, busy: Mapping[EngineKey, Engine], *, background: bool | None) -> Turn | None:
        """Return the next turn of background work, of other work, or of what there is; None without a demand."""
        pacer = self._background.pacer if background else self._pacer
        turn = pacer.next({key: engine.demand(background) for key, engine in busy.items()})
        if turn is None or background is None:
            return turn
        return replace(turn, budget=replace(turn.budget, background=background))

    def _run(self, key: EngineKey, act: Callable[[Engine], tuple[Outputs, StepStats | None]], events: Events) -> None:
        """Call `act` with an engine, add its outputs and statistics to the events, and report its cost to the pacer."""
        if key not in self._engines:
            return  # its model was lost a moment ago
        with self._isolate_faults(self.models[key[0]], events):
            outputs, stats = act(self._engines[key])
            events.tokens += [output for output in outputs if isinstance(output, TokenOutput)]
            events.encoded += [output for output in outputs if isinstance(output, EncodeOutput)]
            if stats is not None:
                events.steps.append(stats)
                prompts = stats.num_tokens - stats.num_decodes - stats.num_whole_tokens
                pacer = self._background.pacer if self._in_background else self._pacer
                pacer.observe(key, StepWork(stats.seconds, stats.num_decodes, prompts, stats.num_whole_tokens))

    @contextmanager
    def _isolate_faults(self, model: LoadedModel, events: Events) -> Iterator[None]:
        """On an exception in the block, end this model's requests and reset its engines; other models continue.

        A model that fails too often, or fails its smallest forward pass, is lost.
        """
        try:
            yield
        except Exception as error:
            logger.exception("the engine of %s broke; its requests end, and it is reset", model.name)
            if model.generate is not None:
                events.tokens += model.generate.recover()
            events.encoded += model.encode.recover()
            too_often = model.faults.record_fault()
            if too_often or isinstance(error, EngineDeadError) or not _computes(model):
                self._lose(model, error, events)

    def _lose(self, model: LoadedModel, error: Exception, events: Events) -> None:
        """Remove a broken model; raises `error` if no other model works, so that the process is replaced."""
        others = [one for one in self.models if one.engine_name != model.engine_name]
        if not any(map(_computes, others)):
            raise error
        reason = str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__} in its engine"
        logger.error("%s is lost (%s); other models go on", model.name, reason)
        events.load_failures.append(LoadFailure(model.name, FailureKind.ERROR, reason))
        self._remove(model)

    def _stats(self, model: LoadedModel) -> EngineStats:
        stats = model.generate.stats() if model.generate is not None else EngineStats(model.name)
        stats.waiting += model.encode.num_waiting
        return stats

    def _check_idle(self, events: Events) -> None:
        """Check the cheap invariants in production: without unfinished requests every KV block is free.

        This runs after a heartbeat without commands: it takes a millisecond or more, which would delay a last token or
        the next request.
        """
        for model in self._whole:
            if model.generate is not None:
                with self._isolate_faults(model, events):
                    model.generate.check_invariants()

    def _fail(self, message: str, *, invalid: bool) -> None:
        try:
            self.channel.send(Events(failure=message, invalid=invalid))
        except EOFError:
            logger.warning("the front has ended and cannot be told: %s", message)


def _computes(model: LoadedModel) -> bool:
    """Return whether the smallest forward pass of a model still works."""
    try:
        model.check()
        model.encode.probe()
    except Exception:
        logger.exception("the smallest forward pass of %s fails", model.name)
        return False
    return True
