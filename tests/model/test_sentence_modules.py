"""Modules after the pooling in any order, truncated vectors, and folders whose network is in a subfolder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests import checkpoints
from tests.model.checkpoints import CPU, saved
from tests.model.test_sentence_transformers import MODES, PREFIX, SMALL, TEXTS, assert_close, encoded, hidden_states
from triptych.model.api.engine_config import EngineConfig
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.sentence_modules import ACTIVATIONS, KEYS, REFUSED, DenseConfig, Fate
from triptych.model.engine.output_heads import load_step
from triptych.model.errors import ConfigError
from triptych.model.llm import LLM
from triptych.service.core.models_folder import ModelsFolder
from triptych.service.planning.outputs.vectors import sparse_settings
from triptych.service.schemas.encode_bodies import EncodeBody

ROOT = Path(__file__).parents[2]
MEAN = MODES["mean"][0]
TANH = "torch.nn.modules.activation.Tanh"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.bert(tmp_path_factory.mktemp("modules") / "bert")


def folder_of(
    plain: Path, into: Path, *modules: tuple[str, dict[str, Any], dict[str, Tensor]], first: str = "", **files: Any
) -> Path:
    """Write the encoder and the modules after it, with their settings and tensors; `files` by name without .json."""
    (into / first).mkdir(parents=True)
    for file in plain.iterdir():
        (into / first / file.name).write_bytes(file.read_bytes())
    listed = [{"idx": 0, "name": "0", "path": first, "type": PREFIX + "Transformer"}]
    for at, (kind, settings, tensors) in enumerate(modules, 1):
        listed.append({"idx": at, "name": str(at), "path": f"{at}_{kind}", "type": PREFIX + kind})
        (into / f"{at}_{kind}").mkdir()
        (into / f"{at}_{kind}" / "config.json").write_text(json.dumps(settings))
        if tensors:
            save_file(tensors, into / f"{at}_{kind}" / "model.safetensors")
    for name, content in {"modules": listed, **files}.items():
        (into / f"{name}.json").write_text(json.dumps(content))
    return into


POOLING: tuple[str, dict[str, Any], dict[str, Tensor]] = ("Pooling", MEAN, {})


def dense(outputs: int, inputs: int = 32, **settings: Any) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    tensors = {"linear.weight": torch.randn(outputs, inputs), "linear.bias": torch.randn(outputs)}
    if settings.get("use_residual") and outputs != inputs:
        tensors["residual.weight"] = torch.randn(outputs, inputs)
    return "Dense", {"in_features": inputs, "out_features": outputs, "activation_function": TANH, **settings}, tensors


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_a_projection_has_the_function_of_torch(name: str, tmp_path: Path) -> None:
    weight, bias, vectors = torch.randn(5, 4), torch.randn(5), 3 * torch.randn(7, 4)
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "model.safetensors")
    step = load_step(DenseConfig(tmp_path / "model.safetensors", 4, 5, bias=True, activation=name), CPU)
    torch.testing.assert_close(step(vectors), getattr(nn, name)()(vectors @ weight.t() + bias))


def test_modules_follow_the_pooling_in_any_order(plain: Path, tmp_path: Path) -> None:
    norm = {"norm.weight": torch.randn(24), "norm.bias": torch.randn(24)}
    first, second = dense(24, use_residual=True), dense(16, 24, activation_function="torch.nn.modules.activation.Mish")
    modules = (
        ("WeightedLayerPooling", {"word_embedding_dimension": 32, "num_hidden_layers": 2}, {}),
        POOLING,
        ("Normalize", {}, {}),
        ("Dropout", {"dropout": 0.5}, {}),
        first,
        ("LayerNorm", {"dimension": 24}, norm),
        second,
        ("Normalize", {}, {}),
    )
    folder = folder_of(plain, tmp_path / "s", *modules)
    llm = LLM(folder, EngineConfig(**SMALL))
    assert llm.info.embedding_size == 16
    for text, found in zip(TEXTS, llm.encode(TEXTS), strict=True):
        vector = nn.functional.normalize(hidden_states(plain, text).mean(0), dim=0)
        weights = first[2]
        projected = torch.tanh(weights["linear.weight"] @ vector + weights["linear.bias"])
        projected = projected + weights["residual.weight"] @ vector
        vector = nn.functional.layer_norm(projected, (24,), norm["norm.weight"], norm["norm.bias"])
        vector = nn.functional.mish(second[2]["linear.weight"] @ vector + second[2]["linear.bias"])
        assert_close(found, nn.functional.normalize(vector, dim=0))


def test_a_mean_of_layers_is_refused_where_the_network_returns_them(plain: Path, tmp_path: Path) -> None:
    folder = folder_of(plain, tmp_path / "s", ("WeightedLayerPooling", {"embedding_dimension": 32}, {}), POOLING)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"output_hidden_states": True}))
    with pytest.raises(ConfigError, match=r"WeightedLayerPooling, a mean of the layers' outputs, which is not served"):
        read_checkpoint(folder)


def test_vectors_are_cut_after_they_are_normalised(plain: Path, tmp_path: Path) -> None:
    """As in sentence-transformers, a truncated vector is shorter than one."""
    settings = {"config_sentence_transformers": {"truncate_dim": 9}}
    for name, modules in {"plain": [POOLING], "unit": [POOLING, ("Normalize", {}, {})]}.items():
        folder = folder_of(plain, tmp_path / name, *modules, **settings)
        llm = LLM(folder, EngineConfig(**SMALL))
        assert llm.info.embedding_size == 9
        for text, found in zip(TEXTS, llm.encode(TEXTS), strict=True):
            vector = hidden_states(plain, text).mean(0)
            assert_close(found, (nn.functional.normalize(vector, dim=0) if name == "unit" else vector)[:9])


@pytest.mark.parametrize("key", ["truncate_dim", "max_active_dims"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "9", True])
def test_a_cut_of_no_size_is_refused(key: str, value: object, plain: Path, tmp_path: Path) -> None:
    folder = folder_of(plain, tmp_path / "s", POOLING, config_sentence_transformers={key: value})
    with pytest.raises(ConfigError, match=f"{key} must be a whole number from 1 on"):
        read_checkpoint(folder)


def test_sparse_vectors_keep_as_many_entries_as_the_folder_says(plain: Path, tmp_path: Path) -> None:
    folder = folder_of(plain, tmp_path / "s", POOLING, config_sentence_transformers={"max_active_dims": 7})
    served: Any = SimpleNamespace(checkpoint=read_checkpoint(folder), tokenizer=None)
    nothing: Any = None
    for asked, kept in {None: 7, 3: 3, 90: 90}.items():
        body = EncodeBody.model_validate({"input": "text", "output": "sparse", "top_k": asked})
        checked: Any = SimpleNamespace(body=body, served=served)
        assert sparse_settings(checked, nothing, nothing)["top_k"] == kept


def test_a_network_in_a_folder_of_its_own_is_read_with_its_tokenizer(plain: Path, tmp_path: Path) -> None:
    """sentence-transformers wrote such folders before its second version."""
    limits = {"sentence_bert_config": {"max_seq_length": 40}}
    old = folder_of(plain, tmp_path / "old", POOLING, first="0_Transformer")
    (old / "0_Transformer" / "sentence_bert_config.json").write_text(json.dumps(limits["sentence_bert_config"]))
    new = folder_of(plain, tmp_path / "new", POOLING, **limits)
    assert read_checkpoint(old).sentences.max_tokens == 40
    assert (encoded(old) == encoded(new)).all()
    found = ModelsFolder(str(tmp_path)).scan()
    assert found is not None and {name: model.reason for name, model in found.items()} == {"new": "", "old": ""}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_a_first_module_that_is_no_network_is_named(kind: str, tmp_path: Path) -> None:
    listed = [{"idx": 0, "name": "0", "path": f"0_{kind}", "type": f"sentence_transformers.models.{kind}"}]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(
        ConfigError, match=rf"modules\.json has {kind} \({REFUSED[kind]}\); served are Transformer"
    ) as error:
        read_checkpoint(tmp_path)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("told", [{}, {"model_type": "MultiVectorEncoder"}])
@pytest.mark.parametrize("mask", [True, False])
def test_a_multi_vector_encoder_is_refused_as_what_it_is(told: dict[str, str], mask: bool, tmp_path: Path) -> None:
    dense = ("Dense", {"in_features": 8, "out_features": 4, "module_input_name": "token_embeddings"}, {})
    modules = [dense, *([("MultiVectorMask", {"skiplist_words": []}, {})] if mask else []), ("Normalize", {}, {})]
    folder = folder_of(saved("bert").path, tmp_path / "s", *modules, config_sentence_transformers=told)
    expected = "a MultiVectorEncoder of sentence-transformers .* is not served; served for late interaction are"
    with pytest.raises(ConfigError, match=expected if told or mask else "token_embeddings, which is not served"):
        read_checkpoint(folder)


def test_without_pickles_no_projection_of_torch_save_is_read(tmp_path: Path) -> None:
    folder = folder_of(saved("bert").path, tmp_path / "s")
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        (folder / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    found = read_checkpoint(folder, pickle=False)
    assert found.sentences.late is None and found.sentences.token_weight is None
    assert any("sparse_linear.pt" in warning and "--no-pickle" in warning for warning in found.warnings)
    with pytest.raises(ConfigError, match="is not a state dict"):
        read_checkpoint(folder)


def test_a_key_that_is_not_applied_is_told(plain: Path, tmp_path: Path) -> None:
    network, model = {"max_seq_length": 20, "query_expansion": True}, {"shape": 9, "colour": "red"}
    pooling = ("Pooling", {**MEAN, "pooling_mode_median": 1}, {})
    folder = folder_of(
        plain,
        tmp_path / "s",
        pooling,
        sentence_bert_config=network,
        config_sentence_transformers={**model, "__version__": {}},
    )
    assert list(read_checkpoint(folder).warnings) == [
        "config_sentence_transformers.json: keys that are not applied: colour, shape",
        "sentence_bert_config.json: keys that are not applied: query_expansion",
        "1_Pooling/config.json: keys that are not applied: pooling_mode_median",
    ]


def test_the_documentation_shows_what_is_done_with_each_key() -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    for kind, fates in KEYS.items():
        name = kind if kind.endswith(".json") else f"{kind} (config.json)"
        [row] = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        cells = dict(zip(Fate, row.strip("| ").split(" | ")[1:], strict=True))
        for key, fate in fates.items():
            assert f"`{key}`" in cells[fate], key
