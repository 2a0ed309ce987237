"""Checkpoints with projections in 8 bits (compressed-tensors W8A8): read exactly; other formats refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.checkpoints import copied, edit_tensors, load_native, native_backends, saved
from tests.model.packers import describe
from tests.model.parity import decoder_logits, decoder_prompts, hidden_states
from tests.parallel.ranks import on_ranks
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.stored_formats import fp8_storage, quantization_of
from triptych.model.config.formats import INT8_ROWS
from triptych.model.engine.builder import load
from triptych.model.engine.model_info import weight_bytes
from triptych.model.engine.planning.memory_plan import plan_weights
from triptych.model.errors import CheckpointError, ConfigError
from triptych.model.linear.base import LinearSpec, Part, linears
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.native import Int8RowsLinear, NativeLinear
from triptych.model.linear.scales import StoredScales
from triptych.model.native.library import Kind
from triptych.model.network.native_stack import native_linears
from triptych.model.network.weights import load_model

needs_native = pytest.mark.skipif(not native_backends(), reason="there is no GCC here")
NUMBERS = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "observer": "minmax"}
QUANTIZATION: dict[str, Any] = {  # llm-compressor writes this for W8A8
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": 1.2,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**NUMBERS, "strategy": "channel", "dynamic": False},
            "input_activations": {**NUMBERS, "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "query", "key", "value", "dense")


def quantised(kind: str, into: Path, scale_dtype: torch.dtype = torch.float32) -> Path:
    """Write the kind's folder with 8-bit projections, rounded like ours: the largest number becomes 127."""
    folder = copied(kind, into)
    file = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        stem = name.removesuffix(".weight")
        if not (name.endswith(".weight") and stem.rpartition(".")[2] in LAYERS and "layer" in stem):
            tensors[name] = tensor
            continue
        scale = (tensor.abs().amax(1, keepdim=True) / 127.0).to(scale_dtype)
        tensors[name] = (tensor / scale.float()).round().clamp(-128, 127).to(torch.int8)
        tensors[f"{stem}.weight_scale"] = scale
    save_file(tensors, file)
    describe(folder, QUANTIZATION)
    return folder


FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "observer": None}


def float_quantised(strategy: str, activations: dict[str, Any] | None, **weights: Any) -> dict[str, Any]:
    """Return the settings of llm-compressor for FP8, FP8_DYNAMIC and FP8_BLOCK."""
    group = {
        "targets": ["Linear"],
        "weights": {**FLOATS, "strategy": strategy, "dynamic": False, **weights},
        "input_activations": activations and {**FLOATS, **activations},
        "output_activations": None,
    }
    return {**QUANTIZATION, "format": "float-quantized", "config_groups": {"group_0": group}}


STATIC, DYNAMIC = {"strategy": "tensor", "dynamic": False}, {"strategy": "token", "dynamic": True}
BLOCK = [16, 8]  # published ones are 128 x 128; with these, fused parts and MLPs have uneven numbers of blocks
FP8: dict[str, tuple[dict[str, Any], str, tuple[int, int]]] = {  # settings; name of the scales; shape of a scale's part
    "by tensor, static": (float_quantised("tensor", STATIC), "weight_scale", (0, 0)),
    "by row": (float_quantised("channel", DYNAMIC), "weight_scale", (1, 0)),
    "weights alone": (float_quantised("channel", None), "weight_scale", (1, 0)),
    "by block": (
        float_quantised("block", {"strategy": "group", "group_size": 8, "dynamic": True}, block_structure=BLOCK),
        "weight_scale",
        (16, 8),
    ),
    "deepseek": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": BLOCK},
        "weight_scale_inv",
        (16, 8),
    ),
    "autofp8": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "weight_scale",
        (0, 0),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        "weight_scale",
        (1, 0),
    ),
}


