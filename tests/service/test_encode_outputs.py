"""Outputs of /encode that are more than vectors, through HTTP, against the pipelines of `transformers`."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from model.text.tokenizer import Tokenizer
from service.planning.outputs.registry import OUTPUTS
from tests.model.checkpoints import HEADS, copied, saved
from tests.service.encode_models import TEXT, encode_app, hf_tokenizer, pipeline, raw_tokenizer, reference_logits
from tests.service.test_bad_requests import check_error
from tests.service.test_heads import Client

MASKED = tuple(kind for kind in HEADS if "masked" in kind)
ANSWERING = tuple(kind for kind in HEADS if "answers" in kind)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    root = tmp_path_factory.mktemp("late")
    late = {f"late_{name}": late_folder(root / name, **settings) for name, settings in LATE.items()}
    late |= {f"late_{name}": colbert_folder(root / name, name) for name in COLBERT}
    app = encode_app(*HEADS, "bert", "bert-token", **late, m3=m3_folder(root / "m3"))
    loop = asyncio.new_event_loop()
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    lifespan = app.router.lifespan_context(app)
    loop.run_until_complete(lifespan.__aenter__())
    yield Client(loop, http, app.state.service.limits)
    loop.run_until_complete(http.aclose())
    loop.run_until_complete(lifespan.__aexit__(None, None, None))
    loop.close()


# Settings of pylate: mask tokens that others do not read, that they read, and none.
LATE: dict[str, dict[str, Any]] = {
    "unread": {},
    "read": {"attend_to_expansion_tokens": True},
    "plain": {"do_query_expansion": False, "skiplist_words": ["the", "on"], "query_prefix": ""},
}
WEIGHTS = torch.empty(7, 32).normal_(generator=torch.Generator().manual_seed(1))


def late_folder(folder: Path, **settings: Any) -> Path:
    copied("bert", folder.parent).rename(folder)
    names = {"query_prefix": "Ada", "document_prefix": "Love", "query_length": 12, "document_length": 20}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(names | settings))
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    (folder / "modules.json").write_text(json.dumps([{"path": path, "type": kind} for path, kind in modules]))
    (folder / "1_Dense").mkdir()
    dense = dict(in_features=32, out_features=7, bias=False, activation_function="torch.nn.modules.linear.Identity")
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": WEIGHTS}, folder / "1_Dense" / "model.safetensors")
    return folder


# `artifact.metadata` as ColBERT itself writes it, in part; and none.
COLBERT: dict[str, dict[str, Any]] = {
    "colbert": {
        **dict(query_token_id="Ada", doc_token_id="Love", query_token="[Q]", doc_token="[D]", dim=7, nbits=1),
        **dict(query_maxlen=12, doc_maxlen=20, attend_to_mask_tokens=False, mask_punctuation=True, similarity="cosine"),
    },
    "colbert-v1": {},
}


def colbert_folder(folder: Path, name: str) -> Path:
    """With the projection among the network's tensors, which have BERT's prefix."""
    copied("bert", folder.parent).rename(folder)
    state = {f"bert.{key}": tensor for key, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    torch.save(state | {"linear.weight": WEIGHTS}, folder / "pytorch_model.bin")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (folder / "config.json").write_text(json.dumps(config))
    if COLBERT[name]:
        (folder / "artifact.metadata").write_text(json.dumps(COLBERT[name]))
    return folder


def m3_folder(folder: Path) -> Path:
    """With the matrices of BGE-M3, in files of `torch.save`."""
    copied("bert", folder.parent).rename(folder)
    torch.save({"weight": WEIGHTS, "bias": WEIGHTS[:, 0].clone()}, folder / "colbert_linear.pt")
    torch.save({"weight": WEIGHTS[:1].clone(), "bias": WEIGHTS[0, :1].clone()}, folder / "sparse_linear.pt")
    return folder


class TestFillMask:
    @pytest.mark.parametrize("kind", MASKED)
    def test_candidates(self, client: Client, kind: str) -> None:
        text = "the [MASK] sat on a mat"
        expected = pipeline("fill-mask", kind)(text, top_k=7)
        [item] = client.encode(model=kind, output="fill_mask", input=text, top_k=7)["data"]
        [mask] = item["masks"]
        assert mask["position"] == 2
        assert [one["token"] for one in mask["candidates"]] == [one["token"] for one in expected]
        assert [one["text"] for one in mask["candidates"]] == [one["token_str"] for one in expected]
        assert [one["sequence"] for one in mask["candidates"]] == [one["sequence"] for one in expected]
        assert [one["score"] for one in mask["candidates"]] == pytest.approx(
            [one["score"] for one in expected], abs=1e-5
        )

    def test_several_masks_and_targets_in_a_batch(self, client: Client) -> None:
        texts = ["[MASK] cat [MASK] on", "the cat [MASK]"]
        fill = pipeline("fill-mask", "bert-masked")
        reply = client.encode(model="bert-masked", output="fill_mask", input=texts, targets=["cat", "mat", "##lace"])
        for item, text in zip(reply["data"], texts, strict=True):
            expected = fill(text, targets=["cat", "mat", "##lace"])
            expected = expected if isinstance(expected[0], list) else [expected]
            for mask, wanted in zip(item["masks"], expected, strict=True):
                assert [one["token"] for one in mask["candidates"]] == [one["token"] for one in wanted]
                assert [one["sequence"] for one in mask["candidates"]] == [one["sequence"] for one in wanted]
        alone = client.encode(model="bert-masked", output="fill_mask", input=texts[1], targets=["cat", "mat", "##lace"])
        assert alone["data"][0]["masks"] == reply["data"][1]["masks"]

    @pytest.mark.parametrize(
        ("fields", "param", "words"),
        [
            (dict(input="no mask"), "input", "has no mask token [MASK]"),
            (dict(input=["a [MASK]", "none"]), "input[1]", "has no mask token"),
            (dict(input="[MASK]", top_k=101), "top_k", "at most 100"),
            (dict(input="[MASK] " * 30, top_k=50), "input", "30 masks x 50 top_k"),
            (dict(input="[MASK]", targets=["cat", "cat mat"]), "targets[1]", "is 2 tokens"),
            (dict(input="[MASK]", normalize=True), "normalize", "no meaning with output 'fill_mask'"),
        ],
    )
    def test_refusals(self, client: Client, fields: dict[str, Any], param: str, words: str) -> None:
        reply = client.post(model="bert-masked", output="fill_mask", **fields)
        assert words in check_error(reply, 400, param, reply.json()["error"]["code"])["message"]


class TestSparse:
    @pytest.mark.parametrize("kind", MASKED[:3])
    def test_weights(self, client: Client, kind: str) -> None:
        texts = [TEXT, "the cat", "a mat on a mat"]
        reply = client.encode(model=kind, output="sparse", input=texts)
        for item, text in zip(reply["data"], texts, strict=True):
            weights = torch.log1p(torch.relu(reference_logits(kind, text))).amax(dim=0)
            assert item["indices"] == weights.nonzero().flatten().tolist()
            assert item["weights"] == pytest.approx(weights[weights > 0].tolist(), abs=1e-4)

    def test_top_k_keeps_the_heaviest(self, client: Client) -> None:
        body = dict(model="bert-masked", output="sparse", input=TEXT)
        [whole], [few] = client.encode(**body)["data"], client.encode(**body, top_k=5)["data"]
        weights = dict(zip(whole["indices"], whole["weights"], strict=True))
        assert few["indices"] == sorted(sorted(weights, key=lambda token: -weights[token])[:5])
        assert few["weights"] == [weights[token] for token in few["indices"]]


def hidden_states(ids: Sequence[int], visible: int | None = None) -> torch.Tensor:
    """`[L, d]` by `transformers`; tokens behind the first `visible` ones are masked."""
    mask = torch.tensor([[at < (visible or len(ids)) for at in range(len(ids))]]).long()
    with torch.inference_mode():
        found = saved("bert").reference(input_ids=torch.tensor([list(ids)]), attention_mask=mask).last_hidden_state[0]
    return found  # type: ignore[no-any-return]


class TestMultiVector:
    """As `encode` of pylate's ColBERT."""

    @pytest.mark.parametrize("name", [*LATE, "colbert"])
    def test_queries(self, client: Client, name: str) -> None:
        texts = ["the cat", TEXT[:12]]
        reply = client.encode(model=f"late_{name}", output="multi_vector", input=texts, input_type="query")
        for item, text in zip(reply["data"], texts, strict=True):
            ids = hf_tokenizer("bert")(text)["input_ids"]
            if name != "plain":
                ids.insert(1, 11)  # Ada
            read = len(ids)
            ids += [4] * (12 - len(ids) if name != "plain" else 0)
            states = hidden_states(ids, None if name == "read" else read)
            expected = torch.nn.functional.normalize(states @ WEIGHTS.T, dim=-1)
            assert torch.allclose(torch.tensor(item["vectors"]), expected, atol=1e-4)

    def test_a_folder_of_colbert_without_metadata(self, client: Client) -> None:
        """The markers are BERT's unused tokens, and unknown ones where the vocabulary has none; lengths 32 and 220."""
        for kind, length in (("query", 32), ("document", 5)):
            ids = [2, 1, *hf_tokenizer("bert")("the cat")["input_ids"][1:]]
            states = hidden_states(ids + [4] * (length - 5), len(ids))
            [item] = client.encode(model="late_colbert-v1", output="multi_vector", input="the cat", input_type=kind)[
                "data"
            ]
            if kind == "document":  # punctuation is unknown too, as the marker is
                states = states[[0, 2, 3, 4]]
            expected = torch.nn.functional.normalize(states @ WEIGHTS.T, dim=-1)
            assert torch.allclose(torch.tensor(item["vectors"]), expected, atol=1e-4)

    @pytest.mark.parametrize("name", [*LATE, "colbert"])
    def test_documents(self, client: Client, name: str) -> None:
        texts = ["Ada , the cat sat", "a mat"]
        reply = client.encode(model=f"late_{name}", output="multi_vector", input=texts)
        comma = raw_tokenizer().token_to_id(",")
        for item, text in zip(reply["data"], texts, strict=True):
            ids = hf_tokenizer("bert")(text)["input_ids"]
            ids.insert(1, 12)  # Love
            skipped = {5, 8} if name == "plain" else {1, comma}  # punctuation without a token is an unknown one
            states = hidden_states(ids)[[token not in skipped for token in ids]]
            expected = torch.nn.functional.normalize(states @ WEIGHTS.T, dim=-1)
            assert torch.allclose(torch.tensor(item["vectors"]), expected, atol=1e-4)

    def test_matrices_of_m3(self, client: Client) -> None:
        ids = hf_tokenizer("bert")(TEXT)["input_ids"]
        states = hidden_states(ids)
        [item] = client.encode(model="m3", output="multi_vector", input=TEXT)["data"]
        expected = torch.nn.functional.normalize(states[1:] @ WEIGHTS.T + WEIGHTS[:, 0], dim=-1)
        assert torch.allclose(torch.tensor(item["vectors"]), expected, atol=1e-4)
        weights: dict[int, float] = {}
        for token, weight in zip(ids, torch.relu(states @ WEIGHTS[0] + WEIGHTS[0, 0]).tolist(), strict=True):
            if weight > 0 and token > 4:
                weights[token] = max(weight, weights.get(token, 0))
        [item] = client.encode(model="m3", output="sparse", input=TEXT)["data"]
        assert item["indices"] == sorted(weights)
        assert item["weights"] == pytest.approx([weights[token] for token in sorted(weights)], abs=1e-4)

    def test_too_long_texts_are_refused_or_cut(self, client: Client) -> None:
        body: dict[str, Any] = dict(
            model="late_unread", output="multi_vector", input="the cat " * 9, input_type="query"
        )
        error = check_error(client.post(**body), 400, "input", "context_length_exceeded")
        assert "more than the 11" in error["message"]
        [item] = client.encode(**body, truncate="right")["data"]
        assert (len(item["vectors"]), item["truncated"]) == (12, True)


