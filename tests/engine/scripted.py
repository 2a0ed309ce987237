"""An engine over a scripted runner that computes nothing, for scheduling tests without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import and_, eq
from zlib import crc32

from triptych.model.api.request import FinishReason, Request, Source, TokenOutput, token_source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.config.cache import NO_STATE, PoolSize, StateSize
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.block_pool import NULL_BLOCK
from triptych.model.engine.scheduling.scheduled_step import (
    UNLIMITED,
    DraftRun,
    SampledToken,
    ScheduledSequence,
    SchedulerOutput,
)
from triptych.model.engine.scheduling.scheduler import Scheduler
from triptych.model.engine.scheduling.sequence import PLACEHOLDER, SequenceStatus

VOCAB = 1000


def next_token(source: Sequence[int], tokens: Sequence[int]) -> int:
    """Return a hash of the source and all tokens, so that a wrong token changes all later ones."""
    return crc32(repr((list(source), list(tokens))).encode()) % VOCAB


@dataclass
class Late:
    """A launched step: `tokens` is known on the device, `found` once the host collects it."""

    found: list[SampledToken | None]
    tokens: dict[int, int]

    def collect(self) -> list[SampledToken | None]:
        return self.found


class ScriptedRunner:
    """A stand-in for `ModelRunner` that checks each step strictly and generates `next_token`."""

    def __init__(
        self,
        block_manager: BlockManager,
        script: Callable[..., int] = next_token,
        draft_script: Callable[..., int] = next_token,
    ) -> None:
        self.block_manager = block_manager
        self.script = script
        self.draft_script = draft_script
        self.draft_runs: list[DraftRun] = []
        self.drafted: dict[tuple[int, int], object] = {}  # as `written`, for the draft model
        self.steps: list[SchedulerOutput] = []
        self.ahead: list[tuple[tuple[int, ...], int]] = []  # (source, layers encoded)
        # By (pool, slot): the tokens that its keys were computed from.
        self.written: dict[tuple[int, int], object] = {}
        self.states: dict[int, object] = {}  # by state slot, the tokens that its state was computed from

    def probe(self) -> None:
        """Do nothing: a script never fails."""

    def encode_ahead(self, source: Source, layers: int, model: str = "") -> None:
        self.ahead.append((source.token_ids, layers))

    def forget_ahead(self) -> None:
        """Do nothing: `ahead` only records the calls."""

    def draft(self, runs: Sequence[DraftRun]) -> list[tuple[int, ...]]:
        """Propose the draft script's tokens up to the first stop id, after checking the draft model's keys."""
        self.draft_runs += runs
        return [self._draft(run) for run in runs]

    def _draft(self, run: DraftRun) -> tuple[int, ...]:
        sequence, tokens = run.sequence, list(run.sequence.token_ids)
        salt = sequence.request.cache_salt
        assert run.stop <= len(tokens) and PLACEHOLDER not in tokens
        if run.num_drafts:
            assert run.stop == len(tokens)
            for _ in range(run.num_drafts):
                tokens.append(self.draft_script((), tokens))
            ends = [at for at in range(run.stop, len(tokens)) if tokens[at] in sequence.stop_token_ids]
            del tokens[min(ends, default=len(tokens)) :]
        said = tokens[sequence.num_tokens :]
        stop = run.stop + max(0, len(said) - 1)
        slots = self._slots(0, sequence.tables[0], 0, stop)
        keys = [(salt, tuple(tokens[: at + 1])) for at in range(stop)]
        assert [self.drafted[slot] for slot in slots[: run.start]] == keys[: run.start], "the draft model's keys"
        self.drafted |= zip(slots[run.start :], keys[run.start :], strict=True)
        run.drafting.computed(stop, len(said))
        return tuple(said)

    def execute(self, output: SchedulerOutput) -> list[SampledToken | None]:
        return self.launch(output).collect()

    def launch(self, output: SchedulerOutput, before: Late | None = None) -> Late:
        self.steps.append(output)
        known = before.tokens if before is not None else {}
        found = [self._compute(step, self._tokens(step, known)) for step in output.scheduled]
        pairs = zip(output.scheduled, found, strict=True)
        return Late(found, {id(step.sequence): token.token_id for step, token in pairs if token is not None})

    def _tokens(self, step: ScheduledSequence, known: dict[int, int]) -> list[int]:
        """Return the sequence's tokens as the device has them: with the previous step's token and the drafts."""
        *earlier, last = step.sequence.token_ids
        assert PLACEHOLDER not in earlier
        assert not (step.drafts and last == PLACEHOLDER), "drafts after an unknown token"
        return [*earlier, known[id(step.sequence)] if last == PLACEHOLDER else last, *step.drafts]

    def _compute(self, step: ScheduledSequence, tokens: list[int]) -> SampledToken | None:
        sequence, stop = step.sequence, step.start + step.num_tokens
        assert step.num_tokens > 0
        source, salt = source_ids(sequence.request), sequence.request.cache_salt
        memory = [("memory", source, at) for at in range(len(source))]
        keys = [(salt, source, tuple(tokens[: at + 1])) for at in range(stop)]
        for number, pool in enumerate(self.block_manager.pools):
            cross_slots = self._slots(number, sequence.source_tables[number], 0, len(source))
            if step.encode_source:
                self.written |= zip(cross_slots, memory, strict=True)
            self.written |= zip(
                self._slots(number, sequence.tables[number], step.start, stop), keys[step.start :], strict=True
            )
            read = max(0, step.start - pool.window + 1) if pool.window is not None else 0
            slots = self._slots(number, sequence.tables[number], read, stop)
            assert [self.written[slot] for slot in slots] == keys[read:], "keys of other tokens"
            assert [self.written[slot] for slot in cross_slots] == memory, "memory of another source"
        if self.block_manager.has_states:
            self._recur(step, salt, tokens)
        if not step.samples:
            return None
        end = len(tokens) - len(step.drafts)
        said = [self.script(source, tokens[: end + ahead]) for ahead in range(1 + len(step.drafts))]
        right = sum(accumulate(map(eq, said, step.drafts), and_))  # the accepted drafts
        first, *later = map(SampledToken, said[: 1 + right])
        return first._replace(later=tuple(later))

    def _recur(self, step: ScheduledSequence, salt: str, tokens: list[int]) -> None:
        sequence = step.sequence
        read = None if sequence.state_slot == NO_STATE else self.states[sequence.state_slot]
        assert read == ((salt, tuple(tokens[: step.start])) if step.start else None), "a state of other tokens"
        assert sequence.state_slot not in [slot for _, slot in sequence.state_writes], "a state that is read is written"
        writes = [(at, slot) for at, slot in sequence.state_writes if at <= step.start + step.num_tokens]
        self.states |= {slot: (salt, tuple(tokens[:at])) for at, slot in writes}
        assert writes[-1][0] == step.start + step.num_tokens
        assert writes == sequence.state_writes or step.drafts or sequence.model_drafts, "a slot that is never written"

    def _slots(self, pool: int, table: list[int], start: int, stop: int) -> list[tuple[int, int]]:
        slots = self.block_manager.slots(table, start, stop)
        first = NULL_BLOCK + 1 if self.block_manager.pools[pool].window is not None else 0
        assert all(slot >= first * self.block_manager.block_size for slot in slots), "a freed block"
        return [(pool, slot) for slot in slots]


class Harness:
    """An engine over scripted tokens that checks every step and its outputs."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        budget: int = 32,
        max_model_len: int = 128,
        eos_token_ids: tuple[int, ...] = (),
        script: Callable[..., int] = next_token,
        prefix_caching: bool = True,
        overlap: bool = False,
        pools: Sequence[PoolSize] = (),
        num_speculative_tokens: int = 0,
        states: StateSize | None = None,
        encoder_layers: int = 1,
        draft_script: Callable[..., int] | None = None,
    ) -> None:
        """Build an engine. `pools` replaces the pool of `num_blocks`; `draft_script` is the draft model's."""
        pools = pools or [PoolSize(num_blocks)]
        blocks = BlockManager(pools, block_size, prefix_caching=prefix_caching, states=states)
        self.runner = ScriptedRunner(blocks, script, draft_script or next_token)
        self.engine = GenerateEngine(
            "scripted",
            self.runner,
            Scheduler(blocks, max_num_seqs, budget, encoder_layers),
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            overlap=overlap,
            num_speculative_tokens=num_speculative_tokens,
        )
        if draft_script is not None:
            self.engine.speculation.draft_context = max_model_len
        self.outputs: list[TokenOutput] = []
        self.limits = UNLIMITED  # of each step

    def add(self, request_id: str, prompt: int | Sequence[int] = 5, **settings: object) -> Request:
        """Add a request. `prompt` and `source` are lengths or ids; `source` makes it an encoder-decoder request."""
        made = request(request_id, prompt, **settings)
        self.engine.add(made)
        return made

    def step(self) -> list[TokenOutput]:
        scheduler = self.engine.scheduler
        decoding = [s for s in scheduler.running if s.num_uncomputed_tokens == 1]
        outputs, stats = self.engine.step(self.limits)
        if stats is not None and stats.num_sequences and not self.engine.overlap:  # with overlap: the previous step's
            step = self.runner.steps[-1]
            assert sum(s.num_tokens for s in step.scheduled) <= scheduler.max_num_batched_tokens
            assert len(step.scheduled) <= scheduler.max_num_seqs
            moved = {id(s.sequence) for s in step.scheduled}
            assert all(id(s) in moved for s in decoding if s.status is SequenceStatus.RUNNING), "a token was held up"
        assert len(scheduler.running) <= scheduler.max_num_seqs
        self.engine.check_invariants()
        self.outputs += outputs
        return outputs

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.outputs += self.engine.abort(request_id, index, FinishReason.CANCELLED)
        self.engine.check_invariants()

    def run(self, limit: int = 5000) -> Harness:
        """Step until no work is left; check that the engine is empty then."""
        for _ in range(limit):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the engine does not come to an end"
        assert self.engine.block_manager.is_empty
        return self

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        mine = [o for o in self.outputs if (o.request_id, o.index) == (request_id, index)]
        return [token for output in mine for token in output.token_ids]

    def ends(self) -> dict[tuple[str, int], FinishReason]:
        """Return how each sequence ended; check that it has no output after its end."""
        ends: dict[tuple[str, int], FinishReason] = {}
        for output in self.outputs:
            key = (output.request_id, output.index)
            assert key not in ends, f"{key} was heard of after its end"
            if output.finish_reason is not None:
                ends[key] = output.finish_reason
        return ends

    @property
    def first_steps(self) -> list[str]:
        """Requests in the order of their first step."""
        return list(dict.fromkeys(s.sequence.request.request_id for step in self.runner.steps for s in step.scheduled))


