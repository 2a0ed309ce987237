"""Metrics of several processes of one service: each process shows the sums over all."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.service.support import ask, make_app, run
from triptych.model.api.stats import Demand, EngineStats, Health, ModelInfo
from triptych.model.errors import ConfigError
from triptych.service.observability.metric_parts import MULTIPROCESS_FOLDER, ready_elsewhere
from triptych.service.observability.metrics import Metrics
from triptych.service.settings.service_settings import ServiceSettings

# A process that counts, says so, and waits for a line before it shows what it sees and ends.
REPLICA = """
import asyncio
import sys
from triptych.model.api.stats import Demand, EngineStats, Health, StepStats
from triptych.model.api.request import FinishReason, Timings
from triptych.service.core.request_context import RequestContext
from triptych.service.observability.metrics import Metrics
from triptych.service.settings.service_settings import ServiceSettings

metrics = Metrics(vllm_names=True)
context = RequestContext(request_id="r", task="generate")
context.model = "gen"
metrics.received(context)
metrics.accepted(context)
metrics.ended(context, FinishReason.STOP, Timings(1, 1, 1, 1, 4), True)
metrics.step(StepStats("gen", "generate", 0.01, 5, 2))
metrics._replicas.labels("gen").set(1)
used = int(sys.argv[1])


class Client:
    restarts = used
    models = {}

    def health(self):
        return Health(live=True, ready=used == 2, reason="")

    def stats(self):
        usage = {512: used / 5}
        blocks = dict(total_blocks=10, free_blocks=10 - used, window_usage=usage)
        blocks |= dict(total_states=20, free_states=20 - used, cached_states=used)
        blocks |= dict(pictures=2 * used, picture_tokens=9)
        return {"gen": EngineStats("gen", running=used, preemptions=used, **blocks)}

    def demand(self):
        return {"gen": Demand(used / 4, 100 * used)}