def in_fp8(
    quantization: dict[str, Any], scale_name: str, block: tuple[int, int], into: Path, kind: str = "llama-gqa"
) -> tuple[Path, Path]:
    """Write the kind's folder with fp8 projections, and one with the floats that they stand for."""
    stored, plain = copied(kind, into / "fp8"), copied(kind, into / "floats")
    numbers, floats = {}, {}
    for name, tensor in load_file(stored / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        numbers[name] = floats[name] = tensor
        if not (name.endswith(".weight") and stem.rpartition(".")[2] in LAYERS and "layer" in stem):
            continue
        (n, k), high, wide = tensor.shape, block[0] or len(tensor), block[1] or tensor.shape[1]
        scales = torch.tensor(
            [
                [tensor[i : i + high, j : j + wide].abs().max().item() / 448 for j in range(0, k, wide)]
                for i in range(0, n, high)
            ]
        )
        spread = scales.repeat_interleave(high, 0)[:n].repeat_interleave(wide, 1)[:, :k]
        numbers[name] = (tensor / spread).to(torch.float8_e4m3fn)
        floats[name] = numbers[name].float() * spread
        numbers[f"{stem}.{scale_name}"] = scales if block[0] else scales[0, 0].clone()
        numbers[f"{stem}.input_scale"] = torch.tensor(0.5)  # of static activations; ignored
    save_file(numbers, stored / "model.safetensors")
    save_file(floats, plain / "model.safetensors")
    describe(stored, quantization)
    return stored, plain


@needs_native
@pytest.mark.parametrize("kind", ["llama-gqa", "bert"])
def test_stored_integers_are_packed_as_quantised_ones(kind: str, tmp_path: Path) -> None:
    """Rounding before or during loading gives the same bytes."""
    library = native_backends()[0].library
    stored = load_native(read_checkpoint(quantised(kind, tmp_path)), library)
    ours = load_native(read_checkpoint(saved(kind).path), library, quantization="int8")
    expected = {linear.spec.name: linear for linear in linears(ours)}
    layers = [linear for linear in linears(stored) if ".layers." in linear.spec.name]
    assert layers and all(isinstance(linear, Int8RowsLinear) for linear in layers)
    for linear in layers:
        other = expected[linear.spec.name]
        assert isinstance(linear, NativeLinear) and isinstance(other, NativeLinear)
        assert linear.arrays.keys() == other.arrays.keys()
        for name, array in linear.arrays.items():
            assert torch.equal(array, other.arrays[name]), f"{linear.spec.name} {name}"


@needs_native
def test_a_product_of_stored_integers_is_exact_up_to_its_activations() -> None:
    """This includes -128, which our own quantisation never makes."""
    torch.manual_seed(0)
    n, k = 37, 130
    integers, scales = torch.randint(-128, 128, (n, k), dtype=torch.int8), torch.rand(n, 1)
    integers[3] = -128
    linear = Int8RowsLinear(LinearSpec("m", k, (Part(n),)), Kind.INT8, torch.float32, native_backends()[0].library)
    linear.fill("m.weight_scale", (slice(0, n),), scales)
    for first, last in ((20, 37), (0, 5), (5, 20)):
        linear.fill("m.weight", (slice(first, last),), integers[first:last])
    linear.fill("m.bias", (slice(0, n),), torch.zeros(n))
    rows = torch.randint(-127, 128, (40, k)).float()
    rows[:, 0] = 127.0  # each row's scale is 1, so its integers equal its numbers
    exact = (rows.double() @ integers.double().T) * scales.T
    torch.testing.assert_close(linear(rows).double(), exact, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_computes_with_the_numbers_that_the_integers_stand_for(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = quantised("llama-gqa", tmp_path, torch.bfloat16)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.down_proj"
    expected = tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"].float()
    model = load_model(read_checkpoint(folder), SdpaBackend(), LinearFactory(dtype))
    assert torch.equal(model.get_parameter("decoder.layers.1.mlp.down.weight"), expected.to(dtype))


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_becomes_the_floats_that_it_stands_for(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Torch and C agree, where fused parts have scales of their own and blocks end within them."""
    stored, plain = map(read_checkpoint, in_fp8(*FP8[name], tmp_path))
    assert len(stored.config.stored_as) == 8 and "head" not in stored.config.stored_as
    ours, theirs = (load_model(one, SdpaBackend(), LinearFactory(dtype)) for one in (stored, plain))
    expected = dict(theirs.named_parameters())
    assert ours.state_dict().keys() == expected.keys()
    for parameter, value in ours.named_parameters():
        assert value.dtype is dtype and torch.equal(value, expected[parameter]), parameter
    if native_backends():
        for quantization in ("none", "int8", "int4"):
            packed = [
                load_model(
                    one,
                    native_backends()[0],
                    native_linears(one.config, dtype, native_backends()[0].library, quantization=quantization),
                )
                for one in (stored, plain)
            ]
            for ours, theirs in zip(*map(linears, packed), strict=True):
                assert isinstance(ours, NativeLinear) and isinstance(theirs, NativeLinear)
                assert all(torch.equal(array, theirs.arrays[at]) for at, array in ours.arrays.items()), ours.spec.name


def test_blocks_become_the_floats_that_transformers_makes_of_them(tmp_path: Path) -> None:
    """Scales called inverse are factors."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # takes 2 s, in each worker that collects this

    stored, _ = in_fp8(*FP8["deepseek"], tmp_path)
    tensors = load_file(stored / "model.safetensors")
    model = load_model(read_checkpoint(stored), SdpaBackend())
    for ours, theirs in (("attn.out", "self_attn.o_proj"), ("mlp.down", "mlp.down_proj")):
        name = f"model.layers.1.{theirs}.weight"
        expected = Fp8Dequantize(None)._dequantize_one(tensors[name], tensors[f"{name}_scale_inv"], torch.float32)
        assert torch.equal(model.get_parameter(f"decoder.layers.1.{ours}.weight"), expected)


def test_blocks_are_read_by_ranks_that_do_not_cut_them(tmp_path: Path) -> None:
    stored, plain = map(read_checkpoint, in_fp8(*FP8["deepseek"], tmp_path))

    @torch.inference_mode()
    def logits(checkpoint: Any, group: Any) -> Tensor:
        return decoder_logits(load_model(checkpoint, SdpaBackend(), LinearFactory(collective=group)), decoder_prompts())

    expected = on_ranks(2, lambda group: logits(plain, group))
    for ours, theirs in zip(on_ranks(2, lambda group: logits(stored, group)), expected, strict=True):
        assert torch.equal(ours, theirs)
    settings, scale, _ = FP8["deepseek"]
    wide, _ = in_fp8({**settings, "weight_block_size": [16, 32]}, scale, (16, 32), tmp_path / "wide")
    with pytest.raises(ConfigError, match=r"attn\.out: 2 ranks cannot divide 32 inputs, 32 to a scale"):
        on_ranks(2, lambda group: logits(read_checkpoint(wide), group))


def test_a_cpu_tells_what_becomes_of_fp8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored, _ = in_fp8(*FP8["deepseek"], tmp_path)
    loaded = load(ModelSpec("m", str(stored), EngineConfig(device="cpu", dtype="bfloat16", kv_cache_memory=1 << 20)))
    assert loaded.info.dtype == "bfloat16" and loaded.info.dtype_reason.endswith("; stored as fp8 by blocks of 16 x 8")
    assert (
        "m: 8 projections are stored as fp8 by blocks of 16 x 8 and served in bfloat16, "
        "each rounded by at most 1/512 of itself"
    ) in caplog.text


def test_projections_that_are_left_out_are_floats_and_others_have_scales(tmp_path: Path) -> None:
    """Their tensors decide which projections are left out; numbers without scales are refused."""
    name = "model.layers.0.mlp.down_proj"
    stored, plain = in_fp8(*FP8["by row"], tmp_path)
    floats, numbers = (load_file(folder / "model.safetensors")[f"{name}.weight"] for folder in (plain, stored))

    def left_out(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}.weight"] = floats
        del tensors[f"{name}.weight_scale"], tensors[f"{name}.input_scale"]

    edit_tensors(stored, left_out)
    assert "decoder.layers.0.mlp.down" not in read_checkpoint(stored).config.stored_as
    model = load_model(read_checkpoint(stored), SdpaBackend())
    assert torch.equal(model.get_parameter("decoder.layers.0.mlp.down.weight"), floats)
    edit_tensors(stored, lambda tensors: tensors.update({f"{name}.weight": numbers}))
    with pytest.raises(CheckpointError, match=f"numbers of 8 bits have no scales: {name}.weight"):
        load_model(read_checkpoint(stored), SdpaBackend())
    describe(plain, FP8["by row"][0])
    with pytest.raises(ConfigError, match="quantization_config says fp8 by row, but no projection has a weight_scale"):
        read_checkpoint(plain)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**FP8["deepseek"][0], "fmt": "e5m2"}, r"fmt: 'e5m2' is not served, only 'e4m3' or 'float8_e4m3fn'"),
        ({**FP8["deepseek"][0], "weight_block_size": [128]}, r"weight_block_size must be two numbers from 1 to 1024"),
        ({**FP8["deepseek"][0], "weight_block_size": [10**9, 128]}, r"weight_block_size must be two numbers"),
        (float_quantised("block", DYNAMIC, block_structure=[128, 10**9]), r"block_structure must be two numbers"),
        ({**FP8["fbgemm"][0], "mystery": 1}, r"quantization_config has unknown settings: mystery"),
        (float_quantised("group", DYNAMIC), r"weights\.strategy: 'group' is not served, only 'tensor' or"),
        (float_quantised("channel", {**DYNAMIC, "num_bits": 4}), r"input_activations\.num_bits: 4 is not served"),
        (["fp8"], r"quantization_config must be an object, found \['fp8'\]"),
    ],
)
def test_other_fp8_is_refused_by_the_setting_that_differs(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quantization_of(settings)


def test_settings_of_the_language_model_alone_are_read(tmp_path: Path) -> None:
    """Of a model that reads images too: transformers looks there where the whole says nothing."""
    stored, plain = in_fp8(*FP8["by row"], tmp_path, "smolvlm")
    config = json.loads((stored / "config.json").read_text())
    whole = read_checkpoint(stored).config.stored_as
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (stored / "config.json").write_text(json.dumps(config))
    assert whole and read_checkpoint(stored).config.stored_as == whole
    ours, expected = (load_model(read_checkpoint(one), SdpaBackend()).state_dict() for one in (stored, plain))
    assert all(torch.equal(ours[name], expected[name]) for name in expected if name.startswith("decoder."))


def test_settings_that_todays_classes_write_are_read() -> None:
    from transformers.utils import quantization_config as classes  # whose package takes 2 s

    written = (
        classes.FineGrainedFP8Config(modules_to_not_convert=["lm_head"]),
        classes.FineGrainedFP8Config(weight_block_size=None, scale_fmt="ue8m0"),
        classes.FbgemmFp8Config(),
        classes.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        classes.BitsAndBytesConfig(load_in_8bit=True),
        classes.GPTQConfig(bits=4, desc_act=True),
        classes.AwqConfig(),
        classes.Mxfp4Config(),
    )
    for one in written:
        quantization_of(json.loads(json.dumps(one.to_dict())))
    with pytest.raises(ConfigError, match=r"expert_dtype: 'fp4' is not served, only 'fp8'"):
        quantization_of(json.loads(json.dumps(classes.FineGrainedFP8Config(expert_dtype="fp4").to_dict())))


def test_scales_are_dropped_behind_the_last_row() -> None:
    scales = StoredScales(LinearSpec("p", 8, (Part(2), Part(1))), fp8_storage((2, 4)), torch.device("cpu"))
    scales.fill("p.weight_scale", (slice(0, 3),), torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]]))
    assert scales.multiplied((slice(2, 3),), torch.ones(1, 8)).tolist() == [[3.0] * 4 + [4.0] * 4]
    assert scales.values is not None
    assert scales.multiplied((slice(0, 2),), torch.ones(2, 8)).tolist() == [[1.0] * 4 + [2.0] * 4] * 2
    assert scales.values is None


