"""The state of a sequence, one output of a request: its tokens, its blocks, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from triptych.model.api.request import FinishReason, Request, TokenLogprob
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.api.token_history import History, SourceTokens
from triptych.model.config.cache import NO_STATE
from triptych.model.engine.scheduling.beam_search import BeamSearch, Candidates
from triptych.model.engine.speculation.model_drafts import ModelDrafts
from triptych.model.engine.speculation.ngrams import NgramDrafts

if TYPE_CHECKING:
    from triptych.model.text.grammar_matcher import Matcher


PLACEHOLDER = -1  # a token that is sampled but has not reached the host yet


@dataclass(slots=True, eq=False)
class Beams:
    """The sequences of a beam search; they are admitted, preempted and ended together."""

    search: BeamSearch
    members: list[SequenceState] = field(default_factory=list)
    candidates: dict[int, Candidates] = field(default_factory=dict)  # by place among the members, for the next step
    log_masses: dict[int, float] = field(default_factory=dict)  # by the same places: logsumexp over the allowed tokens
    forced: bool = False  # the checkpoint's rules chose the tokens of the next step


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class SequenceState:
    """One of the `n` outputs of a request.

    There are no phases: each step computes some tokens that are not in the KV cache yet. Once all are, the next token
    is sampled. Only the `BlockManager` changes its block tables, one for each pool.
    """

    request: Request
    index: int
    arrival: int  # order of arrival in the engine (beams: of their request)
    token_ids: list[int]
    stop_token_ids: frozenset[int]
    num_prompt_tokens: int = 0
    rotary_context: int = 0  # tokens that its keys are rotated for (LongRoPE: long contexts rotate differently)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the computed ones, found in the cache
    num_offered_blocks: int = 0  # of its full blocks, offered to the cache
    adapter: int = 0  # number of the LoRA adapter that computes it; 0: none
    root_hash: bytes | None = None  # of what its blocks depend on before its first token
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, computed on demand
    picture_keys: list[bytes] = field(default_factory=list)  # of its pictures' encodings, computed on demand
    coordinates: Any = None  # of its prompt's positions, where pictures have rows and columns; computed on demand
    tables: list[BlockTable] = field(default_factory=lambda: [BlockTable()])  # of its tokens, by pool
    source_tables: list[BlockTable] = field(default_factory=lambda: [BlockTable()])  # of its source, by pool
    state_slot: int = NO_STATE  # of recurrent layers' states after its computed tokens
    state_writes: list[tuple[int, int]] = field(
        default_factory=list
    )  # (tokens, slot) that its step writes: after its tokens, then after each draft
    state_border: bytes | None = None  # hash of the last snapshot of its output
    shared_border: int = 0  # length of the prefix that was cached when it started
    uses_source: bool = False  # counted as a user of its source
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    scheduled_time: float | None = None
    restarted: bool = False  # it was preempted once
    awaits_token: bool = False  # preempted while its next token was being sampled, which has no placeholder
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    beams: Beams | None = None
    matcher: Matcher | None = None  # of its grammar, if it has one
    is_prepared: bool = True  # False while its grammar is being compiled
    history: History | None = None  # of its tokens, where penalties or bans depend on them
    error: str | None = None  # why it failed
    drafting: NgramDrafts | None = None  # drafts by n-grams, if it has any
    model_drafts: ModelDrafts | None = None  # drafts by a draft model, if there is one
    expects_drafts: bool = False  # it had drafts in its last step
    can_overlap: bool = False  # its next step may be launched before this token reaches the host
    is_limited: bool = False  # its request bans tokens or allows only some
    has_questions: bool = False  # its request asks for scores of its prompt
    only_asks: bool = False  # it ends with its prompt, and only its probe is read
    cumulative_logprob: float = 0.0  # of its output, if requested
    probe_logprobs: list[float] | None = None  # None: not requested or not known yet
    cross_queries: list[Any] = field(default_factory=list)  # of the alignment heads, one tensor a step

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        p = self.params
        self.rotary_context = self.num_prompt_tokens
        compared = p.encoder_no_repeat_ngram_size or p.encoder_repetition_penalty != 1.0
        history = p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty or p.no_repeat_ngram_size
        questions = (p.prompt_logprobs, p.probe, self.request.alignment)
        self.has_questions = any(question is not None for question in questions)
        self.only_asks = p.probe is not None and p.max_tokens == 1
        looked_at = p.logprobs is not None or self.has_questions or p.cumulative_logprob
        self.can_overlap = not (history or compared or looked_at or p.num_beams > 1 or p.grammar or p.timestamps)
        limits = (p.min_tokens, p.allowed_token_ids, p.suppress_tokens, p.begin_suppress_tokens, p.timestamps)
        self.is_limited = any(limits) or p.exponential_decay_length_penalty is not None
        if history or compared:
            source = self.request.source.token_ids if self.request.source is not None else self.request.prompt_token_ids
            tokens = SourceTokens(source, p.encoder_no_repeat_ngram_size) if compared else None
            self.history = History(self.num_prompt_tokens, p.no_repeat_ngram_size, tokens, p.penalty_window)

    @classmethod
    def of(
        cls, request: Request, index: int, arrival: int, eos_token_ids: tuple[int, ...], num_pools: int = 1
    ) -> SequenceState:
        """Return the request's sequence `index`, with empty tables for `num_pools` pools."""
        stops = frozenset(request.params.stop_token_ids)
        return cls(
            request=request,
            index=index,
            arrival=arrival,
            token_ids=list(request.prompt_token_ids),
            stop_token_ids=stops if request.params.ignore_eos else stops.union(eos_token_ids),
            tables=[BlockTable() for _ in range(num_pools)],
            source_tables=[BlockTable() for _ in range(num_pools)],
        )

    def searching(self) -> SequenceState:
        """Begin a beam search with this sequence as its first beam, and return it."""
        params = self.params
        search = BeamSearch(
            num_beams=params.num_beams,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            max_tokens=params.max_tokens,
            stop_token_ids=self.stop_token_ids,
            num_forced=self.request.num_forced,
        )
        self.beams = Beams(search, [self])
        return self

    def fork(self, token_id: int, *, forced: bool = False) -> SequenceState:
        """Return a copy with one more token and no blocks: a continuation of a beam."""
        child = replace(self, token_ids=[*self.token_ids, token_id])
        child.tables = [BlockTable() for _ in self.tables]
        child.source_tables = [BlockTable() for _ in self.source_tables]
        child.state_slot, child.state_writes = NO_STATE, []
        child.uses_source = False
        child.num_prompt_tokens, child.rotary_context = self.num_prompt_tokens, self.rotary_context
        child.history = self.history.fork() if self.history is not None else None
        child.block_hashes = list(self.block_hashes)
        if self.matcher is not None:
            child.matcher = self.matcher.fork()
            if not forced:
                child.matcher.accept(token_id)
        return child

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next step may be launched before this token reaches the host; drafts need the token."""
        return self.can_overlap and not self.expects_drafts

    @property
    def num_slots(self) -> int:
        """Slots among the running sequences: the first beam of a search holds those of all its beams."""
        if self.beams is None:
            return 1
        return self.beams.search.num_beams if self.beams.members[0] is self else 0

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def has_siblings(self) -> bool:
        """Whether its request has other sequences, with the same prompt."""
        return self.params.n > 1 or self.params.num_beams > 1

    @property
    def is_streamed(self) -> bool:
        """Whether its tokens are streamed; a beam search has none before its end."""
        return self.request.streams and self.beams is None

    @property
    def is_background(self) -> bool:
        return self.request.is_background

    @property
    def order(self) -> tuple[int, int]:
        """The order of service: priority, then arrival."""
        return self.request.priority, self.arrival

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_unconstrained(self) -> bool:
        """Whether its request never bans or forces a token."""
        return not (self.history or self.matcher or self.is_limited)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_source(self) -> bool:
        """Whether it has a source whose keys and values are in no blocks yet."""
        return self.request.source is not None and not self.source_tables[0]

    @property
    def source_length(self) -> int:
        """The number of positions of its source; 0 for a decoder-only model."""
        return self.request.source.num_positions if self.request.source is not None else 0

    @property
    def has_placeholder(self) -> bool:
        """Whether its last token has not reached the host yet."""
        return self.token_ids[-1] == PLACEHOLDER

    def append_placeholder(self) -> None:
        """Add a placeholder for the token that is being sampled, unless it is certainly the last one."""
        if self.num_output_tokens + 1 < self.params.max_tokens:
            self.token_ids.append(PLACEHOLDER)

    def drop_placeholders(self, at: int) -> int:
        """Remove the tokens from `at` on, all of them placeholders; return how many."""
        count = len(self.token_ids) - at
        del self.token_ids[at:]
        return count

    @property
    def reuses_prefix(self) -> bool:
        """Whether cached blocks may be reused: scores of the prompt, a probe and an alignment need rows computed anew.

        The last row is always computed, so a probe after the whole prompt needs no other.
        """
        if self.request.alignment is not None:
            return False
        probe = self.params.probe
        if probe is not None and self.probe_logprobs is None and probe.position < self.num_prompt_tokens - 1:
            return False
        return self.params.prompt_logprobs is None or len(self.prompt_logprobs) >= self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def append(self, token_id: int, *, forced: bool = False) -> None:
        """Add the next token, and finish if it is a stop token or the last one.

        A `forced` token is not the model's: the grammar does not see it, and a forced stop token at `max_tokens` counts
        as length.
        """
        self.token_ids.append(token_id)
        self.awaits_token = False
        spent = self.num_output_tokens >= self.params.max_tokens
        imposed = forced and spent
        if token_id in self.stop_token_ids and (imposed or self.num_output_tokens > self.params.min_tokens):
            self.stop_token_id = token_id
            self.finish(FinishReason.LENGTH if imposed else FinishReason.STOP)
            return
        if self.matcher is not None and not forced:
            self.matcher.accept(token_id)
            if self.matcher.is_exhausted and self.matcher.is_complete:
                self.finish(FinishReason.STOP)
                return
        if spent:
            self.finish(FinishReason.LENGTH)
        elif self.matcher is not None and self.matcher.is_exhausted:
            self.fail(self.matcher.failure)

    def fail(self, error: str) -> None:
        self.error = error
        self.finish(FinishReason.ERROR)

    def finish(self, reason: FinishReason) -> None:
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason

    def rotate_for_long_context(self) -> None:
        """Rotate keys for the long context from now on; no earlier key or hash stays valid."""
        self.rotary_context = self.num_tokens
        self.root_hash = None
        self.block_hashes.clear()

    def restart(self) -> None:
        """Return to waiting after a preemption; all tokens will be recomputed."""
        self.restarted = True
        self.awaits_token = not self.num_uncomputed_tokens and self.beams is None
        self.num_computed_tokens = 0
        self.num_offered_blocks = 0
        self.cross_queries.clear()
        if self.model_drafts is not None:
            self.model_drafts.restart()
        if self.beams is not None:
            self.beams.candidates.clear()
        self.status = SequenceStatus.WAITING


class BlockTable(list[int]):
    """A list of block numbers that keeps a copy in int64 (`row`); each read converts only what was added since.

    Changed by `append`, `extend`, `clear`, `pop`, `del` and assignment to items and slices only.
    """

    __slots__ = ("_num_kept", "_row")

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        super().__init__(blocks)
        self._row = np.empty(0, np.int64)
        self._num_kept = 0  # entries of the row that are the list's

    @property
    def row(self) -> NDArray[np.int64]:
        """The same numbers `[len(self)]`, not to be written to and valid until the next change."""
        size, kept = len(self), self._num_kept
        if kept < size:
            if size > len(self._row):
                grown = np.empty(max(8, 2 * size), np.int64)
                grown[:kept] = self._row[:kept]
                self._row = grown
            self._row[kept:size] = self[kept:]
            self._num_kept = size
        return self._row[:size]

    def clear(self) -> None:
        super().clear()
        self._num_kept = 0

    def pop(self, index: SupportsIndex = -1) -> int:
        popped = super().pop(index)
        self._num_kept = 0
        return popped

    def __setitem__(self, key: SupportsIndex | slice, value: int | Iterable[int]) -> None:
        super().__setitem__(key, value)  # type: ignore[index, assignment]
        begin = key.indices(len(self))[0] if isinstance(key, slice) else key.__index__() % len(self)
        self._num_kept = min(self._num_kept, begin)

    def __delitem__(self, key: SupportsIndex | slice) -> None:
        begin = key.indices(len(self))[0] if isinstance(key, slice) else key.__index__() % len(self)
        super().__delitem__(key)
        self._num_kept = min(self._num_kept, begin)
