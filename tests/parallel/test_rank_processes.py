"""Ranks in processes: the results of one rank, detection of a rank that ends, and no process left over."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.front import Brake, async_test, collect, ends_of, idle, ids_of, served, until
from tests.engine.support import mixed, request
from tests.engine.test_process_transport import is_alive
from tests.model.checkpoints import VOCAB, prompt, saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import (
    EncodeRequest,
    EncodeTask,
    FinishReason,
    Request,
    TokenOutput,
    token_source,
)
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.client import async_engine
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.client.process_transport import ProcessTransport
from triptych.model.engine.builder import load
from triptych.model.errors import ConfigError, EngineDeadError
from triptych.model.llm import LLM
from triptych.model.parallel import group

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {"block_size": 4, "device": "cpu", "dtype": "float32", "attention_backend": "sdpa"}
SMALL_POOL = 76 << 10  # bytes of each rank: too little for all at once


def alone(kind: str, requests: list[Request]) -> list[TokenOutput]:
    """Return the outputs of the requests on one rank."""
    engine = load(ModelSpec(kind, str(saved(kind).path), EngineConfig(kv_cache_memory=4 << 20, **SETTINGS))).generate
    assert engine is not None
    for one in requests:
        engine.add(one)
    outputs = []
    while engine.has_work:
        outputs += engine.step()[0]
    return outputs


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def ranks(engine: AsyncEngine) -> list[int]:
    """Return the ids of the engine's rank processes."""
    transport = engine.transport
    assert isinstance(transport, ProcessTransport) and transport.pid is not None
    return [pid for pid in children_of(transport.pid) if b"triptych.model.engine.rank_main" in command(pid)]


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def gone(pids: list[int], seconds: float = 60.0) -> None:
    await until(lambda: not any(map(is_alive, pids)), seconds)


def work(kind: str) -> list[Request]:
    """Return requests with common prefixes, log-probabilities, seeds and beams, more than the pool has room for.

    How many run at once depends on what steps take here; `test_steps` has preemption for certain.
    """
    plain = mixed(kind, 20, logprobs=2, prompt_logprobs=1)
    sampled = [request(kind, f"s{i}", 9 + i, i, temperature=0.8, seed=i, max_tokens=16) for i in range(6)]
    beams = [request(kind, f"b{i}", 20, i, num_beams=3, n=2, max_tokens=10) for i in range(2)]
    return [*plain, *sampled, *beams]


def logprobs(outputs: list[TokenOutput], name: str) -> dict[str, list[float]]:
    """Return the log-probabilities by request; a prompt's first token has none."""
    found: dict[str, list[float]] = {}
    for output in outputs:
        entries = getattr(output, name) or ()
        found.setdefault(output.request_id, []).extend(one.logprob for one in entries if one is not None)
    return {request_id: values for request_id, values in found.items() if values}


def check_same(outputs: list[TokenOutput], expected: list[TokenOutput]) -> None:
    assert ends_of(outputs) == ends_of(expected)
    for request_id, index in ends_of(expected):
        assert ids_of(outputs, request_id, index) == ids_of(expected, request_id, index), request_id
    for name in ("logprobs", "prompt_logprobs"):
        ours, theirs = logprobs(outputs, name), logprobs(expected, name)
        assert len(theirs) > 10
        assert ours.keys() == theirs.keys()
        for request_id, values in theirs.items():
            assert ours[request_id] == pytest.approx(values, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    "kinds",
    [("llama-gqa", "bart"), pytest.param(("llama-gqa", "bart", "whisper"), marks=pytest.mark.slow)],
    ids="-".join,
)
@async_test
async def test_two_ranks_equal_one_and_a_rank_that_ends_fails_requests_at_once(
    kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "_RESTART_SECONDS", (60.0,))
    settings = {**SETTINGS, "kv_cache_memory": SMALL_POOL, "max_model_len": 96, "tensor_parallel_size": 2}
    async with served(*kinds, transport=ProcessTransport, **settings) as engine:
        info = engine.models["llama-gqa"]
        assert (info.tensor_parallel_size, info.attention_backend) == (2, "sdpa")
        assert "run on one rank" in info.attention_reason
        assert info.kv_bytes_per_token == 2 * 2 * 1 * 8 * 4  # one of two heads of keys
        for kind in kinds:
            requests = work(kind)
            expected = alone(kind, requests)
            check_same(await collect(engine.submit(requests)), expected)
            await until(lambda: idle(engine))
        await check_prefixes(engine)
        await check_encode(engine)
        await check_blame(engine)
        await check_death(engine, *kinds[1:])


async def check_prefixes(engine: AsyncEngine) -> None:
    """Check that prefix hits hold on every rank."""
    requests = [request("llama-gqa", f"p{i}", 30, 7) for i in range(3)]
    expected = alone("llama-gqa", requests[:1])
    for one in requests:
        assert ids_of(await collect(engine.submit([one])), one.request_id) == ids_of(expected, "p0")
    await until(lambda: engine.stats()["llama-gqa"].prefix_hits >= 2 * 28)


