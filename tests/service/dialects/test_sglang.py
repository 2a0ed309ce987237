"""SGLang's bodies on /generate and /encode."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.support import App, ask, check_accounts, events, let_time_pass, make_app


def generate(app: App, **fields: Any) -> Any:
    params = {"max_new_tokens": 5, **fields.pop("sampling_params", {})}
    reply = ask(app, "POST", "/generate", json={"model": "gen", "sampling_params": params, **fields})
    assert reply.status_code == 200, reply.text
    return events(reply.text) if fields.get("stream") else reply.json()


def test_one_text(app: App) -> None:
    reply = generate(app, text="ab", rid="mine")
    meta = reply["meta_info"]
    assert (reply["text"], len(reply["output_ids"])) == ("hello", 5)
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("mine", 3, 5, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["e2e_latency"] > 0


def test_several_prompts_and_choices_are_a_list(app: App) -> None:
    assert [one["text"] for one in generate(app, text=["ab", "c"], sampling_params={"n": 2})] == ["hello"] * 4
    assert [one["meta_info"]["prompt_tokens"] for one in generate(app, input_ids=[[1, 2], [3]])] == [2, 1]
    assert [one["text"] for one in generate(app, text=["ab"])] == ["hello"]
    assert generate(app, input_ids=[1, 2])["meta_info"]["prompt_tokens"] == 2


def test_sampling(app: App) -> None:
    reply = generate(app, text="ab", priority=-3, sampling_params={"stop": "lo", "no_stop_trim": True, "top_k": -1})
    assert (reply["text"], reply["meta_info"]["finish_reason"]) == ("hello", {"type": "stop", "matched": "lo"})
    [request] = app.client.submitted
    assert (request.params.temperature, request.params.top_k, request.priority) == (1.0, 0, 3)
    assert ask(app, "POST", "/generate", json={"model": "seq", "text": "ab"}).status_code == 200
    assert app.client.submitted[1].params.max_tokens == 63


def test_logprobs(app: App) -> None:
    meta = generate(app, text="ab", return_logprob=True, top_logprobs_num=1, return_text_in_logprobs=True)["meta_info"]
    assert meta["output_token_logprobs"][0] == [-0.5, 71, "h"]
    assert meta["output_top_logprobs"][0] == [[-0.5, 71, "h"]]
    assert "input_token_logprobs" not in meta
    meta = generate(app, text="ab", return_logprob=True, logprob_start_len=0)["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 256, None], [-0.5, 64, None], [-0.5, 65, None]]
    meta = generate(app, text="ab", return_logprob=True, logprob_start_len=2)["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.5, 65, None]]


def test_streams_are_cumulative(app: App) -> None:
    *found, done = generate(app, text="ab", stream=True, return_logprob=True)
    assert done == "[DONE]"
    assert [one["text"] for one in found] == ["h", "he", "hel", "hell", "hello"]
    assert [len(one["meta_info"]["output_token_logprobs"]) for one in found] == [1, 2, 3, 4, 5]
    assert [one["meta_info"]["finish_reason"] is None for one in found] == [True] * 4 + [False]
    assert found[-1]["output_ids"] == generate(app, text="ab")["output_ids"]
    *found, _ = generate(app, text=["ab", "c"], stream=True)
    assert {one["index"] for one in found} == {0, 1}


def test_a_deadline_is_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    let_time_pass(app, monkeypatch, 10.0, outputs=5)
    reply = generate(app, text="ab", timeout_s=10.0, sampling_params={"max_new_tokens": 50})
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    check_accounts(app)


@pytest.mark.parametrize("source", [{"text": "w1 w2"}, {"input_ids": [1, 3, 4, 2]}])
def test_encoding(app: App, source: dict[str, Any]) -> None:
    one = ask(app, "POST", "/encode", json=source).json()
    assert (len(one["embedding"]), one["meta_info"]["prompt_tokens"]) == (8, 4)
    name, value = next(iter(source.items()))
    many = ask(app, "POST", "/encode?model=enc", json={name: [value, value], "dimensions": 3}).json()
    assert [item["embedding"] for item in many] == [one["embedding"][:3]] * 2
