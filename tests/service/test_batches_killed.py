"""Batches and the ends of processes: kills at random, and the memory of a large file."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from lab.faults.batch import BatchUnderFaults, killed_at_random
from tests.service.processes import ServiceProcess, eventually

pytestmark = pytest.mark.slow


@contextmanager
def started(state: Path, models: list[str]) -> Iterator[ServiceProcess]:
    service = ServiceProcess([*models, "--runtime", "local", "--state-dir", str(state)])
    try:
        service.wait_ready()
        yield service
    finally:
        service.stop()


def trying(holds: Callable[[], bool]) -> Callable[[], bool]:
    def tried() -> bool:
        try:
            return holds()
        except httpx.HTTPError:
            return False

    return tried


def test_each_line_has_one_result_after_kills_of_engine_and_service(tmp_path: Path, models: list[str]) -> None:
    seed = random.randrange(1 << 32)
    services: list[ServiceProcess] = []

    def start() -> None:
        services.append(ServiceProcess([*models, "--runtime", "local", "--state-dir", str(tmp_path)]))
        services[-1].wait_ready()
        batch.url = services[-1].url

    kinds = iter([*random.Random(seed).choices(["engine", "service"], k=3), "engine", "service"])

    def kill() -> None:
        if next(kinds) == "engine":
            eventually(lambda: len(services[-1].engine_pids()) == 1)
            os.kill(services[-1].engine_pids()[0], signal.SIGKILL)
        else:
            services[-1].signal(signal.SIGKILL)
            services[-1].wait()
            start()

    try:
        services.append(ServiceProcess([*models, "--runtime", "local", "--state-dir", str(tmp_path)]))
        services[-1].wait_ready()
        batch = BatchUnderFaults(services[-1].url, "gen")
        remark = killed_at_random(batch, kill, lambda holds: eventually(trying(holds), 300), seed)
        assert "0 failed" in remark
    finally:
        services[-1].stop()


def test_a_large_file_takes_bounded_memory(tmp_path: Path, models: list[str]) -> None:
    """Upload 180 MB, and check and cancel a batch of 10,000 lines of it."""
    body = {"model": "gen", "prompt": "a", "max_tokens": 1, "user": "x" * 18_000}
    lines = (
        json.dumps({"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": body}).encode() + b"\n"
        for at in range(10_000)
    )
    file = tmp_path / "lines.jsonl"
    with file.open("wb") as stream:
        stream.writelines(lines)
    with started(tmp_path / "state", models) as service, httpx.Client(base_url=service.url, timeout=60) as client:
        before = peak_memory(service)
        with file.open("rb") as stream:
            made = client.post("/v1/files", files={"file": ("x", stream)}, data={"purpose": "batch"})
        assert made.json()["bytes"] == file.stat().st_size
        request = {"input_file_id": made.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        path = f"/v1/batches/{client.post('/v1/batches', json=request).json()['id']}"
        eventually(lambda: client.get(path).json()["request_counts"]["completed"] > 100)
        client.post(f"{path}/cancel")
        eventually(lambda: client.get(path).json()["status"] == "cancelled")
        found = client.get(path).json()
        assert found["request_counts"]["completed"] + found["request_counts"]["failed"] == 10_000
        assert peak_memory(service) - before < 80 << 20


def peak_memory(service: ServiceProcess) -> int:
    status = Path(f"/proc/{service.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) << 10


def test_another_replica_goes_on(tmp_path: Path, models: list[str]) -> None:
    """Two services of one folder would be refused; two replicas of Ray share it, and one is killed."""
    pytest.importorskip("ray", reason="Ray is not installed")
    service = ServiceProcess([*models, "--runtime", "ray", "--replicas", "2", "--state-dir", str(tmp_path)])
    try:
        service.wait_ready()
        batch = BatchUnderFaults(service.url, "gen")

        def kill() -> None:
            replicas = [pid for pid, line in service.descendants().items() if "ServeReplica" in line]
            os.kill(random.choice(replicas), signal.SIGKILL)
            eventually(trying(lambda: httpx.get(f"{service.url}/readyz").status_code == 200))

        assert "each with one result" in killed_at_random(
            batch, kill, lambda holds: eventually(trying(holds), 300), random.randrange(1 << 32)
        )
    finally:
        service.stop()
