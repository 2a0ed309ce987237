"""The memory plan, made from headers alone, equals the memory in use; a model that does not fit is refused at once.

tests/model/test_weights.py checks the planned weight bytes of every kind in every format.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.checkpoints import CPU, copied, prompt, saved
from tests.model.sparse import QWEN3_4B, QWEN3_8B, sparse_checkpoint
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import Checkpoint, read_checkpoint
from triptych.model.checkpoint.tensor_files import TensorReader
from triptych.model.config.cache import PoolSpec
from triptych.model.config.model import ModelConfig
from triptych.model.config.sharding import Shard
from triptych.model.engine import builder
from triptych.model.engine.builder import load
from triptych.model.engine.model_info import weight_bytes
from triptych.model.engine.planning.cache_budget import Context, KVLayout, fit_context, max_context
from triptych.model.engine.planning.memory_plan import (
    plan_memory,
    plan_weights,
)
from triptych.model.errors import CheckpointError, ConfigError
from triptych.model.linear.base import linears
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.native import NativeLinear
from triptych.model.llm import LLM
from triptych.model.native.library import Library
from triptych.model.network.native_stack import native_linears
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_model
from triptych.model.parallel.group import Group

GIB = 1 << 30
Large = dict[str, Checkpoint]
Format = Callable[[ModelConfig, Library | None], LinearFactory]


def torchs(dtype: torch.dtype) -> Format:
    return lambda config, library: LinearFactory(dtype)


def packed(dtype: torch.dtype, quantization: str = "none") -> Format:
    return lambda config, library: native_linears(config, dtype, library, quantization=quantization)


WIDE, PACKED_INT8 = packed(torch.float32), packed(torch.bfloat16, "int8")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Large:
    """Return checkpoints of 4 and 8 billion parameters in sparse files."""
    folder = tmp_path_factory.mktemp("large")
    shapes = {"4B": QWEN3_4B, "8B": QWEN3_8B}
    return {name: read_checkpoint(sparse_checkpoint(folder / name, raw)) for name, raw in shapes.items()}


def held(model: Transformer) -> int:
    """Return the bytes of all weights in memory."""
    projections = [linear for linear in linears(model) if isinstance(linear, NativeLinear)]
    arrays = [array for projection in projections for array in projection.arrays.values()]
    return sum(tensor.nbytes for tensor in [*model.parameters(), *arrays])


@pytest.mark.parametrize("kind", ["llama-gqa", "t5-gated-untied", "gpt2"])
def test_a_rank_takes_what_was_planned_for_it(kind: str) -> None:
    checkpoint, linear = read_checkpoint(saved(kind).path), LinearFactory(collective=Group(Shard(0, 2), CPU))
    model = load_model(checkpoint, SdpaBackend(), linear)
    assert plan_weights(checkpoint, linear).total == weight_bytes(model) == held(model)


def test_a_network_that_was_converted_takes_what_is_there() -> None:
    """Check a model whose projections were made in float32, as the bench converts its random models."""
    model = load_model(read_checkpoint(saved("llama").path), SdpaBackend()).bfloat16()
    assert weight_bytes(model) == held(model)


def test_missing_tensors_show_in_the_plan(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(CheckpointError, match=r"missing: .*layers\.2\."):
        plan_weights(read_checkpoint(folder), LinearFactory())


def layout(*, has_source: bool) -> KVLayout:
    """Return a layout whose blocks of 16 tokens take 16,000 bytes."""
    return KVLayout(16, (PoolSpec(None, (0,), 1000),), has_source, step_tokens=2048)


def test_fewer_sequences_than_were_asked_for_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Check a model with recurrent layers, which keep a state for each sequence whatever its length."""
    engine = EngineConfig(device="cpu", kv_cache_memory=1 << 16, max_model_len=64, max_num_seqs=8)
    loaded = load(ModelSpec("m", str(saved("qwen3-next").path), engine))
    assert loaded.generate is not None
    assert 1 <= loaded.info.max_num_seqs == loaded.generate.scheduler.max_num_seqs < 8
    assert caplog.text.count(f"m: max_num_seqs is {loaded.info.max_num_seqs}, not 8: the KV cache has no room") == 1
    assert loaded.info.state_slots == loaded.generate.block_manager.num_states == 4 * loaded.info.max_num_seqs
    blocks = loaded.info.num_blocks * loaded.info.block_size * loaded.info.kv_bytes_per_token
    assert 0 < loaded.info.state_slots * loaded.info.state_slot_bytes < (1 << 16) - blocks
    cache = loaded.generate.runner.cache  # type: ignore[attr-defined]
    assert 0 < cache.nbytes <= 1 << 16


def planned(checkpoint: Checkpoint, kept: Format, available: float, **settings: Any) -> int:
    engine = EngineConfig(device="cpu", **settings)
    return plan_memory("m", engine, checkpoint, kept(checkpoint.config, None), engine.limits(), int(available))


def test_a_pool_is_made_of_what_the_weights_will_leave(large: Large) -> None:
    weights = plan_weights(large["4B"], PACKED_INT8(large["4B"].config, None)).total
    assert 4.7e9 < weights < 4.9e9
    assert planned(large["4B"], PACKED_INT8, 24e9) == GIB
    assert planned(large["4B"], PACKED_INT8, weights + 2 * GIB) == GIB // 2
    assert planned(large["4B"], PACKED_INT8, weights + 2 * GIB, kv_cache_memory=GIB) == GIB


