"""CUDA graph capture with fakes of torch's classes: on the model's device, with one stream for all sizes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triptych.model.engine.execution.cuda_graphs import CudaRecorder, recorded
from triptych.model.system.background_work import Work
from triptych.model.system.devices import HostCopy

SECOND = torch.device("cuda", 1)


class Stream:
    def __init__(self, device: int) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        assert other.device == self.device


class Gpus:
    """Fakes of two devices and their streams; the first device is current."""

    def __init__(self) -> None:
        self.streams = [Stream(0), Stream(1)]  # the current streams
        self.made: list[Stream] = []
        self.current = 0
        self.capturing: list[Stream] = []
        self.recorded: list[int] = []
        self.modes: list[str] = []

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def Stream(self) -> Stream:
        self.made.append(Stream(self.current))
        return self.made[-1]

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.streams[self.current if device is None else device.index]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.streams[stream.device] = self.streams[stream.device], stream
        yield
        self.streams[stream.device] = before

    @contextmanager
    def graph(
        self, graph: Any, pool: int, stream: Stream | None = None, capture_error_mode: str = ""
    ) -> Iterator[None]:
        self.modes.append(capture_error_mode)
        assert stream is not None and stream.device == self.current == pool
        self.capturing.append(stream)
        yield

    def graph_pool_handle(self) -> int:
        return self.current

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: None)

    def get_device_capability(self, device: torch.device) -> tuple[int, int]:
        return (9, 0) if device == SECOND else (8, 0)

    def Event(self) -> Any:
        def record(stream: Stream | None = None) -> None:
            self.recorded.append((stream or self.current_stream()).device)

        return SimpleNamespace(record=record, synchronize=lambda: None)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    gpus = Gpus()
    names = ("device", "Stream", "current_stream", "stream", "graph", "graph_pool_handle", "CUDAGraph", "Event")
    for name in (*names, "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpus, name))
    return gpus


def test_steps_are_recorded_on_their_models_device_and_one_stream(gpus: Gpus) -> None:
    ran: list[Stream] = []
    record = CudaRecorder(SECOND)

    def run() -> torch.Tensor:
        assert gpus.current == 1
        ran.append(gpus.current_stream())
        return torch.zeros(1)

    for _ in range(3):
        record(run)
    assert gpus.current == 0
    assert len(gpus.made) == 1  # each of 20 streams would keep 32 MiB for cuBLAS
    assert gpus.capturing == 3 * gpus.made
    assert ran[::2] == 3 * gpus.made  # the warm-up run before each capture


def test_recorded_kernels_begin_early_from_hopper_on(gpus: Gpus) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from triptych.model.system.held_kernels import overlap

    seen = []
    for device in (torch.device("cuda", 0), SECOND):
        CudaRecorder(device)(lambda: seen.append(overlap()["OVERLAP"]) or torch.zeros(1))
    assert seen == [False, False, True, True]  # of a run before each capture, and of the capture
    assert not overlap()["OVERLAP"]


def test_other_threads_do_not_end_the_recording_of_sums_over_ranks(gpus: Gpus) -> None:
    for collective in (False, True):
        CudaRecorder(SECOND, collective=collective)(lambda: torch.zeros(1))
    assert gpus.modes == ["global", "thread_local"]


def test_tokens_are_waited_for_on_their_device(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    host = SimpleNamespace(copy_=lambda tensor, non_blocking: None)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: host)
    tokens = SimpleNamespace(device=SECOND, shape=(3,), dtype=torch.int64)
    assert HostCopy(tokens).get() is host  # type: ignore[arg-type]
    assert gpus.recorded == [1]


def test_steps_without_a_graph_are_launched(caplog: pytest.LogCaptureFixture) -> None:
    def failing(error: Exception) -> Any:
        def record_each() -> Work[None]:
            raise error
            yield

        return SimpleNamespace(record_each=record_each)

    with caplog.at_level(logging.WARNING):
        said = "operation not permitted when stream is capturing"
        assert recorded(failing(RuntimeError(f"{said}\nmore"))) == (None, said)
        assert recorded(failing(AssertionError())) == (None, "AssertionError")  # of a compiler: no RuntimeError
    assert "could not be recorded" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        recorded(failing(torch.OutOfMemoryError("no memory for them")))
