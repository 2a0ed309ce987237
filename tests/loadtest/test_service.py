"""The real service: the client's figures agree with its own."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.loadtest.support import CLOSED, Arrivals, Clients, Workload, in_several_tries, measured, retried
from tests.service.processes import ServiceProcess, eventually

COUNTS = {"requests ended", "refusals", "prompt tokens", "output tokens"}
BEFORE_ARRIVAL_MS = 100  # on a busy machine
SMALL = Workload(prompt_tokens="uniform:8-40", output_tokens="uniform:4-16")


@pytest.fixture(scope="module")
def service(embedded_service: ServiceProcess) -> ServiceProcess:
    return embedded_service


def check(document: dict[str, Any], figures: set[str]) -> None:
    rows = {row["name"]: row for row in document["crosscheck"]}
    assert figures <= rows.keys()
    for name in figures & COUNTS:
        assert rows[name]["client"] == rows[name]["server"], name
    for name in figures - COUNTS:  # a server cannot see a request before its own loop does
        assert -2 <= rows[name]["client"] - rows[name]["server"] <= BEFORE_ARRIVAL_MS, rows[name]


@in_several_tries
def test_generation_agrees_with_the_service(service: ServiceProcess) -> None:
    document = measured(service.url, model="code", requests=16, arrivals=CLOSED, workload=SMALL).document
    check(document, COUNTS | {"first token, mean", "between tokens, mean", "end to end, mean", "queueing, mean"})
    between = next(row for row in document["crosscheck"] if row["name"] == "between tokens, mean")
    assert between["client"] == pytest.approx(between["server"], rel=0.1)
    tokens = document["tokens"]
    assert tokens["with_usage"] == 16
    assert tokens["output"] == tokens["planned_output"]
    assert tokens["prompt"] == tokens["planned_prompt"]  # by the server's own tokenizer
    assert document["prompt_lengths_by"] == "the server's /tokenize"
    assert document["settings"]["max_model_len"] == 1024
    assert document["latency_ms"]["outside"]["p50"] < document["latency_ms"]["e2e"]["p50"]
    assert document["server"]["name"] == "triptych"


def test_tokens_seen_are_those_of_the_usage(service: ServiceProcess) -> None:
    clients = Clients(extra={"return_token_ids": True})
    run = measured(service.url, model="code", requests=8, arrivals=CLOSED, workload=SMALL, clients=clients)
    assert run.document["tokens"]["counted_unlike_usage"] == 0
    for record in run.records:
        assert sum(record.token_counts) == record.completion_tokens == record.planned_output_tokens


@pytest.mark.parametrize("target", ["openai-completions", "generate"])
@retried
def test_an_encoder_decoder(service: ServiceProcess, target: str) -> None:
    work = Workload(kind="seq2seq", prompt_tokens="uniform:6-20")
    document = measured(
        service.url, target=target, model="normalize", requests=8, arrivals=CLOSED, workload=work
    ).document
    check(document, {"requests ended", "prompt tokens", "output tokens", "end to end, mean"})


@pytest.mark.parametrize("target", ["encode", "openai-embeddings"])
@retried
def test_embeddings(service: ServiceProcess, target: str) -> None:
    work = Workload(kind="embedding", prompt_tokens="uniform:4-20", texts="uniform:1-4")
    document = measured(service.url, target=target, model="embed", requests=8, arrivals=CLOSED, workload=work).document
    check(document, {"requests ended", "prompt tokens", "end to end, mean"})
    assert document["tokens"]["prompt"] == document["tokens"]["planned_prompt"]


def test_nothing_is_left_behind_by_clients_that_leave(service: ServiceProcess) -> None:
    arrivals = Arrivals(kind="poisson", rate=20.0)
    work = Workload(prompt_tokens="20", output_tokens="60")
    run = measured(
        service.url, model="code", requests=20, arrivals=arrivals, workload=work, clients=Clients(cancel=0.6)
    )
    assert run.document["counts"]["cancelled"] > 4
    assert run.document["tokens"]["wasted"] > 0
    none = 'triptych_requests_running{model="code"} 0.0'
    eventually(lambda: none in httpx.get(f"{service.url}/metrics").text)