async def check_encode(engine: AsyncEngine) -> None:
    for kind in ("llama-gqa", "bart"):
        inputs = [EncodeRequest(f"e{i}", kind, token_source(prompt(3 + i, i)), EncodeTask.EMBEDDING) for i in range(4)]
        found = await engine.encode(inputs)
        one_rank = load(ModelSpec(kind, str(saved(kind).path), EngineConfig(**SETTINGS, kv_cache_memory=4 << 20)))
        for one in inputs:
            one_rank.encode.add(one)
        expected = one_rank.encode.step()[0]
        for ours, theirs in zip(found, expected, strict=True):
            assert vector(ours.data) == pytest.approx(vector(theirs.data), rel=1e-4, abs=1e-5)


def vector(data: bytes) -> list[float]:
    return memoryview(data).cast("f").tolist()


async def check_blame(engine: AsyncEngine) -> None:
    """Check that an invalid token id ends only its own request and does not break the group."""
    wrong = Request("wrong", "llama-gqa", (VOCAB + 5,), SamplingParams(max_tokens=3))
    right = [request("llama-gqa", f"right{i}", 5 + i, i) for i in range(2)]
    outputs = await collect(engine.submit([right[0], wrong, right[1]]))
    assert ends_of(outputs)["wrong", 0] is FinishReason.ERROR
    expected = alone("llama-gqa", right)
    for one in right:
        assert ids_of(outputs, one.request_id) == ids_of(expected, one.request_id)
    assert engine.health().ready


async def check_death(engine: AsyncEngine, *others: str) -> None:
    """Check that a model whose follower is killed is lost alone, and that the last model takes its engine with it."""
    transport = engine.transport
    assert isinstance(transport, ProcessTransport) and transport.pid is not None
    rank_processes = ranks(engine)
    lost = await killed(engine, "llama-gqa", rank_processes[0])
    assert {outputs[-1].finish_reason for outputs in lost if isinstance(outputs, list)} == {FinishReason.ERROR}
    await until(lambda: list(engine.models) == [*others])
    check_same(await collect(engine.submit(work("bart"))), alone("bart", work("bart")))
    assert engine.health().ready and engine.restarts == 0
    for name in others[:-1]:
        await engine.unload(name)
    last = others[-1]
    failures = await killed(engine, last, rank_processes[-1])
    assert {(type(one), str(one)) for one in failures} == {
        (EngineDeadError, f"rank 1 of {last} ended by signal SIGKILL")
    }
    assert not engine.health().ready
    await gone([transport.pid, *rank_processes])


async def killed(engine: AsyncEngine, kind: str, rank: int) -> list[list[TokenOutput] | BaseException]:
    """Kill a rank of a model while three requests run; return what came of them."""
    os.kill(rank, signal.SIGSTOP)  # so that no call ends before it is killed
    streams = [engine.submit([request(kind, f"{kind}{i}", 30, i, max_tokens=60)]) for i in range(3)]
    await asyncio.sleep(0.2)
    os.kill(rank, signal.SIGKILL)
    began = time.monotonic()
    found = await asyncio.gather(*map(collect, streams), return_exceptions=True)
    assert time.monotonic() - began < 20.0  # and not when the others' calls time out
    return found


OFFLINE = """
import sys, time
from pathlib import Path
from triptych.model.api.engine_config import EngineConfig
from triptych.model.errors import EngineDeadError
from triptych.model.llm import LLM
from triptych.model.api.sampling_params import SamplingParams

settings = dict(device="cpu", dtype="float32", kv_cache_memory=1 << 20)
llm = LLM(Path(sys.argv[1]), EngineConfig(tensor_parallel_size=2, **settings))
prompts, params = [(5, 6, 7), (8, 9)], SamplingParams(max_tokens=8, ignore_eos=True)

def tokens():
    return [token for _, output in llm.stream(prompts, params) for token in output.token_ids]

print(*llm._loaded.rank_processes.pids, flush=True)
print(*tokens(), flush=True)
input()  # what happens now is the test's
try:
    print(*tokens(), flush=True)
except EngineDeadError as error:
    print(error, flush=True)
"""