@pytest.mark.parametrize(
    ("name", "kept", "gigabytes", "settings", "message"),
    [
        ("8B", WIDE, 24, {}, r"m: its weights take 29\.\d+ GiB as dtype float32, of 22\.35 GiB that are available; "
         r"what would fit: dtype bfloat16 \(15\.\d+ GiB\), quantization int8 \(\d\.\d+ GiB\)"),
        ("8B", packed(torch.bfloat16), 12, {}, r"what would fit: quantization int8 \("),
        ("8B", torchs(torch.float32), 12, {}, r"no number format fits, dtype bfloat16 takes 15\."),
        ("8B", PACKED_INT8, 6, {}, r"as quantization int8, .* what would fit: quantization int4 \(5\.\d+ GiB\)"),
        ("8B", PACKED_INT8, 5, {}, r"as quantization int8, .* no number format fits, quantization int4 takes 5\.\d+"),
        ("4B", PACKED_INT8, 24, {"max_model_len": 40_960}, r"m: the KV pool has room for 455 blocks, but one request "
         r"of max_model_len 40960 needs 2560 \(5760 MiB\): raise kv_cache_memory or lower max_model_len, 7280 fits"),
        ("4B", PACKED_INT8, 6, {"kv_cache_memory": 2 * GIB}, r"m: a KV pool of 2\.00 GiB does not fit with weights "
         r"of 4\.48 GiB: 1\.\d+ GiB are left, for a context of \d{4} at most; lower kv_cache_memory"),
        ("4B", PACKED_INT8, 4.85, {}, r"one request of max_model_len 256 needs 16 .* lower max_model_len, 64 fits"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_what_would_is_named(
    name: str, kept: Format, gigabytes: float, settings: dict[str, Any], message: str, large: Large
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(large[name], kept, gigabytes * 1e9, **settings)


def test_int8_is_not_named_where_it_would_be_refused() -> None:
    xlnet = read_checkpoint(saved("xlnet").path)
    with pytest.raises(ConfigError, match=r"what would fit: dtype bfloat16 \([^,]*$"):
        planned(xlnet, WIDE, plan_weights(xlnet, WIDE(xlnet.config, None)).total)


def test_the_longest_context_that_fits_is_served_and_said() -> None:
    kv, auto = layout(has_source=False), EngineConfig()
    own = max_context(auto, read_checkpoint(saved("llama").path).config, auto.limits())
    assert own == Context(128, "all that the model takes")
    assert fit_context(auto, own, kv, 16 * 8000) == own
    fitted = fit_context(auto, Context(5000, "positions"), kv, 16 * 30_999)
    assert fitted == Context(480, "what the KV pool holds; the model takes 5000")
    with_source = layout(has_source=True)
    assert fit_context(auto, Context(5000, ""), with_source, 16 * 41_000).tokens == 320


@pytest.mark.parametrize(
    ("asked", "tokens", "memory", "message"),
    [
        (None, 5000, 15_000, r"has room for 15 blocks, .* max_model_len 256 needs 16 .* max_model_len, 240 fits"),
        (None, 128, 7_999, r"has room for 7 blocks, .* max_model_len 128 needs 8 .* max_model_len, 112 fits"),
        (300, 300, 18_999, r"has room for 18 blocks, .* max_model_len 300 needs 19 .* max_model_len, 288 fits"),
        (300, 300, 999, r"has room for 0 blocks, .* lower max_model_len$"),
    ],
)
def test_a_context_that_was_asked_for_is_never_cut_and_others_not_without_end(
    asked: int | None, tokens: int, memory: int, message: str
) -> None:
    kv = layout(has_source=False)
    with pytest.raises(ConfigError, match=message):
        fit_context(EngineConfig(max_model_len=asked), Context(tokens, ""), kv, 16 * memory)


def test_an_engine_serves_what_its_pool_holds(tmp_path: Path) -> None:
    """Check a request of exactly the served length, and that a longer one is refused."""
    folder = copied("llama", tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 128', '"max_position_embeddings": 4096'))
    one = 2 * 2 * 32 * 4 * 16  # bytes of a block: K and V, layers, width, float32, tokens
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 512}
    llm = LLM(folder, EngineConfig(kv_cache_memory=20 * one, **settings))
    assert (llm.info.max_model_len, llm.info.num_blocks) == (320, 20)
    assert llm.info.max_model_len_reason == "what the KV pool holds; the model takes 4096"
    assert len(list(llm.stream([prompt(300)], SamplingParams(max_tokens=100, ignore_eos=True)))) == 20
    with pytest.raises(ConfigError, match="takes 1 to 319 tokens"):
        list(llm.stream([prompt(320)], SamplingParams()))


def test_what_does_not_fit_is_said_within_a_second_and_nothing_is_read(
    large: Large, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorReader, "__enter__", lambda reader: pytest.fail("weights were read"))
    monkeypatch.setattr(builder, "available_memory", lambda **_: 12 * 10**9)
    engine = EngineConfig(device="cpu", dtype="float32")
    began = time.process_time()
    with pytest.raises(ConfigError, match="m: its weights take"):
        load(ModelSpec("m", str(large["8B"].path), engine))
    assert time.process_time() - began < 1.5  # CPU time excludes other processes
