"""Low-rank adapters: read from PEFT's folders, refused by name, computed as merged weights are, row by row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.checkpoints import CPU, by_layer, load_native, loaded, native_backends, prompt, saved
from tests.model.gguf_files import converted
from tests.model.lora import matrices, merged, root_scale, write_adapter
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.adapter_tensors import read_adapter
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.errors import ConfigError
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.inputs import packed_input
from triptych.model.network.lora import AdapterRuns, LoraAdapter
from triptych.model.network.lora_weights import load_adapter
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_model

needs_native = pytest.mark.skipif(not native_backends(), reason="there is no GCC here")
LAYERS = r"layers?\.\d+\.|\.h\.\d+\."  # projections of layers, not the output
PROMPTS = [prompt(7), prompt(1), prompt(12), prompt(5)]


@torch.inference_mode()
def logits(model: Transformer, adapters: list[LoraAdapter | None], prompts: list[tuple[int, ...]] = PROMPTS) -> Tensor:
    """Return the logits of prompts in one step, each with its adapter."""
    inputs = packed_input(prompts, CPU, causal=True)
    runs = AdapterRuns.of_segments(adapters, map(len, prompts))
    return model.logits(model.decode(replace(inputs, adapters=runs)))


@torch.inference_mode()
def expected(models: list[Any]) -> Tensor:
    """Return the logits of transformers for each prompt by its model."""
    return torch.cat([one(torch.tensor([ids])).logits[0] for one, ids in zip(models, PROMPTS, strict=True)])


def adapters_of(kind: str, tmp_path: Path, model: Transformer, targets: str = LAYERS) -> tuple[list[Any], list[Any]]:
    """Return two adapters of different ranks, loaded, and the merged models of transformers."""
    reference, found, references = saved(kind).reference, [], []
    for name, rank, std in (("sql", 4, 0.2), ("fr", 33, 0.1)):
        pairs = matrices(reference, targets, rank, seed=rank, std=std)
        folder = write_adapter(tmp_path / name, pairs)
        found.append(load_adapter(name, read_adapter(folder), model))
        references.append(merged(reference, pairs))
    return found, references


KINDS = ["llama", "gpt2", "gpt-neox", "gemma2", "phi", "opt", "falcon", "qwen3", "bloom", "cohere", "olmo2"]


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_native)], ids=["torch", "c"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_merged_weights(kind: str, native: bool, tmp_path: Path) -> None:
    model = loaded(kind, native_backends()[0] if native else None)
    (sql, fr), (merged_sql, merged_fr) = adapters_of(kind, tmp_path, model)
    theirs = expected([merged_sql, saved(kind).reference, merged_fr, merged_sql])
    ours = logits(model, [sql, None, fr, sql])
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
    without = logits(model, [None] * 4)
    assert (ours - without).abs().max() > 0.01 * theirs.abs().max(), "the adapters change nothing"


@pytest.mark.parametrize("kind", ["llama-gqa", "gpt2"])
def test_adapters_fit_a_base_in_gguf(kind: str, tmp_path: Path) -> None:
    """The file has other names and another order of rows (Llama's queries and keys)."""
    checkpoint = read_checkpoint(converted(kind, tmp_path))
    model = load_model(checkpoint, by_layer(SdpaBackend(), checkpoint.config, torch.float32), LinearFactory())
    (sql, fr), (merged_sql, merged_fr) = adapters_of(kind, tmp_path, model)
    theirs = expected([merged_sql, saved(kind).reference, merged_fr, merged_sql])
    assert (logits(model, [sql, None, fr, sql]) - theirs).abs().max() < 1e-4 * theirs.abs().max()


FORMATS = [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.float32, "int8"), (torch.bfloat16, "int4")]


@needs_native
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_a_rows_bits_are_its_own(kind: str, dtype: torch.dtype, quantization: str, tmp_path: Path) -> None:
    """Alone, with others of its adapter, of another, and of none, in any order: the same bits."""
    checkpoint, library = read_checkpoint(saved(kind).path), native_backends()[0].library
    model = load_native(checkpoint, library, dtype, quantization=quantization)
    (sql, fr), _ = adapters_of(kind, tmp_path, model)
    chosen = [sql, None, fr, sql]
    together = logits(model, chosen).split([len(ids) for ids in PROMPTS])
    for ids, adapter, found in zip(PROMPTS, chosen, together, strict=True):
        alone = logits(model, [adapter], [ids])
        assert torch.equal(alone, found)
    swapped = logits(model, chosen[::-1], PROMPTS[::-1]).split([len(ids) for ids in PROMPTS[::-1]])
    assert all(torch.equal(*pair) for pair in zip(together, swapped[::-1], strict=True))
    long = prompt(110)  # three have more rows than pass through an MLP at a time
    one, many = logits(model, [sql], [long]), logits(model, [None, fr, sql, fr], [PROMPTS[0], long, long, long])
    assert torch.equal(one, many[len(PROMPTS[0]) + len(long) :][: len(long)])


