"""Generation for one model: requests in, tokens out, one step at a time. Speaks token ids; text is not its business.

A step is three verbs: schedule, execute, update. Where the model runs on a device of its own, they overlap: a step is
launched before the tokens of the one before are known here, for sequences that turn out to have ended in vain; one that
needs its token first (for a penalty, a grammar, log-probabilities, its search) takes part in every other step. Every
sequence that was added ends with exactly one output that has a `finish_reason`; whatever way it ends, its blocks are
free in the same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import chain, compress, count
from typing import TYPE_CHECKING, Any, Protocol

from model.api.request import FinishReason, Request, TokenOutput
from model.api.stats import EngineStats, StepStats
from model.engine.fault_isolation import run_isolated
from model.engine.scheduling.block_manager import BlockManager
from model.engine.scheduling.scheduler import SampledToken, ScheduledSequence, Scheduler, SchedulerOutput
from model.engine.scheduling.sequence import PLACEHOLDER, Beams, SequenceState, SequenceStatus
from model.engine.scheduling.step_budget import (
    UNLIMITED,
    StepBudget,
    StepDemand,
)
from model.errors import ConfigError
from model.text.grammar import GrammarError

if TYPE_CHECKING:
    from model.text.grammar_matcher import Grammars, Matcher

logger = logging.getLogger(__name__)

Unit = list[ScheduledSequence]  # what cannot be computed apart: a sequence, or all beams of a search


class Launch(Protocol):
    """A step under way."""

    def collect(self) -> list[SampledToken | None]:
        """Wait for its tokens, one for each scheduled sequence that samples."""


class Runner(Protocol):
    """What turns a step into tokens: `ModelRunner`, or a scripted one in tests."""

    def execute(self, output: SchedulerOutput) -> list[SampledToken | None]:
        """Launch and collect."""

    def launch(self, output: SchedulerOutput, before: Any = None) -> Launch:
        """Start a step; the tokens of the launch `before` it may not be known here yet."""

    def probe(self) -> None:
        """The smallest pass there is; raises if not even that works."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that was launched and is not collected."""

    launch: Launch
    scheduled: SchedulerOutput
    began: float

    @property
    def may_be_followed(self) -> bool:
        """Whether the next step is launched before this one's tokens are known here.

        Sequences that must see their token first sit the next step out. Where they are not the fewer, the wait costs
        less than a step without them.
        """
        steps = self.scheduled.scheduled
        seeing = sum(step.samples and not step.sequence.can_run_ahead for step in steps)
        return not seeing or 2 * seeing < len(steps)


