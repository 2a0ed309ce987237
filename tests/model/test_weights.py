"""Weights packed while they are read: the same bits as packed afterwards, and no second copy in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.matrix import rest_is_slow
from tests.model.checkpoints import KINDS, contents, copied, copy_weights, load_native, native_backends, saved
from tests.model.parity import MECHANISMS, hidden_states
from tests.model.sparse import QWEN3_4B, QWEN3_8B, qwen3, sparse_checkpoint
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint import tensor_files
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.tensor_files import TensorReader, read_headers
from triptych.model.engine.model_info import weight_bytes
from triptych.model.engine.planning.memory_plan import plan_weights
from triptych.model.errors import CheckpointError
from triptych.model.linear.factory import LinearFactory
from triptych.model.native.library import Kind
from triptych.model.network.build import build_model
from triptych.model.network.embeddings import PackedTable, TokenTable
from triptych.model.network.native_stack import attach_native_stacks, native_linears
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_model
from triptych.model.system.host_memory import available_memory

needs_native = pytest.mark.skipif(not native_backends(), reason="there is no GCC here")


def takes_what_was_planned(model: Transformer, planned: int) -> None:
    """Assert that the model's bytes are exactly those of the plan."""
    assert planned == weight_bytes(model) == sum(tensor.nbytes for tensor in contents(model).values())


def stored_as(dtype: torch.dtype, kind: str, into: Path) -> Path:
    folder = copied(kind, into)
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    return folder


EXTREMES = ((torch.float32, None), (torch.bfloat16, Kind.INT8))
OTHERS = ((torch.bfloat16, None), (torch.float32, Kind.INT8))
# These kinds cover all code of reading, packing and planning. `test_parity.py` loads every kind.
LOADED = (
    *("llama-gqa", "llama-sharded", "phi3", "gpt2", "gpt-neox", "gemma4", "xglm", "nemotron", "falcon-slopes"),
    *("opt-narrow", "mixtral", "gpt-oss", "minimax-m2", "qwen3-vl-moe", "qwen3-next", "bart", "blenderbot", "t5-relu"),
    *("t5gemma", "umt5", "whisper", "bert-no-pooler", "modernbert", "gte", "xlnet-sequence", "deberta-v2-convolution"),
    *("deberta-v2-unshared", "deit-teacher", "vit-image"),
)
EACH = rest_is_slow(
    [(kind, *how) for kind in KINDS for how in (*EXTREMES, *(OTHERS if kind in MECHANISMS else ()))],
    lambda kind, *how: kind in LOADED and (how in EXTREMES or kind in ("llama-gqa", "gpt-oss", "t5-relu", "vit-image")),
)


