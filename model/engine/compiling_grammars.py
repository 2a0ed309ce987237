"""Sequences whose grammars are being compiled; the scheduler skips them until they have a matcher. No torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.errors import ConfigError, GrammarError

if TYPE_CHECKING:
    from triptych.model.text.grammar_matcher import Grammars, Matcher

logger = logging.getLogger(__name__)


class CompilingGrammars:
    """Compiles the grammars of sequences in the background and gives them their matchers."""

    def __init__(self, grammars: Grammars | None) -> None:
        self.grammars = grammars  # None: no tokenizer, so requests have no grammars
        self._pending: list[tuple[Future[Matcher], list[SequenceState]]] = []

    @property
    def any_done(self) -> bool:
        """Whether a compiled grammar has not been given to its sequences yet."""
        return any(future.done() for future, _ in self._pending)

    def begin(self, grammar: str, sequences: list[SequenceState]) -> None:
        """Start to compile a grammar for all sequences of a request."""
        assert self.grammars is not None, "a request with a grammar for a model that knows no text"
        self._pending.append((self.grammars.compile(grammar), sequences))

    def wait(self, seconds: float) -> None:
        """Wait for the next compiled grammar, at most `seconds`."""
        if self._pending:
            wait([future for future, _ in self._pending], seconds, "FIRST_COMPLETED")

    def attach(self) -> Iterator[tuple[list[SequenceState], str | None]]:
        """Give unfinished sequences their compiled grammars; yield those whose grammar failed to compile.

        The second value is the error's text if the grammar is at fault, else None.
        """
        done = [entry for entry in self._pending if entry[0].done()]
        self._pending = [entry for entry in self._pending if entry not in done]
        for future, sequences in done:
            waiting = [sequence for sequence in sequences if not sequence.finished]
            try:
                matcher = future.result().with_stop_tokens(sequences[0].stop_token_ids)
            except (GrammarError, ConfigError) as error:
                yield waiting, str(error)
                continue
            except Exception:
                logger.exception("a grammar could not be compiled")
                yield waiting, None
                continue
            for sequence in waiting:
                sequence.matcher, sequence.is_prepared = matcher.fork(), True

    def clear(self) -> None:
        """Forget all of them: their sequences have ended."""
        self._pending.clear()