@torch.inference_mode()
def test_two_ranks_read_their_part_of_integers_and_scales(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(quantised("llama-gqa", tmp_path))

    @torch.inference_mode()
    def work(group: Any) -> Tensor:
        model = load_model(checkpoint, SdpaBackend(), LinearFactory(collective=group))
        return decoder_logits(model, decoder_prompts())

    expected = decoder_logits(load_model(checkpoint, SdpaBackend()), decoder_prompts())
    for found in on_ranks(2, work):
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@needs_native
@torch.inference_mode()
def test_in_c_it_is_as_near_to_torch_as_8_bits_of_activations_are(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(quantised("bert", tmp_path))
    exact, _ = hidden_states(load_model(checkpoint, SdpaBackend()))
    found, _ = hidden_states(load_native(checkpoint, native_backends()[0].library))
    error = torch.cat(found) - torch.cat(exact)
    assert 0 < error.pow(2).mean().sqrt() < 0.05 * torch.cat(exact).std()


@needs_native
def test_it_is_served_as_it_is_stored_and_takes_what_was_planned(tmp_path: Path) -> None:
    folder = quantised("llama-gqa", tmp_path)
    checkpoint = read_checkpoint(folder)
    assert set(checkpoint.config.stored_as.values()) == {INT8_ROWS}
    assert "head" not in checkpoint.config.stored_as
    loaded = load(ModelSpec("m", str(folder), EngineConfig(device="cpu", dtype="float32", kv_cache_memory=1 << 20)))
    assert (loaded.info.dtype, loaded.info.dtype_reason) == ("int8", "the checkpoint stores it so")
    planned = plan_weights(checkpoint, native_linears(checkpoint.config, torch.float32, None)).total
    assert planned == loaded.info.weight_bytes == weight_bytes(loaded.encode.model)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (
            ("quant_method",),
            "aqlm",
            r"quantization_config\.quant_method: 'aqlm' is not served, only 'compressed-tensors' or 'gptq' or",
        ),
        (
            ("format",),
            "marlin-24",
            r"format: 'marlin-24' is not served, only 'pack-quantized' or 'int-quantized' or 'float-quantized'",
        ),
        (("transform_config",), {"R1": {}}, r"quantization_config has unknown settings: transform_config"),
        (("config_groups",), {}, r"config_groups must be an object of groups"),
        (
            ("config_groups", "group_0", "weights", "num_bits"),
            4,
            r"group_0\.weights\.num_bits: 4 is not served, only 8",
        ),
        (("config_groups", "group_0", "weights", "strategy"), "tensor", r"weights\.strategy: 'tensor' is not served"),
        (
            ("config_groups", "group_0", "weights", "strategy"),
            "group",
            r"weights\.group_size must be a number of inputs",
        ),
        (("config_groups", "group_0", "input_activations", "dynamic"), False, r"input_activations\.dynamic: False"),
        (("config_groups", "group_0", "input_activations"), None, r"input_activations must be an object, found None"),
    ],
)
def test_other_formats_are_refused_by_the_setting_that_differs(
    where: tuple[str, ...], value: Any, message: str, tmp_path: Path
) -> None:
    folder, changed = copied("llama-gqa", tmp_path), deepcopy(QUANTIZATION)
    inner = changed
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    describe(folder, changed)
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(folder)


