"""The result cache of /encode, over a scripted engine."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import httpx
import pytest

from tests.service.support import App, ask, check_accounts, hold, make_app, opened, run, samples, until
from triptych.model.api.request import EncodeOutput, EncodeRequest, EncodeTask, FinishReason, token_source
from triptych.model.errors import ConfigError
from triptych.service.core.embed_cache import ENTRY_BYTES, CachingClient, Key, ResultStore, _key
from triptych.service.schemas.replies import InfoReply
from triptych.service.settings.service_settings import ServiceSettings

SIZE = 1 << 20


def cached(size: int = SIZE, **options: Any) -> App:
    return make_app(settings=ServiceSettings(embed_cache_bytes=size, **options))


async def encode(client: httpx.AsyncClient, *texts: str, key: str = "", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await client.post("/encode", json={"input": list(texts), **fields}, headers=headers)


def vectors(reply: httpx.Response) -> list[Any]:
    assert reply.status_code == 200, reply.text
    return [item["embedding"] for item in reply.json()["data"]]


def lookups(app: App) -> dict[str, float]:
    return {source: count for (_, source), count in samples(app, "triptych_embed_cache_inputs_total").items()}


def test_the_same_text_is_computed_once_and_the_reply_is_the_uncached_one() -> None:
    app = cached()
    plain = vectors(ask(make_app(), "POST", "/encode", json={"input": ["w1", "w2", "w3"]}))

    async def work(client: httpx.AsyncClient) -> None:
        first, second = await encode(client, "w1", "w2", "w1"), await encode(client, "w2", "w3")
        assert len(app.client.encoded) == 3
        assert vectors(first) == [plain[0], plain[1], plain[0]]
        assert vectors(second) == plain[1:]
        assert second.json()["usage"]["prompt_tokens"] == 6
        coded = (await encode(client, "w3", encoding_format="base64")).json()["data"][0]["embedding"]
        assert isinstance(coded, str) and len(app.client.encoded) == 3
        assert lookups(app) == {"computed": 3, "in_flight": 1, "kept": 2}
        found = (await client.get("/info")).json()
        InfoReply.model_validate(found)
        assert found["embed_cache"] == {"max_bytes": SIZE, "bytes": 3 * (32 + ENTRY_BYTES), "entries": 3}
        assert samples(app, "triptych_embed_cache_bytes")["enc",] == 3 * (32 + ENTRY_BYTES)
        check_accounts(app)

    run(app, work)


@pytest.mark.parametrize(
    "changed",
    [
        {"pooling": "cls"},
        {"normalize": False},
        {"dimensions": 4},
        {"output": "tokens"},
        {"prompt_name": "query"},
        {"model": "gen"},
        {"input": [{"text": "w1", "text_pair": "w2"}]},
    ],
)
def test_whatever_changes_the_result_is_computed(changed: dict[str, Any]) -> None:
    app = cached()

    async def work(client: httpx.AsyncClient) -> None:
        for fields in ({}, changed, changed):
            assert (await encode(client, "w1 w2", **fields)).status_code == 200
        assert len(app.client.encoded) == 2

    run(app, work)


def test_keys_share_nothing() -> None:
    app = cached(api_keys=("one", "two"))

    async def work(client: httpx.AsyncClient) -> None:
        for key in ("one", "two", "one", "two"):
            vectors(await encode(client, "w1", key=key))
        assert len(app.client.encoded) == 2

    run(app, work)


@pytest.mark.parametrize("ended", ["cancelled", "gone", "late"])
def test_who_leaves_does_not_end_what_others_wait_for(ended: str) -> None:
    app = cached()

    async def work(client: httpx.AsyncClient) -> None:
        free = hold(app)
        timeout = {"timeout_s": 0.05} if ended == "late" else {}
        first = asyncio.create_task(encode(client, "w1", "w2", request_id="first", **timeout))
        await until(lambda: len(app.client.encoded) == 2)
        second = asyncio.create_task(encode(client, "w3", "w2"))
        await until(lambda: len(app.client.encoded) == 3)
        if ended == "cancelled":
            assert (await client.delete("/requests/first")).status_code == 200
            assert (await first).status_code == 409
        elif ended == "gone":
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        else:
            assert (await first).status_code == 504
        await until(lambda: len(app.client.cancelled) == 1)  # w1, for which no other request waits
        free.set()
        assert vectors(await second) == vectors(await encode(client, "w3", "w2"))
        assert len(app.client.encoded) == 3
        assert vectors(await encode(client, "w1")) and len(app.client.encoded) == 4

    run(app, work)


def test_what_nobody_waits_for_is_aborted_and_computed_anew() -> None:
    app = cached()

    async def work(client: httpx.AsyncClient) -> None:
        free = hold(app)
        asked = [asyncio.create_task(encode(client, "w1", request_id=name)) for name in ("a", "b")]
        await until(lambda: len(app.service.jobs) == 2)
        assert len(app.client.encoded) == 1
        for name, reply in zip("ab", asked, strict=True):
            assert not app.client.cancelled
            await client.delete(f"/requests/{name}")
            assert (await reply).status_code == 409
        assert len(app.client.cancelled) == 1
        again = asyncio.create_task(encode(client, "w1"))
        await until(lambda: len(app.client.encoded) == 2)
        free.set()
        vectors(await again)
        await until(lambda: not app.client.running)

    run(app, work)


@pytest.mark.parametrize(
    ("script", "status"), [({"error_after": 0}, 500), ({"die_after": 0}, 500), ({"queue_full": "queue_tokens"}, 429)]
)
def test_errors_reach_all_who_wait_and_are_not_kept(script: dict[str, Any], status: int) -> None:
    app = cached()

    async def work(client: httpx.AsyncClient) -> None:
        app.service.client.check_room = lambda *_: None  # type: ignore[method-assign]  # so that encode refuses
        for name, value in script.items():
            setattr(app.script, name, value)
        app.script.delay_s = 0.05
        replies = await asyncio.gather(*(encode(client, "w1", "w2") for _ in range(3)))
        assert [reply.status_code for reply in replies] == [status] * 3
        for name in script:
            setattr(app.script, name, None)
        vectors(await encode(client, "w1", "w2"))
        assert lookups(app) == {"computed": 4, "in_flight": 4, "kept": 0}

    run(app, work)


def request(name: str, model: str = "enc", **fields: Any) -> EncodeRequest:
    return EncodeRequest(name, model, token_source((4, 5)), **fields)


@pytest.mark.parametrize("event", ["restart", "unload", "unload in flight"])
def test_nothing_is_kept_over_the_end_of_a_model(event: str) -> None:
    app = cached()

    async def main() -> None:
        async with opened(app):
            client = app.service.client
            assert isinstance(client, CachingClient)
            await client.encode([request("a", "gen")])
            free = hold(app)
            first = asyncio.create_task(client.encode([request("b")]))
            await until(lambda: len(app.client.encoded) == 2)
            if event != "unload in flight":
                free.set()
                await first
            if event == "restart":
                app.client.restarts += 1
            else:
                await client.unload("enc")
                app.client.models["enc"] = app.client._loadable["enc"]
            free.set()
            await first
            [found] = await client.encode([request("c")])
            assert found.data and len(app.client.encoded) == 3
            await client.encode([request("d", "gen")])
            assert len(app.client.encoded) == (4 if event == "restart" else 3)

    asyncio.run(main())


def test_every_field_but_id_and_times_is_part_of_the_key() -> None:
    """A field that is added later is, too."""
    app = cached()

    async def main() -> None:
        async with opened(app):
            client = app.service.client
            await client.encode([request("a", arrival_time=1.0, deadline=None)])
            await client.encode([request("b", arrival_time=2.0, deadline=1e12)])
            assert len(app.client.encoded) == 1
            for number, changed in enumerate(({"top_k": 3}, {"positions": (1,)}, {"task": EncodeTask.TOKENS}), start=2):
                await client.encode([request("c", **changed)])
                assert len(app.client.encoded) == number

    asyncio.run(main())


def output(size: int) -> EncodeOutput:
    return EncodeOutput("x", bytes(size), (size // 4,), finish_reason=FinishReason.STOP)


def test_the_least_recently_used_results_go_first() -> None:
    each = 100 + ENTRY_BYTES
    store = ResultStore(3 * each)
    for name in "abc":
        store.put((name,), "m" if name == "a" else "n", output(100))
    assert store.get(("a",)) is not None
    store.put(("d",), "n", output(100))
    assert [store.get((name,)) is not None for name in "abcd"] == [True, False, True, True]
    assert (store.size, len(store), dict(store.sizes)) == (3 * each, 3, {"m": each, "n": 2 * each})
    store.put(("e",), "n", output(4 * each))  # larger than all the room
    assert len(store) == 3
    store.forget("n")
    assert (store.size, len(store), dict(store.sizes)) == (each, 1, {"m": each, "n": 0})


def test_a_kept_result_takes_no_more_than_it_counts() -> None:
    """Long values of a client, such as ids to choose among, are not kept with each result."""

    def key(at: int) -> Key:
        ids, spans = tuple(range(10_000, 11_000)), tuple((one, one + 1) for one in range(256))
        source = token_source((1, 2, at + 1_000))
        return _key("", EncodeRequest(str(at), "m", source, candidates=ids, positions=ids[:at], spans=spans))

    store = ResultStore(10**9)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for at in range(200):
        store.put(key(at), "m", output(3072))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store) == 200 and after - before < store.size


def test_without_the_setting_nothing_is_kept() -> None:
    app = make_app()

    async def work(client: httpx.AsyncClient) -> None:
        await asyncio.gather(encode(client, "w1"), encode(client, "w1"))
        assert len(app.client.encoded) == 2
        assert (await client.get("/info")).json()["embed_cache"] is None

    run(app, work)
    with pytest.raises(ConfigError, match="embed_cache must not be negative"):
        ServiceSettings(embed_cache_bytes=-1)
