"""Speculative decoding of one model: which sequences get drafts, when its draft model is run, and how often drafts were
right. No torch.

What is proposed in a step is decided when it is scheduled (`propose`), by what each sequence keeps: n-grams
(`NgramDrafts`) and what the draft model has computed of it (`ModelDrafts`).
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
    """Gives sequences what drafts for them, runs the draft model, and counts what came of it."""

    def __init__(self, num_speculative_tokens: int, draft_context: int | None = None) -> None:
        """`num_speculative_tokens`: most drafts in a step of a sequence whose request does not say how many.
        `draft_context`: the draft model proposes tokens up to this length; None: there is no draft model."""
        self.num_speculative_tokens = num_speculative_tokens
        self.draft_context = draft_context
        self.num_drafts = 0  # steps of a sequence with drafts
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0  # drafts that were right
        self.num_model_draft_tokens = self.num_model_accepted_tokens = 0  # of them, the draft model's
        self._odds = DraftOdds()
        self._pages = DraftPages()
        self._seconds = 0.0  # of the last step, in which the draft model proposed

    def prepare(self, request: Request, sequences: Iterable[SequenceState]) -> None:
        """Let the sequences of a request be drafted for, if it is to be."""
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
        """Return how many tokens of a request a step may draft; beams have no next token to draft."""
        asked = request.params.num_speculative_tokens
        limit = self.num_speculative_tokens if asked is None else asked
        if asked is None and request.prediction:
            limit = limit or PREDICTED_TOKENS
        return 0 if request.params.num_beams > 1 else limit

    def reset(self) -> None:
        """Assume nothing of the draft model's cache: every sequence has ended."""
        self._pages.clear()

    def propose(self, scheduled: SchedulerOutput, scheduler: Scheduler) -> None:
        """Add drafts to a step, by n-grams or for the draft model to propose (`run_draft_model`)."""
        if any(step.sequence.drafting is not None for step in scheduled.scheduled):
            add_drafts(scheduled, scheduler, self._pages)

    def run_draft_model(self, scheduled: SchedulerOutput, runner: Runner, scheduler: Scheduler) -> None:
        """Put the draft model's tokens into a step; if it fails, its sequences are drafted for by n-grams alone."""
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
        """Take the time of a step that only decoded, with its drafts."""
        if self.draft_context is not None:
            self._odds.measured(step_seconds=step_seconds - self._seconds)

    def verified(self, sequence: SequenceState, num_drafts: int, num_right: int) -> bool:
        """Learn how many drafts of a sequence's step were right; return whether they were the draft model's."""
        by_model = sequence.model_drafts is not None and sequence.model_drafts.verified(num_right)
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_model_draft_tokens += num_drafts * by_model
        return by_model

    def accepted(self, num_tokens: int, *, by_model: bool) -> None:
        """Count drafts that have become tokens of the output."""
        self.num_accepted_tokens += num_tokens
        self.num_model_accepted_tokens += num_tokens * by_model
