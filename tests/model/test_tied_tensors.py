"""Tensors that share memory in `transformers` are read from any of their names that a folder has."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.matrix import rest_is_slow
from tests.model.checkpoints import copied, loaded, saved
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.errors import CheckpointError
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_model

TIED = (
    *("llama-tied", "gemma3", "gpt2", "mistral3", "gemma4", "cohere", "falcon", "bloom", "mpt", "opt", "opt-narrow"),
    *("marian", "marian-untied", "bart", "mbart", "m2m-100", "blenderbot", "blenderbot-small", "pegasus", "whisper"),
    *("t5gemma", "t5-relu", "t5-gated-untied", "mt5", "mt5-tied", "umt5", "umt5-tied", "t5-encoder", "bart-nli"),
    *("bert-masked", "roberta-masked", "xlm-roberta-masked", "distilbert-masked", "albert-masked", "electra-masked"),
    *("mpnet-masked", "modernbert-masked", "eurobert-masked-tied", "nomic-bert-masked", "gte-masked"),
    *(
        "jina-v3-masked",
        "deberta-v2-masked",
        "esm-masked",
        "ernie-masked",
        "megatron-bert-masked",
        "data2vec-text-masked",
    ),
)


def read_and_load(folder: Path) -> Transformer:
    return load_model(read_checkpoint(folder), SdpaBackend())


def shared_names(kind: str) -> list[list[str]]:
    """Return the names of each tensor that has several names in the reference."""
    names = defaultdict(list)
    for name, tensor in saved(kind).reference.state_dict().items():
        if tensor.numel():
            names[tensor.data_ptr(), tensor.shape].append(name)
    return [group for group in names.values() if len(group) > 1]


def holds_the_same(model: Transformer, expected: Mapping[str, Tensor]) -> bool:
    found = model.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


# These differ in which tensors they share: tables, heads, parts of a masked head, and whole layers.
FEW = (
    *("llama-tied", "gemma3", "gpt2", "gemma4", "bloom", "opt-narrow", "marian", "marian-untied", "bart", "m2m-100"),
    *("whisper", "t5gemma", "t5-relu", "t5-gated-untied", "mt5-tied", "umt5-tied", "bart-nli", "bert-masked"),
    *("albert-masked", "mpnet-masked", "modernbert-masked", "deberta-v2-masked", "esm-masked"),
)


@pytest.mark.parametrize("kind", rest_is_slow(TIED, lambda kind: kind in FEW))
def test_any_one_name_of_a_shared_tensor_is_enough(kind: str, tmp_path: Path) -> None:
    folder, expected = copied(kind, tmp_path), loaded(kind).state_dict()
    tensors, reference = load_file(folder / "model.safetensors"), saved(kind).reference.state_dict()
    groups = shared_names(kind)
    assert groups
    for group in groups:
        shared = reference[group[0]]
        rest = {name: tensor for name, tensor in tensors.items() if not torch.equal(tensor, shared)}
        for name in group:
            save_file({**rest, name: shared.clone()}, folder / "model.safetensors")
            assert holds_the_same(read_and_load(folder), expected), name


def edited(folder: Path, *without: str, **changes: Tensor) -> Path:
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in without}
    save_file({**kept, **changes}, folder / "model.safetensors")
    return folder


def test_an_output_of_its_own_is_no_token_table(tmp_path: Path) -> None:
    folder = edited(copied("llama", tmp_path), "model.embed_tokens.weight")
    with pytest.raises(CheckpointError, match=r"missing: embed_tokens\.weight"):
        read_and_load(folder)


@pytest.mark.parametrize(
    ("kind", "output", "bias"),
    [
        ("bert-masked", "cls.predictions.decoder", "cls.predictions.bias"),
        ("roberta-masked", "lm_head.decoder", "lm_head.bias"),
        ("albert-masked", "predictions.decoder", "predictions.bias"),
    ],
)
def test_an_output_that_differs_from_the_table_is_read_as_transformers_reads_it(
    kind: str, output: str, bias: str, tmp_path: Path
) -> None:
    """The reference then ties nothing, and the output uses the bias that is stored as its own."""
    head = loaded(kind).config.masked_head
    assert head is not None
    weight, other = torch.randn(97, head.size), torch.randn(97)
    folder = edited(copied(kind, tmp_path), **{f"{output}.weight": weight, f"{output}.bias": other, bias: other + 1})
    theirs = type(saved(kind).reference).from_pretrained(folder).state_dict()
    assert torch.equal(theirs[f"{output}.weight"], weight) and torch.equal(theirs[f"{output}.bias"], other)
    ours = read_and_load(folder).state_dict()
    assert torch.equal(ours["masked_head.out.weight"], weight) and torch.equal(ours["masked_head.out.bias"], other)


@pytest.mark.parametrize("left", ["cls.predictions.bias", "cls.predictions.transform.dense.weight"])
def test_a_part_of_a_head_for_masked_words_is_an_error(left: str, tmp_path: Path) -> None:
    folder = copied("bert-masked", tmp_path)
    names = load_file(folder / "model.safetensors")
    edited(folder, *(name for name in names if name.startswith("cls.") and name != left))
    with pytest.raises(CheckpointError, match=r"missing: cls\.predictions\."):
        read_and_load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    assert read_and_load(folder).masked_head is None  # the network alone has no use for the rest of the head
