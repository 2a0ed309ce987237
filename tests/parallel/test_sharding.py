"""Shards of all ranks make up the whole, and a rank reads only its own."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.model.checkpoints import CPU, saved
from tests.model.published_decoders import PUBLISHED_DECODERS
from tests.model.published_experts import PUBLISHED_EXPERTS
from tests.model.published_gemmas import PUBLISHED_GEMMAS
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint import tensor_files
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.tensor_files import StoredTensor, TensorReader
from triptych.model.config.model import ModelConfig
from triptych.model.config.sharding import Shard, ShardSlice, cuts, local_shape
from triptych.model.engine.builder import load
from triptych.model.errors import ConfigError
from triptych.model.families import config_from_raw
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.build import build_model, shard_slices, tensor_shapes
from triptych.model.network.weights import load_model
from triptych.model.parallel.group import Group

KV_HEADS = {"llama-gqa": 2, "llama-mqa-head-dim": 1}  # of 4 heads
SPLIT_KINDS = (
    "llama-gqa",
    "llama-mqa-head-dim",
    "gpt2",
    "t5-gated-untied",
    "umt5",
    "bart",
    "xlnet",
    "deberta",
    "deberta-v2",
    "albert",
    "vit",
)

LARGE = {
    "Llama-3.1-8B": PUBLISHED_DECODERS["Llama-3.1-8B"],
    **{name: PUBLISHED_EXPERTS[name] for name in ("Qwen3-30B-A3B", "gpt-oss-20b", "Mixtral-8x7B-v0.1")},
    **{name: PUBLISHED_GEMMAS[name] for name in ("gemma-4-E2B", "gemma-4-26B-A4B")},
}


def config_of(kind: str) -> ModelConfig:
    return read_checkpoint(saved(kind).path).config


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", SPLIT_KINDS)
def test_pieces_of_all_ranks_cover_every_parameter_and_fit_their_networks(kind: str, size: int) -> None:
    config = config_of(kind)
    network = build_model(config, SdpaBackend())
    whole = tensor_shapes(network)
    seen = {name: [0] * shape[0] for name, shape in whole.items()}
    copies = max(1, size // KV_HEADS[kind]) if kind in KV_HEADS else 1
    for rank in range(size):
        shard = Shard(rank, size)
        pieces = shard_slices(network, shard)
        local = tensor_shapes(build_model(config, SdpaBackend(), LinearFactory(collective=Group(shard, CPU))))
        assert {name: local_shape(shape, pieces[name]) for name, shape in whole.items()} == local
        for name, shard_slice in pieces.items():
            if shard_slice is not None and shard_slice.dim == 0:
                for start, stop in shard_slice.ranges:
                    seen[name][start:stop] = [count + 1 for count in seen[name][start:stop]]
    for name, counts in seen.items():
        if pieces[name] is not None and set(counts) != {0}:
            assert set(counts) <= {1, copies}, name
            assert 0 not in counts, name


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("name", LARGE)
def test_each_rank_has_its_part_of_a_published_model(name: str, size: int) -> None:
    """Check token tables, heads and experts too: a rank with more than its part would waste the others' memory."""
    config = config_from_raw(json.loads(LARGE[name].config))
    network = build_model(replace(config, pictures=None), SdpaBackend())  # a split model reads no pictures
    shapes = tensor_shapes(network)
    whole = sum(map(math.prod, shapes.values()))
    for rank in (0, size - 1):
        pieces = shard_slices(network, Shard(rank, size))
        part = sum(math.prod(local_shape(shape, pieces[name])) for name, shape in shapes.items())
        assert part * size < 1.1 * whole  # several ranks have each head of keys, and norms


def test_fused_matrices_are_split_part_by_part() -> None:
    network = build_model(config_of("llama-gqa"), SdpaBackend())  # 4 heads and 2 of keys, of 8; 48 columns
    of_two, of_four = ([shard_slices(network, Shard(rank, size)) for rank in range(size)] for size in (2, 4))
    name = "decoder.layers.1"
    assert of_two[1][f"{name}.attn.qkv.weight"] == ShardSlice(0, ((16, 32), (40, 48), (56, 64)))
    assert of_two[1][f"{name}.mlp.up.weight"] == ShardSlice(0, ((24, 48), (72, 96)))
    assert of_two[1][f"{name}.attn.out.weight"] == ShardSlice(1, ((16, 32),))
    # 97 tokens do not split evenly
    assert of_two[0]["tokens.weight"] == of_two[0]["head.weight"] == ShardSlice(0, ((0, 48),))
    assert of_two[1]["tokens.weight"] == of_two[1]["head.weight"] == ShardSlice(0, ((48, 97),))
    # Two ranks have each head of keys, the one that their queries look at.
    assert of_four[1][f"{name}.attn.qkv.weight"] == ShardSlice(0, ((8, 16), (32, 40), (48, 56)))
    assert of_four[2][f"{name}.attn.qkv.weight"] == ShardSlice(0, ((16, 24), (40, 48), (56, 64)))