class GenerateEngine:
    """Continuous batching over one model."""

    def __init__(
        self,
        name: str,
        runner: Runner,
        scheduler: Scheduler,
        *,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        grammars: Grammars | None = None,
        overlap: bool = False,
    ) -> None:
        """`overlap`: launch a step before the tokens of the one before are here."""
        self.name = name
        self.runner = runner
        self.scheduler = scheduler
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.grammars = grammars  # None: a model that knows no text takes none
        self.overlap = overlap
        self._pending_step: PendingStep | None = None
        self._landed = 0.0  # when the latest flight was collected
        self._arrivals = count()
        self._preparing: list[tuple[Future[Matcher], list[SequenceState]]] = []
        self._outputs: list[TokenOutput] = []  # put out and not yet handed over

    @property
    def block_manager(self) -> BlockManager:
        return self.scheduler.block_manager

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self._pending_step)

    @property
    def only_prepares(self) -> bool:
        """Whether all that is left to do waits for its grammar to be compiled."""
        if self._pending_step or self.scheduler.running or any(prepared.done() for prepared, _ in self._preparing):
            return False
        return not any(sequence.is_prepared for sequence in self.scheduler.waiting)

    def demand(self) -> StepDemand:
        """What the next step could compute; a step under way counts as one that decodes."""
        demand = self.scheduler.demand()
        if self._pending_step is not None and not demand.decodes:
            demand = replace(demand, decodes=len(self._pending_step.scheduled.scheduled))
        return demand

    def add(self, request: Request) -> None:
        """Take a request on; what it may generate is cut to what the context leaves, however it is sampled."""
        request = self._in_context(request)
        indices = range(1 if request.params.num_beams > 1 else request.params.n)
        pools = len(self.block_manager.pools)
        sequences = [
            SequenceState.of(request, index, next(self._arrivals), self.eos_token_ids, pools) for index in indices
        ]
        if request.params.num_beams > 1:
            sequences[0].searching()
        if request.params.grammar:
            assert self.grammars is not None, f"{self.name} knows no text"
            self._preparing.append((self.grammars.compile(request.params.grammar), sequences))
        for sequence in sequences:
            sequence.is_prepared = not request.params.grammar
            self.scheduler.add(sequence)

    def _in_context(self, request: Request) -> Request:
        room = max(1, self.max_model_len - len(request.prompt_token_ids))
        if request.params.max_tokens <= room:
            return request
        return replace(request, params=replace(request.params, max_tokens=room))

    def abort(self, request_id: str, index: int | None, reason: FinishReason) -> list[TokenOutput]:
        """End the sequences of a request (or one of them) now; idempotent."""
        wanted = [s for s in self.scheduler if s.request.request_id == request_id and index in (None, s.index)]
        self._end_all(wanted, reason)
        return self._handed_over()

    def recover(self) -> list[TokenOutput]:
        """Begin anew after a step that raised: end every sequence with an error and empty the pool.

        What was put out before it raised is handed over too. Raises what the runner's probe raises: then the fault is
        not in this engine's state, and nothing would get better.
        """
        pending, self._pending_step = self._pending_step, None
        ended = {(output.request_id, output.index) for output in self._outputs if output.finish_reason is not None}
        steps = pending.scheduled.scheduled if pending is not None else []
        for sequence in [*self.scheduler, *(step.sequence for step in steps)]:
            indices = [sequence.index] if sequence.beams is None else range(sequence.params.n)
            for key in [(sequence.request.request_id, index) for index in indices]:
                if key not in ended:
                    ended.add(key)
                    self._outputs.append(TokenOutput(*key, finish_reason=FinishReason.ERROR))
            sequence.finish(FinishReason.ERROR)
        self._preparing.clear()
        self.scheduler.reset()
        self.runner.probe()
        return self._handed_over()

    def _handed_over(self) -> list[TokenOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def check_deadlines(self) -> list[TokenOutput]:
        """End the sequences whose deadline has passed, and let those begin whose grammars are compiled."""
        self._expire(time.monotonic())
        self._prepared()
        return self._handed_over()

    def finish_pending(self) -> tuple[list[TokenOutput], StepStats | None]:
        """Wait for the step under way, if there is one; the outputs of all sequences it moved or ended."""
        stats = self._land() if self._pending_step is not None else None
        return self._handed_over(), stats

    def step(self, budget: StepBudget = UNLIMITED) -> tuple[list[TokenOutput], StepStats | None]:
        """Compute one step within `budget`; the outputs of all sequences it moved or ended."""
        self._expire(time.monotonic())
        self._prepared()
        stats = None
        if self._pending_step is not None and not self._pending_step.may_be_followed:
            stats = self._land()
        began = time.monotonic()
        scheduled = self.scheduler.schedule(budget)
        for step in scheduled.scheduled:
            if step.sequence.scheduled_time is None:
                step.sequence.scheduled_time = began
        if not scheduled.scheduled:
            stats = self._land() if self._pending_step is not None else stats
        elif self.overlap:
            stats = self._launch(scheduled, began) or stats
        else:
            stats = self._compute(scheduled, began)
        return self._handed_over(), stats

    def _compute(self, scheduled: SchedulerOutput, began: float) -> StepStats:
        """A step from its beginning to its end."""
        parts = run_isolated(_units(scheduled), lambda units: self._execute(scheduled, units), self.runner.probe)
        unwritten: set[tuple[int, int]] = set()
        for part, sampled in parts:
            steps = list(chain.from_iterable(part))
            if sampled is None:
                unwritten.update(*(self.block_manager.forget_unwritten(step.sequence) for step in steps))
                self._end_all([step.sequence for step in steps], FinishReason.ERROR)
            elif unwritten and any(_reads(step.sequence, unwritten) for step in steps):
                self.scheduler.preempt(steps[0].sequence)  # it shared blocks that were never filled
            else:
                for step in steps:
                    step.sequence.num_computed_tokens += step.num_tokens
                self._update(steps, sampled)
        return self._account(scheduled, time.monotonic() - began)

    def _launch(self, scheduled: SchedulerOutput, began: float) -> StepStats | None:
        """Start a step, then take what the one before has brought."""
        before = self._pending_step
        try:
            launch = self.runner.launch(scheduled, before.launch if before is not None else None)
        except Exception:
            logger.exception("a step of %d sequences could not be launched", len(scheduled.scheduled))
            if before is not None:
                self._land()
            left = [step for step in scheduled.scheduled if not step.sequence.finished]
            if not left:
                return None
            return self._compute(_part(scheduled, left), began)
        self._pending_step = PendingStep(launch, scheduled, began)
        for step in scheduled.scheduled:
            step.sequence.num_computed_tokens += step.num_tokens
            if step.samples and step.sequence.can_run_ahead:
                step.sequence.append_placeholder()
        return self._collect(before) if before is not None else None

    def _land(self) -> StepStats:
        """Wait for the step that is under way."""
        assert self._pending_step is not None
        pending, self._pending_step = self._pending_step, None
        return self._collect(pending)

    def _collect(self, pending: PendingStep) -> StepStats:
        """What a launched step has brought, for those who have not ended since."""
        sampled = pending.launch.collect()
        steps = pending.scheduled.scheduled
        alive = [not step.sequence.finished for step in steps]
        self._update(compress(steps, alive), compress(sampled, alive))
        now = time.monotonic()
        began, self._landed = max(pending.began, self._landed), now
        return self._account(pending.scheduled, now - began)

    def _account(self, scheduled: SchedulerOutput, seconds: float) -> StepStats:
        steps = scheduled.scheduled
        decodes = sum(step.num_tokens == 1 and not step.encode_source for step in steps)
        whole = sum(step.sequence.source_length for step in steps if step.encode_source)
        return StepStats(self.name, "generate", seconds, scheduled.num_tokens, len(steps), decodes, whole)

    def wait_prepared(self, seconds: float) -> None:
        """Return once a grammar is compiled, or after so long."""
        if self._preparing and self.only_prepares:
            wait([prepared for prepared, _ in self._preparing], seconds, "FIRST_COMPLETED")

    def stats(self) -> EngineStats:
        return EngineStats(
            model=self.name,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            free_blocks=self.block_manager.num_free,
            total_blocks=self.block_manager.num_blocks,
            cached_blocks=self.block_manager.num_cached,
            preemptions=self.scheduler.num_preemptions,
            prefix_queries=self.block_manager.num_queried_tokens,
            prefix_hits=self.block_manager.num_hit_tokens,
        )

    def check_invariants(self) -> None:
        self.block_manager.check_invariants(self.scheduler)

    def _execute(self, whole: SchedulerOutput, units: Iterable[Unit]) -> list[SampledToken | None]:
        """The model over these units of a step."""
        return self.runner.execute(_part(whole, list(chain.from_iterable(units))))

    def _update(self, steps: Iterable[ScheduledSequence], sampled: Iterable[SampledToken | None]) -> None:
        searches: dict[int, Beams] = {}
        block_size = self.block_manager.block_size
        for step, token in zip(steps, sampled, strict=True):
            sequence, beams = step.sequence, step.sequence.beams
            # What was built upon the token unseen stands behind it.
            ahead = sequence.drop_placeholders(step.start + step.num_tokens) if token is not None else 0
            if sequence.num_computed_tokens // block_size > sequence.num_offered_blocks:
                self.block_manager.cache_full_blocks(sequence)
            if token is not None and beams is not None:
                if sequence.status is not SequenceStatus.RUNNING or sequence not in beams.members:
                    continue  # its search was preempted, or went on, while the step was under way
                beams.candidates[beams.members.index(sequence)] = token.candidates
                beams.forced = token.forced
                searches[id(beams)] = beams
            elif token is not None:
                self._take(step, token)
                if ahead > 1 and not sequence.finished:
                    sequence.token_ids.append(PLACEHOLDER)
        for beams in searches.values():
            if len(beams.candidates) == len(beams.members):
                self._advance(beams)

    def _advance(self, beams: Beams) -> None:
        """Let a search whose beams are all computed take its next tokens; put its hypotheses out when it is over."""
        candidates = [beams.candidates[place] for place in range(len(beams.members))]
        chosen = beams.search.advance(candidates, [sequence.output_token_ids for sequence in beams.members])
        if beams.search.done:
            stuck = beams.members[0].matcher if not beams.search.finished else None
            self._end_search(beams, FinishReason.ERROR if stuck else None, stuck.failure if stuck else None)
            return
        parents = [beams.members[place] for place, _ in chosen]
        try:
            children = [
                parent.fork(token, forced=beams.forced) for parent, (_, token) in zip(parents, chosen, strict=True)
            ]
        except Exception:
            logger.exception("a search could not go on")
            self._end_search(beams, FinishReason.ERROR)
            return
        for parent, child in zip(parents, children, strict=True):
            self.block_manager.fork(parent, child)
        self.scheduler.replace_beams(beams, children)

    def _end_search(self, beams: Beams, reason: FinishReason | None, error: str | None = None) -> None:
        """Put the n best hypotheses out; `reason` where the search was cut short, None where it is over."""
        first = beams.members[0]
        best = beams.search.best([sequence.output_token_ids for sequence in beams.members])
        for index in range(first.params.n):
            output = TokenOutput(
                first.request.request_id, index, finish_reason=reason or FinishReason.LENGTH, error=error
            )
            if index < len(best):
                output.token_ids, output.score = list(best[index].token_ids), best[index].score
                ended = bool(output.token_ids) and output.token_ids[-1] in first.stop_token_ids
                cut = beams.forced and first.matcher is not None and len(output.token_ids) == first.params.max_tokens
                if ended and not cut and reason is None:
                    output.finish_reason, output.stop_reason = FinishReason.STOP, output.token_ids[-1]
            output.scheduled_time = first.scheduled_time
            output.cached_tokens = min(first.num_cached_tokens, first.num_prompt_tokens)
            self._outputs.append(output)
        for sequence in list(beams.members):
            self.scheduler.finish(sequence, reason or FinishReason.STOP)

    def _take(self, step: ScheduledSequence, token: SampledToken) -> None:
        """Put a sequence's next token out."""
        sequence = step.sequence
        first = sequence.num_output_tokens == 0
        try:
            sequence.append(token.token_id, forced=token.forced)
        except Exception:  # of its own grammar, say: nobody else's
            logger.exception("a sequence could not take its next token")
            self._end(sequence, FinishReason.ERROR)
            return
        output = TokenOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=[token.token_id],
            logprobs=None if token.logprob is None else [token.logprob],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_token_id,
            error=sequence.error,
        )
        if first:
            output.scheduled_time = sequence.scheduled_time
            output.cached_tokens = min(sequence.num_cached_tokens, sequence.num_prompt_tokens)
            if sequence.params.prompt_logprobs is not None:
                output.prompt_logprobs = sequence.prompt_logprobs
        self._outputs.append(output)  # before anything that could raise: what is in the scheduler has not ended
        if sequence.finished:
            self.scheduler.remove(sequence)

    def _prepared(self) -> None:
        """Let those go on whose grammars are compiled by now; end those that have none."""
        done = [one for one in self._preparing if one[0].done()]
        self._preparing = [one for one in self._preparing if one not in done]
        for prepared, sequences in done:
            waiting = [sequence for sequence in sequences if not sequence.finished]
            try:
                matcher = prepared.result().with_stop_tokens(sequences[0].stop_token_ids)
            except (GrammarError, ConfigError) as error:
                self._end_all(waiting, FinishReason.ERROR, str(error))
                continue
            except Exception:
                logger.exception("a grammar could not be compiled")
                self._end_all(waiting, FinishReason.ERROR)
                continue
            for sequence in waiting:
                sequence.matcher, sequence.is_prepared = matcher.fork(), True

    def _expire(self, now: float) -> None:
        late = [s for s in self.scheduler if s.request.deadline is not None and s.request.deadline <= now]
        self._end_all(late, FinishReason.DEADLINE)

    def _end_all(self, sequences: Iterable[SequenceState], reason: FinishReason, error: str | None = None) -> None:
        for sequence in sequences:
            if sequence.finished:
                continue  # with its other beams
            if sequence.beams is None:
                self._end(sequence, reason, error)
            else:
                self._end_search(sequence.beams, reason, error)

    def _end(self, sequence: SequenceState, reason: FinishReason, error: str | None = None) -> None:
        self._outputs.append(
            TokenOutput(sequence.request.request_id, sequence.index, finish_reason=reason, error=error)
        )
        self.scheduler.finish(sequence, reason)


def _part(whole: SchedulerOutput, steps: list[ScheduledSequence]) -> SchedulerOutput:
    """These of a step's sequences, with the copies of blocks that they need."""
    copies = whole.copies
    if copies and len(steps) < len(whole.scheduled):
        filled = {(pool, block) for step in steps for pool, table in enumerate(step.sequence.tables) for block in table}
        copies = [copy for copy in copies if (copy.pool, copy.target) in filled]
    return SchedulerOutput(steps, copies)


def _reads(sequence: SequenceState, blocks: set[tuple[int, int]]) -> bool:
    """Whether a sequence has one of these blocks, each named by its pool and its number there."""
    pairs = zip(sequence.tables, sequence.source_tables, strict=True)
    return any((pool, block) in blocks for pool, tables in enumerate(pairs) for block in chain(*tables))


def _units(output: SchedulerOutput) -> list[Unit]:
    units: dict[int, Unit] = {}
    for step in output.scheduled:
        units.setdefault(id(step.sequence.beams or step.sequence), []).append(step)
    return list(units.values())