def test_a_setting_that_is_absent_has_the_meaning_of_the_format(tmp_path: Path) -> None:
    """Activations are static unless the setting says dynamic."""
    folder, changed = copied("llama-gqa", tmp_path), deepcopy(QUANTIZATION)
    del changed["config_groups"]["group_0"]["input_activations"]["dynamic"]
    describe(folder, changed)
    with pytest.raises(ConfigError, match=r"input_activations\.dynamic: False is not served, only True"):
        read_checkpoint(folder)


def test_integers_and_scales_are_part_of_the_bijection(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj"

    def refusal(change: Callable[[dict[str, Tensor]], None], quantization: dict[str, Any] | None = QUANTIZATION) -> str:
        folder = quantised("llama-gqa", tmp_path / str(len(list(tmp_path.iterdir()))))
        edit_tensors(folder, change)
        describe(folder, quantization)
        with pytest.raises(CheckpointError) as error:
            load_model(read_checkpoint(folder), SdpaBackend())
        return str(error.value)

    def narrowed(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}.weight_scale"] = tensors[f"{name}.weight_scale"][0]

    def widened(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float()

    def lost(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{name}.weight_scale"]

    # One part of a fused projection lacks its scale: the other parts determine the format.
    assert "missing: layers.0.self_attn.k_proj.weight_scale" in refusal(lost)
    assert f"misshaped: {name}.weight_scale: found [1], expected [16, 1]" in refusal(narrowed)
    assert refusal(widened) == f"expected int8, found {name}.weight (F32)"
    assert "expected floating point, found model.layers.0.self_attn.q_proj.weight (I8), " in refusal(
        lambda tensors: None, None
    )
