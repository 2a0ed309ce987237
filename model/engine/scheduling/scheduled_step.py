"""The interface between scheduling and execution: what a step computes, and the tokens that it samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from triptych.model.api.request import Source, TokenLogprob
from triptych.model.engine.scheduling.beam_search import Candidates
from triptych.model.engine.scheduling.block_manager import BlockCopy
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.engine.scheduling.source_blocks import LayersAhead
from triptych.model.engine.speculation.model_drafts import ModelDrafts


class ScheduledSequence(NamedTuple):  # made for every token: a frozen dataclass takes thrice the time
    """One sequence's part of a step."""

    sequence: SequenceState
    start: int  # tokens computed before this step
    num_tokens: int  # computed in this step, from `start`, with the drafts
    encode_source: bool  # the encoder runs first and its keys and values are written
    drafts: tuple[int, ...] = ()  # proposed next tokens, computed after its last one

    @property
    def stop(self) -> int:
        """The number of computed tokens after the step, without drafts."""
        return self.start + self.num_tokens - len(self.drafts)

    @property
    def samples(self) -> bool:
        """Whether its last token is computed, so that a next token is sampled."""
        return self.start + self.num_tokens - len(self.drafts) == self.sequence.num_tokens


class DraftRun(NamedTuple):
    """The tokens that a draft model computes and proposes for one sequence before a step."""

    place: int  # of the sequence in the step
    sequence: SequenceState
    drafting: ModelDrafts  # the sequence's
    start: int  # tokens that it has computed
    stop: int
    num_drafts: int  # to propose after `stop` tokens; 0: it only brings its cache up to date

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Everything that a step computes, in packed order."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)  # before anything is written
    ahead: list[LayersAhead] = field(default_factory=list)  # of at most one source; computed first
    encoded_before: list[int] = field(default_factory=list)  # tokens of this step's sources that earlier steps computed
    picture_tokens: list[int] = field(default_factory=list)  # of each picture whose encoding ends in this step
    draft_runs: list[DraftRun] = field(default_factory=list)  # whose proposals are added before the step runs

    def put_drafts(self, proposals: Sequence[tuple[int, ...]]) -> None:
        """Add the draft model's proposals to the steps of their sequences."""
        for run, drafts in zip(self.draft_runs, proposals, strict=True):
            step = self.scheduled[run.place]
            self.scheduled[run.place] = step._replace(num_tokens=step.num_tokens + len(drafts), drafts=drafts)

    @property
    def num_tokens(self) -> int:
        """Decoder and encoder tokens of the step."""
        return self.num_decoder_tokens + self.num_whole_tokens

    @property
    def num_decoder_tokens(self) -> int:
        """Tokens that the decoder computes."""
        return sum(s.num_tokens for s in self.scheduled)

    @property
    def num_whole_tokens(self) -> int:
        """Tokens that the encoder computes."""
        sources = sum(s.sequence.source_length for s in self.scheduled if s.encode_source)
        ahead = sum(ahead.tokens for ahead in self.ahead)
        return sources - sum(self.encoded_before) + sum(self.picture_tokens) + ahead


class SampledToken(NamedTuple):
    """The next token of one sequence, with what its request asks about it."""

    token_id: int
    logprob: TokenLogprob | None = None
    forced: bool = False  # the checkpoint's rules left no other
    candidates: Candidates = ()  # of a beam: the search chooses among them
    later: tuple[SampledToken, ...] = ()  # the tokens after it, one for each accepted draft
    masked_logprob: float | None = None  # among the allowed tokens, if requested
    log_mass: float = 0.0  # of a beam: logsumexp over the allowed tokens, if requested
    alignment: list[int] | None = None  # of a prompt whose last token is computed, if requested


# -- The executor of a step.


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

    def encode_ahead(self, source: Source, layers: int, model: str = "") -> None:
        """Compute the next `layers` layers of the encoder for a source that a later step finishes.

        `model` is the model or adapter that its request names.
        """

    def forget_ahead(self) -> None:
        """Drop the source that `encode_ahead` started."""

    def draft(self, runs: Sequence[DraftRun]) -> list[tuple[int, ...]]:
        """Return the draft model's proposals for each run; only where there is a draft model."""

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


# -- What an engine could compute in its next step, and the part of it that the pacer allows.


@dataclass(frozen=True, slots=True)
class StepDemand:
    """The work that one engine could do in its next step.

    `prompt_tokens` are decoder tokens of prompts, which can be split. Tokens of one source, or of one text to encode,
    belong together: `whole_tokens` is the smallest part of the first such input (one layer, as its share of the tokens,
    or the whole input if layers cannot be split), 0 without one. `all_whole_tokens` are those that one step could take.
    """

    decodes: int = 0
    streams: bool = False  # some of the decoded tokens are streamed
    waiting: int = 0  # sequences that are not admitted, without those that decode nothing
    prompt_tokens: int = 0
    whole_tokens: int = 0
    all_whole_tokens: int = 0

    @property
    def prefills(self) -> bool:
        return self.prompt_tokens > 0 or self.whole_tokens > 0


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The part of its demand that an engine may compute in one step; None: up to the engine's own limits.

    If `whole_tokens` is not 0, the step takes at least the demand's. A step has foreground or `background` work.
    """

    decodes: bool = True
    prompt_tokens: int | None = None
    whole_tokens: int | None = None
    background: bool | None = None  # None: both kinds of work


UNLIMITED = StepBudget()


DECODES_ONLY = StepBudget(prompt_tokens=0, whole_tokens=0)
