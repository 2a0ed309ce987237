"""Steps of two ranks: one message each, replayed and launched ahead, with the results of one rank.

Rank 1 is a thread of the test, so that graphs can be pretended on both ranks as `tests.engine.test_overlap` does.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.engine.support import request
from tests.engine.test_overlap import LengthsBackend, assorted, recorded, tokens_of
from tests.model.checkpoints import CPU, saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import Request, TokenOutput
from triptych.model.attention.selection import Selection
from triptych.model.config.sharding import Shard
from triptych.model.engine import builder, generate_builder, kernel_checks, rank_main
from triptych.model.engine.builder import LoadedModel, load
from triptych.model.engine.execution.batch import BatchLayout
from triptych.model.engine.execution.step_logits import BEST, CANDIDATES, WHOLE
from triptych.model.engine.execution.step_program import StepPlan
from triptych.model.engine.network_plan import NetworkPlan
from triptych.model.engine.planning import kernels
from triptych.model.errors import ConfigError, EngineDeadError
from triptych.model.linear.factory import LinearFactory
from triptych.model.network import fused_ops
from triptych.model.parallel import rank_processes, step_ring
from triptych.model.parallel.group import Group
from triptych.model.parallel.messages import Load, Message, Pools, Step
from triptych.model.parallel.rank_processes import RankProcesses
from triptych.model.system import fallbacks, kernel_faults
from triptych.model.system.background_work import Work, finish
from triptych.model.system.child_process import FrameSocket

SETTINGS: dict[str, Any] = {"block_size": 4, "device": "cpu", "dtype": "float32", "kv_cache_memory": 1 << 20}
# Bytes of each rank: too little for all requests at once.
SMALL_POOLS = {"llama-gqa": 14 << 10, "bart": 52 << 10, "qwen3-next": 80 << 10}


class Said(FrameSocket):
    """Rank 0's end of the socket, which records every message."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.messages: list[Message] = []

    def send(self, frame: bytes) -> None:
        self.messages.append(msgspec.msgpack.decode(frame, type=Message))
        super().send(frame)


class RankThread:
    """A rank as a thread, with what rank 0 needs of a process."""

    pid = 0

    def __init__(self, rank: int, size: int, rendezvous: int, ring: int) -> None:
        ours, theirs = socket.socketpair()
        self.frames = Said(ours)
        worker = rank_main.RankWorker(FrameSocket(theirs), rendezvous, ring, Shard(rank, size))
        self._thread = threading.Thread(target=self._run, args=(worker, theirs), daemon=True)
        self.error: BaseException | None = None
        self._thread.start()

    def _run(self, worker: rank_main.RankWorker, connection: socket.socket) -> None:
        try:
            worker.run()
        except EOFError:
            pass
        except BaseException as error:
            self.error = error
        finally:
            if worker._group is not None:
                worker._group.close()
            connection.close()

    def wait(self, seconds: float | None = None) -> int:
        self._thread.join(seconds)
        return 0

    def kill(self) -> None:
        """Do nothing: the thread ends with its socket."""


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RankThread]]:
    """Run ranks as threads, with a graph-safe backend and graphs that remember the recorded function."""
    started: list[RankThread] = []

    def start(rank: int, size: int, rendezvous: int, ring: int) -> Any:
        started.append(RankThread(rank, size, rendezvous, ring))
        return SimpleNamespace(rank=rank, process=started[-1], frames=started[-1].frames)

    used = torch.get_num_threads()
    chosen = Selection(LengthsBackend(), "asked for", preferred="sdpa")
    monkeypatch.setattr(rank_processes, "_start", start)
    for module in (kernels, rank_main):
        monkeypatch.setattr(module, "select_backend", lambda *_: chosen)
    for module in (generate_builder, rank_main):
        monkeypatch.setattr(module, "CudaRecorder", lambda *_, **__: recorded)
    monkeypatch.setattr(generate_builder, "can_record", lambda engine, model, device: engine.cuda_graphs)
    yield started
    torch.set_num_threads(used)
    assert [thread.error for thread in started] == [None] * len(started)