@needs_native
@pytest.mark.parametrize(("kind", "dtype", "how"), EACH)
def test_packed_as_they_are_read_or_afterwards_weights_are_the_same_and_as_many_as_planned(
    kind: str, dtype: torch.dtype, how: Kind | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, library = read_checkpoint(saved(kind).path), native_backends()[0].library
    quantization = "int8" if how is Kind.INT8 else "none"
    linear = native_linears(checkpoint.config, dtype, library, quantization=quantization)
    afterwards = build_model(checkpoint.config, SdpaBackend(), linear)
    floats = load_model(checkpoint, SdpaBackend(), LinearFactory(dtype))
    takes_what_was_planned(floats, plan_weights(checkpoint, LinearFactory(dtype)).total)
    copy_weights(floats, afterwards)
    monkeypatch.setattr(tensor_files, "BUFFER_BYTES", 1000)  # a few rows at a time
    packed = load_model(checkpoint, SdpaBackend(), linear)
    without_library = native_linears(checkpoint.config, dtype, None, quantization=quantization)
    takes_what_was_planned(packed, plan_weights(checkpoint, without_library).total)
    expected, found = contents(afterwards), contents(packed)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype and torch.equal(found[name], tensor), name


@needs_native
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", [None, Kind.INT8])
@pytest.mark.parametrize("kind", ["llama-tied", "gemma", "bart", "bert"])
def test_a_token_table_stored_in_16_bits_stays_so_and_nothing_changes(
    kind: str, how: Kind | None, stored: torch.dtype, tmp_path: Path
) -> None:
    backend = native_backends()[0]
    checkpoint = read_checkpoint(stored_as(stored, kind, tmp_path))
    narrow = load_native(checkpoint, backend.library, quantization="int8" if how is Kind.INT8 else "none")
    wide = build_model(checkpoint.config, backend, narrow.linear)
    copy_weights(load_model(checkpoint, backend), wide)
    attach_native_stacks(wide)
    models = (narrow, wide)
    assert narrow.dtype is torch.float32
    if how is None and checkpoint.config.head is not None and checkpoint.config.head.tied:
        assert isinstance(narrow.tokens, PackedTable)  # the head's panels have every bit of it
    else:
        assert isinstance(narrow.tokens, TokenTable) and narrow.tokens.weight.dtype is stored
    ours, theirs = (torch.cat(hidden_states(model)[0]) for model in models)
    assert torch.equal(ours, theirs)
    if narrow.head is not None and narrow.encoder is None:
        assert torch.equal(narrow.logits(ours), wide.logits(theirs))


def test_a_file_that_becomes_shorter_while_it_is_read_is_named(tmp_path: Path) -> None:
    file = copied("llama", tmp_path) / "model.safetensors"
    stored = read_headers([file])
    last = max(stored.values(), key=lambda tensor: tensor.offset)
    with file.open("r+b") as opened:
        opened.truncate(last.offset + 1)
    with (
        TensorReader(stored) as reader,
        pytest.raises(CheckpointError, match=f"became shorter while {last.name} was read"),
    ):
        list(reader.rows(last.name, 1, 0, last.shape[0]))


_PEAK = """
import json, os, sys, torch
from triptych.model.api.engine_config import EngineConfig
from triptych.model.engine.builder import load
from triptych.model.api.messages import ModelSpec
from triptych.model.native.library import native

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def measure(settings):
    native()
    torch.set_num_threads(2)
    torch.zeros(1 << 20).bfloat16().float().sum()
    before = status("VmRSS")
    loaded = load(ModelSpec("m", sys.argv[1], EngineConfig(**settings)))
    print(json.dumps({"before": before, "peak": status("VmHWM"), "weights": loaded.info.weight_bytes}), flush=True)

for settings in json.loads(sys.argv[2]):
    if not os.fork():  # a process for each, with what is imported
        measure(settings)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def peaks_of(folder: Path, *settings: dict[str, object]) -> list[dict[str, int]]:
    """Return, for each of the settings, a process's resident bytes before it loads a model and at most, and the bytes
    of the loaded weights.
    """
    arguments = [sys.executable, "-c", _PEAK, str(folder), json.dumps(settings)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_native
def test_loading_takes_what_is_kept_and_one_buffer(tmp_path: Path) -> None:
    """A checkpoint of 150 MB; all of it as float32 would be 300, and its files count where they are mapped."""
    folder = sparse_checkpoint(tmp_path / "model", qwen3(768, 2048, 8, 8, vocab=10_000, tied=True))
    common = dict(device="cpu", kv_cache_memory=8 << 20, max_model_len=128)
    formats = (dict(dtype="float32", quantization="int8"), dict(dtype="bfloat16", quantization="none"))
    for found in peaks_of(folder, *({**common, **one} for one in formats)):
        assert found["peak"] - found["before"] < found["weights"] + (8 << 20) + tensor_files.BUFFER_BYTES + (12 << 20)


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize(("raw", "most"), [(QWEN3_4B, 6.5e9), (QWEN3_8B, 10.5e9)], ids=["4B", "8B"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_large_models_in_8_bits_on_a_small_machine(
    raw: dict[str, object], most: float, dtype: str, tmp_path: Path
) -> None:
    if available_memory() < 1.2 * most:
        pytest.skip(f"less than {1.2 * most / 1e9:.0f} GB are free")
    folder = sparse_checkpoint(tmp_path / "model", raw)
    [found] = peaks_of(folder, dict(dtype=dtype, quantization="int8", device="cpu", kv_cache_memory=1 << 30))
    assert found["peak"] <= most
