"""Adds drafts to a scheduled step, by n-grams or for the draft model to propose. Policy only: no tensors.

Drafts use rows and blocks that neither this step nor the next one needs, so they preempt and delay nothing. Rejected
drafts give their blocks back (`BlockManager.trim`), perhaps after the next step is scheduled.
"""

from __future__ import annotations

from triptych.model.engine.scheduling.scheduled_step import DraftRun, ScheduledSequence, SchedulerOutput
from triptych.model.engine.scheduling.scheduler import Scheduler
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.engine.speculation.model_drafts import COMPUTED_AT_ONCE, DraftPages
from triptych.model.engine.speculation.ngrams import READ_AT_ONCE, NgramDrafts

# Upper bound on sampled rows in a step with drafts. Beyond this, computing rejected drafts costs more than reading the
# weights once saves; and the logits of a step need memory.
MAX_VERIFIED_ROWS = 32


def add_drafts(output: SchedulerOutput, scheduler: Scheduler, pages: DraftPages) -> None:
    """Add drafts to the sequences that sample in this step.

    Prompts are indexed meanwhile, at most `READ_AT_ONCE` tokens in a step. The draft model proposes where n-grams are
    less likely to be accepted: the runs in `output.draft_runs` ask it to.
    """
    steps, unread, uncomputed = output.scheduled, READ_AT_ONCE, COMPUTED_AT_ONCE
    rows = MAX_VERIFIED_ROWS - sum(step.samples for step in steps)
    budget = min(rows, scheduler.max_num_batched_tokens - sum(step.num_tokens for step in steps))
    drafting = [(place, step.sequence.drafting) for place, step in enumerate(steps) if step.sequence.drafting]
    for drafted, (place, ngrams) in enumerate(drafting):
        step = steps[place]
        unread -= ngrams.known.read(unread)
        share = _share(step.sequence, scheduler, budget // (len(drafting) - drafted)) if step.samples else 0
        drafts = _ngram_drafts(step.sequence, ngrams, share)
        asked = _ask_draft_model(step.sequence, ngrams, share)
        if asked:
            is_last = drafted == len(drafting) - 1  # each prompt leaves half to the later ones
            run = _draft_run(step, place, asked, uncomputed if is_last else uncomputed // 2, scheduler, pages)
            output.draft_runs.append(run)
            uncomputed = max(0, uncomputed - run.num_tokens)
            budget -= run.num_drafts
        elif drafts:
            count = scheduler.block_manager.extend(step.sequence, step.num_tokens, len(drafts), len(scheduler.running))
            steps[place] = step._replace(num_tokens=step.num_tokens + count, drafts=tuple(drafts[:count]))
            budget -= count


def _share(sequence: SequenceState, scheduler: Scheduler, share: int) -> int:
    """Return how many of `share` drafts a sequence may get without leaving LongRoPE's short context."""
    short = scheduler.block_manager.short_context
    if short is not None and sequence.rotary_context <= short:
        share = min(share, short - sequence.num_tokens)
    return max(0, share)


def _ngram_drafts(sequence: SequenceState, ngrams: NgramDrafts, most: int) -> list[int]:
    """Return drafts of a sequence's next tokens; none while its last token is still on the device."""
    drafts = ngrams.propose(sequence.token_ids, sequence.num_prompt_tokens)[:most]
    sequence.expects_drafts = bool(drafts)
    if sequence.has_placeholder:
        return []
    drafts = drafts[: sequence.params.max_tokens - sequence.num_output_tokens - 1]
    return drafts if sequence.matcher is None else _allowed(sequence, drafts)


def _allowed(sequence: SequenceState, drafts: list[int]) -> list[int]:
    """Return the drafts before the first that the grammar rejects or that would end it."""
    assert sequence.matcher is not None
    matcher = sequence.matcher.fork()
    for count, draft in enumerate(drafts):
        if not matcher.tokens[draft]:
            return drafts[:count]
        matcher.accept(draft)
        if matcher.is_exhausted:
            return drafts[:count]
    return drafts


def _ask_draft_model(sequence: SequenceState, ngrams: NgramDrafts, most: int) -> int:
    """Return how many drafts the draft model should propose; call `_ngram_drafts` first.

    It proposes none before the first token, while the last token is still on the device, or where an n-gram is more
    likely to be accepted.
    """
    drafts = sequence.model_drafts
    if drafts is None or not sequence.num_output_tokens:
        return 0
    if sequence.expects_drafts and ngrams.chance >= drafts.rate:
        return 0
    wanted = drafts.wanted(sequence.num_tokens, min(most, sequence.params.max_tokens - sequence.num_output_tokens - 1))
    sequence.expects_drafts = sequence.expects_drafts or bool(wanted)
    return 0 if sequence.has_placeholder else wanted


def _draft_run(
    step: ScheduledSequence, place: int, asked: int, most: int, scheduler: Scheduler, pages: DraftPages
) -> DraftRun:
    """Bring the draft model's KV cache of a sequence up to date, then propose up to `asked` tokens.

    At most `most` missing tokens are computed; if more are missing, it proposes nothing in this step. Two tokens may
    always be computed, which is what a sequence needs that already has drafts, so another sequence's prompt does not
    stop it.
    """
    sequence, drafting, size = step.sequence, step.sequence.model_drafts, scheduler.block_manager.block_size
    assert drafting is not None
    table, hashes = sequence.tables[0], sequence.block_hashes
    if not drafting.num_computed:
        drafting.num_filled = pages.find(table, hashes)
        drafting.num_computed = min(drafting.num_filled * size, sequence.num_tokens - 1)
    start = drafting.begin(sequence.num_tokens)
    stop, count = min(sequence.num_tokens, start + max(most, 2)), 0
    if stop == sequence.num_tokens:
        count = scheduler.block_manager.extend(sequence, step.num_tokens, asked, len(scheduler.running))
        drafting.ask(count)
    pages.write(table[start // size :])
    full = min(stop // size, len(hashes))
    pages.fill(table[drafting.num_filled : full], hashes[drafting.num_filled : full])
    drafting.num_filled = max(full, drafting.num_filled)
    return DraftRun(place, sequence, drafting, start, stop, count)
