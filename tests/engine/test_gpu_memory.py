"""The size of a GPU's KV pool: its arithmetic with fake memory, and the step whose peak memory is measured."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.checkpoints import loaded
from triptych.model.api.engine_config import BatchLimits, EngineConfig
from triptych.model.engine import generate_builder, network_plan
from triptych.model.engine.gpu_memory import (
    GRAPH_MARGIN,
    MARGIN,
    GpuMemory,
    largest_step,
    measure_peak,
    pool_bytes,
    pool_memory,
)
from triptych.model.errors import ConfigError
from triptych.model.network.inputs import StackInput
from triptych.model.network.transformer import Transformer

GIB = 1 << 30
LIMITS = BatchLimits(6, 50, 24, 400)


class FakeMemory:
    """A fake GPU: this process holds `weights`, other processes `others` bytes.

    A forward pass allocates `step` bytes while it runs, and `context` bytes for good that belong to no tensor.
    """

    def __init__(self, total: int, weights: int, step: int, *, others: int = 0, context: int = 0) -> None:
        self.total, self.held, self.step = total, weights, step
        self.others, self.context = others, context
        self.cached = 0
        self.highest = 0

    def gpu_memory(self) -> GpuMemory:
        return GpuMemory(self.total - self.held - self.cached - self.others, self.total)

    def reserved(self) -> int:
        return self.held + self.cached

    def restart_peak(self) -> None:
        self.cached = 0
        self.highest = self.held

    def peak(self) -> int:
        return self.highest

    def run(self) -> None:
        self.cached = self.step  # the allocator's cache
        self.highest = max(self.highest, self.held + self.step)
        self.others += self.context
        self.context = 0


def test_peak_is_what_a_step_adds_and_is_released() -> None:
    memory = FakeMemory(80 * GIB, 16 * GIB, 3 * GIB)
    memory.cached = 7 * GIB  # left over from loading
    assert measure_peak(memory.run, memory) == 3 * GIB
    assert memory.gpu_memory() == GpuMemory(64 * GIB, 80 * GIB)


@pytest.mark.parametrize(
    ("cards", "settings", "expected"),
    [
        ([GpuMemory(64 * GIB, 80 * GIB)], {}, 72 * GIB - 16 * GIB - 3 * GIB - MARGIN),
        ([GpuMemory(64 * GIB, 80 * GIB)], {"recorded_sizes": 20}, 53 * GIB - MARGIN - 20 * GRAPH_MARGIN),
        ([GpuMemory(64 * GIB, 80 * GIB), GpuMemory(60 * GIB, 80 * GIB)], {}, 49 * GIB - MARGIN),  # the fullest rank's
        ([GpuMemory(64 * GIB, 80 * GIB)], {"gathered_layers": 0.25}, int((53 * GIB - MARGIN) / 1.25)),
        ([GpuMemory(10 * GIB, 80 * GIB)], {}, 0),
    ],
)
def test_pool_bytes(cards: list[GpuMemory], settings: dict[str, Any], expected: int) -> None:
    assert pool_bytes(cards, 0.9, 3 * GIB, **settings) == expected


@pytest.mark.parametrize(
    ("gpu", "reserved", "expected"),
    [
        # Of a half, 40 GiB: 0.9 of it without the weights, the step and the margin.
        (GpuMemory(64 * GIB, 80 * GIB), 16 * GIB, 17 * GIB - MARGIN),
        (GpuMemory(20 * GIB, 80 * GIB), 16 * GIB, 13 * GIB - MARGIN),  # the others exceed theirs by 4
        (GpuMemory(32 * GIB, 80 * GIB), 8 * GIB, 25 * GIB - MARGIN),  # the others have taken theirs
        (GpuMemory(64 * GIB, 80 * GIB), 40 * GIB, 0),
    ],
)
def test_a_share_of_a_gpu_does_not_depend_on_which_replica_came_first(
    gpu: GpuMemory, reserved: int, expected: int
) -> None:
    assert pool_bytes([gpu.part(0.5, reserved)], 0.9, 3 * GIB) == expected


class Counted:
    """Records the tokens of each pass of a model, and counts its rows of logits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: Callable[[], None] = lambda: None) -> None:
        self.tokens: list[tuple[str, tuple[int, ...]]] = []
        self.rows = 0
        for name in ("encode", "decode"):
            self._count(monkeypatch, name, then)
        logits = Transformer.logits

        def counted(model: Transformer, hidden: Tensor) -> Tensor:
            self.rows += len(hidden)
            return logits(model, hidden)

        monkeypatch.setattr(Transformer, "logits", counted)

    def _count(self, monkeypatch: pytest.MonkeyPatch, name: str, then: Callable[[], None]) -> None:
        real = getattr(Transformer, name)

        def counted(model: Transformer, inputs: StackInput, *arguments: Any) -> Tensor:
            self.tokens.append((name, inputs.metadata.q_lens))
            then()
            found: Tensor = real(model, inputs, *arguments)
            return found

        monkeypatch.setattr(Transformer, name, counted)


@pytest.mark.parametrize("kind", ["llama-gqa", "gpt2", "bart", "t5-relu", "gemma"])
def test_the_largest_step_fills_every_stack_and_samples_all_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    largest_step(loaded(kind), LIMITS, 20)
    stacks = ["decode"] if loaded(kind).encoder is None else ["encode", "decode"]
    assert counted.tokens == [(name, (20, 20, 10)) for name in stacks]
    assert counted.rows == 6


def test_pool_memory_counts_what_the_measured_step_leaves_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(10 * GIB, 2 * GIB, GIB, others=GIB // 2, context=GIB // 4)
    Counted(monkeypatch, then=memory.run)
    pool = pool_memory(loaded("llama"), LIMITS, 64, 0.9, memory)
    gathered = 1 + 2 / 2  # two layers, which the reference backend copies to read them
    assert pool == int((9 * GIB - 2 * GIB - GIB // 2 - GIB // 4 - GIB - MARGIN) / gathered)


def test_measured_pool_is_used_unless_a_size_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(10 * GIB, 2 * GIB, GIB)
    counted = Counted(monkeypatch, then=memory.run)
    monkeypatch.setattr(generate_builder, "CudaMemory", lambda device: memory)

    def pool(**settings: Any) -> int:
        return generate_builder.measure_pool(
            EngineConfig(**settings), loaded("llama"), LIMITS, 64, torch.device("cuda")
        )

    assert pool(kv_cache_memory=1 << 20) == 1 << 20
    assert not counted.tokens
    left = 9 * GIB - 2 * GIB - GIB - MARGIN
    assert pool() == left // 2  # each page takes twice its size, as above
    assert pool(gpu_memory_utilization=0.5) == (left - 4 * GIB) // 2
    assert pool(gpu_share=0.75) == int(left - 9 * GIB * 0.25) // 2


def test_a_step_is_as_large_as_the_share_of_the_gpu_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    for share, expected in ((1.0, (256, 8192)), (0.25, (256, 4096)), (0.2, (128, 2048))):
        limits = network_plan.batch_limits(EngineConfig(gpu_share=share), torch.device("cuda"))
        assert (limits.max_num_seqs, limits.max_num_batched_tokens) == expected


def test_step_that_does_not_fit_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    Counted(monkeypatch, then=full)
    with pytest.raises(ConfigError, match="a step of max_num_batched_tokens 50 does not fit with the weights"):
        pool_memory(loaded("llama"), LIMITS, 64, 0.9, FakeMemory(GIB, GIB, 0))
