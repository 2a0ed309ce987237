"""The interface between the generate engine and the executor of its steps. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from model.api.request import Source
from model.engine.scheduling.scheduled_step import DraftRun, SampledToken, SchedulerOutput


class Launch(Protocol):
    """A step that runs on the device."""

    def collect(self) -> list[SampledToken | None]:
        """Wait for the tokens: one for each scheduled sequence, None for one that does not sample."""


class Runner(Protocol):
    """The executor of steps: `ModelRunner`, or a scripted one in tests."""

    def execute(self, output: SchedulerOutput) -> list[SampledToken | None]:
        """Launch a step and collect its tokens."""

    def launch(self, output: SchedulerOutput, before: Any = None) -> Launch:
        """Start a step; the tokens of the previous launch, `before`, may not have arrived yet."""

    def encode_ahead(self, source: Source, layers: int) -> None:
        """Compute the next `layers` of the encoder for a source; the step that encodes it continues from there."""

    def forget_ahead(self) -> None:
        """Drop the source that `encode_ahead` began."""

    def draft(self, runs: Sequence[DraftRun]) -> list[tuple[int, ...]]:
        """Return the tokens that the draft model proposes after each run; only if there is a draft model."""

    def probe(self) -> None:
        """Run the smallest possible forward pass; raises if even that fails."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that was launched and not yet collected."""

    launch: Launch
    scheduled: SchedulerOutput
    began: float

    @property
    def allows_run_ahead(self) -> bool:
        """Whether to launch the next step before this one's tokens arrive.

        Sequences that need their token first are left out of such a step. If they are at least half of the batch,
        waiting costs less than a step without them.
        """
        steps = self.scheduled.scheduled
        blocked = sum(step.samples and not step.sequence.can_run_ahead for step in steps)
        return not blocked or 2 * blocked < len(steps)
