"""Clients of Hugging Face, TEI, Cohere, Jina and vLLM: the real client if it is installed, otherwise its bodies."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.model.checkpoints import saved
from tests.service.encode_models import TEXT, encode_app, hf_tokenizer, pipeline, reference_logits
from tests.service.support import live
from tests.service.test_bad_requests import check_error

pytestmark = pytest.mark.usefixtures("hub_client")
KINDS = ("bert", "bert-masked", "bert-entities", "bert-answers", "bert-nli")
TEXTS = [TEXT, "the cat sat", "a mat"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = encode_app(*KINDS)
    with live(app) as address:
        yield address


def client(url: str, task: str, model: str = "") -> InferenceClient:
    return InferenceClient(model=f"{url}/pipeline/{task}{model and '?model='}{model}", token="any")


def post(url: str, path: str, **body: Any) -> Any:
    reply = httpx.post(url + path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def vectors(texts: list[str]) -> np.ndarray[Any, Any]:
    """Return mean-pooled vectors of length 1 by `transformers`."""
    found = []
    for text in texts:
        with torch.inference_mode():
            hidden = saved("bert").reference(**hf_tokenizer("bert")(text, return_tensors="pt")).last_hidden_state[0]
        found.append(torch.nn.functional.normalize(hidden.mean(dim=0), dim=0))
    return torch.stack(found).numpy()


class TestInferenceClient:
    def test_fill_mask(self, url: str) -> None:
        found = client(url, "fill-mask").fill_mask("the [MASK] sat", top_k=3, targets=["cat", "mat", "on", "a"])
        expected = pipeline("fill-mask", "bert-masked")("the [MASK] sat", top_k=3, targets=["cat", "mat", "on", "a"])
        assert [(one.token, one.token_str, one.sequence) for one in found] == [
            (one["token"], one["token_str"], one["sequence"]) for one in expected
        ]
        assert [one.score for one in found] == pytest.approx([one["score"] for one in expected], abs=1e-5)

    def test_question_answering(self, url: str) -> None:
        asks = client(url, "question-answering")
        best = asks.question_answering(question="the cat", context=TEXT)
        assert TEXT[best.start : best.end] == best.answer  # type: ignore[union-attr]
        several = asks.question_answering(question="the cat", context=TEXT, top_k=3, max_answer_len=4, doc_stride=9)
        assert len(several) == 3 and several[0].score >= several[1].score  # type: ignore[arg-type, index]

    @pytest.mark.parametrize("way", ["none", "simple", "average"])
    def test_token_classification(self, url: str, way: Any) -> None:
        found = client(url, "token-classification").token_classification(TEXT, aggregation_strategy=way)
        expected = pipeline("token-classification", "bert-entities")(TEXT, aggregation_strategy=way)
        assert [(one.entity or one.entity_group, one.word, one.start, one.end) for one in found] == [
            (one.get("entity") or one.get("entity_group"), one["word"], one["start"], one["end"]) for one in expected
        ]

    def test_zero_shot_classification(self, url: str) -> None:
        labels = ["cat", "mat", "on"]
        asks = client(url, "zero-shot-classification")
        found = asks.zero_shot_classification(TEXT, labels, hypothesis_template="a {}", multi_label=True)
        expected = pipeline("zero-shot-classification", "bert-nli")(
            TEXT, labels, hypothesis_template="a {}", multi_label=True
        )
        assert [one.label for one in found] == expected["labels"]
        assert [one.score for one in found] == pytest.approx(expected["scores"], abs=1e-5)

    def test_sentence_similarity(self, url: str) -> None:
        found = client(url, "sentence-similarity", "bert").sentence_similarity("the cat", other_sentences=TEXTS)
        *others, source = vectors([*TEXTS, "the cat"])
        assert found == pytest.approx([float(one @ source) for one in others], abs=1e-5)
        assert post(url, "/similarity?model=bert", inputs={"source_sentence": "the cat", "sentences": TEXTS}) == found

    @pytest.mark.parametrize("function", [None, "softmax", "sigmoid", "none"])
    def test_text_classification(self, url: str, function: Any) -> None:
        found = client(url, "text-classification").text_classification(TEXT, function_to_apply=function, top_k=2)
        judge = pipeline("text-classification", "bert-nli")
        expected = judge(TEXT, top_k=2, **({"function_to_apply": function} if function else {}))
        assert [one["label"] for one in expected] == [one.label for one in found]
        assert [one["score"] for one in expected] == pytest.approx([one.score for one in found], abs=1e-4)

    def test_feature_extraction(self, url: str) -> None:
        found = client(url, "feature-extraction", "bert").feature_extraction(TEXTS)  # type: ignore[arg-type]
        assert np.allclose(found, vectors(TEXTS), atol=1e-5)

    def test_errors_name_the_clients_fields(self, url: str) -> None:
        with pytest.raises(HfHubHTTPError, match=r"parameters\.top_k must be at most 100"):
            client(url, "fill-mask").fill_mask("[MASK]", top_k=1000)
        with pytest.raises(HfHubHTTPError, match="inputs has no mask token"):
            client(url, "fill-mask").fill_mask("the cat")
        with pytest.raises(HfHubHTTPError, match=r"parameters\.max_seq_len is not supported"):
            client(url, "question-answering").question_answering(question="a", context="the", max_seq_len=9)
        with pytest.raises(HfHubHTTPError, match="model bert has no masked-language-model head"):
            client(url, "fill-mask", "bert").fill_mask("[MASK]")


class TestEmbeddings:
    """Bodies of OpenAI's, Jina's and vLLM's clients."""

    def found(self, url: str, **fields: Any) -> list[Any]:
        data = post(url, "/v1/embeddings", **{"model": "bert", "input": TEXTS, **fields})["data"]
        assert [one["index"] for one in data] == list(range(len(data)))
        return [one["embedding"] for one in data]

    @pytest.mark.parametrize("length_1", ["normalize", "normalized", "use_activation"])
    def test_what_the_numbers_are(self, url: str, length_1: str) -> None:
        floats = np.float32(self.found(url, **{length_1: True}))
        assert np.allclose(floats, vectors(TEXTS), atol=1e-5)
        for kind in ("int8", "uint8", "binary", "ubinary"):
            body = dict(model="bert", input=TEXTS, normalize=True, embedding_type=kind)
            expected = [one["embedding"] for one in post(url, "/encode", **body)["data"]]
            for encoding in ("base64", "float"):  # the first is what OpenAI's client sends, and reads as float32
                found = self.found(url, **{length_1: True}, embedding_type=kind, encoding_format=encoding)
                assert found == expected
        for fields in ({"encoding_format": "base64"}, {"embedding_type": "base64"}, {"encoding_type": "base64"}):
            packed = self.found(url, **{length_1: True}, **fields)
            assert [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in packed] == floats.tolist()

    def test_a_range_of_ones_own(self, url: str) -> None:
        floats = np.float32(self.found(url))
        ranges = [floats.min(axis=0).tolist(), (floats.max(axis=0) + 1).tolist()]
        found = self.found(url, embedding_type="uint8", ranges=ranges, user="me", priority=0, add_special_tokens=True)
        body = dict(model="bert", input=TEXTS, embedding_type="uint8", ranges=ranges)
        assert found == [one["embedding"] for one in post(url, "/encode", **body)["data"]]

    def test_late_chunking(self, url: str) -> None:
        """Texts are read as one; a space is put between those that have none."""
        parts, whole = ["Ada sat ", "on a mat", "the cat"], "Ada sat on a mat the cat"
        chunks = [[0, 8], [8, 16], [17, 24]]
        [expected] = post(url, "/encode", model="bert", input=whole, chunks=chunks)["data"]
        assert self.found(url, input=parts, late_chunking=True) == expected["embeddings"]
        objects = [{"text": part} for part in parts]
        assert self.found(url, input=objects, late_chunking=True) == expected["embeddings"]
        apart = self.found(url, input=objects)
        assert np.abs(np.subtract(apart, expected["embeddings"])).max() > 1e-3
        body = {"model": "bert", "input": ["the", "  "], "late_chunking": True}
        reply = httpx.post(f"{url}/v1/embeddings", json=body)
        assert "input[1] has no token" in check_error(reply, 400, "input[1]", "invalid_value")["message"]

    @pytest.mark.parametrize("cut", [{"truncate": True}, {"truncate_prompt_tokens": -1}])
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_long_texts(self, url: str, cut: dict[str, Any], side: str) -> None:
        text = "the cat " * 40 + "sat on a mat " * 20
        expected = post(url, "/encode", model="bert", input=text, truncate=side)["data"][0]["embedding"]
        assert self.found(url, input=text, truncation_side=side, **cut) == [expected]