def offline() -> subprocess.Popen[str]:
    """Start a program that generates over two ranks, twice."""
    return subprocess.Popen(
        [sys.executable, "-c", OFFLINE, str(saved("llama-gqa").path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def line(program: subprocess.Popen[str]) -> list[str]:
    assert program.stdout is not None
    return program.stdout.readline().split()


def wait_gone(pid: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while is_alive(pid):
        assert time.monotonic() < deadline, "a rank outlives its rank 0"
        time.sleep(0.02)


def test_offline_ranks_end_with_a_program_that_is_killed() -> None:
    requests = [
        Request(str(at), "llama-gqa", ids, SamplingParams(max_tokens=8, ignore_eos=True))
        for at, ids in enumerate([(5, 6, 7), (8, 9)])
    ]
    with offline() as program:
        (follower,) = map(int, line(program))
        expected = [token for output in alone("llama-gqa", requests) for token in output.token_ids]
        assert list(map(int, line(program))) == expected
        assert is_alive(follower)
        program.kill()
    wait_gone(follower)


@pytest.mark.slow
def test_offline_a_rank_that_dies_raises_and_the_program_ends_in_order() -> None:
    with offline() as program:
        (follower,) = map(int, line(program))
        line(program)
        os.kill(follower, signal.SIGKILL)
        wait_gone(follower)
        out, err = program.communicate("\n", timeout=60)
    assert out == "rank 1 of llama-gqa ended by signal SIGKILL\n", err
    assert program.returncode == 0, err


@pytest.mark.slow
def test_offline_ranks_end_with_a_program_that_is_done() -> None:
    with offline() as program:
        (follower,) = map(int, line(program))
        first = line(program)
        out, err = program.communicate("\n", timeout=60)
    assert out.split() == first
    assert (program.returncode, err.count("Traceback")) == (0, 0), err
    assert not is_alive(follower)


@pytest.mark.slow
def test_what_fails_while_loading_leaves_no_rank() -> None:
    engine = EngineConfig(**SETTINGS, kv_cache_memory=4096, tensor_parallel_size=2)
    before = set(children_of(os.getpid()))
    with pytest.raises(ConfigError, match="the KV pool has room for"):
        load(ModelSpec("m", str(saved("llama-gqa").path), engine))
    assert set(children_of(os.getpid())) <= before


@pytest.mark.slow
@async_test
async def test_a_rank_that_dies_while_nothing_runs_is_noticed_and_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "_RESTART_SECONDS", (0.1,))
    settings = {**SETTINGS, "tensor_parallel_size": 2}
    async with served("llama-gqa", transport=ProcessTransport, **settings) as engine:
        (first,) = ranks(engine)
        os.kill(first, signal.SIGKILL)
        await until(lambda: not engine.health().ready)
        await until(lambda: engine.health().ready, 60.0)
        (second,) = ranks(engine)
        one = request("llama-gqa", "again", 5)
        assert ids_of(await collect(engine.submit([one])), "again") == ids_of(alone("llama-gqa", [one]), "again")
    assert first != second
    await gone([first, second])


@pytest.mark.slow
@async_test
async def test_a_loop_in_a_thread_has_ranks_too_and_a_call_that_breaks_breaks_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(async_engine, "_RESTART_SECONDS", (60.0,))
    before = set(children_of(os.getpid()))
    async with served("bart", **SETTINGS, tensor_parallel_size=2, kv_cache_dtype="int8") as engine:
        started = sorted(set(children_of(os.getpid())) - before)
        assert len(started) == 1
        outputs = await collect(engine.submit(work("bart")))
        assert FinishReason.ERROR not in ends_of(outputs).values()
        Brake(monkeypatch).failing = True  # rank 1 is left waiting in the middle of the call
        with pytest.raises(EngineDeadError, match="RuntimeError in rank 0 of bart"):
            await asyncio.wait_for(
                collect(engine.submit([request("bart", "broken", 5)])), 20.0
            )  # and not when rank 1's call times out
        await gone(started)


@pytest.mark.slow
@async_test
async def test_a_rank_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "_RESTART_SECONDS", (60.0,))
    monkeypatch.setattr(group, "TIMEOUT_SECONDS", 2.0)  # rank 0's own
    before = set(children_of(os.getpid()))
    async with served("llama-gqa", **SETTINGS, tensor_parallel_size=2) as engine:
        (follower,) = set(children_of(os.getpid())) - before
        os.kill(follower, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="RuntimeError in rank 0 of llama-gqa"):
            await asyncio.wait_for(collect(engine.submit([request("llama-gqa", "stuck", 5)])), 20.0)
        await gone([follower])


def test_ranks_have_tables_for_every_window() -> None:
    """Check chunked prompts and a beam search, whose blocks are copied in both pools."""
    found = []
    settings = {"max_model_len": 96, "max_num_batched_tokens": 64, "block_size": 4, "kv_cache_memory": 1 << 20}
    for size in (1, 2):
        config = EngineConfig(
            device="cpu", dtype="float32", attention_backend="sdpa", tensor_parallel_size=size, **settings
        )
        llm = LLM(saved("gemma3").path, config)
        try:
            assert len(llm.info.cache_pools) == 2
            for params in (SamplingParams(max_tokens=20, ignore_eos=True), SamplingParams(max_tokens=8, num_beams=3)):
                tokens = [one.token_ids for _, one in llm.stream([prompt(70, 1), prompt(23, 2)], params)]
                found.append((size, tokens))
        finally:
            llm.close()
    assert [tokens for size, tokens in found if size == 1] == [tokens for size, tokens in found if size == 2]
