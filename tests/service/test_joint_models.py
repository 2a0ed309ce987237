"""CLIP and SigLIP over HTTP: vectors of texts and images together, and images labelled by texts, as `transformers`."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.engine.thread_transport import ThreadTransport
from tests.model.checkpoints import copied, saved
from tests.model.test_images import file, picture
from tests.service.encode_models import Client, client_of
from tests.service.test_bad_requests import check_error
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.app import create_app
from triptych.service.core.models import Models, ServedModel
from triptych.service.settings.service_settings import ServiceSettings

KINDS = ("clip", "siglip", "siglip2")
LENGTHS = {"siglip": 16, "siglip2": 40}  # of texts that are filled up
FILES = [file(picture(50, 40)), file(picture(34, 60), "JPEG"), file(picture(70, 70), "WEBP")]
TEXTS = ["w5", "w1 w2 w3", "w9 w8"]
LABELS = ["w1", "w2 w3", "w4"]


def _tokenizer(folder: Path, kind: str) -> None:
    """Write a tokenizer of words, with the ends of its kind."""
    from tokenizers import Tokenizer as Words
    from tokenizers import models, pre_tokenizers, processors

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 3, **{f"w{at}": at + 10 for at in range(60)}, "<unk>": 4}
    made = Words(models.WordLevel(vocabulary, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    begin = "<s> " if kind == "clip" else ""
    made.post_processor = processors.TemplateProcessing(
        single=f"{begin}$A </s>", special_tokens=[("<s>", 1), ("</s>", 3)]
    )
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "TokenizersBackend", "pad_token": "<pad>", "eos_token": "</s>"}
    if kind == "siglip2":  # whose class reads texts in its own way, whatever tokenizer.json says
        _letters(folder)
        return
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _letters(folder: Path) -> None:
    """Write a tokenizer of letters as SigLIP 2's folders have it."""
    from transformers import Siglip2Tokenizer

    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    made = Siglip2Tokenizer(
        vocab={name: at for at, name in enumerate(names)},
        merges=[],
        add_bos_token=False,
        add_eos_token=True,
        padding_side="right",
        model_input_names=["input_ids"],
    )
    made.save_pretrained(folder)


def _folder(kind: str, into: Path) -> Path:
    from transformers import CLIPImageProcessorPil, Siglip2ImageProcessorPil, SiglipImageProcessorPil

    folder = copied(kind, into)
    _tokenizer(folder, kind)
    side = {"height": 34, "width": 34}
    if kind == "clip":
        CLIPImageProcessorPil(size={"shortest_edge": 34}, crop_size=side).save_pretrained(folder)
    elif kind == "siglip2":
        Siglip2ImageProcessorPil(patch_size=8, max_num_patches=25).save_pretrained(folder)
    else:
        SiglipImageProcessorPil(size=side).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("joint")
    return {kind: _folder(kind, root) for kind in KINDS}


