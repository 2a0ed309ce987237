"""Runs a draft model: a small model that proposes next tokens, one pass for each.

It samples as the served model does, with each request's settings, seed and position. So the closer its logits are, the
more drafts are accepted, at any temperature. Its KV cache uses the block numbers of the served model's first pool;
layers with a window keep all blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from triptych.model.cache.kv_cache import KVCache
from triptych.model.engine.execution.batch import BatchLayout, pack
from triptych.model.engine.execution.cuda_graphs import DecodeGraphs
from triptych.model.engine.execution.mixed_graphs import MixedGraphs
from triptych.model.engine.execution.step_program import StepPlan, StepProgram
from triptych.model.engine.scheduling.scheduled_step import DraftRun, ScheduledSequence
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.network.transformer import Transformer
from triptych.model.sampling.sampler import SamplingRow, sample


class DraftModel:
    """The draft model of a served model, with its KV cache."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        vocab_size: int,
        *,
        has_rules: bool,
        graphs: DecodeGraphs | None = None,
        mixed_graphs: MixedGraphs | None = None,
    ) -> None:
        """`vocab_size` is the served model's; the draft model's logits may have another width. `has_rules`: the served
        checkpoint bans or forces tokens in every request. The graphs are of passes over `cache`."""
        self.model = model
        self.cache = cache
        self._vocab_size = vocab_size
        self._has_rules = has_rules
        self._graphs = graphs
        self._mixed_graphs = mixed_graphs
        self._program = StepProgram(model, cache, graphs, mixed_graphs=mixed_graphs)

    @torch.inference_mode()
    def draft(
        self, runs: Sequence[DraftRun], sampling_row: Callable[[SequenceState], SamplingRow]
    ) -> list[tuple[int, ...]]:
        """Compute the tokens of each run; return up to `num_drafts` proposals for each. None ends its sequence.

        `sampling_row` gives the sampling settings of a sequence's next token.
        """
        drafts = [_Drafts(run, self._pages(run.sequence), self._has_rules) for run in runs]
        going = sorted(drafts, key=lambda one: one.run.num_tokens > 1)  # attention may launch single tokens separately
        while going:
            tokens = self._pass(going, sampling_row)
            for one, token in zip([one for one in going if one.run.num_drafts], tokens, strict=True):
                one.add(token)
            going = [one for one in going if one.goes_on]
        for one in drafts:
            one.run.drafting.computed(one.num_computed, len(one.proposed))
        return [tuple(one.proposed) for one in drafts]

    def _pages(self, sequence: SequenceState) -> SequenceState:
        """Return the sequence with a table for each pool here, all equal to that of its first pool."""
        if len(sequence.tables) == len(self.cache.pools) == 1:
            return sequence
        tables, nothing = sequence.tables[:1] * len(self.cache.pools), sequence.source_tables[:1]
        return replace(sequence, tables=tables, source_tables=nothing * len(self.cache.pools))

    def _pass(self, going: Sequence[_Drafts], sampling_row: Callable[[SequenceState], SamplingRow]) -> list[int]:
        """Compute the next tokens of each run; return a proposal for each run that must propose."""
        steps = [one.step() for one in going]
        layout, mixed = BatchLayout.of(steps), None
        replayed = self._graphs is not None and self._graphs.fits(steps)
        if self._graphs is not None and replayed:
            layout = self._graphs.layout(layout, uneven=False)
        elif self._mixed_graphs is not None and (mixed := self._mixed_graphs.fitted(steps)):
            layout = self._mixed_graphs.layout(mixed, layout)
        row = pack(layout, steps, self.cache.block_size, {}, pinned=self.cache.device.type == "cuda")
        layout.split(row).ids.clamp_(max=self.model.config.embedding.vocab_size - 1)
        last, end = list[int](), 0
        for one, step in zip(going, steps, strict=True):
            end += step.num_tokens
            last += [end - 1] * bool(one.run.num_drafts)
        plan = StepPlan(layout, row, len(steps), replayed, logit_rows=tuple(last), mixed=mixed)
        _, logits = self._program.run(plan, None)
        if not last:
            return []
        rows = [one.sampling_row(sampling_row) for one in going if one.run.num_drafts]
        tokens: list[int] = sample(self._of_vocabulary(logits.whole), rows).tolist()
        return tokens

    def _of_vocabulary(self, logits: Tensor) -> Tensor:
        """Pad or cut logits `[N, V]` to the served model's vocabulary."""
        return pad(logits, (0, self._vocab_size - logits.shape[1]), value=float("-inf"))


class _Drafts:
    """The proposals for one sequence."""

    def __init__(self, run: DraftRun, pages: SequenceState, has_rules: bool) -> None:
        self.run = run
        self.proposed: list[int] = []
        self.goes_on = False
        self._pages = pages
        self._num_passes = 0
        self._ahead = run.sequence  # with the proposals, if sampling depends on them
        self._is_plain = run.sequence.is_unconstrained and not has_rules

    @property
    def num_computed(self) -> int:
        """The number of tokens in the cache after all passes."""
        return self.run.stop + self._num_passes - 1

    def step(self) -> ScheduledSequence:
        """Return the next pass: first the missing known tokens, then the latest proposal."""
        self._num_passes += 1
        if not self.proposed:
            return ScheduledSequence(self._pages, self.run.start, self.run.num_tokens, False)
        return ScheduledSequence(self._pages, self.num_computed - 1, 1, False, (self.proposed[-1],))

    def sampling_row(self, sampling_row: Callable[[SequenceState], SamplingRow]) -> SamplingRow:
        row = sampling_row(self._ahead)
        if self._is_plain:
            row.num_ahead = len(self.proposed)
        return row

    def add(self, token: int) -> None:
        """Add a proposal, unless it ends the sequence."""
        sequence = self.run.sequence
        self.goes_on = token not in sequence.stop_token_ids
        if not self.goes_on:
            return
        self.proposed.append(token)
        if not self._is_plain:
            self._ahead = self._ahead.fork(token)
        matcher = self._ahead.matcher
        self.goes_on = len(self.proposed) < self.run.num_drafts and not (matcher is not None and matcher.is_exhausted)
