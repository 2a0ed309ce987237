"""Checkpoints in nf4, fp4, LLM.int8(), MXFP4 and NVFP4: right ones give the right numbers, others a named error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.checkpoints import copied, load_native, native_backends
from tests.model.decoder_rows import LLAMA
from tests.model.packers import describe
from tests.model.parity import decoder_logits, decoder_prompts
from tests.parallel.ranks import on_ranks
from triptych.model.api.engine_config import EngineConfig
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.stored_formats import quantization_of
from triptych.model.config.formats import integers_in_groups
from triptych.model.config.sharding import Shard
from triptych.model.errors import CheckpointError, ConfigError
from triptych.model.linear.base import linears
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.native import NativeLinear
from triptych.model.llm import LLM
from triptych.model.native.library import Kind
from triptych.model.network.weights import load_model
from triptych.model.parallel.group import Group

# Quantiles of a normal distribution (QLoRA, appendix E), and 4-bit floats by their codes, scaled so that 12 is 1.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3))
E2M1 = tuple(sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6))
BITSANDBYTES = {
    "quant_method": "bitsandbytes",
    **{"load_in_4bit": True, "load_in_8bit": False, "_load_in_4bit": True, "_load_in_8bit": False},
    **{"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": "bfloat16"},
    **{"bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0, "llm_int8_skip_modules": ["lm_head"]},
    **{"llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False},
}
INT8 = {**BITSANDBYTES, "load_in_4bit": False, "load_in_8bit": True, "_load_in_4bit": False, "_load_in_8bit": True}
Coded = tuple[dict[str, Tensor], Tensor]  # stored tensors of a projection by name, and the numbers that they stand for


def places(values: Tensor, table: tuple[float, ...]) -> Tensor:
    return (values[..., None] - torch.tensor(table)).abs().argmin(-1).to(torch.uint8)


def in_4_bits(kind: str, block: int, nested: bool, storage: torch.dtype = torch.uint8) -> Callable[[Tensor], Coded]:
    """Store as bitsandbytes does: flat, in blocks that cross rows, the first of two numbers in the high bits."""
    table = NF4 if kind == "nf4" else FP4

    def make(weight: Tensor) -> Coded:
        flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % block)).view(-1, block)
        absmax = flat.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
        state["shape"] = list(weight.shape)
        tensors = {"weight.quant_map": torch.tensor(table)}
        if nested:
            codes = torch.linspace(-1, 1, 256)
            offset, rest = absmax.mean(), absmax - absmax.mean()
            largest = torch.stack([part.abs().max() for part in rest.split(4)])
            stored = places(rest / largest.repeat_interleave(4)[: len(rest)], tuple(codes.tolist()))
            absmax = codes[stored.long()] * largest.repeat_interleave(4)[: len(rest)] + offset.item()
            tensors |= {"weight.nested_absmax": largest, "weight.nested_quant_map": codes}
            state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": offset.item()}
        tensors["weight.absmax"] = stored if nested else absmax
        found = places(flat / absmax[:, None], table)
        exact = (torch.tensor(table)[found.long()] * absmax[:, None]).flatten()[: weight.numel()].view(weight.shape)
        numbers = found.flatten()[: weight.numel()].view(-1, 2)
        tensors["weight"] = (numbers[:, 0] << 4 | numbers[:, 1]).view(storage)[:, None]
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode())).byte()
        return tensors, exact

    return make


def int8_rows(weight: Tensor) -> Coded:
    largest = weight.abs().amax(1)
    integers = (weight * 127 / largest[:, None]).round().to(torch.int8)
    tensors = {"weight": integers, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return tensors, integers * (largest / 127)[:, None]


def microscaled(weight: Tensor) -> Coded:
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(2) / 6).log2().ceil()
    codes = places(groups / exponents.exp2()[:, :, None], E2M1)
    exact = torch.tensor(E2M1)[codes.long()] * exponents.exp2()[:, :, None]
    pairs = codes.flatten(1).unflatten(1, (-1, 2))
    packed = pairs[:, :, 0] | pairs[:, :, 1] << 4
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, exact.flatten(1)


def nvfp4(weight: Tensor) -> Coded:
    groups, whole = weight.unflatten(1, (-1, 16)), torch.tensor([3.0])
    scales = (groups.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
    spread = (scales.float() / whole)[:, :, None]
    codes = places(groups / spread, E2M1)
    pairs = codes.flatten(1).unflatten(1, (-1, 2))
    tensors = {"weight_packed": pairs[:, :, 0] | pairs[:, :, 1] << 4, "weight_scale": scales}
    tensors |= {"weight_global_scale": whole, "input_global_scale": torch.ones(1)}
    return tensors, (torch.tensor(E2M1)[codes.long()] * spread).flatten(1)


def compressed(form: str, group: int, strategy: str, activations: dict[str, Any] | None) -> dict[str, Any]:
    floats = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group, "strategy": strategy}
    return {
        **{"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"},
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**floats, "dynamic": False, "scale_dtype": "torch.uint8", "observer": "mse"},
                "input_activations": activations and {**floats, **activations},
                "output_activations": None,
                "format": form,
            }
        },
        "ignore": ["lm_head"],
    }


MXFP4 = compressed("mxfp4-pack-quantized", 32, "group", None)
NVFP4 = compressed("nvfp4-pack-quantized", 16, "tensor_group", {"dynamic": "local"})
FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Coded]]] = {
    "nf4": (BITSANDBYTES, in_4_bits("nf4", 64, nested=False)),
    "nf4, nested": (BITSANDBYTES, in_4_bits("nf4", 64, nested=True)),
    "fp4, as bfloat16": (BITSANDBYTES, in_4_bits("fp4", 128, nested=True, storage=torch.bfloat16)),
    "int8": (INT8, int8_rows),
    "int8, as it once was": ({"load_in_8bit": True}, int8_rows),
    "mxfp4": (MXFP4, microscaled),
    "nvfp4": (NVFP4, nvfp4),
}
FITTING = {"mxfp4": "gemma3", "nvfp4": "gemma3"}


def stored(form: str, into: Path) -> tuple[Path, Path]:
    """Write a folder with layers in a format, and one with the floats that they stand for."""
    settings, make = FORMS[form]
    folder, plain = copied("llama-gqa", into / "coded"), copied("llama-gqa", into / "plain")
    tensors, floats = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, kind = name.rpartition(".")
        tensors[name] = floats[name] = tensor
        if kind != "weight" or not stem.endswith("_proj") or (form == "mxfp4" and tensor.shape[1] % 32):
            continue
        made, floats[name] = make(tensor)
        del tensors[name]
        tensors |= {f"{stem}.{own}": value for own, value in made.items()}
    save_file(tensors, folder / "model.safetensors")
    save_file(floats, plain / "model.safetensors")
    describe(folder, settings)
    return folder, plain


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_those_that_are_meant(form: str, tmp_path: Path) -> None:
    coded, plain = (load_model(read_checkpoint(folder), SdpaBackend()) for folder in stored(form, tmp_path))
    expected = dict(plain.named_parameters())
    assert len(expected) > 10
    for name, parameter in coded.named_parameters():
        assert torch.equal(parameter, expected[name]) or (
            form.startswith("int8") and torch.allclose(parameter, expected[name], rtol=1e-6, atol=0)
        ), name


@pytest.mark.skipif(not native_backends(), reason="there is no GCC here")
@pytest.mark.parametrize(("form", "most"), [("nf4", 0.008), ("int8", 1e-6), ("mxfp4", 1e-7), ("nvfp4", 0.008)])
def test_what_c_keeps_is_as_near_as_it_can_be(form: str, most: float, tmp_path: Path) -> None:
    """Read weights back by products with unit rows: integers are exact, others close within their groups."""
    folder, plain = stored(form, tmp_path)
    coded, floats = (
        load_native(read_checkpoint(folder), native_backends()[0].library),
        load_model(read_checkpoint(plain), SdpaBackend()),
    )
    exact = {linear.spec.name: linear for linear in linears(floats)}
    for linear in linears(coded):
        if linear.spec.name.endswith(("mlp.up", "attn.qkv")):
            ones = torch.eye(linear.spec.inputs)
            expected = exact[linear.spec.name](ones)
            assert (linear(ones) - expected).norm() <= most * expected.norm(), linear.spec.name
    stored_as = read_checkpoint(folder).config.stored_as
    assert len(stored_as) == (6 if form == "mxfp4" else 8)
    if form == "int8":
        assert set(stored_as.values()) == {integers_in_groups(8, 128, offsets=False)}
    if form == "mxfp4":
        assert set(stored_as.values()) == {integers_in_groups(8, 32, offsets=False)}


TORCHAO = {"quant_method": "torchao", "modules_to_not_convert": None, "quant_type": {"default": {"_type": "X"}}}


def in_torchao(
    into: Path, kind: str = "IntxUnpackedToInt8Tensor", names: Any = ("qdata", "scale", "zero_point"), **changes: Any
) -> tuple[Path, dict[str, Tensor]]:
    """Write a folder with torchao's tensors as transformers writes it, and one with the floats that they stand for."""
    folder = copied("llama-gqa", into)
    tensors, floats, told = dict[str, Tensor](), dict[str, Tensor](), {"format": "pt"}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, own = name.rpartition(".")
        if own != "weight" or not stem.endswith("_proj"):
            tensors[name] = tensor
            continue
        width = 32 if tensor.shape[1] % 32 == 0 else 16
        groups = tensor.unflatten(1, (-1, width))
        low, high = groups.amin(2), groups.amax(2)
        scales = ((high - low) / 15).bfloat16()
        zeros = (-8 - low / scales).round().clamp(-8, 7).to(torch.int8)
        integers = (groups / scales[:, :, None] + zeros[:, :, None]).round().clamp(-8, 7).to(torch.int8)
        tensors |= {f"{stem}._weight_qdata": integers.flatten(1), f"{stem}._weight_scale": scales}
        tensors[f"{stem}._weight_zero_point"] = zeros
        floats[name] = ((integers.float() - zeros[:, :, None]) * scales[:, :, None].float()).flatten(1)
        data = {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}, "block_size": [1, width], **changes}
        told[name] = json.dumps({"_type": kind, "_data": data, "_tensor_data_names": names})
    save_file(tensors, folder / "model.safetensors", told)
    describe(folder, TORCHAO)
    return folder, floats