@pytest.fixture(scope="module")
def client(folders: dict[str, Path]) -> Iterator[Client]:
    config = EngineConfig(kv_cache_memory=4 << 20, device="cpu", dtype="float32")
    named = {**folders, "bert": saved("bert").path, "vit": saved("vit-image").path}
    tokenizers = {name: Tokenizer.from_folder(folder) for name, folder in named.items()}
    models = Models(
        ServedModel(name, read_checkpoint(folder), tokenizers[name], config) for name, folder in named.items()
    )
    specs = [ModelSpec(name, str(folder), config) for name, folder in named.items()]
    with client_of(create_app(AsyncEngine(specs, ThreadTransport, tokenizers), models, ServiceSettings())) as made:
        yield made


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@torch.inference_mode()
def theirs(folder: Path, kind: str, texts: list[str], files: list[bytes]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return vectors of texts and images, and logits per image."""
    from transformers import AutoImageProcessor, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    padding: dict[str, Any] = {"padding": True}
    if kind != "clip":
        padding = {"padding": "max_length", "max_length": LENGTHS[kind]}
    ids = tokenizer(texts, return_tensors="pt", **padding)["input_ids"]
    images = [Image.open(BytesIO(one)).convert("RGB") for one in files]
    pixels = AutoImageProcessor.from_pretrained(folder)(images, return_tensors="pt")
    model = saved(kind).reference
    of_texts, of_images = model.get_text_features(ids).pooler_output, model.get_image_features(**pixels).pooler_output
    return of_texts, of_images, model(input_ids=ids, **pixels).logits_per_image


def near(found: Any, expected: torch.Tensor) -> bool:
    return bool((torch.tensor(found) - expected).abs().max() < 1e-4 * expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_images_of_one_request(kind: str, client: Client, folders: dict[str, Path]) -> None:
    given = [TEXTS[0], {"image": coded(FILES[0])}, {"text": TEXTS[1]}, {"image": coded(FILES[1])}, TEXTS[2]]
    reply = client.encode(model=kind, input=given)
    vectors = [item["embedding"] for item in reply["data"]]
    of_texts, of_images, _ = theirs(folders[kind], kind, TEXTS, FILES[:2])
    assert near(vectors[::2], of_texts) and near(vectors[1::2], of_images)
    patches = 5 * 4 + 4 * 6 if kind == "siglip2" else 2 * (16 + (kind == "clip"))
    lengths = [3, 5, 4] if kind == "clip" else [LENGTHS[kind]] * 3
    assert reply["usage"]["prompt_tokens"] == patches + sum(lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_labelled_as_the_pipeline_does(kind: str, client: Client, folders: dict[str, Path]) -> None:
    given = [{"image": coded(one)} for one in FILES]
    reply = client.encode(model=kind, input=given, output="zero_shot", labels=LABELS, hypothesis_template="w7 {}")
    _, _, logits = theirs(folders[kind], kind, [f"w7 {label}" for label in LABELS], FILES)
    expected = logits.softmax(1) if kind == "clip" else logits.sigmoid()
    for item, row in zip(reply["data"], expected, strict=True):
        assert item["scores"] == sorted(item["scores"], reverse=True)
        found = dict(zip(item["labels"], item["scores"], strict=True))
        assert near([found[label] for label in LABELS], row)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_in_hugging_faces_form(kind: str, client: Client) -> None:
    body = {"model": kind, "inputs": coded(FILES[0]), "parameters": {"candidate_labels": LABELS}}
    found = client.post("/pipeline/zero-shot-image-classification", **body).json()
    [item] = client.encode(model=kind, input=[{"image": coded(FILES[0])}], output="zero_shot", labels=LABELS)["data"]
    pairs = zip(item["labels"], item["scores"], strict=True)
    assert found == [{"label": label, "score": score} for label, score in pairs]


def test_embeddings_in_the_forms_of_jina_and_infinity(client: Client) -> None:
    url = f"data:image/png;base64,{coded(FILES[0])}"
    expected = client.encode(model="clip", input=[{"image": url}, "w1 w2"])["data"]
    jina = client.post(
        "/v1/embeddings", **{"model": "clip", "input": [{"image": coded(FILES[0])}, {"text": "w1 w2"}]}
    ).json()["data"]
    assert [one["embedding"] for one in jina] == [one["embedding"] for one in expected]
    infinity = client.post("/v1/embeddings", **{"model": "clip", "input": url, "modality": "image"}).json()
    assert [one["embedding"] for one in infinity["data"]] == [expected[0]["embedding"]]
    texts = client.post("/v1/embeddings", **{"model": "clip", "input": ["w1 w2"], "modality": "text"}).json()
    assert texts["data"][0]["embedding"] == expected[1]["embedding"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": [{"image": "http://a.b/c.png"}]}, "input[0].image", "follows no addresses"),
        ({"input": ["w1", {"image": "aGVsbG8="}]}, "input[1].image", "not an image file"),
        ({"input": ["w1", {"image": 3}]}, "input[1].image", "string"),
        ({"input": ["w1", 3]}, "input[1]", "input should be"),
        ({"input": [{"text": "w1", "text_pair": "w2"}]}, "input[0].text_pair", "reads one text"),
        ({"input": "w1", "output": "zero_shot", "labels": ["w2"]}, "input", "must be an image"),
        ({"input": [{"image": coded(FILES[0])}], "output": "zero_shot"}, "labels", "labels is required"),
        ({"input": "w1", "split": "pooled"}, "split", "has no meaning with output 'embedding' of model clip"),
        ({"input": "w1", "chunks": [[0, 1]]}, "chunks", "has no meaning"),
        ({"input": "w1 " * 30}, "input", "20"),
        (
            {"input": [{"image": coded(FILES[0])}], "output": "zero_shot", "labels": ["w1", "w1 " * 30]},
            "labels[1]",
            "labels[1] has",
        ),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str, words: str, client: Client) -> None:
    assert words in check_error(client.post(model="clip", **fields), 400, param)["message"]


def test_a_model_of_texts_reads_no_images_among_texts(client: Client) -> None:
    error = check_error(client.post(model="bert", input=[{"image": coded(FILES[0])}, "w1"]), 400, "input[0]")
    assert "bert reads text, not images" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modality": "image", "input": [{"text": "w1"}]}, "input[0]"),
        ({"modality": "text", "input": ["w1", {"image": coded(FILES[0])}]}, "input[1]"),
        ({"modality": "image", "input": [coded(FILES[0])], "late_chunking": True}, "late_chunking"),
    ],
)
def test_inputs_of_another_modality_are_refused(fields: dict[str, Any], param: str, client: Client) -> None:
    check_error(client.post("/v1/embeddings", model="clip", **fields), 400, param)


def test_labels_are_read_once_for_all_images(client: Client) -> None:
    given = {"model": "clip", "input": [{"image": coded(one)} for one in FILES], "output": "zero_shot"}
    reply = client.encode(labels=LABELS, **given)
    alone = [client.encode(**(given | {"input": [one]}), labels=LABELS)["data"][0] for one in given["input"]]
    assert [one | {"index": 0} for one in reply["data"]] == alone
    sentences = client.encode(model="clip", input=[f"This is a photo of {label}." for label in LABELS])
    assert reply["usage"]["prompt_tokens"] == 3 * 17 + sentences["usage"]["prompt_tokens"]
    check_error(client.post(labels=LABELS * 682, **given), 413, "input")


def test_base64_may_have_line_breaks(client: Client) -> None:
    lines = base64.encodebytes(FILES[0]).decode()
    [broken, whole] = client.encode(model="clip", input=[{"image": lines}, {"image": coded(FILES[0])}])["data"]
    assert broken["embedding"] == whole["embedding"]


def test_images_of_all_requests_have_a_bound(client: Client) -> None:
    """A request alone is taken; its room is free again however it ends."""
    pool = client.images
    pool._most_bytes, most = 3 * 34 * 34, pool._most_bytes
    try:
        given = {"model": "clip", "input": [{"image": coded(one)} for one in FILES]}
        assert client.post(**given).status_code == 200
        check_error(client.post(**(given | {"input": [{"image": "AAAA"}]})), 400, "input[0].image")
        assert pool.held_bytes == 0
        with pool.request() as other:
            other.hold(1)
            reply = client.post(**given)
            assert reply.status_code == 429 and "decoded images" in reply.json()["error"]["message"]
        assert pool.held_bytes == 0 and client.post(**given).status_code == 200
    finally:
        pool._most_bytes = most


def test_no_more_files_are_decoded_once_the_client_has_gone(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"model": "clip", "input": [{"image": coded(FILES[0])}] * 50}).encode()
    messages = iter([{"type": "http.request", "body": body}])
    decoded, replies = 0, list[Any]()

    async def prepare(*_: object) -> tuple[bytes, int]:
        nonlocal decoded
        decoded += 1
        await asyncio.sleep(0.01)
        return bytes(3 * 34 * 34), 1

    async def receive() -> Any:
        if (message := next(messages, None)) is None:
            await asyncio.sleep(0.05)
        return message or {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        replies.append(message)

    monkeypatch.setattr(client.images, "prepare", prepare)
    scope = {"type": "http", "method": "POST", "path": "/encode", "query_string": b"", "http_version": "1.1"}
    client.call(scope | {"headers": [(b"content-type", b"application/json")]}, receive, send)
    assert 0 < decoded < 25 and client.images.held_bytes == 0
    assert replies[0]["status"] == 499


def test_too_long_a_text_is_truncated_if_asked(client: Client) -> None:
    """The end of a text is kept."""
    [cut, whole] = client.encode(model="clip", input=["w1 " * 30, "w1 " * 18], truncate="right")["data"]
    assert cut["truncated"] and cut["embedding"] == whole["embedding"]


def test_every_curl_of_the_page_is_answered(client: Client) -> None:
    page = (Path(__file__).parents[2] / "docs" / "images.md").read_text()
    lines = re.findall(r"curl -s http://127\.0\.0\.1:8000(/\S+) .*\n\s+-d '(.*)'", page)
    assert len(lines) == page.count("curl -s http") == 11
    for path, text in lines:
        if '"seeing"' in text:
            continue  # `test_pictures` sends it
        body = json.loads(text.replace("'$IMAGE'", coded(FILES[1])))
        reply = client.post(path, **body)
        assert reply.status_code == 200, (text, reply.text)
    [path] = re.findall(r"curl -s 'http://127\.0\.0\.1:8000(\S+)' .*--data-binary @cat.jpg", page)
    reply = client.send(path, FILES[1], "image/jpeg")
    assert reply.status_code == 200 and len(reply.json()) == 3


def test_capabilities_and_their_requests(client: Client) -> None:
    info = client.get("/info").json()
    models = {one["name"]: one for one in info["models"]}
    for kind in KINDS:
        names = [one["name"] for one in models[kind]["capabilities"]]
        assert names == ["label_image", "embed", "embed_image"]
        for one in models[kind]["capabilities"]:
            assert client.post(one["path"], **one["body"]).status_code == 200, one
