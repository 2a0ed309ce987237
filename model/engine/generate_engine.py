"""The generate engine: continuous batching for one model, one step at a time. It handles token ids, no text.

A step has three parts: schedule, execute, update. On a GPU they overlap: the host runs ahead and launches a step before
the previous one's tokens arrive; the step's work is discarded for sequences that turn out to have ended. A sequence
that needs its last token before the next step (for penalties, a grammar, log-probabilities or beam search) takes part
in every other step.

Every added sequence ends with exactly one output that has a `finish_reason`, and its KV blocks are freed in the same
step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress, count
from typing import TYPE_CHECKING

from triptych.model.api.messages import Abort
from triptych.model.api.request import FinishReason, Request, TokenOutput, received
from triptych.model.api.stats import EngineStats, StepStats
from triptych.model.engine.compiling_grammars import CompilingGrammars
from triptych.model.engine.fault_isolation import Unit, group_units, run_isolated, select, uses_any
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.scheduled_step import (
    UNLIMITED,
    PendingStep,
    Runner,
    SampledToken,
    ScheduledSequence,
    SchedulerOutput,
    StepBudget,
    StepDemand,
)
from triptych.model.engine.scheduling.scheduler import Scheduler
from triptych.model.engine.scheduling.sequence import PLACEHOLDER, Beams, SequenceState, SequenceStatus
from triptych.model.engine.scheduling.source_blocks import LayersAhead
from triptych.model.engine.speculation.speculation import Speculation
from triptych.model.engine.token_outputs import search_outputs, token_output
from triptych.model.errors import ConfigError

if TYPE_CHECKING:
    from triptych.model.network.lora import LoraAdapter
    from triptych.model.text.grammar_matcher import Grammars

logger = logging.getLogger(__name__)


class GenerateEngine:
    """Schedules, executes and ends the generation requests of one model."""

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
        num_speculative_tokens: int = 0,
        draft_context: int | None = None,
        adapters: Mapping[str, LoraAdapter] | None = None,
    ) -> None:
        """`overlap`: run ahead, that is, launch a step before the previous one's tokens arrive. `draft_context`: the
        length up to which the runner's draft model proposes tokens, if it has one. `adapters` are those that requests
        may name as their model; they may change."""
        self.name = name
        self.runner = runner
        self.scheduler = scheduler
        self.max_model_len = max_model_len
        self._adapters = {} if adapters is None else adapters
        self.eos_token_ids = eos_token_ids
        self.compiling = CompilingGrammars(grammars)
        self.overlap = overlap
        self.speculation = Speculation(num_speculative_tokens, draft_context)
        self._pending_step: PendingStep | None = None
        self._last_collect_time = 0.0
        self._arrival_numbers = count()
        self._next_deadline = math.inf  # not after that of any sequence
        self._outputs: list[TokenOutput] = []  # not yet returned to the loop

    @property
    def block_manager(self) -> BlockManager:
        return self.scheduler.block_manager

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self._pending_step)

    @property
    def waits_for_grammars(self) -> bool:
        """Whether all remaining sequences wait for their grammars to be compiled."""
        if self._pending_step or self.scheduler.running or self.compiling.any_done:
            return False
        return not any(sequence.is_prepared for sequence in self.scheduler.waiting)

    @property
    def has_foreground(self) -> bool:
        return self.scheduler.has_foreground

    @property
    def has_background(self) -> bool:
        return self.scheduler.has_background

    def demand(self, background: bool | None = None) -> StepDemand:
        """Return what the next step could compute; a pending step counts as decoding."""
        demand = self.scheduler.demand(background)
        if self._pending_step is not None and not demand.decodes:
            demand = replace(demand, decodes=len(self._pending_step.scheduled.scheduled))
        return demand

    def add(self, request: Request) -> None:
        """Add a request; its `max_tokens` is limited to the rest of the context length.

        Raises `ConfigError` for one with pictures where the model reads none.
        """
        if request.images and not self.scheduler.pictures.max_rows:
            raise ConfigError(f"images: {self.name} does not read pictures in prompts")
        adapter = self._adapters.get(request.model)
        request = self._limit_max_tokens(request)
        if request.images:
            request = replace(request, images=received(request.images))
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)
        indices = range(1 if request.params.num_beams > 1 else request.params.n)
        pools = len(self.block_manager.pools)
        sequences = [
            SequenceState.of(request, index, next(self._arrival_numbers), self.eos_token_ids, pools)
            for index in indices
        ]
        if request.params.num_beams > 1:
            sequences[0].searching()
        if request.params.grammar:
            self.compiling.begin(request.params.grammar, sequences)
        self.speculation.prepare(request, sequences)
        for sequence in sequences:
            sequence.is_prepared = not request.params.grammar
            sequence.adapter = 0 if adapter is None else adapter.number
            self.scheduler.add(sequence)

    def _limit_max_tokens(self, request: Request) -> Request:
        limit = max(1, self.max_model_len - len(request.prompt_token_ids))
        if request.params.max_tokens <= limit:
            return request
        return replace(request, params=replace(request.params, max_tokens=limit))

    def abort(self, request_id: str, index: int | None, reason: FinishReason) -> list[TokenOutput]:
        """End the sequences of a request, or only its sequence `index`, now; idempotent."""
        return self.abort_all([Abort(self.name, request_id, index, reason)])

    def abort_all(self, aborts: Sequence[Abort]) -> list[TokenOutput]:
        """End the named sequences in one pass: thousands of waiting clients may disconnect together."""
        named: dict[str, list[Abort]] = {}
        for abort in aborts:
            named.setdefault(abort.request_id, []).append(abort)
        found = [(s, named[s.request.request_id]) for s in self.scheduler if s.request.request_id in named]
        for sequence, of_request in found:
            reason = next((one.reason for one in of_request if one.index in (None, sequence.index)), None)
            if reason is not None:
                self._end_all([sequence], reason)
        return self._take_outputs()

    def recover(self) -> list[TokenOutput]:
        """Reset the engine after an exception: end every sequence with an error and empty the KV pool.

        Outputs from before the exception are returned too.
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
        self.compiling.clear()
        self.scheduler.reset()
        self.speculation.reset()
        self.runner.forget_ahead()
        return self._take_outputs()

    def _take_outputs(self) -> list[TokenOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def check_deadlines(self) -> list[TokenOutput]:
        """End the sequences whose deadline has passed, and give others their compiled grammars."""
        self._end_expired(time.monotonic())
        self._attach_grammars()
        return self._take_outputs()

    def finish_pending(self) -> tuple[list[TokenOutput], StepStats | None]:
        """Wait for the pending step, if there is one; return its outputs and statistics."""
        stats = self._collect_pending() if self._pending_step is not None else None
        return self._take_outputs(), stats

    def step(self, budget: StepBudget = UNLIMITED) -> tuple[list[TokenOutput], StepStats | None]:
        """Compute one step within `budget`, or launch it and collect the previous one; return what was finished."""
        self._end_expired(time.monotonic())
        self._attach_grammars()
        stats = None
        if self._pending_step is not None and not self._pending_step.allows_run_ahead:
            stats = self._collect_pending()
        began = time.monotonic()
        scheduled = self.scheduler.schedule(budget)
        self.speculation.propose(scheduled, self.scheduler)
        for step in scheduled.scheduled:
            if step.sequence.scheduled_time is None:
                step.sequence.scheduled_time = began
        for ahead in scheduled.ahead:
            self._encode_ahead(ahead)
        self.speculation.run_draft_model(scheduled, self.runner, self.scheduler)
        if not scheduled.scheduled:
            stats = self._collect_pending() if self._pending_step is not None else stats
            if scheduled.ahead:
                stats = self._step_stats(scheduled, time.monotonic() - began)
        elif self.overlap:
            stats = self._launch(scheduled, began) or stats
        else:
            stats = self._compute(scheduled, began)
        return self._take_outputs(), stats

    def _encode_ahead(self, ahead: LayersAhead) -> None:
        """Compute some layers of a source; if that fails, a later step encodes it whole and isolates the fault."""
        try:
            self.runner.encode_ahead(ahead.source, ahead.layers, ahead.model)
        except Exception:
            logger.exception("a source could not be encoded in parts")
            self.scheduler.source_passes.fail()
            self.runner.forget_ahead()

    def _compute(self, scheduled: SchedulerOutput, began: float) -> StepStats:
        """Execute a step and wait for its tokens; if it raises, isolate the fault."""
        parts = run_isolated(group_units(scheduled), lambda units: self._execute(scheduled, units), self.runner.probe)
        unwritten: set[tuple[int, int]] = set()
        for part, sampled in parts:
            steps = list(chain.from_iterable(part))
            if sampled is None:
                unwritten.update(*(self.block_manager.forget_unwritten(step.sequence) for step in steps))
                self._end_all([step.sequence for step in steps], FinishReason.ERROR)
            elif unwritten and any(uses_any(step.sequence, unwritten) for step in steps):
                self.scheduler.preempt(steps[0].sequence)  # it shares blocks that a failed sequence did not fill
            else:
                for step in steps:
                    step.sequence.num_computed_tokens = step.stop
                self._update(steps, sampled)
        return self._step_stats(scheduled, time.monotonic() - began)

    def _launch(self, scheduled: SchedulerOutput, began: float) -> StepStats | None:
        """Launch a step, then collect the previous one."""
        before = self._pending_step
        try:
            launch = self.runner.launch(scheduled, before.launch if before is not None else None)
        except Exception:
            logger.exception("a step of %d sequences could not be launched", len(scheduled.scheduled))
            if before is not None:
                self._collect_pending()
            unfinished = [step for step in scheduled.scheduled if not step.sequence.finished]
            if not unfinished:
                return None
            return self._compute(select(scheduled, unfinished), began)
        self._pending_step = PendingStep(launch, scheduled, began)
        for step in scheduled.scheduled:
            step.sequence.num_computed_tokens = step.stop
            if step.samples and step.sequence.can_run_ahead:
                step.sequence.append_placeholder()
        return self._collect(before) if before is not None else None

    def _collect_pending(self) -> StepStats:
        """Wait for the pending step."""
        assert self._pending_step is not None
        pending, self._pending_step = self._pending_step, None
        return self._collect(pending)

    def _collect(self, pending: PendingStep) -> StepStats:
        """Wait for a launched step and update the sequences that have not ended since."""
        sampled = pending.launch.collect()
        steps = pending.scheduled.scheduled
        unfinished = [not step.sequence.finished for step in steps]
        self._update(compress(steps, unfinished), compress(sampled, unfinished))
        now = time.monotonic()
        began, self._last_collect_time = max(pending.began, self._last_collect_time), now
        return self._step_stats(pending.scheduled, now - began)

    def _step_stats(self, scheduled: SchedulerOutput, seconds: float) -> StepStats:
        steps = scheduled.scheduled
        # A drafting sequence decodes with all of its tokens.
        decodes = sum(
            step.num_tokens for step in steps if step.num_tokens == 1 + len(step.drafts) and not step.encode_source
        )
        whole, tokens = scheduled.num_whole_tokens, scheduled.num_tokens
        if decodes == tokens:
            self.speculation.measured(seconds)
        return StepStats(self.name, "generate", seconds, tokens, len(steps), decodes, whole)

    def wait_for_grammars(self, seconds: float) -> None:
        """Wait for the next compiled grammar, at most `seconds`, if no sequence can run without one."""
        if self.waits_for_grammars:
            self.compiling.wait(seconds)

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
            window_usage=self.block_manager.window_usage,
            free_states=self.block_manager.num_free_states,
            cached_states=self.block_manager.num_cached_states,
            total_states=self.block_manager.num_states,
            drafts=self.speculation.num_drafts,
            draft_tokens=self.speculation.num_draft_tokens,
            accepted_tokens=self.speculation.num_accepted_tokens,
            model_draft_tokens=self.speculation.num_model_draft_tokens,
            model_accepted_tokens=self.speculation.num_model_accepted_tokens,
            pictures=self.scheduler.pictures.num_encoded,
            picture_tokens=self.scheduler.pictures.num_encoded_rows,
        )

    def check_invariants(self) -> None:
        self.block_manager.check_invariants(self.scheduler)

    def _execute(self, output: SchedulerOutput, units: Iterable[Unit]) -> list[SampledToken | None]:
        """Execute these units of a step."""
        return self.runner.execute(select(output, list(chain.from_iterable(units))))

    def _update(self, steps: Iterable[ScheduledSequence], sampled: Iterable[SampledToken | None]) -> None:
        """Append the sampled tokens to their sequences, cache full blocks and advance complete beam searches."""
        searches: dict[int, Beams] = {}
        for step, token in zip(steps, sampled, strict=True):
            sequence, beams = step.sequence, step.sequence.beams
            # Placeholders after this token's position belong to steps that were launched ahead.
            ahead = sequence.drop_placeholders(step.stop) if token is not None else 0
            self._cache_full_blocks(sequence)
            if token is not None and beams is not None:
                if sequence.status is not SequenceStatus.RUNNING or sequence not in beams.members:
                    continue  # its search was preempted or advanced while the step was pending
                place = beams.members.index(sequence)
                beams.candidates[place], beams.log_masses[place] = token.candidates, token.log_mass
                beams.forced = token.forced
                searches[id(beams)] = beams
            elif token is not None:
                if step.drafts:
                    self._append_run(step, token)
                else:
                    self._append_token(sequence, token)
                if ahead > 1 and not sequence.finished:
                    sequence.token_ids.append(PLACEHOLDER)
        for beams in searches.values():
            if len(beams.candidates) == len(beams.members):
                self._advance(beams)

    def _advance(self, beams: Beams) -> None:
        """Advance a search whose beams all have their candidates; output its hypotheses when it is done."""
        places = range(len(beams.members))
        chosen = beams.search.advance(
            [beams.candidates[place] for place in places],
            [sequence.output_token_ids for sequence in beams.members],
            [beams.log_masses[place] for place in places],
        )
        if beams.search.done:
            # No hypothesis and no candidate left: the grammar allows no token.
            matcher = beams.members[0].matcher if not beams.search.finished else None
            self._end_search(beams, FinishReason.ERROR if matcher else None, matcher.failure if matcher else None)
            return
        parents = [beams.members[index] for index, _ in chosen]
        try:
            children = [
                parent.fork(token, forced=beams.forced) for parent, (_, token) in zip(parents, chosen, strict=True)
            ]
        except Exception:
            logger.exception("a beam search could not continue")
            self._end_search(beams, FinishReason.ERROR)
            return
        for parent, child in zip(parents, children, strict=True):
            self.block_manager.fork(parent, child)
        self.scheduler.replace_beams(beams, children)

    def _end_search(self, beams: Beams, reason: FinishReason | None, error: str | None = None) -> None:
        """Output the n best hypotheses and end the search; `reason` is None if the search is done."""
        self._outputs += search_outputs(beams, reason, error)
        for sequence in list(beams.members):
            self.scheduler.finish(sequence, reason or FinishReason.STOP)

    def _append_run(self, step: ScheduledSequence, token: SampledToken) -> None:
        """Append a token, and the tokens sampled after each of its accepted drafts."""
        sequence = step.sequence
        is_computed = sequence.num_computed_tokens == step.stop  # else it was preempted while the step was pending
        by_model = self.speculation.verified(sequence, len(step.drafts), len(token.later))
        for place, one in enumerate((token, *token.later)):
            if place and is_computed:
                sequence.num_computed_tokens += 1
                self._cache_full_blocks(sequence)
            self._append_token(sequence, one)
            output = self._outputs[-1]  # of this token: a stop string may end the text with any of them
            output.drafted_tokens = len(step.drafts) if place == 0 else 0
            output.accepted_tokens = int(place < len(token.later))
            self.speculation.accepted(output.accepted_tokens, by_model=by_model)
            if sequence.finished:
                break
        if is_computed and not sequence.finished:
            self.block_manager.trim(sequence)

    def _cache_full_blocks(self, sequence: SequenceState) -> None:
        if sequence.num_computed_tokens // self.block_manager.block_size > sequence.num_offered_blocks:
            self.block_manager.prefixes.cache_full_blocks(sequence)

    def _append_token(self, sequence: SequenceState, token: SampledToken) -> None:
        """Append a sampled token to its sequence and output it."""
        try:
            sequence.append(token.token_id, forced=token.forced)
        except Exception:  # of its grammar, for example: other sequences are not affected
            logger.exception("a sequence could not take its next token")
            self._end(sequence, FinishReason.ERROR)
            return
        if token.masked_logprob is not None:
            sequence.cumulative_logprob += token.masked_logprob
        # Before anything that could raise: `recover` ends what is in the scheduler.
        self._outputs.append(token_output(sequence, token))
        if sequence.finished:
            self.scheduler.remove(sequence)

    def _attach_grammars(self) -> None:
        """Give sequences their compiled grammars; end those whose grammar failed to compile."""
        for sequences, error in self.compiling.attach():
            self._end_all(sequences, FinishReason.ERROR, error)

    def _end_expired(self, now: float) -> None:
        if now < self._next_deadline:
            return
        timed = [(s.request.deadline, s) for s in self.scheduler if s.request.deadline is not None]
        self._next_deadline = min((deadline for deadline, _ in timed if deadline > now), default=math.inf)
        self._end_all([sequence for deadline, sequence in timed if deadline <= now], FinishReason.DEADLINE)

    def _end_all(self, sequences: Iterable[SequenceState], reason: FinishReason, error: str | None = None) -> None:
        for sequence in sequences:
            if sequence.finished:
                continue  # ended with another beam of its search
            if sequence.beams is None:
                self._end(sequence, reason, error)
            else:
                self._end_search(sequence.beams, reason, error)
        if self.scheduler.source_passes.current is None:
            self.runner.forget_ahead()

    def _end(self, sequence: SequenceState, reason: FinishReason, error: str | None = None) -> None:
        self._outputs.append(
            TokenOutput(sequence.request.request_id, sequence.index, finish_reason=reason, error=error)
        )
        self.scheduler.finish(sequence, reason)