def test_torchaos_integers_are_those_that_are_meant(tmp_path: Path) -> None:
    folder, floats = in_torchao(tmp_path)
    loaded = dict(load_model(read_checkpoint(folder), SdpaBackend()).named_parameters())
    for name, target in (("o_proj", "attn.out"), ("down_proj", "mlp.down")):
        module = "self_attn" if name == "o_proj" else "mlp"
        expected = floats[f"model.layers.1.{module}.{name}.weight"]
        assert torch.allclose(loaded[f"decoder.layers.1.{target}.weight"], expected, rtol=1e-6, atol=1e-7)
    stored_as = read_checkpoint(folder).config.stored_as
    assert stored_as["decoder.layers.1.attn.out"] == integers_in_groups(4, 32, offsets=True)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "Int4TilePackedTo4dTensor",
            {},
            "proj.weight: torchao's Int4TilePackedTo4dTensor is not served, only Int8Tensor",
        ),
        ("IntxUnpackedToInt8Tensor", {"block_size": [2, 32]}, "of 4 bits in blocks of 2 x 32 is not served"),
        ("IntxUnpackedToInt8Tensor", {"block_size": 5}, "torchao's metadata of it cannot be read"),
        ("IntxUnpackedToInt8Tensor", {"names": 5}, "torchao's metadata of it cannot be read"),
        (
            "IntxUnpackedToInt8Tensor",
            {"names": [["qdata"]]},
            r"IntxUnpackedToInt8Tensor with \['qdata'\] is not served",
        ),
    ],
)
def test_other_tensors_of_torchao_are_refused(kind: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder, _ = in_torchao(tmp_path, kind, **changes)
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(folder)


def test_integers_that_do_not_fit_their_bits_are_refused(tmp_path: Path) -> None:
    folder, _ = in_torchao(tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        told = file.metadata()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj._weight_qdata"][5, 3] = 8
    save_file(tensors, folder / "model.safetensors", told)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj.* integers from -8 to 8, expected 4 bits"):
        load_model(read_checkpoint(folder), SdpaBackend())


def spoil(name: str, value: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        full = f"model.layers.0.mlp.up_proj.{name}"
        if value is None:
            del tensors[full]
        else:
            tensors[full] = value

    return change


STATE = "weight.quant_state.bitsandbytes__nf4"


def state(**changes: Any) -> Callable[[dict[str, Tensor]], None]:
    told = json.dumps({"shape": [48, 32], "blocksize": 64, "quant_type": "nf4", **changes})
    return spoil(STATE, torch.tensor(list(told.encode()), dtype=torch.uint8))


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("nf4", spoil(STATE, None), "up_proj: its quant_state cannot be read: there is none of nf4 or fp4"),
        ("nf4", spoil(STATE, torch.zeros(3, dtype=torch.uint8)), "up_proj: its quant_state cannot be read"),
        ("nf4", spoil(STATE, torch.tensor(list(b'{"shape": 5}')).byte()), "up_proj: its quant_state cannot be read"),
        ("nf4", state(blocksize=64.0), "up_proj: its quant_state cannot be read"),
        ("nf4", state(nested_blocksize=4, nested_offset=10**400), "up_proj: its quant_state cannot be read"),
        ("nf4", spoil("weight.quant_map", None), "up_proj.weight.quant_map is missing, found"),
        ("nf4", spoil("weight.absmax", torch.ones(3)), r"absmax: expected F32 \[24\], found F32 \[3\]"),
        ("nf4", spoil("weight", torch.ones(9, 1, dtype=torch.uint8)), "9 bytes are not 48 x 32 numbers of 4 bits"),
        ("nf4, nested", spoil("weight.nested_absmax", torch.ones(2)), r"nested_absmax: expected F32 \[6\]"),
        ("int8", spoil("SCB", torch.ones(3)), "expected int8 rows with a float32 for each"),
        ("int8", spoil("weight_format", torch.ones((), dtype=torch.uint8)), "weight_format: only rows are read"),
        ("mxfp4", spoil("weight_scale", torch.ones(48, 2).byte()), "expected bytes with a scale for 32 numbers"),
        ("mxfp4", spoil("weight_packed", torch.ones(()).byte()), "expected bytes with a scale for 32 numbers"),
        ("nvfp4", spoil("weight_global_scale", None), "up_proj.weight_global_scale is missing, found"),
        ("nvfp4", spoil("weight_global_scale", torch.ones(3)), r"expected one float32, found F32 \[3\]"),
    ],
)
def test_what_does_not_fit_is_named(
    form: str, change: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    folder, _ = stored(form, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load_model(read_checkpoint(folder), SdpaBackend())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**INT8, "llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight: True is not served"),
        ({**BITSANDBYTES, "bnb_5bit": 1}, "unknown settings: bnb_5bit"),
        ({"quant_method": "hqq", "quant_type": {}}, "quant_method: 'hqq' is not served"),
        ({"quant_method": "mxfp4", "group_size": 16}, "unknown settings: group_size"),
        (compressed("mxfp4-pack-quantized", 16, "group", None), "weights.group_size: 16 is not served, only 32"),
        (compressed("nvfp4-pack-quantized", 16, "tensor_group", {"type": "int"}), "input_activations: .* only floats"),
    ],
)
def test_other_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quantization_of(settings, ["model.layers.0.mlp.up_proj.weight_packed"])