def loaded(kind: str, size: int, *, overlap: bool = False, **changes: Any) -> LoadedModel:
    ranks = {"tensor_parallel_size": size, "cuda_graphs": size > 1, "max_num_seqs": 12}
    settings = EngineConfig(**{**SETTINGS, **ranks, **changes})
    model = load(ModelSpec(kind, str(saved(kind).path), settings))
    assert model.generate is not None
    model.generate.overlap = overlap
    return model


Found = dict[tuple[str, int], list[TokenOutput]]


def outputs(model: LoadedModel, requests: list[Request]) -> dict[Any, Any]:
    return tokens_of(outputs_of(model, requests))


def outputs_of(model: LoadedModel, requests: list[Request]) -> Found:
    engine = model.generate
    assert engine is not None
    found: Found = {}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for output in engine.step()[0]:
            found.setdefault((output.request_id, output.index), []).append(output)
    return found


def prompt_logprobs(found: Found) -> list[float]:
    scored = found["read", 0][0].prompt_logprobs
    assert scored is not None
    return [one.logprob for one in scored if one is not None]


@pytest.mark.parametrize("overlap", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("kind", ["llama-gqa", "bart", "qwen3-next"])
def test_two_ranks_replay_what_one_computes(kind: str, overlap: bool, threads: list[RankThread]) -> None:
    """Check a pool too small for all: it preempts sequences of plain, search and scored requests."""
    requests = [*assorted(kind, blind=False), request(kind, "read", 30, 11, max_tokens=8, prompt_logprobs=1)]
    model = loaded(kind, 2, overlap=overlap, max_model_len=64, kv_cache_memory=SMALL_POOLS[kind])
    try:
        found, alone = outputs_of(model, requests), outputs_of(loaded(kind, 1), requests)
        assert tokens_of(found) == tokens_of(alone)
        assert prompt_logprobs(found) == pytest.approx(prompt_logprobs(alone), rel=1e-4, abs=1e-4)
        assert len(prompt_logprobs(found)) == len(requests[-1].prompt_token_ids) - 1
        assert model.generate is not None
        # As many run as have room for their states; then blocks are enough.
        assert (model.generate.scheduler.num_preemptions > 0) == (kind != "qwen3-next")
        begun = next(at for at, one in enumerate(threads[0].frames.messages) if isinstance(one, Step))
        steps = threads[0].frames.messages[begun:]
        assert all(isinstance(one, Step) for one in steps)  # copies, encoded sources and scored prompts are in them
        assert any(step.copies for step in steps) and any(step.scored for step in steps)
        assert any(step.sources for step in steps) == (kind == "bart")
        assert sum(step.replayed for step in steps) > 10
        assert any(not step.replayed for step in steps)
        assert any(step.states for step in steps) == (kind == "qwen3-next")
        assert any(step.num_known for step in steps) == overlap
        reduced = {WHOLE, BEST, CANDIDATES} if kind != "bart" else set()  # which has generation rules
        assert {needed for step in steps for needed in step.needed} == reduced
    finally:
        model.close()


def test_other_ranks_do_without_broken_kernels(threads: list[RankThread], monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(plan: NetworkPlan) -> Work[NetworkPlan]:
        yield None
        return kernel_checks.without(plan, faults)

    faults, asked = {kernel_faults.FP8: "off by 1", kernel_faults.step_part("gated"): "no compiler"}, list[Any]()
    chosen, real = rank_main.select_backend, LinearFactory
    monkeypatch.setattr(builder, "checked", checked)
    monkeypatch.setattr(fused_ops, "broken", set())
    monkeypatch.setattr(rank_main, "select_backend", lambda *given: asked.append(given[3]) or chosen(*given))
    monkeypatch.setattr(rank_main, "use_torch", asked.append)
    monkeypatch.setattr(
        rank_main, "LinearFactory", lambda *given, **named: asked.append(named["faults"]) or real(*given, **named)
    )
    loaded("llama", 2).close()
    assert asked == [faults] * 3
    assert fused_ops.broken == {"gated"}
    fallbacks.forget()


@pytest.mark.parametrize("overlap", [False, True], ids=["", "ahead"])
def test_two_ranks_accept_the_drafts_that_one_accepts(overlap: bool, threads: list[RankThread]) -> None:
    kind = "llama-gqa"
    requests = [
        request(kind, "greedy", 9, 0, max_tokens=40),
        request(kind, "likely", 9, 1, max_tokens=40, temperature=0.3, top_k=3, seed=4),
        request(kind, "drawn", 9, 2, max_tokens=40, temperature=0.3, seed=5),
        request(kind, "scored", 9, 3, max_tokens=40, logprobs=1),
        request(kind, "penalised", 9, 4, max_tokens=30, presence_penalty=0.1),
    ]
    model = loaded(kind, 2, overlap=overlap, num_speculative_tokens=4)
    alone = loaded(kind, 1)
    try:
        assert outputs(model, requests) == outputs(alone, requests)
        assert model.generate is not None
        stats = model.generate.stats()
        assert stats.draft_tokens > stats.accepted_tokens > 0
        steps = [one for one in threads[0].frames.messages if isinstance(one, Step)]
        drafted = [step for step in steps if len(step.needed) > step.num_segments]
        assert {kind for step in drafted for kind in step.needed} == {WHOLE, BEST, CANDIDATES}
    finally:
        model.close()


@pytest.mark.parametrize("kind", ["mixtral", "gemma3", "t5-relu"])
def test_two_ranks_choose_one_ranks_tokens_of_reduced_and_whole_rows(kind: str, threads: list[RankThread]) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_k": 4, "seed": 1},
        {"temperature": 1.1, "top_k": 20, "top_p": 0.7, "seed": 2, "n": 2},
        {"temperature": 0.8, "seed": 3},
        {"logprobs": 2},
        {"presence_penalty": 0.5},
        {"num_beams": 2},
    ]
    requests = [request(kind, f"r{at}", 3 + at, at, max_tokens=8, **one) for at, one in enumerate(settings)]
    model = loaded(kind, 2)
    try:
        assert outputs(model, requests) == outputs(loaded(kind, 1), requests)
        steps = [one for one in threads[0].frames.messages if isinstance(one, Step)]
        assert {needed for step in steps for needed in step.needed} == {WHOLE, BEST, CANDIDATES}
    finally:
        model.close()


@pytest.mark.parametrize("overlap", [False, True], ids=["", "ahead"])
def test_a_step_is_one_message(overlap: bool, threads: list[RankThread], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check for one more broadcast if the step is launched before the last tokens are known."""
    model = loaded("llama-gqa", 2, overlap=overlap)
    try:
        engine, (rank,) = model.generate, threads
        assert engine is not None
        for number in range(3):
            engine.add(request("llama-gqa", f"r{number}", 5 + number, number, max_tokens=20))
        for _ in range(4):
            engine.step()
        group = model.rank_processes.group  # type: ignore[union-attr]
        made: Counter[str] = Counter()
        for name in ("broadcast", "sum", "stack", "concatenate"):
            real = getattr(group, name)
            monkeypatch.setattr(
                group, name, lambda *args, name=name, real=real: made.update([name]) or real(*args), raising=True
            )
        said = len(rank.frames.messages)
        for _ in range(6):
            engine.step()
        messages = rank.frames.messages[said:]
        assert len(messages) == 6
        assert all(isinstance(one, Step) and one.replayed and one.num_segments == 3 for one in messages)
        layers = 2
        assert made == Counter(sum=6 * (2 * layers + 1), stack=6, broadcast=6 * overlap)
    finally:
        model.close()


def test_a_rank_that_cannot_record_leaves_all_without_graphs(
    threads: list[RankThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no graph for you")

    monkeypatch.setattr(
        rank_main, "recorded", lambda graphs: (finish(graphs.record_each()), (None, "no graph for you"))[1]
    )
    model = loaded("llama-gqa", 2)
    try:
        requests = [request("llama-gqa", "one", 5, max_tokens=4)]
        assert model.info.recorded_sizes == 0
        assert outputs(model, requests) == outputs(loaded("llama-gqa", 1), requests)
        assert not any(one.replayed for one in threads[0].frames.messages if isinstance(one, Step))
    finally:
        model.close()


@pytest.mark.parametrize("failing", [generate_builder, rank_main], ids=["rank 0", "rank 1"])
def test_a_rank_that_fails_to_record_alone_ends_all_at_once_with_its_reason(
    failing: Any, threads: list[RankThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check while the other rank is in a sum, for which it would wait a minute."""
    for seconds in ("_TOGETHER_SECONDS", "_CLOSE_SECONDS"):  # a thread is not ended by its socket
        monkeypatch.setattr(rank_processes, seconds, 0.1)
    monkeypatch.setattr(failing, "recorded", lambda graphs: (None, "no graph for you"))
    name = "rank 0" if failing is generate_builder else "rank 1"
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=f"{name} of llama-gqa could not record decode steps: no graph for you"):
        loaded("llama-gqa", 2)
    assert time.monotonic() - began < 20.0
    threads[0].wait(60.0)
    threads[0].error = None  # whatever it met: its socket is closed


def test_an_id_that_is_no_token_is_refused_before_it_is_sent(threads: list[RankThread]) -> None:
    model = loaded("llama-gqa", 2)
    try:
        engine = model.generate
        assert engine is not None
        wrong = Request("wrong", "llama-gqa", (10_000,), request("llama-gqa", "x", 1).params)
        right = request("llama-gqa", "right", 5, max_tokens=3)
        found = outputs(model, [wrong, right])
        assert found["right", 0] == outputs(loaded("llama-gqa", 1), [right])["right", 0]
        assert not found["wrong", 0][0]
    finally:
        model.close()


def test_a_rank_that_takes_no_messages_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a step that is longer than the socket buffer of a rank that hangs."""
    ours, theirs = socket.socketpair()
    process = SimpleNamespace(pid=0, wait=lambda seconds=None: 0, kill=lambda: None)
    started = SimpleNamespace(rank=1, process=process, frames=FrameSocket(ours))
    monkeypatch.setattr(rank_processes, "_start", lambda *_: started)
    monkeypatch.setattr(rank_processes, "TIMEOUT_SECONDS", 0.2)
    load_nothing = Load("", False, 64, "float32", "cpu", "sdpa", None, None, "none")
    with theirs:
        ranks = RankProcesses("m", Group(Shard(0, 2), CPU), [load_nothing])
        long = Step((1, 1, 1, 0, 1), bytes(1 << 22), 1, False, 0, False, None)
        with pytest.raises(EngineDeadError, match="rank 1 of m takes no messages"), ranks.sending(long):
            pytest.fail("it was sent")
        with pytest.raises(EngineDeadError, match="rank 1 of m takes no messages"):
            ranks.check()
        ranks.close()


def test_ranks_that_read_no_steps_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check short messages, which a socket takes, with integers that fill the ring."""
    ours, theirs = socket.socketpair()
    process = SimpleNamespace(pid=0, wait=lambda seconds=None: 0, kill=lambda: None)
    monkeypatch.setattr(
        rank_processes, "_start", lambda *_: SimpleNamespace(rank=1, process=process, frames=FrameSocket(ours))
    )
    monkeypatch.setattr(rank_processes, "TIMEOUT_SECONDS", 0.2)
    row = torch.zeros(step_ring.RING_BYTES // 8, dtype=torch.int64)  # half of the ring
    plan = StepPlan(BatchLayout(1, 1, 1), row, 1, replayed=False)
    load_nothing = Load("", False, 64, "float32", "cpu", "sdpa", None, None, "none")
    with theirs:
        ranks = RankProcesses("m", Group(Shard(0, 2), CPU), [load_nothing])
        for _ in range(2):
            with ranks.sending_step(plan.message, row):
                pass
        with (
            pytest.raises(EngineDeadError, match="a rank of m takes no messages"),
            ranks.sending_step(plan.message, row),
        ):
            pytest.fail("it was sent")
        with pytest.raises(EngineDeadError, match="a rank of m takes no messages"):
            ranks.check()
        ranks.close()


def test_a_cache_whose_slots_are_no_int32_is_refused(threads: list[RankThread]) -> None:
    model = loaded("llama-gqa", 2)
    try:
        ranks = model.rank_processes
        assert ranks is not None
        with pytest.raises(ConfigError, match=r"2,147,483,664 tokens; .* lower kv_cache_memory"):
            ranks.make_pools([5, (1 << 27) + 1], 16, torch.float32)
        assert [one.block_size for one in threads[0].frames.messages if isinstance(one, Pools)] == [4]
    finally:
        model.close()
