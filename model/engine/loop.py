"""The one loop that steps all engines of a process in turn: commands in, a step of each, one frame of events out.

Runs in a thread or as the main loop of a child process; knows neither text nor sockets. Whatever breaks inside a step
ends the loop with a `failure` frame: state that may be corrupt serves nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from model.config import ConfigError
from model.engine.errors import EngineDeadError
from model.engine.loading import LoadedModel, load
from model.engine.protocol import Abort, Channel, Commands, Events
from model.engine.stats import EngineStats

HEARTBEAT_SECONDS = 1.0
PREPARING_SECONDS = 0.002  # between looks at grammars being compiled, with nothing else to do

logger = logging.getLogger(__name__)


class EngineLoop:
    """Engines of all models of one process over one channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.models: dict[str, LoadedModel] = {}

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
            if commands is None and not self._has_work:
                self._check_idle()
            events = Events()
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
        busy = [m for m in self.models.values() if m.encode.has_work or (m.generate and m.generate.has_work)]
        if not busy:
            return HEARTBEAT_SECONDS
        steps = any(m.encode.has_work or (m.generate and not m.generate.only_prepares) for m in busy)
        return 0 if steps else PREPARING_SECONDS

    @property
    def _has_work(self) -> bool:
        return any(m.encode.has_work or (m.generate and m.generate.has_work) for m in self.models.values())

    def _apply(self, commands: Commands, events: Events) -> None:
        if commands.load:
            self._load(commands)
            events.ready = True
        for request in commands.generate:
            engine = self.models[request.model].generate
            assert engine is not None, f"{request.model} does not generate"
            engine.add(request)
        for encode in commands.encode:
            self.models[encode.model].encode.add(encode)
        self._abort(commands.abort, events)

    def _load(self, commands: Commands) -> None:
        for spec in commands.load:
            self.models[spec.name] = load(spec)
            self.channel.send(Events(loaded=[self.models[spec.name].info]))

    def _abort(self, aborts: Iterable[Abort], events: Events) -> None:
        for abort in aborts:
            model = self.models[abort.model]
            events.encoded += model.encode.abort(abort.request_id, abort.reason)
            if model.generate is not None:
                events.tokens += model.generate.abort(abort.request_id, abort.index, abort.reason)

    def _step(self, events: Events) -> None:
        for model in self.models.values():
            if model.generate is not None and model.generate.has_work:
                tokens, step = model.generate.step()
                events.tokens += tokens
                events.steps += [step] if step else []
            if model.encode.has_work:
                encoded, step = model.encode.step()
                events.encoded += encoded
                events.steps += [step] if step else []

    def _stats(self, model: LoadedModel) -> EngineStats:
        stats = model.generate.stats() if model.generate is not None else EngineStats(model.info.name)
        stats.waiting += model.encode.num_waiting
        return stats

    def _check_idle(self) -> None:
        """The cheap invariants, in production too: with nothing to do, every block is free.

        Looked at when there was nothing to do for a heartbeat: it takes a millisecond and more, and whoever got a last
        token or sends the next request would wait for it.
        """
        for model in self.models.values():
            if model.generate is not None:
                model.generate.check_invariants()

    def _fail(self, message: str, *, invalid: bool) -> None:
        try:
            self.channel.send(Events(failure=message, invalid=invalid))
        except EOFError:
            logger.warning("nobody is left to be told: %s", message)
