"""Runs a scheduled step: packs it, runs the Transformer, samples. It keeps no state of requests.

SchedulerOutput -> StepPlan -> StepProgram: hidden states, logits -> next tokens

A step is launched, then collected. On a GPU the next step may be launched in between; it reads the tokens of the
previous step on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from triptych.model.api.request import Source, TokenLogprob
from triptych.model.attention.base import are_uneven
from triptych.model.cache.kv_cache import KVCache, StateSpan
from triptych.model.config.model import GenerationRules
from triptych.model.engine.execution.batch import BatchLayout, pack
from triptych.model.engine.execution.cuda_graphs import DecodeGraphs
from triptych.model.engine.execution.encoder_graphs import EncoderGraphs
from triptych.model.engine.execution.mixed_graphs import MixedGraphs
from triptych.model.engine.execution.pictures import PictureStore, fill_positions, key_ends, picture_parts
from triptych.model.engine.execution.sources import align, blank_source, keep_queries, kept_layers, source_input
from triptych.model.engine.execution.step_logits import StepLogits, needed_rows
from triptych.model.engine.execution.step_program import StepPlan, StepProgram
from triptych.model.engine.scheduling.block_manager import BlockCopy, BlockManager
from triptych.model.engine.scheduling.scheduled_step import DraftRun, SampledToken, ScheduledSequence, SchedulerOutput
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.engine.scheduling.token_constraints import allowed_tokens, banned_tokens, biases, forced_token
from triptych.model.errors import ConfigError
from triptych.model.network.inputs import packed_input
from triptych.model.network.lora import AdapterRuns
from triptych.model.network.transformer import Transformer
from triptych.model.parallel.rank0 import Rank0Transformer
from triptych.model.sampling.sampler import (
    BeamCandidates,
    SamplingRow,
    chosen_logprobs,
    logprobs_of,
    token_logprobs,
    top_candidates,
)
from triptych.model.system.devices import HostCopy, device_tensor

_NO_RULES = GenerationRules()
_NO_CANDIDATES = BeamCandidates([])
LOGPROB_ROWS = 256  # rows of prompt logits held at once


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight: the device may still be computing it."""

    steps: list[ScheduledSequence]
    rows: dict[int, int]  # first row of a sequence that samples, by its `id`
    tokens: Tensor  # [S] sampled tokens on the device: after a sequence's last token, then after each of its drafts
    arriving: HostCopy  # the same, on the way to the host
    forced: list[bool]  # of each row: the checkpoint's rules allowed one token only
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    candidates: dict[int, BeamCandidates] = field(default_factory=dict)
    masked_logprobs: dict[int, float] = field(default_factory=dict)
    alignments: dict[int, list[int]] = field(default_factory=dict)

    def collect(self) -> list[SampledToken | None]:
        """Wait, and return the next token of each scheduled sequence; None while its prompt is not finished."""
        tokens = self.arriving.get().tolist() if self.rows else []
        found: list[SampledToken | None] = []
        for step in self.steps:
            row = self.rows.get(id(step.sequence))
            if row is None:
                found.append(None)
                continue
            later = []
            for place, draft in enumerate(step.drafts, row):
                if tokens[place] != draft:
                    break
                later.append(self._token(tokens, place + 1))
            found.append(self._token(tokens, row, tuple(later)))
        return found

    def _token(self, tokens: Rows[int], row: int, later: tuple[SampledToken, ...] = ()) -> SampledToken:
        found = self.candidates.get(row, _NO_CANDIDATES)
        return SampledToken(
            tokens[row],
            self.logprobs.get(row),
            self.forced[row],
            found.tokens,
            later,
            self.masked_logprobs.get(row),
            found.log_mass,
            self.alignments.get(row),
        )


class Drafter(Protocol):
    """The draft model of the served one (`triptych.model.engine.speculation.draft_model`)."""

    model: Transformer
    cache: KVCache

    def draft(
        self, runs: Rows[DraftRun], sampling_row: Callable[[SequenceState], SamplingRow]
    ) -> list[tuple[int, ...]]:
        """Return up to `num_drafts` proposals for each run."""