def gpt_oss_in_mxfp4(folder: Path, **sizes: int) -> dict[str, Tensor]:
    """Write a gpt-oss whose experts are in MXFP4; return the numbers that `transformers` computes of them."""
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = GptOssConfig(**{**LLAMA, "num_experts_per_tok": 2, "head_dim": 12, "hidden_size": 64, **sizes})
    torch.manual_seed(0)
    GptOssForCausalLM(config).save_pretrained(folder)
    tensors, expected = load_file(folder / "model.safetensors"), {}
    for layer in (0, 1):
        for projection in ("gate_up_proj", "down_proj"):
            stem = f"model.layers.{layer}.mlp.experts.{projection}"
            experts, inputs, outputs = tensors.pop(stem).shape
            blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(115, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
            tensors |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
            expected[stem] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    save_file(tensors, folder / "model.safetensors")
    describe(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    return expected


@pytest.mark.parametrize(
    ("experts", "columns", "size", "held"),
    [
        (4, 128, 2, [(4, 64)] * 2),  # columns of each
        (3, 96, 2, [(3, 32), (3, 64)]),  # of three blocks of 32
        (4, 96, 2, [(2, 96)] * 2),  # whole experts, which are more even than blocks
        (4, 32, 2, [(2, 32)] * 2),
        (8, 96, 4, [(2, 96)] * 4),
        (4, 320, 4, [(4, 64), (4, 96)] * 2),  # one expert a rank would be no matrices of experts
    ],
)
@torch.inference_mode()
def test_ranks_divide_experts_without_parting_blocks(
    experts: int, columns: int, size: int, held: list[tuple[int, int]], tmp_path: Path
) -> None:
    gpt_oss_in_mxfp4(tmp_path, num_local_experts=experts, intermediate_size=columns)
    checkpoint = read_checkpoint(tmp_path)

    @torch.inference_mode()
    def work(group: Group) -> tuple[tuple[int, int], Tensor]:
        model = load_model(checkpoint, SdpaBackend(), LinearFactory(collective=group))
        (down,) = [linear for linear in linears(model) if linear.spec.name == "decoder.layers.1.mlp.down"]
        assert down.weight.shape == (down.spec.experts * 64, down.spec.inputs)
        return (down.spec.experts, down.spec.inputs), decoder_logits(model, decoder_prompts())

    found = on_ranks(size, work)
    expected = decoder_logits(load_model(checkpoint, SdpaBackend()), decoder_prompts())
    assert [shape for shape, _ in found] == held
    for _, ours in found:
        assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()
        assert torch.equal(ours, found[0][1])


def test_more_ranks_than_blocks_of_columns_are_refused(tmp_path: Path) -> None:
    gpt_oss_in_mxfp4(tmp_path, num_local_experts=3, intermediate_size=32)
    with pytest.raises(ConfigError, match="2 is more than the columns of the decoder's MLP: 32 in blocks of 32 that"):
        Shard(0, 2).check(read_checkpoint(tmp_path).config)


def test_the_experts_of_gpt_oss_are_those_that_are_meant(tmp_path: Path) -> None:
    """Blocks and scales of all experts of a layer give the numbers that `transformers` computes."""
    name = "model.layers.1.mlp.experts"
    expected = gpt_oss_in_mxfp4(tmp_path, num_local_experts=3, intermediate_size=96)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.config.stored_as["decoder.layers.1.mlp.up"] == integers_in_groups(8, 32, offsets=False)
    loaded = dict(load_model(checkpoint, SdpaBackend()).named_parameters())
    up = loaded["decoder.layers.1.mlp.up.weight"].unflatten(0, (3, 2, 96))
    theirs = expected[f"{name}.gate_up_proj"]
    assert torch.equal(up[:, 0], theirs[:, 0::2]) and torch.equal(up[:, 1], theirs[:, 1::2])
    down = loaded["decoder.layers.1.mlp.down.weight"].unflatten(0, (3, 64))
    assert torch.equal(down, expected[f"{name}.down_proj"])
    if not native_backends():
        return
    kept = {
        (linear.spec.name.split(".")[-2], linear.kind, linear.group)
        for linear in linears(LLM(tmp_path, EngineConfig(device="cpu", kv_cache_memory=1 << 20)).network)
        if isinstance(linear, NativeLinear) and "layers" in linear.spec.name
    }
    assert {("mlp", Kind.INT8, 32), ("mlp", Kind.F32, 0)} < kept  # experts, and their router
    assert {(kind, group) for name, kind, group in kept if name == "attn"} <= {(Kind.BF16, 0), (Kind.F32, 0)}
