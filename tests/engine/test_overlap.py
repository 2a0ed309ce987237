"""Steps launched before the last tokens are known, and CUDA graphs, give the same tokens as sequential steps.

Here recorded steps run without a GPU: a replay calls the recorded function again.
It has the same buffers, which are all that the backend reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.scripted import Harness, Late, expected_tokens
from tests.engine.support import pools_for, request
from tests.engine.test_beam_search import BeamRunner
from tests.matrix import rest_is_slow
from tests.model.checkpoints import CPU, loaded
from triptych.model.api.request import FinishReason, Request, TokenOutput
from triptych.model.attention import base
from triptych.model.attention.base import AttentionMetadata
from triptych.model.attention.layer_backends import Recurrence
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.cache.kv_cache import KVCache, StateCache, StateSpan, StateTables
from triptych.model.config.attention import GatedDeltaConfig
from triptych.model.config.cache import NO_STATE, StateSize
from triptych.model.engine.execution import cuda_graphs
from triptych.model.engine.execution.cuda_graphs import DecodeGraphs, num_recorded, sizes_up_to, uneven_sizes
from triptych.model.engine.execution.mixed_graphs import MixedGraphs
from triptych.model.engine.execution.model_runner import Launched, ModelRunner
from triptych.model.engine.execution.step_program import StepPlan, StepProgram
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.scheduled_step import SchedulerOutput
from triptych.model.engine.scheduling.scheduler import Scheduler
from triptych.model.network.delta_net import recur
from triptych.model.system.background_work import finish

KINDS = ["gpt2", "llama-gqa", "phi3-longrope", "gemma3", "qwen3-next", "t5-relu", "bart"]


class LengthsBackend(SdpaBackend):
    """A backend that reads lengths only from device tables, as kernels do, and skips slots below 0."""

    graph_safe = True
    chunk = 7

    def unsupported_recurrence(self, config: GatedDeltaConfig, dtype: torch.dtype) -> str | None:
        return None

    def recur(
        self, layer: Recurrence, inputs: Tensor, gates: Tensor, tables: StateTables, states: StateCache | None
    ) -> Tensor:
        """Compute the rows in the tables alone; a recorded step has unused rows, which stay NaN."""
        read = tables.singles.T.tolist() if tables.singles is not None else []
        spans = [StateSpan(row, row + 1, *slots) for row, *slots in read if slots != [NO_STATE] * 2]
        if tables.segments is not None and tables.chunks is not None:
            chunks = tables.chunks.T.tolist()
            for first, last, source in tables.segments.T.tolist():
                begun = chunks[first][0]
                for _, end, _, _, target in chunks[first:last]:
                    if target != NO_STATE or end == chunks[last - 1][1]:
                        spans.append(StateSpan(begun, end, source, target))
                        begun, source = end, target
        out = torch.full((len(inputs), layer.config.value_size), float("nan"))
        found, rows = recur(layer, inputs, gates, spans, states), [r for span in spans for r in range(*span[:2])]
        out[rows] = found[rows]
        return out

    def forward(self, query, key, value, cache, metadata, config, bias=None, sinks=None) -> Tensor:  # type: ignore[no-untyped-def]
        lengths = metadata.device_lengths
        if lengths is None or metadata.block_tables is None:
            return super().forward(query, key, value, cache, metadata, config, bias, sinks)
        kv_lens = lengths.kv_lens.tolist()
        alive = [b for b, length in enumerate(kv_lens) if length]
        starts = lengths.cu_seqlens_q.tolist()
        rows = [row for b in alive for row in range(starts[b], starts[b + 1])]
        slots = metadata.slot_mapping
        assert slots is None or (slots[[r for r in range(len(query)) if r not in rows]] < 0).all()
        out = torch.full_like(query, float("nan"))
        if alive:
            known = AttentionMetadata(
                q_lens=tuple(starts[b + 1] - starts[b] for b in alive),
                kv_lens=tuple(kv_lens[b] for b in alive),
                causal=metadata.causal,
                block_tables=metadata.block_tables[alive],
                slot_mapping=None if slots is None else slots[rows],
            )
            keys = [None if tensor is None else tensor[rows] for tensor in (key, value)]
            out[rows] = super().forward(query[rows], *keys, cache, known, config, bias, sinks)
        return out


def recorded(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
    result = run()
    return result, lambda: result.copy_(run())


class CountingRunner(ModelRunner):
    """A runner that counts the steps launched during another, and the replayed steps."""

    followed = 0

    def launch(self, output: SchedulerOutput, before: Launched | None = None) -> Launched:
        self.followed += before is not None
        return super().launch(output, before)


def outputs_of(
    kind: str,
    requests: list[Request],
    *,
    overlap: bool = False,
    graphs: bool = False,
    prompts: bool = False,
    num_blocks: int = 300,
    drafts: int = 0,
) -> tuple[dict[tuple[str, int], list[TokenOutput]], CountingRunner]:
    model = loaded(kind, LengthsBackend())
    decoder = model.config.decoder
    assert decoder is not None
    pools = pools_for(decoder, num_blocks)
    states = StateSize(24, 12) if decoder.recurrences else None
    blocks = BlockManager(pools, 4, short_context=model.config.short_context, states=states)
    num_states = states.num_slots if states is not None else 0
    cache = KVCache(decoder, [pool.num_pages for pool in pools], 4, torch.float32, CPU, num_states)
    decode, mixed = None, None
    if graphs:
        decode = DecodeGraphs(model, cache, max_num_seqs=12, max_model_len=64, record=recorded)
        finish(decode.record_each())
    if prompts:
        mixed = MixedGraphs(model, cache, max_num_seqs=12, max_model_len=64, record=recorded)
        finish(mixed.record_each())
    runner = CountingRunner(model, cache, blocks, decode, mixed_graphs=mixed)
    eos = model.config.eos_token_ids
    engine = GenerateEngine(
        kind,
        runner,
        Scheduler(blocks, 12, 64),
        max_model_len=64,
        eos_token_ids=eos,
        overlap=overlap,
        num_speculative_tokens=drafts,
    )
    found: dict[tuple[str, int], list[TokenOutput]] = {}
    waiting = list(requests)
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop(0))
        for output in engine.step()[0]:
            found.setdefault((output.request_id, output.index), []).append(output)
        engine.check_invariants()
    assert blocks.is_empty
    return found, runner


def tokens_of(found: dict[tuple[str, int], list[TokenOutput]]) -> dict[Any, Any]:
    return {
        key: ([t for o in outputs for t in o.token_ids], outputs[-1].finish_reason, outputs[-1].stop_reason)
        for key, outputs in found.items()
    }


def assorted(kind: str, *, blind: bool) -> list[Request]:
    """Return greedy and sampled requests; `blind` leaves out those that must see each token before the next step."""
    made = [
        request(kind, "greedy", 9, 0, max_tokens=20),
        request(kind, "drawn", 17, 1, max_tokens=15, temperature=0.9, seed=4),
        request(kind, "one", 5, 2, max_tokens=1),
        request(kind, "two", 5, 3, max_tokens=2, temperature=1.0, top_k=5, n=3, seed=1),
        request(kind, "long", 30, 4, max_tokens=25, temperature=1.0, top_p=0.9, seed=2),
        request(kind, "stops", 12, 5, max_tokens=30, temperature=1.3, seed=5, ignore_eos=False, min_tokens=2,
                stop_token_ids=tuple(range(0, 90, 7))),
    ]  # fmt: skip
    if not blind:
        made += [
            request(kind, "penalised", 8, 6, max_tokens=12, repetition_penalty=1.4),
            request(kind, "scored", 8, 7, max_tokens=6, logprobs=2),
            request(kind, "beams", 8, 8, max_tokens=6, num_beams=3, n=2),
        ]
    return made


@cache
def sequential(kind: str, blind: bool) -> dict[tuple[str, int], list[TokenOutput]]:
    return outputs_of(kind, assorted(kind, blind=blind))[0]


# Each kind runs mixed requests with graphs; a few kinds also run the other combinations.
EACH = rest_is_slow(
    product(KINDS, ("blind", "mixed"), ("", "graphs")),
    lambda kind, sort, graphs: (
        (sort, bool(graphs)) == ("mixed", True)
        or kind == "gpt2"
        or (kind, sort, graphs) in (("qwen3-next", "blind", "graphs"), ("bart", "mixed", ""))
    ),
)


@pytest.mark.parametrize(("kind", "sort", "graphs"), EACH)
def test_overlap_gives_the_tokens_of_sequential_steps(kind: str, sort: str, graphs: str) -> None:
    plain = sequential(kind, sort == "blind")
    found, runner = outputs_of(kind, assorted(kind, blind=sort == "blind"), overlap=True, graphs=bool(graphs))
    assert tokens_of(found) == tokens_of(plain)
    assert runner.followed > 5
    assert plain["stops", 0][-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("graphs", [False, True], ids=["", "graphs"])
def test_steps_with_one_long_sequence_among_short_ones(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that such steps have graphs of their own, which divide the keys as for one sequence."""
    requests = [request("gpt2", f"r{i}", 38 if i == 3 else 1 + i % 2, i, max_tokens=3 + i) for i in range(9)]
    plain, _ = outputs_of("gpt2", requests)
    seen: list[tuple[bool, bool]] = []
    launch = StepProgram.run

    def noted(self: StepProgram, plan: StepPlan, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        seen.append((plan.replayed, plan.uneven))
        return launch(self, plan, tokens)

    monkeypatch.setattr(StepProgram, "run", noted)
    monkeypatch.setattr(base, "UNEVEN_KEYS", 16)
    monkeypatch.setattr(base, "UNEVEN_TIMES", 3)
    monkeypatch.setattr(cuda_graphs, "uneven_sizes", lambda *_: [4, 12])
    found, runner = outputs_of("gpt2", requests, overlap=True, graphs=graphs)
    assert tokens_of(found) == tokens_of(plain)
    assert {(graphs, True), (graphs, False)} <= set(seen)
    if runner.graphs is not None:
        assert {size for size, uneven in runner.graphs._recorded if uneven} == {4, 12}


@pytest.mark.parametrize("kind", ["gpt2", "bart"])
def test_a_replay_is_sent_the_tables_in_use(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a replay does not copy all table columns: for 256 sequences of 131,072 tokens they take 17 MB."""
    sent: list[int] = []
    real = cuda_graphs.to_device
    monkeypatch.setattr(cuda_graphs, "to_device", lambda host, device: sent.append(host.numel()) or real(host, device))
    outputs_of(kind, [request(kind, "one", 5, 0, max_tokens=12)], graphs=True)
    widest = 2 * 4 if kind == "bart" else 5  # blocks of 4 for 13 and 5 tokens, or for 17, where 64 would have 16
    assert max(sent) <= 4 + 2 + 2 + widest


@pytest.mark.parametrize("kind", ["gpt2", "bart"])
def test_preemption_while_a_step_is_pending(kind: str) -> None:
    requests = [request(kind, f"r{i}", 12, i, max_tokens=30, temperature=1.0, seed=i) for i in range(6)]
    plain, _ = outputs_of(kind, requests)
    found, runner = outputs_of(kind, requests, overlap=True, graphs=True, num_blocks=34 if kind == "gpt2" else 44)
    assert tokens_of(found) == tokens_of(plain)
    assert runner.followed > 5


SEEING: list[dict[str, Any]] = [
    {"logprobs": 1},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 3},
    {"presence_penalty": 0.5},
    {"prompt_logprobs": 0},
]


def launches(harness: Harness) -> list[bool]:
    """Return a list that gets, for each launch, whether it precedes the tokens of the previous step."""
    followed: list[bool] = []
    real = harness.runner.launch

    def launch(output: SchedulerOutput, before: Late | None = None) -> Late:
        followed.append(before is not None)
        return real(output, before)

    harness.runner.launch = launch  # type: ignore[method-assign]
    return followed


@pytest.mark.parametrize("settings", SEEING, ids=lambda s: next(iter(s)))
def test_sequences_that_need_their_token_skip_a_step_that_runs_ahead(settings: dict[str, Any]) -> None:
    harness = Harness(overlap=True)
    made = [harness.add(f"blind{i}", 5, max_tokens=30) for i in range(5)]
    made.append(harness.add("seeing", 5, max_tokens=14, **settings))
    followed = launches(harness)
    harness.run()
    assert all(harness.tokens(one.request_id) == expected_tokens(one) for one in made)
    assert followed == [False] + [True] * (len(followed) - 1)
    assert len(followed) <= 31
    took_part = [any(s.sequence.request is made[-1] for s in step.scheduled) for step in harness.runner.steps]
    assert took_part[:27] == [True, False] * 13 + [True]


def test_no_run_ahead_if_most_sequences_need_their_token() -> None:
    harness = Harness(overlap=True)
    made = [harness.add(f"seeing{i}", 5, max_tokens=10, repetition_penalty=1.3) for i in range(3)]
    made += [harness.add(f"blind{i}", 5, max_tokens=10) for i in range(3)]
    followed = launches(harness)
    harness.run()
    assert all(harness.tokens(one.request_id) == expected_tokens(one) for one in made)
    assert followed == [False] * 10


def test_search_preempted_while_a_step_is_pending_is_unchanged() -> None:
    """Check that its candidates arrive while its beams wait again."""
    harness = Harness(num_blocks=26, block_size=2, overlap=True, max_num_seqs=12)
    harness.engine.runner = harness.runner = BeamRunner(harness.engine.block_manager)
    made = [harness.add(f"blind{i}", [i] * 2, max_tokens=8) for i in range(7)]
    harness.add("search", 2, num_beams=2, n=2, max_tokens=8)
    harness.run()
    assert harness.engine.scheduler.num_preemptions > 0
    assert all(harness.tokens(one.request_id) == expected_tokens(one) for one in made)
    alone = Harness(num_blocks=100, block_size=2)
    alone.engine.runner = alone.runner = BeamRunner(alone.engine.block_manager)
    alone.add("search", 2, num_beams=2, n=2, max_tokens=8)
    alone.run()
    assert [harness.tokens("search", i) for i in range(2)] == [alone.tokens("search", i) for i in range(2)]


def test_recorded_sizes_hold_every_batch() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(40) == [1, 2, 4, 8, 16, 32, 40]
    assert sizes_up_to(64)[-2:] == [48, 64]
    assert uneven_sizes(256, 32_768) == [16, 32, 64, 128, 256]
    assert uneven_sizes(40, 32_768) == [16, 32, 40]
    assert uneven_sizes(12, 32_768) == uneven_sizes(256, 4096) == []
    assert num_recorded(40, 32_768) == 7 + 3


def test_failed_launch_loses_no_token_of_other_sequences() -> None:
    harness = Harness(overlap=True)
    made = [harness.add(f"r{i}", 5 + i, max_tokens=12) for i in range(4)]
    real, broken = harness.runner.launch, []

    def launch(output: SchedulerOutput, before: Late | None = None) -> Late:
        if len(harness.runner.steps) > 3 and any(s.sequence.request.request_id == "r2" for s in output.scheduled):
            broken.append(len(output.scheduled))
            raise RuntimeError("this request breaks the model")
        return real(output, before)

    harness.runner.launch = launch  # type: ignore[method-assign]
    harness.run()
    ends = harness.ends()
    assert ends.pop(("r2", 0)) is FinishReason.ERROR
    assert broken[0] == 4 and broken[-1] == 1
    assert set(ends.values()) == {FinishReason.LENGTH}
    for one in made:
        if one.request_id != "r2":
            assert harness.tokens(one.request_id) == expected_tokens(one)


def test_abort_while_a_step_is_pending_ends_once_and_frees_blocks() -> None:
    harness = Harness(overlap=True)
    kept = harness.add("kept", 5, max_tokens=20)
    harness.add("gone", 5, max_tokens=20)
    for _ in range(4):
        harness.step()
    harness.abort("gone")
    harness.run()
    assert harness.ends() == {("gone", 0): FinishReason.CANCELLED, ("kept", 0): FinishReason.LENGTH}
    assert harness.tokens("kept") == expected_tokens(kept)