@pytest.mark.parametrize(
    "name", ["encoder.layers.0.attn_norms.post.weight", "encoder.layers.0.mlp.down.bias", "pooler.weight"]
)
def test_what_is_not_split_is_whole_on_every_rank(name: str) -> None:
    assert shard_slices(build_model(config_of("bert"), SdpaBackend()), Shard(1, 2))[name] is None


def test_one_rank_holds_all() -> None:
    config = config_of("bart")
    assert Shard().config(config) == config
    assert Shard().shard_slice(config, "tokens.weight") is None


def test_cuts_of_a_tensor_that_fills_a_part_of_a_parameter() -> None:
    parameter = torch.arange(24.0).view(8, 3)
    pieces = (ShardSlice(0, ((1, 3), (5, 8))), ShardSlice(1, ((1, 3),)))
    for shard_slice, expected in zip(pieces, (parameter[[1, 2, 5, 6, 7]], parameter[:, 1:]), strict=True):
        found = torch.zeros(local_shape((8, 3), shard_slice))
        for start, stop in ((0, 2), (2, 6), (6, 8)):  # three stored tensors make the parameter
            for source, into in cuts((8, 3), (start, stop), shard_slice):
                found[into] = parameter[start:stop][source]
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["llama-gqa", "gpt2", "gpt-neox", "bart"])
def test_a_rank_reads_only_its_part_of_the_files(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns too, where a line of them is worth a read of its own, which it is not in models as small as these."""
    monkeypatch.setattr(tensor_files, "_MIN_RUN", 1)
    read: Counter[str] = Counter()
    reading = TensorReader._read

    def counted(reader: TensorReader, stored: StoredTensor, begin: int, into: torch.Tensor) -> None:
        read[stored.name] += into.nbytes
        reading(reader, stored, begin, into)

    monkeypatch.setattr(TensorReader, "_read", counted)
    checkpoint, shard = read_checkpoint(saved(kind).path), Shard(1, 2)
    model = load_model(checkpoint, SdpaBackend(), LinearFactory(collective=Group(shard, CPU)))
    assert sum(read.values()) == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("llama-gqa", {"tensor_parallel_size": 3}, "tensor_parallel_size 3 must divide the 4 heads of the decoder"),
        ("t5-relu", {"tensor_parallel_size": 8}, "tensor_parallel_size 8 must divide the 4 heads of the encoder"),
        ("bert", {"attention_backend": "native"}, "attention_backend native cannot be had: .* run on one rank"),
        (
            "bert",
            {"quantization": "int8"},
            "quantization int8 needs the native backend, or a GPU and Triton: .* run on one rank",
        ),
        ("bert", {"batch_invariant": True}, "batch_invariant needs the native backend; .* run on one rank"),
    ],
)
def test_what_cannot_be_split_is_refused_before_a_weight_is_read(
    kind: str, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorReader, "__enter__", lambda reader: pytest.fail("weights were read"))
    engine = EngineConfig(**{"device": "cpu", "dtype": "float32", "tensor_parallel_size": 2, **settings})
    with pytest.raises(ConfigError, match=message):
        load(ModelSpec(kind, str(saved(kind).path), engine))


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for device in ("cuda", "cuda:2", "auto"):
        engine = EngineConfig(device=device, dtype="float32", tensor_parallel_size=2 if device == "cuda:2" else 4)
        with pytest.raises(ConfigError, match=r"tensor_parallel_size \d .* than the 3 visible GPUs"):
            load(ModelSpec("m", str(saved("llama").path), engine))


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_is_positive(size: int) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size must be positive"):
        EngineConfig(tensor_parallel_size=size)


def test_heads_of_keys_that_ranks_cannot_share_are_refused() -> None:
    config = config_of("llama")
    assert config.decoder is not None
    attention = replace(config.decoder.layers[0].attention, num_heads=12, num_kv_heads=4)
    config = replace(config, decoder=config.decoder.with_layers(lambda layer: replace(layer, mixer=attention)))
    with pytest.raises(ConfigError, match="must divide the 4 key and value heads of the decoder, or be a multiple"):
        Shard(0, 6).check(config)
    Shard(0, 12).check(config)
