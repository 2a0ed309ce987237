"""Folders of token vectors without a network give the vectors of torch's embedding bag."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize

from triptych.model.api.engine_config import EngineConfig
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.errors import ConfigError
from triptych.model.inspection.anatomy import describe_stack, dissect
from triptych.model.llm import LLM

TEXTS = ["hello world", "Hello, a world!", "b", "zz b \u4f60"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "a", "b", ",", "##b", "!"]
MODULES = "sentence_transformers.models."


def tokenizer() -> Tokenizer:
    """Return a tokenizer that puts special tokens around texts, which are not read."""
    made = Tokenizer(models.WordPiece({word: token for token, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return made


def table() -> Tensor:
    return torch.randn(len(WORDS), 12, generator=torch.Generator().manual_seed(1))


def expected(texts: list[str] = TEXTS) -> Tensor:
    """Return what sentence-transformers computes: `nn.EmbeddingBag` over ids without special tokens."""
    ids = [tokenizer().encode(text, add_special_tokens=False).ids for text in texts]
    starts = torch.tensor([0, *(len(one) for one in ids[:-1])]).cumsum(0)
    return embedding_bag(torch.tensor([token for one in ids for token in one]), table(), starts)


def write(folder: Path, name: str, weights: dict[str, Tensor], modules: list[tuple[str, str]], **config: Any) -> Path:
    """Write a model whose table is in the subfolder `name`."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / name / "model.safetensors")
    tokenizer().save(str(folder / name / "tokenizer.json"))
    if modules:
        listed = [{"idx": at, "path": path, "type": f"{MODULES}{kind}"} for at, (kind, path) in enumerate(modules)]
        (folder / "modules.json").write_text(json.dumps(listed))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


STATIC, UNIT = ("StaticEmbedding", "0_StaticEmbedding"), ("Normalize", "1_Normalize")
MODEL2VEC = dict(model_type="model2vec", architectures=["StaticModel"], hidden_dim=12, seq_length=1_000_000)
FOLDERS: dict[str, tuple[str, str, list[tuple[str, str]], dict[str, Any], bool]] = {
    "a module": ("0_StaticEmbedding", "embedding.weight", [STATIC], {}, False),
    "in the folder itself": ("", "embedding.weight", [("StaticEmbedding", "")], {}, False),
    "and a norm": ("0_StaticEmbedding", "embedding.weight", [STATIC, UNIT], {}, True),
    "model2vec": ("", "embeddings", [("StaticEmbedding", "."), UNIT], {**MODEL2VEC, "normalize": True}, True),
    "model2vec alone": ("", "embeddings", [], {**MODEL2VEC, "normalize": True}, True),
    "model2vec alone, of any length": ("", "embeddings", [], {**MODEL2VEC, "normalize": False}, False),
}


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_vectors_are_those_of_an_embedding_bag(kind: str, backend: str, tmp_path: Path) -> None:
    name, tensor, modules, config, unit = FOLDERS[kind]
    folder = write(tmp_path / "m", name, {tensor: table()}, modules, **config)
    with LLM(str(folder), EngineConfig(attention_backend=backend)) as llm:
        found = torch.tensor(llm.encode(TEXTS))
    wanted = normalize(expected(), dim=-1) if unit else expected()
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tables_of_other_floats_are_read_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "", {"embedding.weight": table().to(dtype)}, [("StaticEmbedding", "")])
    with LLM(str(folder), EngineConfig()) as llm:
        found = torch.tensor(llm.encode(["a"]))
    assert torch.equal(found[0], table()[WORDS.index("a")].to(dtype).float())


def test_what_a_tokenizer_cuts_off_is_the_length_of_a_text(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "", {"embeddings": table()}, [], **MODEL2VEC)
    assert read_checkpoint(folder).sentences.max_tokens is None
    cutting = tokenizer()
    cutting.enable_truncation(3)
    cutting.save(str(folder / "tokenizer.json"))
    assert read_checkpoint(folder).sentences.max_tokens == 3


def test_a_description_says_that_there_are_no_layers(tmp_path: Path) -> None:
    config = read_checkpoint(write(tmp_path / "m", "", {"embeddings": table()}, [], **MODEL2VEC)).config
    assert config.encoder is not None
    assert describe_stack(config.encoder) == {"layers": "none: vectors of tokens alone", "width": "12"}
    anatomy = dissect(config)
    assert (anatomy.total_parameters, anatomy.flops_per_token("encoder", 100)) == (len(WORDS) * 12, 0)


REFUSED: dict[str, tuple[dict[str, Tensor], str]] = {
    "no table": ({"vectors": table()}, "no tensor embedding.weight or embeddings, found vectors"),
    "integers": (
        {"embeddings": torch.ones(11, 12, dtype=torch.int8)},
        r"a table of F32, F16, BF16, found I8 \[11, 12\]",
    ),
    "one dimension": ({"embeddings": torch.ones(11)}, r"a table of F32, F16, BF16, found F32 \[11\]"),
    "shared rows": ({"embeddings": table(), "mapping": torch.arange(11)}, "mapping: tokens that share rows of a table"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_tensors_are_refused(case: str, tmp_path: Path) -> None:
    weights, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(write(tmp_path / "m", "", weights, [], **MODEL2VEC))


def test_other_folders_are_refused_by_what_differs(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "", {"embeddings": table()}, [("StaticEmbedding", ""), ("Pooling", "1_Pooling")])
    with pytest.raises(ConfigError, match="the order StaticEmbedding, Pooling; after StaticEmbedding are served Dense"):
        read_checkpoint(folder)
    shutil.rmtree(folder)
    (folder / "0_StaticEmbedding").mkdir(parents=True)
    (folder / "modules.json").write_text(json.dumps([{"path": STATIC[1], "type": f"{MODULES}{STATIC[0]}"}]))
    with pytest.raises(ConfigError, match="the folder is empty"):
        read_checkpoint(folder)