class TestTokenClassification:
    @pytest.mark.parametrize("way", ["none", "simple", "first", "average", "max"])
    def test_as_the_pipeline(self, client: Client, way: str) -> None:
        texts = [TEXT, "Ada Lovelace", "zzz sat xx Londonx", "Lovelacex , Ada"]
        find = pipeline("token-classification", "bert-entities")
        reply = client.encode(model="bert-entities", output="token_classification", input=texts, aggregation=way)
        assert any(item["entities"] for item in reply["data"])
        for item, text in zip(reply["data"], texts, strict=True):
            expected = find(text, aggregation_strategy=way)
            found = [
                (one["label"], one["start"], one["end"], one["text"], one.get("position")) for one in item["entities"]
            ]
            name = "entity" if way == "none" else "entity_group"
            assert found == [(one[name], one["start"], one["end"], one["word"], one.get("index")) for one in expected]
            scores = [one["score"] for one in item["entities"]]
            assert scores == pytest.approx([float(one["score"]) for one in expected], abs=1e-5)

    def test_labels_to_ignore(self, client: Client) -> None:
        body = dict(model="bert-entities", output="token_classification", input=TEXT)
        [item] = client.encode(**body, ignore_labels=[])["data"]
        assert len(item["entities"]) == len(hf_tokenizer("bert")(TEXT)["input_ids"]) - 2

    def test_long_texts_in_windows(self, client: Client) -> None:
        text = " ".join([TEXT] * 9)
        tokenizer = hf_tokenizer("bert-entities")
        tokenizer.model_max_length = 64
        import transformers

        model = saved("bert-entities").reference
        find = transformers.pipeline(
            "token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="simple", stride=20
        )
        expected = find(text)
        body = dict(model="bert-entities", output="token_classification", aggregation="simple", stride=20)
        [item] = client.encode(**body, input=text)["data"]
        assert item["windows"] > 2
        assert [(one["label"], one["start"], one["end"]) for one in item["entities"]] == [
            (one["entity_group"], one["start"], one["end"]) for one in expected
        ]