def request(
    request_id: str,
    prompt: int | Sequence[int] = 5,
    *,
    source: int | Sequence[int] = 0,
    priority: int = 0,
    deadline: float | None = None,
    cache_salt: str = "",
    tenant: str = "",
    **params: object,
) -> Request:
    ids = tuple(range(10, 10 + prompt)) if isinstance(prompt, int) else tuple(prompt)
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    if source:
        begin = crc32(request_id.encode())  # a source given by its length is unique to the request
        reads = tuple(range(begin, begin + source)) if isinstance(source, int) else tuple(source)
        return Request(
            *(request_id, "scripted", ids, sampling, token_source(reads), priority, cache_salt),
            deadline=deadline,
            tenant=tenant,
        )
    return Request(request_id, "scripted", ids, sampling, None, priority, cache_salt, deadline=deadline, tenant=tenant)


def source_ids(made: Request) -> tuple[int, ...]:
    """Return the source of the encoder; empty for a decoder-only model."""
    return made.source.token_ids if made.source is not None else ()


def expected_tokens(made: Request) -> list[int]:
    """Return the tokens of a request that runs alone without a stop id."""
    source, tokens = source_ids(made), list(made.prompt_token_ids)
    for _ in range(made.params.max_tokens):
        tokens.append(next_token(source, tokens))
    return tokens[-made.params.max_tokens :]


def breaks_on(harness: Harness, request_id: str) -> None:
    """Make the model fail on a request, and sample token 0 where the keys that it should have written are missing."""
    real = harness.runner.launch

    def launch(output: SchedulerOutput, before: Late | None = None) -> Late:
        harness.runner.steps.append(output)
        if any(step.sequence.request.request_id == request_id for step in output.scheduled):
            raise RuntimeError("this request breaks the model")
        first = output.scheduled[0]
        if not harness.runner.written and not first.encode_source and (first.start or first.sequence.source_length):
            return Late([SampledToken(0) for _ in output.scheduled], {})
        return real(output, before)

    harness.runner.launch = launch  # type: ignore[method-assign]