class TestTei:
    def test_every_token(self, url: str) -> None:
        found = post(url, "/embed_all?model=bert", inputs=["the cat", "a"])
        assert [len(one) for one in found] == [4, 3]
        expected = post(url, "/encode", model="bert", input="the cat", output="tokens")["data"][0]["tokens"]
        assert found[0] == expected

    def test_sparse(self, url: str) -> None:
        [found] = post(url, "/embed_sparse", inputs="the cat")
        weights = torch.log1p(torch.relu(reference_logits("bert-masked", "the cat"))).amax(dim=0)
        assert [one["index"] for one in found] == weights.nonzero().flatten().tolist()
        assert [one["value"] for one in found] == pytest.approx(weights[weights > 0].tolist(), abs=1e-4)


def entailment(pairs: list[tuple[str, str]]) -> list[float]:
    """Return the probability of the last class."""
    logits = [reference_logits("bert-nli", one, other) for one, other in pairs]
    return [float(one.softmax(-1)[-1]) for one in logits]


class TestRanking:
    @pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
    def test_pairs_by_a_classifier(self, url: str, path: str) -> None:
        """The bodies of Cohere's, Jina's and vLLM's clients."""
        scores = entailment([("the cat", text) for text in TEXTS])
        order = sorted(range(3), key=lambda at: -scores[at])
        body = {"model": "bert-nli", "query": "the cat", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
        found = post(url, path, **body, top_n=2, return_documents=True, max_tokens_per_doc=None, priority=0)
        assert [one["index"] for one in found["results"]] == order[:2]
        assert [one["document"]["text"] for one in found["results"]] == [TEXTS[at] for at in order[:2]]
        assert found["meta"]["api_version"]["version"] == (
            "2" if path == "/v2/rerank" else "1"
        )  # Vercel's AI SDK needs it
        relevance = [one["relevance_score"] for one in found["results"]]
        assert relevance == pytest.approx([scores[at] for at in order[:2]], abs=1e-5)
        everything = post(url, path, **body)
        assert len(everything["results"]) == 3 and "document" not in everything["results"][0]

    @pytest.mark.parametrize("most", [4, 4096])
    def test_documents_are_truncated_to_a_number_of_tokens(self, url: str, most: int) -> None:
        """Haystack's and Cohere's clients send 4,096 with every request."""
        texts = [TEXT, "the cat", "in Londonx the cat"]
        cut = texts if most > 4 else ["Ada Lovelace sat", "the cat", "in Londonx the"]  # Love and ##lace are two tokens
        body = {"query": "the cat", "documents": [texts[0], {"text": texts[1]}, texts[2]], "return_documents": True}
        found = post(url, "/v2/rerank", **body, max_tokens_per_doc=most)["results"]
        scores = {at: pytest.approx(one, abs=1e-5) for at, one in enumerate(entailment([("the cat", t) for t in cut]))}
        assert {one["index"]: one["relevance_score"] for one in found} == scores
        assert {one["index"]: one["document"]["text"] for one in found} == dict(enumerate(texts))

    def test_cosines_by_a_model_of_vectors(self, url: str) -> None:
        found = post(url, "/v2/rerank", model="bert", query="the cat", documents=TEXTS)
        *others, query = vectors([*TEXTS, "the cat"])
        cosines = [float(one @ query) for one in others]
        assert [one["index"] for one in found["results"]] == sorted(range(3), key=lambda at: -cosines[at])
        assert found["results"][0]["relevance_score"] == pytest.approx(max(cosines), abs=1e-5)
        short = post(url, "/rerank", model="bert", query="the cat", texts=TEXTS, return_text=True)
        assert [(one["index"], one["score"]) for one in short] == [
            (one["index"], one["relevance_score"]) for one in found["results"]
        ]
        assert [one["text"] for one in short] == [TEXTS[one["index"]] for one in short]

    @pytest.mark.parametrize("path", ["/v1/score", "/score"])
    def test_scores(self, url: str, path: str) -> None:
        one_to_all = post(url, path, text_1="the cat", text_2=TEXTS)["data"]
        assert [one["score"] for one in one_to_all] == pytest.approx(
            entailment([("the cat", t) for t in TEXTS]), abs=1e-5
        )
        each = post(url, path, text_1=TEXTS[::-1], text_2=TEXTS)["data"]
        expected = entailment(list(zip(TEXTS[::-1], TEXTS, strict=True)))
        assert [one["score"] for one in each] == pytest.approx(expected, abs=1e-5)

    @pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
    def test_classes(self, url: str, path: str) -> None:
        found = post(url, path, input=TEXTS)["data"]
        for one, text in zip(found, TEXTS, strict=True):
            expected = reference_logits("bert-nli", text).softmax(-1)
            assert one["probs"] == pytest.approx(expected.tolist(), abs=1e-5)
            assert (one["label"], one["num_classes"]) == (
                ("contradiction", "neutral", "ENTAILMENT")[expected.argmax()],
                3,
            )

    @pytest.mark.parametrize(
        ("path", "body", "status", "param", "code"),
        [
            ("/v1/rerank", {"documents": []}, 400, "documents", "invalid_value"),
            ("/v1/rerank", {"documents": ["a", ""]}, 400, "documents[1]", "invalid_value"),
            ("/v1/rerank", {"documents": ["a"] * 2049}, 413, "documents", "too_many_inputs"),
            ("/v1/rerank", {"documents": ["a"], "top_n": 0}, 400, "top_n", "invalid_value"),
            ("/v2/rerank", {"documents": ["a"], "max_tokens_per_doc": 0}, 400, "max_tokens_per_doc", "invalid_value"),
            ("/v2/rerank", {"documents": ["a"], "max_chunks_per_doc": 9}, 400, "max_chunks_per_doc", "not_supported"),
            ("/v2/rerank", {"documents": ["a"], "model": "nope"}, 404, "model", "model_not_found"),
            (
                "/v1/rerank",
                {"documents": ["the " * 99], "truncation": False},
                400,
                "documents[0]",
                "context_length_exceeded",
            ),
            ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, 400, "text_2", "invalid_value"),
            ("/v1/classify", {"input": "a", "model": "bert"}, 400, "model", "wrong_task"),
            ("/v1/classify", {"input": "a", "labels": ["x"]}, 400, "labels", "not_supported"),
        ],
    )
    def test_refusals(self, url: str, path: str, body: dict[str, Any], status: int, param: str, code: str) -> None:
        query = {"query": "the cat"} if path.endswith("rerank") else {}
        check_error(httpx.post(url + path, json={**query, **body}), status, param, code)


COHERE = dict(model="bert", texts=TEXTS, input_type="search_document")


class TestCohere:
    def test_the_first_version(self, url: str) -> None:
        found = post(url, "/v1/embed", **COHERE)
        assert found["response_type"] == "embeddings_floats"
        assert found["meta"]["billed_units"]["input_tokens"] > 10  # LangChain adds them up
        assert np.allclose(found["embeddings"], vectors(TEXTS), atol=1e-5)

    def test_types(self, url: str) -> None:
        kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
        found = post(url, "/v2/embed", **COHERE, embedding_types=kinds, output_dimension=16)["embeddings"]
        assert np.allclose(np.linalg.norm(found["float"], axis=1), 1, atol=1e-5)
        assert {kind: len(found[kind][0]) for kind in kinds[:-1]} == dict(
            float=16, int8=16, uint8=16, binary=2, ubinary=2
        )
        assert np.array_equal(np.packbits(np.array(found["float"]) > 0, axis=-1), found["ubinary"])

    def test_what_is_not_there_is_refused(self, url: str) -> None:
        reply = httpx.post(f"{url}/v2/embed", json={"model": "bert", "texts": ["a"], "images": ["x"]})
        check_error(reply, 400, "images", "not_supported")