class ModelRunner:
    """Runs the steps of one model over its KV cache."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        block_manager: BlockManager,
        graphs: DecodeGraphs | None = None,
        draft_model: Drafter | None = None,
        unrecorded: Mapping[str, str] | None = None,
        encoder_graphs: EncoderGraphs | None = None,
        mixed_graphs: MixedGraphs | None = None,
        pictures: PictureStore | None = None,
    ) -> None:
        """`unrecorded`: why some steps are not CUDA graphs, by name; empty: they are, or need not be. `pictures`
        are those of prompts, if the model reads any."""
        self.model = model
        self.cache = cache
        self.block_manager = block_manager
        self.graphs = graphs
        self.mixed_graphs = mixed_graphs
        self.draft_model = draft_model
        self._ranks = model.rank_processes if isinstance(model, Rank0Transformer) else None
        group = self._ranks.group if self._ranks is not None else None
        self._program = StepProgram(model, cache, graphs, group, encoder_graphs, mixed_graphs, pictures)
        self._pictures = pictures
        self._both_ways = model.config.pictures is not None and model.config.pictures.both_ways
        self._ruled = model.config.generation != _NO_RULES
        self.unrecorded = dict(unrecorded or {})
        self.device = cache.device

    def execute(self, output: SchedulerOutput) -> list[SampledToken | None]:
        """Launch a step and wait for its tokens."""
        return self.launch(output).collect()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput, before: Launched | None = None) -> Launched:
        """Launch a step; `before` is the previous step if its tokens are not collected yet.

        Adds prompt log-probabilities to the sequences that ask for them.
        """
        steps = decodes_first(output.scheduled, by_adapter=bool(self.model.lora))
        logits = self._run(steps, output.copies, before)  # [S, V]
        sampling = [step for step in steps if step.samples]
        for step in steps:
            if step.sequence.history is not None and not step.samples:
                step.sequence.history.read(step.sequence.token_ids[: step.start + step.num_tokens])
        return self._sample(output.scheduled, sampling, logits)

    def draft(self, runs: Rows[DraftRun]) -> list[tuple[int, ...]]:
        """Return the draft model's proposals for each run."""
        assert self.draft_model is not None
        rules = self.model.config.generation
        return self.draft_model.draft(runs, lambda one: self._sampling_row(one, rules, ruled=self._ruled))

    @torch.inference_mode()
    def encode_ahead(self, source: Source, layers: int, model: str = "") -> None:
        """Compute the next `layers` layers of the encoder for a source that a later step finishes."""
        self._program.encode_ahead(source, layers, self.model.lora.get(model))

    def forget_ahead(self) -> None:
        """Drop the source that `encode_ahead` started."""
        self._program.forget_ahead()

    @torch.inference_mode()
    def probe(self) -> None:
        """Run the smallest possible pass, without the cache; raises if the device or model is broken."""
        if self.model.encoder is None:
            self.model.decode(packed_input([[0]], self.device, causal=True))
        else:
            self.model.encode(source_input([blank_source(self.model.config)], self.device))

    def _run(self, steps: Rows[ScheduledSequence], copies: Rows[BlockCopy], before: Launched | None) -> StepLogits:
        """Run a step and return the logits of the S rows to sample from; store the scores of prompts."""
        plan, slices, probed = self._plan(steps, copies, before)
        tokens = before.tokens if before is not None and plan.num_known else None
        together: AbstractContextManager[None] = nullcontext()
        if self._ranks is not None:
            config = self.model.config
            plan.check_ids(config.embedding.vocab_size, config.source_vocab_size)
            together = self._ranks.sending_step(plan.message, plan.row)
        with together:
            hidden, logits = self._program.run(plan, tokens)
            if plan.kept_layers:
                keep_queries(steps, self._program.cross_queries)
            for rows, part in zip(self._program.prompt_logits(plan, hidden), slices, strict=True):
                scored, top = self._tensor(part.token_ids), [part.top] * len(rows)
                part.sequence.prompt_logprobs += token_logprobs(rows, scored, top)
        for row, one in zip(logits.whole[len(logits.whole) - len(probed) :], probed, strict=True):
            one.sequence.probe_logprobs = logprobs_of(row[None], one.token_ids)
        return logits.without_last(len(probed))

    def _plan(
        self, steps: Rows[ScheduledSequence], copies: Rows[BlockCopy], before: Launched | None
    ) -> tuple[StepPlan, list[PromptSlice], list[ProbedRow]]:
        placeholders: dict[int, int] = {}
        if before is not None:
            placeholders = {id(s.sequence): before.rows[id(s.sequence)] for s in steps if s.sequence.has_placeholder}
        asked = any(step.sequence.has_questions for step in steps)
        layers = kept_layers(steps) if asked else ()
        if layers and self._ranks is not None:
            raise ConfigError("a prompt is not aligned with its source by a model on several ranks")
        adapters = self._adapters(steps)
        shown = self._pictures is not None and any(step.sequence.request.images for step in steps)
        pictures = tuple(picture_parts(steps, self.block_manager.hasher, self.model.lora)) if shown else ()
        replayed = self.graphs is not None and not (layers or adapters or pictures) and self.graphs.fits(steps)
        splits_keys = self.model.backend.graph_safe  # Triton: by lengths on the device
        uneven = splits_keys and are_uneven([step.start + 1 for step in steps if step.num_tokens == 1])
        layout = BatchLayout.of(steps)
        if self.graphs is not None and replayed:
            uneven = uneven and bool(self.graphs.uneven_sizes)
            layout = self.graphs.layout(layout, uneven=uneven)
        mixed = None
        if self.mixed_graphs is not None and not (replayed or layers or adapters or shown):
            mixed = self.mixed_graphs.fitted(steps, uneven=uneven)
            layout = self.mixed_graphs.layout(mixed, layout) if mixed is not None else layout
        row = pack(layout, steps, self.block_manager.block_size, placeholders, pinned=self.device.type == "cuda")
        coordinates = self._coordinates(row, layout, steps) if shown else None
        num_known = len(before.tokens) if before is not None and placeholders else 0
        new = [step.sequence for step in steps if step.encode_source]
        slices, probed = (list(prompt_slices(steps)), list(probed_rows(steps))) if asked else ([], [])
        plan = StepPlan(
            layout,
            row,
            len(steps),
            replayed,
            num_known,
            uneven,
            _logit_rows(steps, probed),
            copies=tuple((copy.pool, copy.target, copy.source) for copy in copies),
            sources=tuple(sequence.request.source for sequence in new if sequence.request.source is not None),
            source_slots=tuple(self._source_slots(new)),
            scored=tuple(part.rows for part in slices),
            states=tuple(state_spans(steps)) if self.cache.states and not replayed else (),
            needed=needed_rows(steps, len(probed)) if self._ranks is not None and not self._ruled else b"",
            kept_layers=layers,
            mixed=mixed,
            adapters=adapters,
            source_adapters=tuple(self.model.lora.get(one.request.model) for one in new) if adapters else (),
            pictures=pictures,
            coordinates=coordinates,
            key_ends=key_ends(steps) if pictures and self._both_ways else None,
        )
        return plan, slices, probed

    def _coordinates(self, row: Tensor, layout: BatchLayout, steps: Rows[ScheduledSequence]) -> Tensor | None:
        """Write the positions of prompts with pictures into a packed step; return the coordinates, if there are any."""
        config = self.model.config
        assert config.pictures is not None
        if not any(rotary.sections for rotary in config.decoder_stack.rotaries):
            return None
        return fill_positions(layout.split(row).positions.numpy(), steps, config.pictures.patches)

    def _adapters(self, steps: Rows[ScheduledSequence]) -> AdapterRuns | None:
        """Return the adapters of a step's rows; None if no sequence has one."""
        found = self.model.lora
        if not found:
            return None
        chosen = (found.get(step.sequence.request.model) for step in steps)
        return AdapterRuns.of_segments(chosen, (step.num_tokens for step in steps))

    def _source_slots(self, sequences: Rows[SequenceState]) -> Iterator[int]:
        """Yield the slots of new sources, pool by pool."""
        for pool in range(len(self.cache.pools)):
            for sequence in sequences:
                yield from self.block_manager.slots(sequence.source_tables[pool], 0, sequence.source_length)

    def _sample(
        self, all_steps: list[ScheduledSequence], sampling: Rows[ScheduledSequence], logits: StepLogits
    ) -> Launched:
        steps = sampling
        if any(step.drafts for step in sampling):
            steps = [step for step in sampling for _ in range(1 + len(step.drafts))]  # of each row
        places = {id(step.sequence): row - len(step.drafts) for row, step in enumerate(steps)}
        if not steps:
            nothing = logits.whole.new_empty(0, dtype=torch.int64)
            return Launched(all_steps, places, nothing, HostCopy(nothing), [])
        rules, ruled = self.model.config.generation, self._ruled
        if steps is sampling:
            rows = [self._sampling_row(step.sequence, rules, ruled=ruled) for step in steps]
        else:
            rows = [row for step in sampling for row in self._drafted_rows(step, rules, ruled=ruled)]
        wanted = [i for i, step in enumerate(steps) if step.sequence.params.logprobs is not None]
        searching = not wanted and all(step.sequence.beams is not None for step in steps)
        # A beam samples no token: its search chooses among the candidates.
        if searching:
            tokens, processed = torch.zeros(len(rows), dtype=torch.int64), logits.whole
        else:
            tokens, processed = logits.choose(rows)
        arriving = HostCopy(tokens)
        logprobs: dict[int, TokenLogprob] = {}
        if wanted:
            tops = [steps[i].sequence.params.logprobs or 0 for i in wanted]
            logprobs = dict(
                zip(
                    wanted,
                    token_logprobs(self._at(logits.whole, logits.places(wanted)), self._at(tokens, wanted), tops),
                    strict=True,
                )
            )
        summed = [i for i, row in enumerate(rows) if row.params.cumulative_logprob and not searching]
        masked: dict[int, float] = {}
        if summed:
            scores = self._at(processed, logits.places(summed))
            masked = dict(zip(summed, chosen_logprobs(scores, self._at(tokens, summed)), strict=True))
        forced = [row.forced_token_id is not None for row in rows]
        candidates = self._candidates(steps, rows, logits)
        aligned = {places[id(s.sequence)]: self._align(s.sequence) for s in sampling if s.sequence.cross_queries}
        return Launched(all_steps, places, tokens, arriving, forced, logprobs, candidates, masked, aligned)

    def _align(self, sequence: SequenceState) -> list[int]:
        return align(sequence, self.cache, self.model.config.decoder_stack)

    def _candidates(
        self, steps: Rows[ScheduledSequence], rows: Rows[SamplingRow], logits: StepLogits
    ) -> dict[int, BeamCandidates]:
        """Return the most likely continuations of each beam, by row."""
        beams = [i for i, step in enumerate(steps) if step.sequence.beams is not None]
        if not beams:
            return {}
        counts = [s.beams.search.num_candidates for i in beams if (s := steps[i].sequence).beams is not None]
        scores = self._at(logits.whole, logits.places(beams))
        found = top_candidates(scores, [rows[i] for i in beams], counts)
        return dict(zip(beams, found, strict=True))

    def _drafted_rows(self, step: ScheduledSequence, rules: GenerationRules, *, ruled: bool) -> Iterator[SamplingRow]:
        """Yield the sampling row after a sequence's last token, then after each draft as if it were accepted."""
        sequence = step.sequence
        yield self._sampling_row(sequence, rules, ruled=ruled)
        for ahead, draft in enumerate(step.drafts, 1):
            if ruled or not sequence.is_unconstrained:
                sequence = sequence.fork(draft)
                yield self._sampling_row(sequence, rules, ruled=ruled)
            else:
                row = self._sampling_row(sequence, rules, ruled=False)
                row.num_ahead = ahead
                yield row

    def _sampling_row(self, sequence: SequenceState, rules: GenerationRules, *, ruled: bool) -> SamplingRow:
        if not ruled and sequence.is_unconstrained:
            return SamplingRow(sequence.params, sequence.index, sequence.token_ids, sequence.num_prompt_tokens)
        banned = banned_tokens(sequence, rules)
        allowed = allowed_tokens(sequence, banned)
        return SamplingRow(
            params=sequence.params,
            index=sequence.index,
            token_ids=sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            banned_token_ids=banned if allowed is None else (),
            biases=biases(sequence, rules) if rules.biases else None,
            ending_token_ids=tuple(sequence.stop_token_ids) if sequence.params.exponential_decay_length_penalty else (),
            forced_token_id=forced_token(sequence, rules),
            allowed=allowed,
            history=sequence.history,
        )

    def _at(self, tensor: Tensor, rows: Rows[int]) -> Tensor:
        return tensor[self._tensor(rows)] if len(rows) < len(tensor) else tensor

    def _tensor(self, values: Iterable[int]) -> Tensor:
        return device_tensor(list(values), self.device, torch.int64)