metrics.update_engines(Client())
print("counted", flush=True)
sys.stdin.readline()
sys.stdout.write(asyncio.run(metrics.scrape(Client()))[0].decode())
"""


class Replica:
    def __init__(self, folder: Path, running: int) -> None:
        command = [sys.executable, "-c", REPLICA, str(running)]
        environment = {MULTIPROCESS_FOLDER: str(folder), "PYTHONPATH": ":".join(sys.path)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "counted\n"

    def shown(self) -> dict[tuple[str, ...], float]:
        """Figures by name and label values; the process ends."""
        text, _ = self.process.communicate("\n", timeout=120)
        found: dict[tuple[str, ...], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, *(value for _, value in sorted(sample.labels.items())))
                assert key not in found, f"{key} twice"
                found[key] = sample.value
        return found


@pytest.mark.parametrize("asked", [0, 1])
def test_each_metric_appears_once_for_all_replicas(tmp_path: Path, asked: int) -> None:
    replicas = [Replica(tmp_path, running) for running in (2, 3)]
    shown = replicas[asked].shown()
    assert shown["triptych_requests_total", "gen", "stop", "generate"] == 2
    assert shown["vllm:request_success_total", "stop", "gen"] == 2
    assert shown["triptych_time_to_first_token_seconds_count", "gen"] == 2
    assert shown["triptych_requests_running", "gen"] == 5
    assert shown["triptych_kv_blocks", "gen", "used"] == 5
    assert shown["triptych_kv_cache_usage_ratio", "gen"] == pytest.approx(0.3)  # the fullest
    assert shown["triptych_kv_window_usage_ratio", "gen", "512"] == pytest.approx(0.6)
    states = [shown["triptych_state_slots", "gen", state] for state in ("used", "cached", "free")]
    assert states == [5, 5, 30]
    assert shown["triptych_saturation_ratio", "gen"] == 0.75
    assert shown["triptych_tokens_waiting", "gen"] == 500
    assert shown["triptych_engine_restarts_total", "gen"] == 5
    assert shown["triptych_preemptions_total", "gen"] == 5
    assert shown["triptych_pictures_encoded_total", "gen"] == 10
    assert shown["triptych_picture_tokens_encoded_total", "gen"] == 18
    assert shown["triptych_replicas", "gen"] == 2
    assert (shown["triptych_engine_live", "gen"], shown["triptych_engine_ready", "gen"]) == (2, 1)
    replicas[1 - asked].shown()


def test_a_crashed_replica_keeps_its_counts_and_loses_its_state(tmp_path: Path) -> None:
    crashed, other = Replica(tmp_path, 2), Replica(tmp_path, 3)
    crashed.process.kill()
    crashed.process.communicate()
    shown = other.shown()
    assert shown["triptych_requests_total", "gen", "stop", "generate"] == 2
    assert shown["triptych_requests_running", "gen"] == 3
    assert shown["triptych_replicas", "gen"] == 1


def test_a_replica_knows_whether_another_one_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MULTIPROCESS_FOLDER, str(tmp_path))
    assert not ready_elsewhere(["gen"])
    busy, ready = Replica(tmp_path, 3), Replica(tmp_path, 2)
    assert ready_elsewhere(["gen"]) and not ready_elsewhere(["another"])
    ready.process.kill()
    ready.process.communicate()
    assert not ready_elsewhere(["gen"])  # the first one lives and is not ready
    busy.shown()


def test_a_scrape_does_not_stop_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    go, collector = threading.Event(), app.metrics._collector

    def slow() -> Any:
        assert go.wait(30), "the event loop waits for the scrape"
        return collector()

    async def work(client: httpx.AsyncClient) -> None:
        asking = asyncio.create_task(client.get("/metrics"))
        await asyncio.sleep(0.1)
        assert (await client.get("/livez")).status_code == 200
        go.set()
        assert "triptych_http_requests_total" in (await asking).text

    monkeypatch.setattr(app.metrics, "_collector", slow)
    run(app, work)


def test_the_folder_of_figures_is_made_or_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "not" / "there"
    monkeypatch.setenv(MULTIPROCESS_FOLDER, str(folder))
    Metrics()
    assert folder.is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv(MULTIPROCESS_FOLDER, str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match=f"{MULTIPROCESS_FOLDER} {tmp_path}/file/below: Not a directory"):
        Metrics()


def test_all_but_a_few_tokens_are_added_while_a_stream_runs() -> None:
    """A killed process loses the rest: its requests have not ended, and a scrape may never have seen it."""
    metrics = Metrics()
    count = metrics.generated("gen")
    for _ in range(1000):
        count(2, 0.01)
    for name in ("triptych_generation_tokens_total", "triptych_inter_token_latency_seconds_count"):
        assert 2000 - 128 < (metrics.registry.get_sample_value(name, {"model": "gen"}) or 0) <= 2000


def test_no_series_tells_when_another_one_began() -> None:
    app = make_app()
    assert ask(app, "POST", "/generate", json={"model": "gen", "prompt": "a", "max_tokens": 1}).status_code == 200
    text = ask(app, "GET", "/metrics").text
    assert "triptych_requests_total{" in text and "_created" not in text


def test_gauges_that_have_no_model_are_shown(tmp_path: Path) -> None:
    reply = ask(make_app(settings=ServiceSettings(state_dir=str(tmp_path / "state"))), "GET", "/metrics")
    assert reply.status_code == 200 and "\ntriptych_batches_active 0" in reply.text


def test_openmetrics_names_the_trace_of_a_latency() -> None:
    app, trace = make_app(), "4bf92f3577b34da6a3ce929d0e0e4736"
    for headers in ({"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}, {"traceparent": "nonsense"}):
        body = {"model": "gen", "prompt": "a", "max_tokens": 1}
        assert ask(app, "POST", "/generate", json=body, headers=headers).status_code == 200
    reply = ask(app, "GET", "/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,text/plain"})
    assert reply.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in openmetrics.text_string_to_metric_families(reply.text)}
    for name in ("triptych_time_to_first_token_seconds", "triptych_e2e_request_latency_seconds"):
        assert [one.exemplar.labels for one in families[name].samples if one.exemplar] == [{"trace_id": trace}]
    assert families["process_resident_memory_bytes"].samples[0].value > 0
    for accept in ("*/*", "application/openmetrics-text; version=abc", "text/plain; version=1.x"):
        reply = ask(app, "GET", "/metrics", headers={"accept": accept})
        assert reply.status_code == 200 and "trace_id" not in reply.text


@pytest.mark.parametrize("median", [0.004, 0.05, 0.7, 9.0])
def test_the_99th_percentile_is_within_a_fifth(median: float) -> None:
    """As Prometheus computes it: linearly between the bounds of a bucket."""
    draw = random.Random(0)
    seconds = [median * draw.lognormvariate(0, 0.6) for _ in range(5000)]
    metrics = Metrics()
    observed = metrics._ttft.labels("gen")
    for one in seconds:
        observed.observe(one)
    counts = [bucket.get() for bucket in observed._buckets]
    bounds = [0.0, *observed._upper_bounds]
    rank, seen, place = 0.99 * len(seconds), 0.0, 0
    while seen + counts[place] < rank:
        seen, place = seen + counts[place], place + 1
    found = bounds[place] + (bounds[place + 1] - bounds[place]) * (rank - seen) / counts[place]
    assert found == pytest.approx(sorted(seconds)[round(rank)], rel=0.2)


class Engine:
    """An engine of one model, as metrics see it."""

    models: ClassVar[dict[str, ModelInfo]] = {}

    def __init__(self) -> None:
        self.restarts = self.preemptions = 0

    def health(self) -> Health:
        return Health(True, True, "")

    def demand(self) -> dict[str, Demand]:
        return {"gen": Demand(0.0, 0)}

    def stats(self) -> dict[str, EngineStats]:
        return {"gen": EngineStats("gen", preemptions=self.preemptions)}


def test_what_a_new_engine_counts_is_added_also_where_it_is_more_than_the_last_one_had() -> None:
    metrics, engine = Metrics(), Engine()
    for engine.restarts, engine.preemptions in ((0, 3), (1, 5), (1, 6), (2, 0), (2, 4)):
        metrics.update_engines(engine)  # type: ignore[arg-type]
    assert metrics.registry.get_sample_value("triptych_preemptions_total", {"model": "gen"}) == 3 + 6 + 4
    assert metrics.registry.get_sample_value("triptych_engine_restarts_total", {"model": "gen"}) == 2
