"""Classifiers and images through POST /encode, and a recurrent decoder, over real engines of tiny checkpoints."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest
import torch
from PIL import Image

from tests.engine.thread_transport import ThreadTransport
from tests.model.checkpoints import saved
from tests.model.test_images import file, picture, png_of
from tests.service.encode_models import Client, client_of
from tests.service.support import word_tokenizer
from tests.service.test_bad_requests import check_error
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.client.async_engine import AsyncEngine
from triptych.service.app import create_app
from triptych.service.core.models import Models, ServedModel
from triptych.service.settings.service_settings import ServiceSettings

MODELS = (
    *("bert", "bert-sequence", "bert-token", "distilbert-sequence", "deberta-v2-sequence", "deberta-sequence"),
    *("llama-sequence", "vit", "vit-image", "qwen3-5-moe"),
)
PAIR = {"text": "w1 w2 w3", "text_pair": "w4 w5"}
IDS, TYPES = [1, 4, 5, 6, 2, 7, 8, 2], [0, 0, 0, 0, 0, 1, 1, 1]  # of the pair


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    config = EngineConfig(kv_cache_memory=4 << 20, device="cpu", dtype="float32")
    specs = [ModelSpec(name, str(saved(name).path), config) for name in MODELS]
    tokenizers = {name: None if name.startswith("vit") else word_tokenizer() for name in MODELS}
    models = Models(ServedModel(name, read_checkpoint(saved(name).path), tokenizers[name], config) for name in MODELS)
    app = create_app(AsyncEngine(specs, ThreadTransport, tokenizers), models, ServiceSettings())
    with client_of(app) as made:
        yield made


def reference(model: str, **inputs: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = saved(model).reference(**{k: torch.tensor([v]) for k, v in inputs.items()}).logits[0]
    return found


def close(found: Any, expected: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(found), expected, atol=1e-4)


class TestClassifiers:
    def test_scores_of_pairs_and_texts(self, client: Client) -> None:
        """A cross-encoder re-ranks so: one list of scores for each pair."""
        reply = client.encode(model="bert-sequence", output="logits", input=[PAIR, {"text": "w1"}])
        assert reply["labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
        assert [item.keys() for item in reply["data"]] == [{"index", "scores"}] * 2
        assert close(reply["data"][0]["scores"], reference("bert-sequence", input_ids=IDS, token_type_ids=TYPES))
        assert close(reply["data"][1]["scores"], reference("bert-sequence", input_ids=[1, 4, 2]))

    def test_the_second_text_matters_as_such(self, client: Client) -> None:
        joined = {"text": "w1 w2 w3 [SEP] w4 w5"}
        scores = [
            item["scores"]
            for item in client.encode(model="bert-sequence", output="logits", input=[PAIR, joined])["data"]
        ]
        assert not close(scores[0], torch.tensor(scores[1]))

    @pytest.mark.parametrize("model", ["distilbert-sequence", "deberta-v2-sequence"])
    def test_a_pair_of_a_model_without_segments_is_one_text(self, client: Client, model: str) -> None:
        [item] = client.encode(model=model, output="logits", input=[PAIR])["data"]
        assert close(item["scores"], reference(model, input_ids=IDS))

    def test_segments_of_a_pair_count_where_the_model_has_them(self, client: Client) -> None:
        [item] = client.encode(model="deberta-sequence", output="logits", input=[PAIR])["data"]
        assert close(item["scores"], reference("deberta-sequence", input_ids=IDS, token_type_ids=TYPES))

    @pytest.mark.parametrize("ids", [[5, 6, 7], [5, 6, 0, 0], [5, 0, 7, 0], [0, 0]])
    def test_a_decoder_classifies_by_its_last_token_that_is_no_padding(self, client: Client, ids: list[int]) -> None:
        """Texts that end with the padding token themselves count as padded, as in `transformers`."""
        [item] = client.encode(model="llama-sequence", output="logits", input=ids)["data"]
        assert close(item["scores"], reference("llama-sequence", input_ids=ids))

    def test_a_token_classifier_scores_every_token(self, client: Client) -> None:
        reply = client.encode(model="bert-token", output="logits", input="w1 w2")
        [item] = reply["data"]
        assert (len(item["scores"]), len(reply["labels"])) == (4, 3)
        assert close(item["scores"], reference("bert-token", input_ids=[1, 4, 5, 2]))

    @pytest.mark.parametrize(("model", "shape"), [("bert-sequence", None), ("bert-token", [4, 3])])
    def test_base64_holds_the_same_numbers(self, client: Client, model: str, shape: list[int] | None) -> None:
        body = dict(model=model, output="logits", input="w1 w2")
        [plain], [coded] = (client.encode(**body, encoding_format=form)["data"] for form in ("float", "base64"))
        data = base64.b64decode(coded["scores"])
        numbers = struct.unpack(f"<{len(data) // 4}f", data)
        flat = plain["scores"] if shape is None else [value for row in plain["scores"] for value in row]
        assert (list(numbers), coded.get("shape")) == (flat, shape)

    def test_a_classifier_still_embeds(self, client: Client) -> None:
        reply = client.encode(model="bert-sequence", input="w1 w2")
        assert "labels" not in reply
        assert len(reply["data"][0]["embedding"]) == 32

    def test_a_model_without_one_says_so(self, client: Client) -> None:
        error = check_error(client.post(model="bert", output="logits", input="w1"), 400, "output", "invalid_value")
        assert "bert has no classifier" in error["message"]

    def test_a_model_that_does_not_generate(self, client: Client) -> None:
        reply = client.post("/generate", model="llama-sequence", prompt=[5])
        check_error(reply, 400, "model", "wrong_task")


class TestRecurrentLayers:
    """The layers are Gated DeltaNet, with experts."""

    def test_tokens_are_the_references_with_their_probabilities(self, client: Client) -> None:
        prompt, cached = list(range(5, 25)), []
        for _ in range(2):  # the second goes on from a snapshot of the first's states
            reply = client.post("/generate", model="qwen3-5-moe", prompt=prompt, max_tokens=6, logprobs=0)
            assert reply.status_code == 200, reply.text
            tokens = reply.json()["choices"][0]["logprobs"]
            ids = [token["id"] for token in tokens]
            expected = reference("qwen3-5-moe", input_ids=prompt + ids)[len(prompt) - 1 : -1]
            assert len(ids) == 6 and ids == expected.argmax(-1).tolist()
            assert close([token["logprob"] for token in tokens], expected.log_softmax(-1).amax(-1))
            cached.append(reply.json()["usage"]["cached_tokens"])
        assert cached == [0, 16]


def coded(data: bytes) -> dict[str, str]:
    return {"image": base64.b64encode(data).decode()}


def pixel_values(*files: bytes) -> torch.Tensor:
    from transformers import ViTImageProcessorPil

    made = ViTImageProcessorPil(size={"height": 32, "width": 32})
    return torch.from_numpy(made([Image.open(BytesIO(one)) for one in files], return_tensors="np")["pixel_values"])


FILES = file(picture(50, 70)), file(picture(64, 40), "JPEG", quality=90), file(picture(32, 32, "RGBA").convert("RGB"))


class TestImages:
    def test_classes(self, client: Client) -> None:
        reply = client.encode(model="vit-image", output="logits", input=[coded(one) for one in FILES])
        with torch.inference_mode():
            expected = saved("vit-image").reference(pixel_values=pixel_values(*FILES)).logits
        assert close([item["scores"] for item in reply["data"]], expected)
        assert reply["labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
        assert reply["usage"]["prompt_tokens"] == 3 * 17  # patches, and the classifier's token

    def test_vectors(self, client: Client) -> None:
        with torch.inference_mode():
            expected = saved("vit").reference(pixel_values=pixel_values(*FILES))
        images = [coded(one) for one in FILES]
        of_first = [item["embedding"] for item in client.encode(model="vit", input=images)["data"]]
        assert close(of_first, expected.last_hidden_state[:, 0])
        pooled = [item["embedding"] for item in client.encode(model="vit", input=images, pooling="pooler")["data"]]
        assert close(pooled, expected.pooler_output)
        each = [item["tokens"] for item in client.encode(model="vit", input=images, output="tokens")["data"]]
        assert close(each, expected.last_hidden_state)

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"hello", "not an image file of JPEG, PNG, WEBP or GIF"),
            (FILES[0][:2000], "the image file is broken"),
            (FILES[1][:700], "the image file is broken"),
            (png_of(100_000, 100_000), "pixels"),
            (file(picture(8, 8), "BMP"), "not an image file of JPEG, PNG, WEBP or GIF"),
        ],
        ids=["text", "half png", "half jpeg", "huge", "bmp"],
    )
    def test_files_that_are_not_taken(self, client: Client, data: bytes, words: str) -> None:
        reply = client.post(model="vit", input=[coded(FILES[0]), coded(data)])
        assert words in check_error(reply, 400, "input[1].image", "invalid_image")["message"]
        assert client.post(model="vit", input=[coded(FILES[0])]).status_code == 200

    def test_a_data_url_is_its_file(self, client: Client) -> None:
        given = [coded(FILES[0]), {"image": "data:image/png;base64," + coded(FILES[0])["image"]}]
        first, second = (item["embedding"] for item in client.encode(model="vit", input=given)["data"])
        assert first == second

    @pytest.mark.parametrize("url", ["http://127.0.0.1/a.png", "https://a.b/c", "file:///etc/passwd", "data:a/b,c"])
    def test_no_address_is_followed(self, client: Client, url: str) -> None:
        error = check_error(client.post(model="vit", input=[{"image": url}]), 400, "input[0].image", "invalid_image")
        assert "follows no addresses" in error["message"] or "a data URL must have" in error["message"]

    @pytest.mark.parametrize("text", ["not base64!", "aGk", "é"])
    def test_invalid_base64(self, client: Client, text: str) -> None:
        reply = client.post(model="vit", input=[{"image": text}])
        assert "is not base64" in check_error(reply, 400, "input[0].image", "invalid_image")["message"]

    @pytest.mark.parametrize(
        ("given", "param"),
        [("w1", "input"), (["w1"], "input[0]"), ([1, 2], "input"), ([[1, 2]], "input[0]"), ([PAIR], "input[0]")],
    )
    def test_a_model_of_images_reads_nothing_else(self, client: Client, given: Any, param: str) -> None:
        error = check_error(client.post(model="vit", input=given), 400, param, "invalid_value")
        assert "vit reads images" in error["message"]

    @pytest.mark.parametrize("model", ["bert", "bert-sequence", "llama-sequence"])
    def test_a_model_of_texts_reads_no_images(self, client: Client, model: str) -> None:
        error = check_error(client.post(model=model, input=[coded(FILES[0])]), 400, "input[0]", "invalid_value")
        assert f"{model} reads text, not images" in error["message"]

    def test_images_by_the_route_of_jina(self, client: Client) -> None:
        [item] = client.encode(model="vit", input=[coded(FILES[0])], normalize=True)["data"]
        found = client.post("/v1/embeddings", model="vit", input=[coded(FILES[0])], normalized=True).json()["data"]
        assert [one["embedding"] for one in found] == [item["embedding"]]

    def test_images_have_no_prompts(self, client: Client) -> None:
        """This holds whatever the folder has: its prompts would be those of a text model of the same pair."""
        reply = client.post(model="vit", input=[coded(FILES[0])], prompt_name="query")
        assert "vit reads images" in check_error(reply, 400, "prompt_name", "invalid_value")["message"]

    def test_too_many_images_in_all(self, client: Client) -> None:
        """Images are counted before any is decoded."""
        before = client.limits.max_detailed_tokens
        object.__setattr__(client.limits, "max_detailed_tokens", 50)
        try:
            check_error(client.post(model="vit", input=[coded(b"broken")] * 3), 413, "input", "too_many_tokens")
            assert client.post(model="vit", input=[coded(FILES[0])] * 2).status_code == 200
        finally:
            object.__setattr__(client.limits, "max_detailed_tokens", before)