@dataclass(frozen=True, slots=True)
class PromptSlice:
    """A range of prompt tokens, scored by the rows before them."""

    sequence: SequenceState
    rows: tuple[int, int]  # of the step's hidden states
    token_ids: Rows[int]
    top: int  # number of most likely tokens requested at each


@dataclass(frozen=True, slots=True)
class ProbedRow:
    """A prompt token after which the scores of some tokens are requested."""

    sequence: SequenceState
    row: int  # of the step's hidden states
    token_ids: Rows[int]


def probed_rows(steps: Rows[ScheduledSequence]) -> Iterator[ProbedRow]:
    """Yield the rows of a step that probes of prompts ask for."""
    first = 0
    for step in steps:
        probe = step.sequence.params.probe
        if probe is not None and step.sequence.probe_logprobs is None and step.start <= probe.position < step.stop:
            yield ProbedRow(step.sequence, first + probe.position - step.start, probe.token_ids)
        first += step.num_tokens


def prompt_slices(steps: Rows[ScheduledSequence]) -> Iterator[PromptSlice]:
    """Yield the prompt tokens that a step scores, in slices of `LOGPROB_ROWS`."""
    first = 0
    for step in steps:
        sequence, top = step.sequence, step.sequence.params.prompt_logprobs
        if top is not None:
            known = len(sequence.prompt_logprobs)  # a recomputed prompt is scored only once
            stop = min(step.start + step.num_tokens + 1, sequence.num_prompt_tokens)
            before = first - 1 - step.start
            for begin in range(max(known, step.start + 1), stop, LOGPROB_ROWS):
                end = min(begin + LOGPROB_ROWS, stop)
                yield PromptSlice(sequence, (before + begin, before + end), sequence.token_ids[begin:end], top)
        first += step.num_tokens


