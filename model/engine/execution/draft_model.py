"""A small model that says what may come next: run over the tokens of sequences, a pass for each token that it says.

It samples as the served model does, by each request's own settings, seed and position, so the closer its logits are the
more of its drafts are right, drawn ones too. Its cache has pages for the same blocks as the first pool of the served
model; layers of any window use all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.cache.paged import KVCache
from model.engine.execution.batch import BatchLayout, pack
from model.engine.execution.step_program import StepPlan, StepProgram
from model.engine.scheduling.scheduled_step import DraftRun, ScheduledSequence
from model.engine.scheduling.sequence import SequenceState
from model.network.transformer import Transformer
from model.sampling.sampler import SamplingRow, sample


class DraftModel:
    """The draft model of a served one, with its cache."""

    def __init__(self, model: Transformer, cache: KVCache, vocab_size: int, *, has_rules: bool) -> None:
        """`vocab_size` is the served model's: logits may be padded to another width. `has_rules`: its checkpoint bans
        or forces tokens of any request."""
        self.model = model
        self.cache = cache
        self._vocab_size = vocab_size
        self._has_rules = has_rules
        self._program = StepProgram(model, cache)

    @torch.inference_mode()
    def draft(
        self, runs: Sequence[DraftRun], sampling_row: Callable[[SequenceState], SamplingRow]
    ) -> list[tuple[int, ...]]:
        """Compute the tokens of each run, and return as many drafts behind them as it asks for, or fewer: what ends a
        sequence is no draft.

        `sampling_row` says how the next token of a sequence is sampled.
        """
        drafts = [_Drafts(run, self._pages(run.sequence), self._has_rules) for run in runs]
        going = sorted(drafts, key=lambda one: one.run.num_tokens > 1)  # attention may launch single tokens apart
        while going:
            tokens = self._pass(going, sampling_row)
            for one, token in zip([one for one in going if one.run.num_drafts], tokens, strict=True):
                one.take(token)
            going = [one for one in going if one.goes_on]
        for one in drafts:
            one.run.drafting.computed(one.num_computed, len(one.said))
        return [tuple(one.said) for one in drafts]

    def _pages(self, sequence: SequenceState) -> SequenceState:
        """The sequence with tables for the pools here, which are all as that which reads furthest back."""
        if len(sequence.tables) == len(self.cache.pools) == 1:
            return sequence
        tables, nothing = sequence.tables[:1] * len(self.cache.pools), sequence.source_tables[:1]
        return replace(sequence, tables=tables, source_tables=nothing * len(self.cache.pools))

    def _pass(self, going: Sequence[_Drafts], sampling_row: Callable[[SequenceState], SamplingRow]) -> list[int]:
        """Compute what is next of each, and return the next token of those that say one."""
        steps = [one.step() for one in going]
        layout = BatchLayout.of(steps)
        row = pack(layout, steps, self.cache.block_size, {}, pinned=self.cache.device.type == "cuda")
        layout.split(row).ids.clamp_(max=self.model.config.embedding.vocab_size - 1)
        last, end = list[int](), 0
        for one, step in zip(going, steps, strict=True):
            end += step.num_tokens
            last += [end - 1] * bool(one.run.num_drafts)
        _, logits = self._program.run(StepPlan(layout, row, len(steps), replayed=False, logit_rows=tuple(last)), None)
        if not last:
            return []
        rows = [one.sampling_row(sampling_row) for one in going if one.run.num_drafts]
        tokens: list[int] = sample(self._of_vocabulary(logits), rows).tolist()
        return tokens

    def _of_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits `[N, V]` as wide as the served model's."""
        return pad(logits, (0, self._vocab_size - logits.shape[1]), value=float("-inf"))


class _Drafts:
    """What is said behind one sequence."""

    def __init__(self, run: DraftRun, pages: SequenceState, has_rules: bool) -> None:
        self.run = run
        self.said: list[int] = []
        self.goes_on = False
        self._pages = pages
        self._num_passes = 0
        self._ahead = run.sequence  # with what was said, as far as its settings depend on it
        self._is_plain = run.sequence.is_unconstrained and not has_rules

    @property
    def num_computed(self) -> int:
        """Tokens behind all passes."""
        return self.run.stop + self._num_passes - 1

    def step(self) -> ScheduledSequence:
        """Return the tokens of the next pass: those that are known, then each that was said but the last."""
        self._num_passes += 1
        if not self.said:
            return ScheduledSequence(self._pages, self.run.start, self.run.num_tokens, False)
        return ScheduledSequence(self._pages, self.num_computed - 1, 1, False, (self.said[-1],))

    def sampling_row(self, sampling_row: Callable[[SequenceState], SamplingRow]) -> SamplingRow:
        row = sampling_row(self._ahead)
        if self._is_plain:
            row.num_ahead = len(self.said)
        return row

    def take(self, token: int) -> None:
        """Take the next token, unless that ends the sequence."""
        sequence = self.run.sequence
        self.goes_on = token not in sequence.stop_token_ids
        if not self.goes_on:
            return
        self.said.append(token)
        if not self._is_plain:
            self._ahead = self._ahead.fork(token)
        matcher = self._ahead.matcher
        self.goes_on = len(self.said) < self.run.num_drafts and not (matcher is not None and matcher.is_exhausted)