@needs_native
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS[1:])
def test_c_adds_what_the_modules_add(dtype: torch.dtype, quantization: str, tmp_path: Path) -> None:
    """Over the same packed matrices, with adapters about as well as without."""
    checkpoint, library = read_checkpoint(saved("llama").path), native_backends()[0].library
    model = load_native(checkpoint, library, dtype, quantization=quantization)
    (sql, fr), _ = adapters_of("llama", tmp_path, model)
    found = [logits(model, chosen) for chosen in ([sql, None, fr, sql], [None] * 4)]
    assert model.decoder is not None
    model.decoder.runner = None
    modules = [logits(model, chosen) for chosen in ([sql, None, fr, sql], [None] * 4)]
    apart = [float((one - other).norm() / other.norm()) for one, other in zip(found, modules, strict=True)]
    assert apart[0] < 2 * apart[1] + 0.05  # C reads the rows that a matrix of integers reads


def llama(tmp_path: Path, targets: str = LAYERS, **settings: Any) -> Path:
    pairs = matrices(saved("llama").reference, targets, settings.get("r", 4), seed=3)
    return write_adapter(tmp_path / "adapter", pairs, **settings)


SCALES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "rslora": ({"use_rslora": True}, {"": root_scale(8, 4)}),
    "alpha": ({"lora_alpha": 3}, {"": 0.75}),
    "alpha by name": ({"alpha_pattern": {"layers.0.self_attn.q_proj": 40}}, {"layers.0.self_attn.q_proj": 10.0}),
    "alpha by end": ({"alpha_pattern": {"down_proj": 40, "mlp.down_proj": 80}}, {"down_proj": 10.0}),
    "alpha by pattern": (
        {"alpha_pattern": {r"layers\.[01]\.mlp.(up|down)_proj": 1}},
        {"up_proj": 0.25, "down_proj": 0.25},
    ),
    "whole names alone": ({"alpha_pattern": {"oj": 40, "^layers.0.self_attn.q_proj": 40}}, {}),
    "from the beginning": (
        {"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 40}},
        {"layers.0.self_attn.q_proj": 10.0},
    ),
    "root and pattern": ({"use_rslora": True, "alpha_pattern": {"q_proj": 6}}, {"": root_scale(8, 4), "q_proj": 3.0}),
}


@pytest.mark.parametrize(("settings", "scales"), SCALES.values(), ids=SCALES)
def test_factors_are_those_of_peft(settings: dict[str, Any], scales: dict[str, float], tmp_path: Path) -> None:
    for name, module in read_adapter(llama(tmp_path, **settings)).modules.items():
        wanted = [factor for end, factor in scales.items() if name.endswith(end)]
        assert module.scale == pytest.approx(wanted[-1] if wanted else 2.0), name


def test_ranks_by_name_and_pickled_weights(tmp_path: Path) -> None:
    reference = saved("llama").reference
    pairs = matrices(reference, "q_proj", 4, seed=1) | matrices(reference, r"\.1\.mlp\.up_proj", 9, seed=2)
    folder = write_adapter(tmp_path / "a", pairs, pickled=True, rank_pattern={"up_proj": 9})
    model = loaded("llama")
    scale = {name: 8 / len(pair[0]) for name, pair in pairs.items()}
    theirs = expected([merged(reference, pairs, scale)] * 4)
    ours = logits(model, [load_adapter("a", read_adapter(folder), model)] * 4)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
    with pytest.raises(ConfigError, match="--no-pickle"):
        read_adapter(folder, pickle=False)


REFUSED: dict[str, dict[str, Any]] = {
    "peft_type is 'IA3'": {"peft_type": "IA3"},
    "use_dora=True": {"use_dora": True},
    "bias='all'": {"bias": "all"},
    "lora_bias=True": {"lora_bias": True},
    "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [3]},
    "target_parameters": {"target_parameters": ["mlp.experts.down_proj"]},
    "modules_to_save": {"modules_to_save": ["embed_tokens"]},
    "use_qalora": {"use_qalora": True},
    "arrow_config": {"arrow_config": {"top_k": 3}},
    "init_lora_weights is 'pissa_niter_4'": {"init_lora_weights": "pissa_niter_4"},
    "use_moonlight is not known": {"use_moonlight": True},
    "says rank 5": {"r": 5},
    "r is 'four'": {"r": "four"},
    "the rank of model.layers.0": {"r": 0},
    "does not name it in target_modules": {"target_modules": ["q_proj"]},
    "target_modules is 3": {"target_modules": 3},
    "alpha_pattern has the pattern": {"alpha_pattern": {"(a+)+b": 3}},
    "lora_alpha is ": {"lora_alpha": [1]},
    "lora_alpha is 1000": {"lora_alpha": 10**400},
}


