"""Speculative decoding of one model: chooses the sequences that get drafts, runs the draft model, counts acceptances.

The drafts of a step are chosen when it is scheduled (`propose`), by the state of each sequence: its n-grams
(`NgramDrafts`), and the part of it that the draft model has computed (`ModelDrafts`). No torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from triptych.model.api.request import Request
from triptych.model.engine.scheduling.scheduled_step import Runner, SchedulerOutput
from triptych.model.engine.scheduling.scheduler import Scheduler
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.engine.speculation.model_drafts import DraftOdds, DraftPages, ModelDrafts
from triptych.model.engine.speculation.ngrams import KnownText, NgramDrafts
from triptych.model.engine.speculation.propose import add_drafts

PREDICTED_TOKENS = 8  # drafts of a step for a request with a prediction, if no setting says how many

logger = logging.getLogger(__name__)


class Speculation:
    """The speculative decoding of one engine, with its counters."""

    def __init__(self, num_speculative_tokens: int, draft_context: int | None = None) -> None:
        """`num_speculative_tokens`: the most drafts of a sequence in a step, if its request does not say how many.
        `draft_context`: the draft model proposes tokens up to this length; None: there is no draft model."""
        self.num_speculative_tokens = num_speculative_tokens
        self.draft_context = draft_context
        self.num_drafts = 0  # steps of a sequence with drafts
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0  # accepted drafts
        self.num_model_draft_tokens = self.num_model_accepted_tokens = 0  # those of the draft model
        self._odds = DraftOdds()
        self._pages = DraftPages()
        self._seconds = 0.0  # that the draft model took in the last step

    def prepare(self, request: Request, sequences: Iterable[SequenceState]) -> None:
        """Set up drafting for the sequences of a request, if it may have drafts."""
        limit = self._limit(request)
        if not limit:
            return
        source = request.source.token_ids if request.source is not None else ()
        known = KnownText(request.prompt_token_ids, source, request.prediction, request.continued)
        for sequence in sequences:
            sequence.drafting = NgramDrafts(limit, known)
            if self.draft_context is not None:
                sequence.model_drafts = ModelDrafts(limit, self._odds, self.draft_context)

    def _limit(self, request: Request) -> int:
        """Return the most drafts of a request's sequence in a step; 0 for beams, which have no single next token."""
        asked = request.params.num_speculative_tokens
        limit = self.num_speculative_tokens if asked is None else asked
        if asked is None and request.prediction:
            limit = limit or PREDICTED_TOKENS
        return 0 if request.params.num_beams > 1 else limit

    def reset(self) -> None:
        """Forget the content of the draft model's cache; all sequences have ended."""
        self._pages.clear()

    def propose(self, scheduled: SchedulerOutput, scheduler: Scheduler) -> None:
        """Add drafts to a step, by n-grams or for the draft model to propose (`run_draft_model`)."""
        if any(step.sequence.drafting is not None for step in scheduled.scheduled):
            add_drafts(scheduled, scheduler, self._pages)

    def run_draft_model(self, scheduled: SchedulerOutput, runner: Runner, scheduler: Scheduler) -> None:
        """Add the draft model's proposals to a step; if it fails, its sequences get drafts from n-grams only."""
        self._seconds = 0.0
        runs = scheduled.draft_runs
        if not runs:
            return
        began = time.monotonic()
        try:
            scheduled.put_drafts(runner.draft(runs))
        except Exception:
            logger.exception("%d sequences could not be drafted", len(runs))
            for run in runs:
                run.sequence.model_drafts = None
                scheduler.block_manager.trim(run.sequence)
            self._pages.clear()
            return
        self._seconds = time.monotonic() - began
        if max(run.num_tokens for run in runs) <= 2:  # the usual pass: the model has computed all earlier tokens
            self._odds.measured(pass_seconds=self._seconds / max(1, *(run.num_drafts for run in runs)))

    def measured(self, step_seconds: float) -> None:
        """Learn the time of a step that only decoded, including its drafts."""
        if self.draft_context is not None:
            self._odds.measured(step_seconds=step_seconds - self._seconds)

    def verified(self, sequence: SequenceState, num_drafts: int, num_accepted: int) -> bool:
        """Learn how many drafts of a sequence's step were accepted; return whether they were the draft model's."""
        by_model = sequence.model_drafts is not None and sequence.model_drafts.verified(num_accepted)
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_model_draft_tokens += num_drafts * by_model
        return by_model

    def accepted(self, num_tokens: int, *, by_model: bool) -> None:
        """Count drafts that became tokens of the output."""
        self.num_accepted_tokens += num_tokens
        self.num_model_accepted_tokens += num_tokens * by_model
