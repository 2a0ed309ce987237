"""Vectors of tokens through POST /encode: folders of pylate, of ColBERT itself and of BGE-M3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.model.checkpoints import copied
from tests.service.encode_models import (
    PROJECTION,
    TEXT,
    Client,
    client_of,
    encode_app,
    hf_tokenizer,
    hidden_states,
    late_folder,
    raw_tokenizer,
)
from tests.service.test_bad_requests import check_error


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    root = tmp_path_factory.mktemp("late")
    late = {f"late_{name}": late_folder(root / name, **settings) for name, settings in LATE.items()}
    late |= {f"late_{name}": colbert_folder(root / name, name) for name in COLBERT}
    with client_of(encode_app(**late, m3=m3_folder(root / "m3"))) as made:
        yield made


# Settings of pylate: mask tokens that others do not read, that they read, and none.
LATE: dict[str, dict[str, Any]] = {
    "unread": {},
    "read": {"attend_to_expansion_tokens": True},
    "plain": {"do_query_expansion": False, "skiplist_words": ["the", "on"], "query_prefix": ""},
}
# `artifact.metadata` as ColBERT itself writes it, in part; and none.
COLBERT: dict[str, dict[str, Any]] = {
    "colbert": {
        **dict(query_token_id="Ada", doc_token_id="Love", query_token="[Q]", doc_token="[D]", dim=7, nbits=1),
        **dict(query_maxlen=12, doc_maxlen=20, attend_to_mask_tokens=False, mask_punctuation=True, similarity="cosine"),
    },
    "colbert-v1": {},
}


def colbert_folder(folder: Path, name: str) -> Path:
    """Write a folder with the projection among the network's tensors, which have BERT's prefix."""
    copied("bert", folder.parent).rename(folder)
    state = {f"bert.{key}": tensor for key, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    torch.save(state | {"linear.weight": PROJECTION}, folder / "pytorch_model.bin")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (folder / "config.json").write_text(json.dumps(config))
    if COLBERT[name]:
        (folder / "artifact.metadata").write_text(json.dumps(COLBERT[name]))
    return folder


def m3_folder(folder: Path) -> Path:
    """Write a folder with BGE-M3's matrices in files of `torch.save`."""
    copied("bert", folder.parent).rename(folder)
    torch.save({"weight": PROJECTION, "bias": PROJECTION[:, 0].clone()}, folder / "colbert_linear.pt")
    torch.save({"weight": PROJECTION[:1].clone(), "bias": PROJECTION[0, :1].clone()}, folder / "sparse_linear.pt")
    return folder


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
            expected = torch.nn.functional.normalize(states @ PROJECTION.T, dim=-1)
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
            expected = torch.nn.functional.normalize(states @ PROJECTION.T, dim=-1)
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
            expected = torch.nn.functional.normalize(states @ PROJECTION.T, dim=-1)
            assert torch.allclose(torch.tensor(item["vectors"]), expected, atol=1e-4)

    def test_matrices_of_m3(self, client: Client) -> None:
        ids = hf_tokenizer("bert")(TEXT)["input_ids"]
        states = hidden_states(ids)
        [item] = client.encode(model="m3", output="multi_vector", input=TEXT)["data"]
        expected = torch.nn.functional.normalize(states[1:] @ PROJECTION.T + PROJECTION[:, 0], dim=-1)
        assert torch.allclose(torch.tensor(item["vectors"]), expected, atol=1e-4)
        weights: dict[int, float] = {}
        for token, weight in zip(ids, torch.relu(states @ PROJECTION[0] + PROJECTION[0, 0]).tolist(), strict=True):
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
        assert "maximum context length is 11 tokens" in error["message"]
        [item] = client.encode(**body, truncate="right")["data"]
        assert (len(item["vectors"]), item["truncated"]) == (12, True)
