"""Decides which sequences compute how many tokens in the next step. Policy only: no tensors, no clock.

There is no prefill phase and no decode phase. Each sequence computes the tokens that are missing from its KV cache,
within the step's budget. Order is by priority, then by arrival; tenants take turns (`fair_shares`).

A running sequence that needs a block and finds none free preempts the last in order, which is recomputed later. New
sequences are admitted strictly in order, and only when their whole prompt fits. So a sequence that fits into an empty
engine always finishes.

Where two sequences have a common prefix, the first in order computes it and the other one waits, then continues from
the shared blocks. If the first ends early, the other one computes the prefix itself.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from triptych.model.api.request import FinishReason, Source
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.fair_shares import FairShares
from triptych.model.engine.scheduling.picture_steps import PictureSteps
from triptych.model.engine.scheduling.scheduled_step import (
    UNLIMITED,
    ScheduledSequence,
    SchedulerOutput,
    StepBudget,
    StepDemand,
)
from triptych.model.engine.scheduling.sequence import Beams, SequenceState, SequenceStatus
from triptych.model.engine.scheduling.source_blocks import SourcePasses

_COUNTED = 256  # waiting sequences that are looked at; the pacer needs no larger number


class Scheduler:
    """Waiting and running sequences of one model."""

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        encoder_layers: int = 1,
        picture_rows: int = 0,
        *,
        both_ways: bool = False,
    ) -> None:
        """`encoder_layers`: parts in which a source or a picture may be encoded, a step each. `picture_rows` of
        pictures are kept, if the model reads any; `both_ways`: a picture's rows are computed in one step."""
        self.source_passes = SourcePasses(encoder_layers)
        self.pictures = PictureSteps(block_manager.hasher, self.source_passes, picture_rows, both_ways=both_ways)
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[SequenceState] = []  # by SequenceState.order
        self.running: list[SequenceState] = []  # by SequenceState.order
        self.num_preemptions = 0
        self.shares = FairShares()
        self._frontiers: set[bytes] = set()  # blocks that running prompts will make known next

    def __iter__(self) -> Iterator[SequenceState]:
        yield from self.running
        yield from self.waiting

    def add(self, sequence: SequenceState) -> None:
        self.shares.came(sequence)
        insort(self.waiting, sequence, key=lambda s: s.order)

    def finish(self, sequence: SequenceState, reason: FinishReason) -> None:
        """End a waiting or running sequence, and free its blocks."""
        sequence.finish(reason)
        self.remove(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Remove a finished sequence from its queue, and free its blocks."""
        self.source_passes.forget(sequence)
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self.block_manager.free(sequence)

    def reset(self) -> None:
        """Remove all sequences, and free all blocks."""
        self.waiting.clear()
        self.running.clear()
        self.source_passes.current = None
        self.pictures.reset()
        self.block_manager.reset()

    @property
    def has_foreground(self) -> bool:
        return any(queue and not queue[0].is_background for queue in (self.running, self.waiting))

    @property
    def has_background(self) -> bool:
        return any(queue and queue[-1].is_background for queue in (self.running, self.waiting))

    def demand(self, background: bool | None = None) -> StepDemand:
        """Return what the next step could compute; of the waiting sequences, only those that it could admit count.

        `background`: count only background work, or none of it.
        """
        running, waiting = (_of_kind(queue, background) for queue in (self.running, self.waiting))
        lefts = [len(sequence.token_ids) - sequence.num_computed_tokens for sequence in running]
        decodes = lefts.count(1)
        prompt_tokens = sum(lefts) - decodes
        streams = any(left == 1 and one.is_streamed for left, one in zip(lefts, running, strict=True))
        passes, most = self.source_passes, self.max_num_batched_tokens

        def missing(sequence: SequenceState) -> list[Source | None]:
            return [span.source for span in self.pictures.missing(sequence, most)]

        sources = [source for one in running if one.request.images for source in missing(one)]
        whole_tokens = sum(map(passes.left, sources))
        places = self.max_num_seqs - (len(running) if background is False else len(self.running))
        begin = waiting
        if places <= 0 and background is not True and self.shares.are_several:
            claimant = self._claimant()
            begin, places = [claimant] if claimant is not None and self._victim_of(claimant) is not None else [], 1
        for sequence in begin:
            if places <= 0 or max(prompt_tokens, whole_tokens) >= most:
                break  # enough for one step
            if sequence.is_prepared:
                places -= 1
                prompt_tokens += sequence.num_uncomputed_tokens
                new = [sequence.request.source] if sequence.needs_source else missing(sequence)
                sources += new
                whole_tokens += sum(map(passes.left, new))
        queued = sum(not sequence.only_asks for sequence in waiting[:_COUNTED])
        first = passes.least(sources[0]) if sources else 0
        return StepDemand(decodes, streams, queued, prompt_tokens, first, whole_tokens)

    def schedule(self, budget: StepBudget = UNLIMITED) -> SchedulerOutput:
        """Return the next step within `budget`, with blocks allocated. It is empty only if nothing can run.

        Prompts take at most `budget.prompt_tokens` together, sources at most `budget.whole_tokens`. A single source
        may exceed that by one layer of the encoder, or take it whole if its layers cannot be computed apart.
        """
        output = SchedulerOutput()
        self._preempt_long()
        self.pictures.begin(budget.whole_tokens, self.max_num_batched_tokens)
        if self.shares.are_several:
            self._share_places(budget)
        left, preempted = self._schedule_running(output, budget)
        if not preempted:
            self._admit(output, left, budget.whole_tokens, budget.background)
        self.pictures.end()
        return output

    def _share_places(self, budget: StepBudget) -> None:
        """Preempt sequences of tenants that have more than their share, for the next one of a tenant that has less.

        Without a budget for prompts none is preempted: its place would be idle in this step.
        """
        if budget.prompt_tokens == 0:
            self.shares.look(self.running, self.waiting)
            return
        claimant = self._claimant()
        if claimant is None:
            return
        together = self._together(claimant)
        slots = sum(one.num_slots for one in together)
        while self._num_places() < slots or not self.block_manager.can_admit(together):
            victim = self._victim_of(claimant)
            if victim is None:
                return
            self.preempt(victim)
            self.num_preemptions -= 1  # counts only preemptions for want of a free block
            self.shares.look(self.running, self.waiting)

    def _claimant(self) -> SequenceState | None:
        """Return the next sequence to be admitted if its tenant has less than its share, among several tenants."""
        self.shares.look(self.running, self.waiting)
        if not self.shares.are_several:
            return None
        head = next((one for one in self.shares.in_turn(self.waiting) if not self._waits(one)), None)
        if head is None or head.is_background:
            return None
        slots = sum(one.num_slots for one in self._together(head))
        return head if self.shares.may_claim(head, slots, self.max_num_seqs, self._room) else None

    def _victim_of(self, claimant: SequenceState) -> SequenceState | None:
        """Return the sequence that is preempted for a claimant, as `_claimant` or `look` has counted."""
        return self.shares.one_over(claimant, self.running, self.max_num_seqs, self._room)

    @property
    def _room(self) -> int:
        """The tokens that the KV cache holds."""
        return self.block_manager.num_blocks * self.block_manager.block_size

    def _num_places(self) -> int:
        """Return how many more sequences may run."""
        return self.max_num_seqs - sum(sequence.num_slots for sequence in self.running)

    def _preempt_long(self) -> None:
        """Preempt the sequences that have left the short context of LongRoPE: all of their keys change."""
        if self.block_manager.short_context is not None:
            for sequence in list(self.running):
                if sequence.status is SequenceStatus.RUNNING and self._leaves_short_context(sequence):
                    self.preempt(sequence)

    def _leaves_short_context(self, sequence: SequenceState) -> bool:
        short = self.block_manager.short_context
        return short is not None and sequence.rotary_context <= short < sequence.num_tokens

    def _schedule_running(self, output: SchedulerOutput, limits: StepBudget) -> tuple[int, bool]:
        """Schedule the running sequences in order; return the tokens left and whether a sequence was preempted.

        Each prompt leaves half of the budget to later ones, so a short prompt does not wait for a long one.
        """
        before = self.num_preemptions
        uncomputed = self._uncomputed_within(limits)
        decoding = uncomputed.count(1)  # one token kept for each of them
        budget = self.max_num_batched_tokens
        if limits.prompt_tokens is not None:
            budget = min(budget, decoding + limits.prompt_tokens)
        prompts = sum(left > 1 for left in uncomputed)
        contested = prompts > 1 or (prompts == 1 and not all(map(self._waits, self.waiting)))
        self._frontiers.clear()
        if self.shares.are_several:
            prompts_left = [pair for pair in zip(self.running, uncomputed, strict=True) if pair[1] > 1]
            self.shares.allow_prompts(prompts_left, budget - decoding, may_admit=self._num_places() > 0)
        for sequence, left in zip(list(self.running), uncomputed, strict=True):
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted by an earlier one in this loop
            decoding -= left == 1
            available = budget - decoding
            if self.shares.allowed and left > 1:
                available = self.shares.room(sequence, available)
            elif contested and left > 1:
                available = -(-available // 2)
            num_tokens = min(left, available)
            if num_tokens > 0 and sequence.request.images:
                most = self.max_num_batched_tokens - decoding - output.num_decoder_tokens
                num_tokens = self.pictures.reach(output, sequence, num_tokens, most)
            if num_tokens <= 0:
                continue
            # It nearly always has room: a block holds many tokens.
            if not self.block_manager.has_room(sequence, num_tokens):
                num_tokens = self._continue(output, sequence, num_tokens)
            else:
                self._put(output, sequence, num_tokens)
            if left > 1:
                self.shares.spend(sequence, num_tokens)
            budget -= min(num_tokens, available)  # a picture that is not cut takes no decode's place
        # A search that was preempted because of its last beam takes the others with it.
        output.scheduled[:] = [s for s in output.scheduled if s.sequence.status is SequenceStatus.RUNNING]
        return budget, self.num_preemptions > before

    def _continue(self, output: SchedulerOutput, sequence: SequenceState, num_tokens: int) -> int:
        """Allocate blocks for up to `num_tokens` tokens of a running sequence; return how many it computes.

        A windowed pool may have room for fewer. It computes none if it is preempted, or if it is a prompt and the rest
        of the step leaves it no block.
        """
        fitting = self.pictures.uncut(sequence, self.block_manager.fitting(sequence, num_tokens))
        if not fitting and num_tokens > 1 and output.scheduled:
            return 0
        wanted = fitting or self.pictures.least(sequence)
        if not self._make_room(sequence, wanted):
            return 0
        self._allocate(output, sequence, wanted)
        return wanted

    def _make_room(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Preempt the last sequence in order until `sequence` fits; return False if that was itself."""
        while not self.block_manager.can_allocate(sequence, num_tokens):
            victim = self.running[-1]
            if self.shares.are_several and victim is not sequence:
                victim = self.shares.victim(self.running[self.running.index(sequence) + 1 :])
            self.preempt(victim)
            if sequence.status is not SequenceStatus.RUNNING:
                return False
        return True

    def preempt(self, sequence: SequenceState) -> None:
        """Free the blocks of a running sequence, or of all beams of its search, and queue it again."""
        for victim in self._together(sequence):
            self.running.remove(victim)
            self.block_manager.free(victim, ended=False)
            victim.restart()
            self.add(victim)
        self.num_preemptions += 1

    def _uncomputed_within(self, limits: StepBudget) -> list[int]:
        """Return how many tokens each running sequence could compute in this step; 0 for work that `limits` exclude."""
        uncomputed = self._catch_up()
        if limits.background is not None:
            uncomputed = [
                left if one.is_background is limits.background else 0
                for left, one in zip(uncomputed, self.running, strict=True)
            ]
        return uncomputed if limits.decodes else [left if left > 1 else 0 for left in uncomputed]

    def _catch_up(self) -> list[int]:
        """Return how many tokens each running sequence could compute in this step.

        A sequence first takes over what others computed of its prompt. It gets none while an earlier one is computing
        its next tokens.
        """
        uncomputed = [sequence.num_uncomputed_tokens for sequence in self.running]
        if self.block_manager.has_states:
            for sequence in self.running:
                self.block_manager.settle(sequence)
        if self.block_manager.has_windows:
            for sequence in self.running:
                self.block_manager.free_outside_window(sequence)
        self._frontiers.clear()
        for place, left in enumerate(uncomputed):
            if left > 1:
                sequence = self.running[place]
                self.block_manager.reuse(sequence)
                uncomputed[place] = 0 if self._follows(sequence) else sequence.num_uncomputed_tokens
                self._lead(sequence)
        return uncomputed

    def _follows(self, sequence: SequenceState) -> bool:
        """Return whether an earlier running prompt computes this one's next tokens."""
        return self.block_manager.prefixes.frontier(sequence) in self._frontiers

    def _lead(self, sequence: SequenceState) -> None:
        frontier = self.block_manager.prefixes.frontier(sequence)
        if frontier is not None:
            self._frontiers.add(frontier)

    def _admit(self, output: SchedulerOutput, budget: int, source_limit: int | None, background: bool | None) -> None:
        """Admit waiting sequences in order until one does not fit; background ones give way to others."""
        most = self.max_num_batched_tokens if source_limit is None else min(source_limit, self.max_num_batched_tokens)
        source_budget = most  # of its own: a long source must not wait for an idle decoder
        gives_way = background is False and self.has_background
        places = self._num_places()
        if budget < 1 or (places < 1 and not gives_way):
            return
        shares = self.shares
        for sequence in list(shares.in_turn(self.waiting) if shares.are_several else self.waiting):
            if budget < 1 or (places < 1 and not gives_way):
                return
            if background is not None and sequence.is_background is not background:
                if background and sequence.is_prepared:
                    return  # what becomes free is for this one
                continue
            if sequence.status is SequenceStatus.RUNNING or self._waits(sequence):
                continue  # admitted with its other beams, or later
            if shares.allowed and shares.room(sequence, budget) < 1:
                continue  # its tenant has its part of this step
            together = self._together(sequence)
            for one in together:
                if self._leaves_short_context(one):
                    one.rotate_for_long_context()
            places -= sum(one.num_slots for one in together)
            if gives_way:
                places = self._give_way(together, places)
            begun = source_budget < most  # the first goes, however long
            encodes = self.block_manager.must_encode(sequence)
            source = sequence.request.source
            left = self.source_passes.left(source) * encodes
            if encodes and most <= 0:
                return
            if places < 0 or not self.block_manager.can_admit(together) or (begun and left > source_budget):
                return
            pauses = source_limit is not None and left > source_budget and self.source_passes.may_pause(source)
            if pauses and not background and source is not None:
                output.ahead.append(self.source_passes.advance(sequence, source, source_budget))
                return
            source_budget -= left
            for one in together:
                self.waiting.remove(one)
                one.status = SequenceStatus.RUNNING
                insort(self.running, one, key=lambda s: s.order)
                num_tokens = self._begin(output, one, shares.room(one, budget) if shares.allowed else budget)
                shares.spend(one, num_tokens)
                budget -= num_tokens

    def _give_way(self, together: list[SequenceState], places: int) -> int:
        """Preempt background sequences until `together` fit; return the places that are left then."""
        while (places < 0 or not self.block_manager.can_admit(together)) and self.running:
            last = self.running[-1]
            if not last.is_background:
                break
            before = sum(sequence.num_slots for sequence in self.running)
            self.preempt(last)
            places += before - sum(sequence.num_slots for sequence in self.running)
        return places

    def _begin(self, output: SchedulerOutput, sequence: SequenceState, budget: int) -> int:
        """Schedule the first tokens of an admitted sequence; return how many. A beam may get none in this step."""
        self.block_manager.reuse(sequence)
        if self._follows(sequence):
            return 0
        num_tokens = min(sequence.num_uncomputed_tokens, budget)
        if sequence.request.images:
            most = self.max_num_batched_tokens - output.num_decoder_tokens
            num_tokens = self.pictures.reach(output, sequence, num_tokens, most)
        num_tokens = self.pictures.uncut(sequence, self.block_manager.fitting(sequence, num_tokens))
        if num_tokens < 1 or not self.block_manager.can_allocate(sequence, num_tokens):
            return 0
        self._allocate(output, sequence, num_tokens)
        return num_tokens

    def _allocate(self, output: SchedulerOutput, sequence: SequenceState, num_tokens: int) -> None:
        """Allocate blocks for `num_tokens` tokens of a sequence and schedule them, with its source if missing."""
        encode_source, source = sequence.needs_source, sequence.request.source
        if encode_source and source is not None:
            output.encoded_before.append(self.source_passes.finish(source))
        output.copies.extend(self.block_manager.allocate(sequence, num_tokens))
        self._put(output, sequence, num_tokens, encode_source=encode_source)

    def _together(self, sequence: SequenceState) -> list[SequenceState]:
        """Return the sequence, or all beams of its search, which are admitted and preempted together."""
        return list(sequence.beams.members) if sequence.beams is not None else [sequence]

    def replace_beams(self, beams: Beams, children: list[SequenceState]) -> None:
        """Replace the running members of a search by their continuations."""
        for parent in beams.members:
            self.running.remove(parent)
            self.block_manager.free(parent)
        beams.members[:] = children
        beams.candidates.clear()
        for child in children:
            insort(self.running, child, key=lambda s: s.order)

    def _waits(self, sequence: SequenceState) -> bool:
        """Return whether a waiting sequence cannot start yet.

        Its grammar is being compiled, its last token is still on the device, or a running prompt computes its next
        tokens.
        """
        if not sequence.is_prepared or sequence.has_placeholder or sequence.awaits_token:
            return True
        return bool(self._frontiers) and self.block_manager.prefixes.frontier_found(sequence) in self._frontiers

    def _put(
        self, output: SchedulerOutput, sequence: SequenceState, num_tokens: int, *, encode_source: bool = False
    ) -> None:
        """Schedule `num_tokens` tokens of a sequence that has the blocks; later sequences may share what it fills."""
        start = sequence.num_computed_tokens
        if self.shares.are_several:
            self.shares.serve(sequence, num_tokens)
        output.scheduled.append(ScheduledSequence(sequence, start, num_tokens, encode_source))
        if self.block_manager.has_states:  # what it fills can be shared after the step
            if num_tokens > 1:
                self._lead(sequence)
            return
        if (start + num_tokens) // self.block_manager.block_size > sequence.num_offered_blocks:
            self.block_manager.prefixes.cache_full_blocks(sequence, num_tokens)
        if start + num_tokens < sequence.num_tokens:
            self._lead(sequence)


def _of_kind(queue: list[SequenceState], background: bool | None) -> list[SequenceState]:
    """Return background sequences of a queue, or the others; they are last, because of their priority."""
    if background is None or not queue or queue[0].is_background is queue[-1].is_background is background:
        return queue
    return [sequence for sequence in queue if sequence.is_background is background]