def state_spans(steps: Rows[ScheduledSequence]) -> Iterator[StateSpan]:
    """Yield the spans of rows of a step with the state slots that they read and write, one for each kept state.

    There may be slots for more drafts than were proposed.
    """
    first = 0
    for step in steps:
        source, begin = step.sequence.state_slot, step.start
        for tokens, slot in step.sequence.state_writes:
            if tokens > step.start + step.num_tokens:
                break
            yield StateSpan(first, first + tokens - begin, source, slot)
            first, begin, source = first + tokens - begin, tokens, slot


def _logit_rows(steps: Rows[ScheduledSequence], probed: Rows[ProbedRow]) -> tuple[int, ...] | None:
    """Return the rows that need logits: last tokens and drafts of the sequences that sample, then probes.

    All of them are multiplied by the head's matrix at once. None means all rows, in order.
    """
    rows: list[int] = []
    end = 0
    for step in steps:
        end += step.num_tokens
        if step.samples:
            rows.extend(range(end - 1 - len(step.drafts), end))
    if len(rows) == end and not probed:
        return None
    return (*rows, *(one.row for one in probed))


def decodes_first(steps: Rows[ScheduledSequence], *, by_adapter: bool = False) -> list[ScheduledSequence]:
    """Sort decoding sequences before prompts: attention may launch the two kinds separately.

    `by_adapter`: in each kind, those of one adapter together, so that their rows are multiplied at once.
    """
    if by_adapter:
        return sorted(steps, key=lambda step: (step.num_tokens > 1, step.sequence.adapter))
    return sorted(steps, key=lambda step: step.num_tokens > 1)