@pytest.mark.parametrize(("message", "settings"), REFUSED.items(), ids=REFUSED)
def test_what_changes_results_is_refused_by_name(message: str, settings: dict[str, Any], tmp_path: Path) -> None:
    reference = saved("llama").reference
    folder = write_adapter(tmp_path / "adapter", matrices(reference, LAYERS, 4, seed=1), **settings)
    with pytest.raises(ConfigError) as refused:
        read_adapter(folder)
    assert message in str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("start", ["gaussian", "eva", "orthogonal", True, False])
def test_plain_beginnings_are_served(start: object, tmp_path: Path) -> None:
    folder = llama(tmp_path, init_lora_weights=start, target_modules=r".*(?:layers).*?(?:.*?_proj.*?)+")
    assert read_adapter(folder).ranks == (4,)


def _rename(stored: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): tensor for name, tensor in stored.items()}


Q = "base_model.model.model.layers.0.self_attn.q_proj"
CHANGED: dict[str, Any] = {
    "lora_A and lora_B is missing": lambda stored: {k: v for k, v in stored.items() if k != f"{Q}.lora_B.weight"},
    "it is a DoRA adapter": lambda stored: stored | {f"{Q}.lora_magnitude_vector": torch.ones(32)},
    "has no projection": lambda stored: _rename(stored, "q_proj", "query"),
    "adapters of the output": lambda stored: _rename(stored, "model.layers.0.self_attn.q_proj", "lm_head"),
    "base model's is [32, 32]": lambda stored: stored | {f"{Q}.lora_B.weight": torch.ones(48, 4)},
    "[rank, inputs] and [outputs, rank]": lambda stored: stored | {f"{Q}.lora_B.weight": torch.ones(32, 5)},
    "infinite or NaN": lambda stored: stored | {f"{Q}.lora_B.weight": torch.full((32, 4), torch.nan)},
    "expected floating-point numbers": lambda stored: stored | {f"{Q}.lora_B.weight": torch.ones(32, 4).int()},
    "if modules_to_save names them": lambda stored: stored | {"base_model.model.score.weight": torch.ones(2, 32)},
    "a table of embeddings": lambda stored: (
        stored | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)}
    ),
    "has no matrices": lambda stored: {},
}


@pytest.mark.parametrize(("message", "change"), CHANGED.items(), ids=CHANGED)
def test_matrices_that_do_not_fit_are_refused(message: str, change: Any, tmp_path: Path) -> None:
    folder = llama(tmp_path, target_modules="all-linear")
    file = folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(ConfigError) as refused:
        load_adapter("sql", read_adapter(folder), loaded("llama"))
    assert message in str(refused.value)


def test_a_base_of_another_shape_is_refused_by_headers(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    with pytest.raises(ConfigError, match="the base model's is"):
        load_adapter("sql", read_adapter(folder), loaded("llama-gqa"))
    with pytest.raises(ConfigError, match=r"no projection .* trained for org/base"):
        load_adapter("sql", read_adapter(folder), loaded("gpt2"))


def test_modules_without_kernels_are_refused(tmp_path: Path) -> None:
    experts = write_adapter(
        tmp_path / "moe", matrices(saved("qwen3-moe").reference, r"layers\.\d+\.self_attn", 4, seed=1)
    )
    model = loaded("qwen3-moe")
    assert load_adapter("sql", read_adapter(experts), model).nbytes
    recurrent = saved("qwen3-5").reference
    folder = write_adapter(tmp_path / "delta", matrices(recurrent, "in_proj_z", 4, seed=1))
    with pytest.raises(ConfigError, match="recurrent layers"):
        load_adapter("sql", read_adapter(folder), loaded("qwen3-5"))
    compared = write_adapter(tmp_path / "deberta", matrices(saved("deberta-v2").reference, "query_proj", 4, seed=1))
    with pytest.raises(ConfigError, match="relative positions are compared with"):
        load_adapter("sql", read_adapter(compared), loaded("deberta-v2"))


def test_a_folder_that_is_none_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found a model"):
        read_adapter(saved("llama").path)
    with pytest.raises(ConfigError, match="no such folder"):
        read_adapter(tmp_path / "nothing")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors is missing"):
        read_adapter(tmp_path)
