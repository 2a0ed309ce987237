"""Timers of host code: methods are wrapped while they are timed, as the engine itself has no timers."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from inspect import isgeneratorfunction
from typing import Any

Where = tuple[Any, str, str]  # object, module or class; attribute; name of the time


class Timers:
    """Measures seconds by name, each without those of nested named calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._inside = [0.0]  # seconds of named calls within each open one

    @contextmanager
    def on(self, *places: Where) -> Iterator[Timers]:
        """Time calls of these attributes inside the block. Raises AttributeError for a missing one."""
        with ExitStack() as undo:
            for owner, attribute, name in places:
                self._wrap(owner, attribute, name, undo)
            yield self

    def _wrap(self, owner: Any, attribute: str, name: str, undo: ExitStack) -> None:
        own = attribute in vars(owner)
        before = getattr(owner, attribute)
        setattr(owner, attribute, self._timed(before, name))
        undo.callback(setattr, owner, attribute, before) if own else undo.callback(delattr, owner, attribute)

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with self._timing(name):
                return function(*arguments, **named)

        def work(*arguments: Any, **named: Any) -> Generator[Any, Any, Any]:
            with self._timing(name):
                return (yield from function(*arguments, **named))

        return work if isgeneratorfunction(function) else call

    @contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        self._inside.append(0.0)
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            own = seconds - self._inside.pop()
            self._inside[-1] += seconds
            self.seconds[name] = self.seconds.get(name, 0.0) + own
            self.calls[name] = self.calls.get(name, 0) + 1
