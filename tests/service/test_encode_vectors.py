"""Vectors of /encode: in integers and bits, of chunks, and of long texts in windows."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.service.encode_models import (
    TEXT,
    Client,
    client_of,
    encode_app,
    hf_tokenizer,
    hidden_states,
    raw_tokenizer,
)
from tests.service.test_bad_requests import check_error
from triptych.model.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with client_of(encode_app("bert")) as made:
        yield made


class TestEmbeddingTypes:
    """The definitions are those of `sentence_transformers.quantization.quantize_embeddings`."""

    TEXTS = (TEXT, "the cat", "a mat on a mat")

    def vectors(self, client: Client, **fields: Any) -> np.ndarray[Any, Any]:
        reply = client.encode(model="bert", input=[*self.TEXTS], normalize=True, **fields)
        return np.array([item["embedding"] for item in reply["data"]])

    @pytest.mark.parametrize("dimensions", [None, 12])
    def test_bits(self, client: Client, dimensions: int | None) -> None:
        fields = {} if dimensions is None else {"dimensions": dimensions}
        expected = np.packbits(self.vectors(client, **fields) > 0, axis=-1)
        assert np.array_equal(self.vectors(client, embedding_type="ubinary", **fields), expected)
        assert np.array_equal(self.vectors(client, embedding_type="binary", **fields), expected.astype(int) - 128)

    @pytest.mark.parametrize("given", [False, True])
    def test_integers(self, client: Client, given: bool) -> None:
        floats = self.vectors(client).astype(np.float32)
        ranges = np.stack([floats.min(axis=0), floats.max(axis=0)]) if given else np.array([[-1.0], [1.0]], np.float32)
        steps = (floats - ranges[0]) / ((ranges[1] - ranges[0]) / 255)
        fields = {"ranges": ranges.tolist()} if given else {}
        assert np.abs(self.vectors(client, embedding_type="uint8", **fields) - steps).max() <= 1
        assert np.abs(self.vectors(client, embedding_type="int8", **fields) - (steps - 128)).max() <= 1
        outside = {"ranges": [[-0.01] * 32, [0.01] * 32]}
        assert set(self.vectors(client, embedding_type="int8", **outside).flatten()) >= {-128, 127}

    def test_bytes_in_base64(self, client: Client) -> None:
        for kind, dtype in (("int8", np.int8), ("uint8", np.uint8), ("binary", np.int8), ("ubinary", np.uint8)):
            body = dict(model="bert", input=TEXT, normalize=True, embedding_type=kind)
            [plain], [coded] = client.encode(**body)["data"], client.encode(**body, encoding_format="base64")["data"]
            assert np.frombuffer(base64.b64decode(coded["embedding"]), dtype).tolist() == plain["embedding"]

    @pytest.mark.parametrize(
        ("fields", "param", "words"),
        [
            (dict(embedding_type="int8"), "embedding_type", "needs ranges, or normalize: true"),
            (dict(embedding_type="binary", ranges=[[0.0], [1.0]]), "ranges", "no meaning with embedding_type 'binary'"),
            (dict(embedding_type="int8", ranges=[[0.0], [1.0]]), "ranges", "each of 32 dimensions"),
            (dict(embedding_type="int8", ranges=[[0.0] * 32] * 2), "ranges", "a lowest and a higher value"),
            (dict(embedding_type="int8", output="tokens"), "embedding_type", "no meaning with output 'tokens'"),
        ],
    )
    def test_refusals(self, client: Client, fields: dict[str, Any], param: str, words: str) -> None:
        reply = client.post(model="bert", input="the cat", **fields)
        assert words in check_error(reply, 400, param, "invalid_value")["message"]


class TestLongTexts:
    LONG = " ".join([TEXT] * 9)

    def test_late_chunks_are_pooled_from_the_whole_text(self, client: Client) -> None:
        located = Tokenizer(raw_tokenizer()).locate(TEXT)
        states = hidden_states(located.ids)
        chunks = [[0, 12], [13, 21], [13, len(TEXT)]]
        [item] = client.encode(model="bert", input=TEXT, chunks=chunks, normalize=True)["data"]
        for vector, (start, end) in zip(item["embeddings"], chunks, strict=True):
            places = [at for at, (begin, stop) in enumerate(located.offsets) if start <= begin < end and stop]
            expected = torch.nn.functional.normalize(states[places].mean(dim=0), dim=0)
            assert torch.allclose(torch.tensor(vector), expected, atol=1e-4)

    @pytest.mark.parametrize("normalize", [True, False])
    def test_windows(self, client: Client, normalize: bool) -> None:
        body: dict[str, Any] = dict(model="bert", input=[self.LONG, TEXT], stride=10, normalize=normalize)
        reply = client.encode(**body, split="separate")
        long, short = reply["data"]
        encoded = hf_tokenizer("bert")(
            self.LONG,
            truncation=True,
            max_length=64,
            stride=10,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        vectors = torch.stack([hidden_states(ids).mean(dim=0) for ids in encoded["input_ids"]])
        vectors = torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors
        assert long["windows"] == len(vectors) > 2 and "windows" not in short
        assert torch.allclose(torch.tensor(long["embeddings"]), vectors, atol=1e-4)
        assert long["places"] == [[places[1][0], places[-2][1]] for places in encoded["offset_mapping"]]
        assert short["places"] == [[0, len(TEXT)]]
        weights = torch.tensor([len(ids) - 2.0 for ids in encoded["input_ids"]])
        expected = (weights @ vectors) / weights.sum()
        expected = torch.nn.functional.normalize(expected, dim=0) if normalize else expected
        pooled, alone = client.encode(**body, split="pooled")["data"]
        assert torch.allclose(torch.tensor(pooled["embedding"]), expected, atol=1e-4)
        assert (
            alone["embedding"] == client.encode(model="bert", input=TEXT, normalize=normalize)["data"][0]["embedding"]
        )

    @pytest.mark.parametrize(
        ("fields", "param", "words"),
        [
            (dict(chunks=[[3, 3]]), "chunks[0]", "two places in the text"),
            (dict(chunks=[[0, 3], [0, 999]]), "chunks[1]", "two places in the text"),
            (dict(chunks=[[3, 4]]), "chunks[0]", "no token that begins in it"),
            (dict(chunks=[[0, 3]], input=["a", "b"]), "chunks", "needs one text"),
            (dict(chunks=[[0, 3]], input=[5, 6]), "chunks", "needs texts"),
            (dict(chunks=[[0, 3]], split="pooled"), "chunks", "exclude each other"),
            (dict(chunks=[[0, 3]], input=LONG), "input", "maximum context length is 64 tokens"),
            (dict(split="pooled", truncate="right"), "split", "exclude each other"),
            (dict(split="pooled", output="tokens"), "split", "no meaning with output 'tokens'"),
            (dict(split="pooled", stride=62, input=LONG), "stride", "must be below the 62 tokens"),
            (dict(stride=3), "stride", "no meaning without split"),
        ],
    )
    def test_refusals(self, client: Client, fields: dict[str, Any], param: str, words: str) -> None:
        reply = client.post(**{"model": "bert", "input": "the cat sat", **fields})
        assert words in check_error(reply, 400, param, reply.json()["error"]["code"])["message"]

    def test_windows_are_counted(self, client: Client) -> None:
        reply = client.post(model="bert", input=[self.LONG] * 600, split="separate", stride=50)
        assert "makes" in check_error(reply, 413, "input", "too_many_inputs")["message"]