def spans(kind: str, question: str, context: str, longest: int) -> tuple[float, dict[tuple[int, int], float]]:
    """The score of "no answer", and of every span of tokens by its characters, over windows of 64 tokens, 10 shared."""
    windows = dict(truncation="only_second", max_length=64, stride=10, return_overflowing_tokens=True)
    encoded = hf_tokenizer(kind)(question, context, return_offsets_mapping=True, **windows)
    nothing, found = 1.0, dict[tuple[int, int], float]()
    for window, offsets in enumerate(encoded["offset_mapping"]):
        tokens = {name: torch.tensor([encoded[name][window]]) for name in hf_tokenizer(kind).model_input_names}
        with torch.inference_mode():
            out = saved(kind).reference(**tokens)
        of = encoded.sequence_ids(window)
        readable = torch.tensor([one == 1 or at == 0 for at, one in enumerate(of)])
        logits = (torch.where(readable, one[0], -1e4) for one in (out.start_logits, out.end_logits))
        starts, ends = (torch.softmax(one, -1).numpy() for one in logits)
        nothing = min(nothing, float(starts[0] * ends[0]))
        for first, last in product(range(len(of)), range(len(of))):
            if of[first] == of[last] == 1 and 0 <= last - first < longest:
                place = offsets[first][0], offsets[last][1]
                found[place] = max(found.get(place, 0), float(starts[first] * ends[last]))
    return nothing, found


