"""A scheduled step as tensors: packs it, runs the Transformer, samples. Keeps no state of requests.

SchedulerOutput -> (encoder over new sources -> cross keys and values) -> decoder over packed tokens -> next tokens
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from itertools import chain

import torch
from torch import Tensor

from model.attention.base import AttentionMetadata
from model.engine.beam import Candidates
from model.engine.block_manager import BlockManager
from model.engine.constraints import allowed_tokens, banned_tokens, forced_token
from model.engine.scheduler import SampledToken, ScheduledSequence, SchedulerOutput
from model.kv_cache import KVCache
from model.request import TokenLogprob
from model.sampling import SamplingRow, likeliest, logprobs_of, sample
from model.transformer import CrossInput, StackInput, Transformer

LOGPROB_ROWS = 256  # rows of prompt logits held at once


class ModelRunner:
    """One model with its pool."""

    def __init__(self, model: Transformer, cache: KVCache, block_manager: BlockManager) -> None:
        self.model = model
        self.cache = cache
        self.block_manager = block_manager
        self.device = cache.keys.device

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> list[SampledToken | None]:
        """Next token of each scheduled sequence, None where its prompt is not computed to the end yet.

        Appends prompt log-probabilities to the sequences that ask for them.
        """
        steps = output.scheduled
        if output.copies:
            self.cache.copy_blocks(output.copies)
        new_sources = [step for step in steps if step.encode_source]
        if new_sources:
            self._encode_sources(new_sources)
        hidden = self.model.decode(self._decoder_input(steps), self.cache, self._cross_input(steps))  # [T, d]
        self._prompt_logprobs(steps, hidden)
        sampling = [step for step in steps if step.samples]
        tokens = iter(self._sample(sampling, self._last_rows(steps, hidden)) if sampling else ())
        return [next(tokens) if step.samples else None for step in steps]

    @torch.inference_mode()
    def probe(self) -> None:
        """The smallest pass there is, without the cache; raises if not even that works."""
        smallest = packed_input([[0]], self.device, causal=self.model.encoder is None)
        (self.model.decode if self.model.encoder is None else self.model.encode)(smallest)

    def _encode_sources(self, steps: Rows[ScheduledSequence]) -> None:
        sources = [step.sequence.source_ids for step in steps]
        memory = self.model.encode(packed_input(sources, self.device, causal=False))  # [S, d]
        slots = chain.from_iterable(
            self.block_manager.slots(step.sequence.cross_block_table, 0, len(source))
            for step, source in zip(steps, sources, strict=True)
        )
        self.model.write_memory(memory, self.cache, self._tensor(slots))

    def _decoder_input(self, steps: Rows[ScheduledSequence]) -> StackInput:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for step in steps:
            stop = step.start + step.num_tokens
            ids += step.sequence.token_ids[step.start : stop]
            positions += range(step.start, stop)
            slots += self.block_manager.slots(step.sequence.block_table, step.start, stop)
        metadata = AttentionMetadata(
            q_lens=tuple(step.num_tokens for step in steps),
            kv_lens=tuple(step.start + step.num_tokens for step in steps),
            causal=True,
            device=self.device,
            block_tables=self._tables([step.sequence.block_table for step in steps]),
            slot_mapping=self._tensor(slots),
        )
        return StackInput(self._tensor(ids), self._tensor(positions), metadata)

    def _cross_input(self, steps: Rows[ScheduledSequence]) -> CrossInput | None:
        if self.model.encoder is None:
            return None
        metadata = AttentionMetadata(
            q_lens=tuple(step.num_tokens for step in steps),
            kv_lens=tuple(len(step.sequence.source_ids) for step in steps),
            causal=False,
            device=self.device,
            block_tables=self._tables([step.sequence.cross_block_table for step in steps]),
        )
        return CrossInput(metadata)

    def _last_rows(self, steps: Rows[ScheduledSequence], hidden: Tensor) -> Tensor:
        """Hidden states `[B, d]` of the last tokens of the sequences that sample."""
        rows: list[int] = []
        end = 0
        for step in steps:
            end += step.num_tokens
            if step.samples:
                rows.append(end - 1)
        return hidden if len(rows) == len(hidden) else hidden[self._tensor(rows)]

    def _sample(self, steps: Rows[ScheduledSequence], hidden: Tensor) -> list[SampledToken]:
        logits = self.model.logits(hidden)  # [B, V]
        rows = [self._sampling_row(step) for step in steps]
        wanted = [i for i, step in enumerate(steps) if step.sequence.params.logprobs is not None]
        searching = not wanted and all(step.sequence.beams is not None for step in steps)
        # A beam's own next token is nobody's: its search decides among the candidates.
        tokens = torch.zeros(len(rows), dtype=torch.int64) if searching else sample(logits, rows)
        logprobs: dict[int, TokenLogprob] = {}
        if wanted:
            at = self._tensor(wanted)
            tops = [steps[i].sequence.params.logprobs or 0 for i in wanted]
            logprobs = dict(zip(wanted, logprobs_of(logits[at], tokens[at], tops), strict=True))
        candidates = self._candidates(steps, rows, logits)
        return [
            SampledToken(token, logprobs.get(i), row.forced_token_id is not None, candidates.get(i, ()))
            for i, (token, row) in enumerate(zip(tokens.tolist(), rows, strict=True))
        ]

    def _candidates(
        self, steps: Rows[ScheduledSequence], rows: Rows[SamplingRow], logits: Tensor
    ) -> dict[int, Candidates]:
        """The likeliest continuations of each beam among the rows."""
        beams = [i for i, step in enumerate(steps) if step.sequence.beams is not None]
        if not beams:
            return {}
        counts = [s.beams.search.num_candidates for i in beams if (s := steps[i].sequence).beams is not None]
        found = likeliest(logits[self._tensor(beams)], [rows[i] for i in beams], counts)
        return dict(zip(beams, found, strict=True))

    def _sampling_row(self, step: ScheduledSequence) -> SamplingRow:
        sequence, rules = step.sequence, self.model.config.generation
        banned = banned_tokens(sequence, rules)
        allowed = allowed_tokens(sequence, banned)
        return SamplingRow(
            params=sequence.params,
            index=sequence.index,
            token_ids=sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            banned_token_ids=banned if allowed is None else (),
            forced_token_id=forced_token(sequence, rules),
            allowed=allowed,
        )

    def _prompt_logprobs(self, steps: Rows[ScheduledSequence], hidden: Tensor) -> None:
        """Log-probabilities of prompt tokens from the rows before them, a slice of rows at a time."""
        first = 0
        for step in steps:
            sequence, top = step.sequence, step.sequence.params.prompt_logprobs
            if top is not None:
                known = len(sequence.prompt_logprobs)  # a recomputed prompt is scored only once
                stop = min(step.start + step.num_tokens + 1, sequence.num_prompt_tokens)
                for begin in range(max(known, step.start + 1), stop, LOGPROB_ROWS):
                    end = min(begin + LOGPROB_ROWS, stop)
                    rows = hidden[first + begin - 1 - step.start : first + end - 1 - step.start]
                    tokens = self._tensor(sequence.token_ids[begin:end])
                    sequence.prompt_logprobs += logprobs_of(self.model.logits(rows), tokens, [top] * len(rows))
            first += step.num_tokens

    def _tables(self, tables: Rows[Rows[int]]) -> Tensor:
        """`[B, M]`, short tables filled up with block 0, which no length reaches."""
        width = max(map(len, tables))
        return torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], device=self.device)

    def _tensor(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)


def packed_input(
    segments: Rows[Rows[int]],
    device: torch.device,
    *,
    causal: bool,
    token_types: Rows[Rows[int]] | None = None,
) -> StackInput:
    """Whole segments, one after the other, attending to themselves without a cache."""
    lens = tuple(map(len, segments))
    types = None
    if token_types is not None:
        types = torch.tensor(list(chain.from_iterable(token_types)), device=device)
    return StackInput(
        input_ids=torch.tensor(list(chain.from_iterable(segments)), device=device),
        positions=torch.tensor([p for length in lens for p in range(length)], device=device),
        metadata=AttentionMetadata(lens, lens, causal=causal, device=device),
        token_types=types,
    )