class TestQuestionAnswering:
    @pytest.mark.parametrize("kind", ANSWERING)
    def test_best_spans(self, client: Client, kind: str) -> None:
        pair = {"text": "the cat sat on", "text_pair": TEXT}
        _, expected = spans(kind, pair["text"], TEXT, 4)
        body = dict(model=kind, output="question_answering", max_answer_length=4, top_k=6, align_to_words=False)
        [item] = client.encode(**body, input=[pair])["data"]
        best = sorted(expected, key=lambda span: -expected[span])[:6]
        assert [(one["start"], one["end"]) for one in item["answers"]] == best
        assert [one["text"] for one in item["answers"]] == [TEXT[start:end] for start, end in best]
        assert [one["score"] for one in item["answers"]] == pytest.approx([expected[span] for span in best], abs=1e-5)

    def test_no_answer_and_words(self, client: Client) -> None:
        pair = {"text": "the cat", "text_pair": TEXT}
        nothing, _ = spans("bert-answers", "the cat", TEXT, 15)
        body = dict(model="bert-answers", output="question_answering", top_k=100, no_answer=True)
        [item] = client.encode(**body, input=[pair])["data"]
        [empty] = [one for one in item["answers"] if not one["text"]]
        assert empty["score"] == pytest.approx(nothing, abs=1e-6)
        words = {" Lovelace ", " Londonx "}
        assert all(
            word.strip() in one["text"] or word.strip()[:4] not in one["text"]
            for one in item["answers"]
            for word in words
        )

    def test_long_contexts_in_windows(self, client: Client) -> None:
        context = " ".join([TEXT] * 9)
        body = dict(model="bert-answers", output="question_answering", top_k=20, stride=10, align_to_words=False)
        [item] = client.encode(**body, input=[{"text": "the cat", "text_pair": context}])["data"]
        _, expected = spans("bert-answers", "the cat", context, 15)
        assert item["windows"] > 2
        best = sorted(expected.values(), reverse=True)[:20]
        assert [one["score"] for one in item["answers"]] == pytest.approx(best, abs=1e-5)
        assert all(context[one["start"] : one["end"]] == one["text"] for one in item["answers"])
        for one in item["answers"]:
            assert one["score"] == pytest.approx(expected[one["start"], one["end"]], abs=1e-5)

    @pytest.mark.parametrize(
        ("given", "param", "words"),
        [
            ("the cat", "input", "must be {text: question, text_pair: context}"),
            ([{"text": "the cat " * 40, "text_pair": "a"}], "input[0]", "leave room for"),
            ([[5, 6]], "input[0]", "must be {text"),
        ],
    )
    def test_refusals(self, client: Client, given: Any, param: str, words: str) -> None:
        reply = client.post(model="bert-answers", output="question_answering", input=given)
        assert words in check_error(reply, 400, param, reply.json()["error"]["code"])["message"]


class TestZeroShot:
    @pytest.mark.parametrize("kind", ["bert-nli", "bart-nli"])
    @pytest.mark.parametrize("multi_label", [False, True])
    def test_as_the_pipeline(self, client: Client, kind: str, multi_label: bool) -> None:
        texts, labels = [TEXT, "the cat sat"], ["cat", "mat", "Ada Lovelace"]
        judge = pipeline("zero-shot-classification", kind)
        body = dict(labels=labels, hypothesis_template="a {} sat", multi_label=multi_label)
        reply = client.encode(model=kind, output="zero_shot", input=texts, **body)
        for item, text in zip(reply["data"], texts, strict=True):
            expected = judge(text, labels, hypothesis_template="a {} sat", multi_label=multi_label)
            assert item["labels"] == expected["labels"]
            assert item["scores"] == pytest.approx(expected["scores"], abs=1e-5)

    def test_an_encoder_decoder_classifies_by_its_end_of_sequence(self, client: Client) -> None:
        pairs = [{"text": TEXT, "text_pair": "the cat"}, {"text": "a mat", "text_pair": TEXT}]
        reply = client.encode(model="bart-nli", output="logits", input=pairs)
        for item, pair in zip(reply["data"], pairs, strict=True):
            expected = reference_logits("bart-nli", pair["text"], pair["text_pair"])
            assert torch.allclose(torch.tensor(item["scores"]), expected, atol=1e-4)
        error = check_error(
            client.post(model="bart-nli", output="logits", input=[[5, 6]]), 400, "input[0]", "invalid_value"
        )
        assert "no end-of-sequence token 2" in error["message"]

    @pytest.mark.parametrize(
        ("fields", "status", "param", "words"),
        [
            (dict(), 400, "labels", "is required"),
            (dict(labels=["a"], hypothesis_template="x"), 400, "hypothesis_template", "must have {}"),
            (dict(labels=["a"] * 300), 413, "input", "makes more than 256 inputs"),
            (dict(labels=["a"], top_k=3), 400, "top_k", "no meaning with output 'zero_shot'"),
        ],
    )
    def test_refusals(self, client: Client, fields: dict[str, Any], status: int, param: str, words: str) -> None:
        reply = client.post(model="bert-nli", output="zero_shot", input="the cat", **fields)
        assert words in check_error(reply, status, param, reply.json()["error"]["code"])["message"]


@pytest.mark.parametrize(
    ("model", "output", "words"),
    [
        ("bert", "fill_mask", "has no masked-language-model head"),
        ("bert", "sparse", "has no masked-language-model head"),
        ("bert", "zero_shot", "has no classifier with a label of entailment"),
        ("bert-nli", "token_classification", "has no classifier of tokens"),
        ("bert-answers", "token_classification", "has no classifier of tokens"),
        ("bert-token", "question_answering", "has no head for answers"),
    ],
)
def test_a_model_that_lacks_something_says_what(client: Client, model: str, output: str, words: str) -> None:
    reply = client.post(model=model, output=output, input="the cat", **({"labels": ["a"]} if "zero" in output else {}))
    assert words in check_error(reply, 400, "output", "invalid_value")["message"]


def test_info_lists_the_outputs_of_each_model(client: Client) -> None:
    shown = {one["name"]: one["outputs"] for one in client.get("/info").json()["models"]}
    vectors: Sequence[str] = ("embedding", "tokens")
    assert shown["bert"] == [*vectors]
    assert shown["bert-masked"] == [*vectors, "sparse", "fill_mask"]
    assert shown["bert-entities"] == [*vectors, "logits", "token_classification"]
    assert shown["bert-answers"] == [*vectors, "logits", "question_answering"]
    assert shown["bart-nli"] == [*vectors, "logits", "zero_shot"]


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
            (dict(chunks=[[0, 3]], input=LONG), "input", "more than the 64"),
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
        reply = client.post(model="bert", input=[self.LONG] * 60, split="separate", stride=50)
        assert "makes" in check_error(reply, 413, "input", "too_many_inputs")["message"]


@pytest.mark.parametrize(
    "body",
    [
        dict(
            model="bart-nli", output="zero_shot", hypothesis_template="{}" * 500, labels=["a"] * 1000, input=["b"] * 40
        ),
        dict(model="bert", split="separate", stride=61, input="the cat " * 3000),
    ],
)
def test_inputs_that_are_too_many_are_not_made_first(client: Client, body: dict[str, Any]) -> None:
    tracemalloc.start()
    try:
        check_error(client.post(**body), 413, "input", "too_many_inputs")
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


def test_every_request_of_the_docs_is_answered(client: Client) -> None:
    """To models of random weights under the names that the page has."""
    names = {"embed": "bert", "masked": "bert-masked", "entities": "bert-entities", "answers": "bert-answers"}
    names |= {"nli": "bart-nli", "late": "late_unread"}
    page = (Path(__file__).parents[2] / "docs" / "encoders.md").read_text()
    lines = re.findall(r"curl -s http://127\.0\.0\.1:8000(/\S+) .*\n\s+-d '(.*)'", page)
    assert len(lines) == page.count("curl -s") > 9
    outputs = set()
    for path, text in lines:
        body = json.loads(text)
        normalized = {"normalize": True} if "embedding_type" in body else {}  # as the folder of `embed` says
        reply = client.post(path, **{**body, **normalized, "model": names[body["model"]]})
        assert reply.status_code == 200, (text, reply.text)
        outputs.add(body.get("output", "embedding"))
    assert outputs == set(OUTPUTS) - {"tokens", "logits"}
