"""Projections in fp8: the Triton kernels against torch in float32, whole models against their dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

import triton
from triton import language as tl

from tests.model.checkpoints import saved
from tests.model.parity import decoder_logits, decoder_prompts
from tests.model.test_stored_formats import FP8, in_fp8
from tests.model.triton_cases import DEVICES, compute_nothing, no_gpu
from tests.parallel.ranks import on_ranks
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.cache.kv_cache import KVCache, LayerCache
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.stored_formats import fp8_storage
from triptych.model.config.cache import paged_specs, pools_of
from triptych.model.config.formats import FLOAT
from triptych.model.engine import builder
from triptych.model.engine.builder import load
from triptych.model.engine.warmup import compile_products
from triptych.model.errors import ConfigError
from triptych.model.linear import fp8, triton_fp8
from triptych.model.linear.base import LinearSpec, Part, linears
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.fp8 import Fp8Linear, quantized
from triptych.model.network.weights import load_model
from triptych.model.system import fallbacks
from triptych.model.system.background_work import finish
from triptych.model.system.float8_kernels import to_float8

CPU = torch.device("cpu")
GPU = torch.device("cuda")
PATTERNS = ("decoder.layers.*",)


def outliers(rows: int, width: int, device: torch.device = CPU) -> Tensor:
    """Return rows with values of all magnitudes, some below float8's range, and a second row of zeros."""
    torch.manual_seed(0)
    x = torch.randn(rows, width) * torch.logspace(-7, 2, width)[torch.randperm(width)]
    x[1:2] = 0
    return x.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("width", "group"), [(48, 0), (200, 0), (200, 64), (640, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_quantised_as_torch_rounds(
    width: int, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = outliers(5, width + 8, device).to(dtype)[:, :width]  # a view of a wider matrix
    ours, theirs = triton_fp8.quantize_rows(x, group), quantized(x, group)
    assert torch.equal(ours[0].view(torch.uint8) & 0x7F, theirs[0].view(torch.uint8) & 0x7F)
    assert torch.equal(ours[0].float(), theirs[0].float()) and torch.equal(ours[1], theirs[1])


@triton.jit
def to_float8_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, to_float8(tl.load(x + at)))


@pytest.mark.parametrize("device", DEVICES)
def test_rounding_keeps_nan_whatever_its_bits(device: torch.device) -> None:
    """A GPU's NaN is 0x7fffffff: adding anything to it would carry into the sign."""
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, -0x400000], dtype=torch.int32)
    x = torch.cat([bits.view(torch.float32), torch.tensor([1.0, -300.0, 1e-3, 0.0])]).to(device)
    out = torch.empty_like(x)
    to_float8_kernel[(1,)](x, out, SIZE=8)
    assert torch.equal(out.isnan(), x.isnan())


def filled(
    n: int, k: int, block: tuple[int, int] | None, device: torch.device = CPU, *, bias: bool = True
) -> Fp8Linear:
    """Return a projection of random weights, quantised here or stored with a scale for each block."""
    torch.manual_seed(1)
    storage = FLOAT if block is None else fp8_storage(block)
    with torch.device("meta"):
        linear = Fp8Linear(LinearSpec("m", k, (Part(n),), bias=bias), torch.float32, device, storage)
    weight, rows = torch.randn(n, k), (slice(0, n),)
    if block is None:
        for first, last in ((0, n // 3), (n // 3, n)):
            linear.fill("m.weight", (slice(first, last),), weight[first:last])
    else:
        high, columns = block[0] or n, storage.scales_of(k)
        scales = torch.rand(-(-n // high), columns) + 0.5
        linear.fill("m.weight_scale", rows, scales.repeat_interleave(high, 0)[:n])
        linear.fill("m.weight", rows, weight.to(torch.float8_e4m3fn))
    if bias:
        linear.fill("m.bias", rows, torch.randn(n))
    linear.finish()
    return linear


SHAPES = [(40, 272, None), (33, 96, (1, 0)), (64, 200, (0, 0)), (128, 192, (64, 64)), (72, 160, (32, 32))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("n", "k", "block", "rows"),
    [(*shape, rows) for shape, rows in zip(SHAPES, (1, 16, 5, 17, 70), strict=True)] + [(*SHAPES[0], 70)],
)
def test_the_kernel_multiplies_the_same_factors_as_torch(
    n: int, k: int, block: tuple[int, int] | None, rows: int, device: torch.device
) -> None:
    """Also where sizes are not multiples of tiles, and the last blocks are cut off."""
    linear, x = filled(n, k, block, device), outliers(rows, k, device)
    assert linear.block[0] == (1 if block is None or block[0] < 2 or n % block[0] else block[0])
    expected = linear.reference(x)
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=2e-6 * expected.abs().max().item())
    wrong = linear.reference(x * 1.1)
    assert (wrong - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "k", "block"), SHAPES[::3])
def test_up_to_sixteen_rows_a_rows_bits_are_its_own(
    n: int, k: int, block: tuple[int, int] | None, device: torch.device
) -> None:
    linear, x = filled(n, k, block, device), outliers(16, k, device)
    together = linear(x)
    for rows in (1, 2, 7):
        assert torch.equal(linear(x[3 : 3 + rows]), together[3 : 3 + rows])


def test_quantising_at_load_rounds_each_output_by_its_largest() -> None:
    linear = filled(40, 272, None, bias=False)
    torch.manual_seed(1)
    weight = torch.randn(40, 272)
    kept = linear.weight.float() * linear.weight_scale
    assert linear.weight.dtype is torch.float8_e4m3fn and linear.weight_scale.shape == (40, 1)
    torch.testing.assert_close(kept.abs().amax(1), weight.abs().amax(1), rtol=1e-6, atol=0)
    error, largest = (kept - weight).abs(), weight.abs().amax(1, keepdim=True)
    assert (error <= weight.abs() / 16 + largest / 448 / 1024).all() and error.max() > 0.01


@torch.inference_mode()
def test_a_models_layers_are_quantised_and_its_head_is_not() -> None:
    checkpoint = read_checkpoint(saved("llama-gqa").path)
    exact = decoder_logits(load_model(checkpoint, SdpaBackend()), decoder_prompts()[:2])
    model = load_model(checkpoint, SdpaBackend(), LinearFactory(fp8=PATTERNS))
    kinds = {linear.spec.name.partition(".")[0]: isinstance(linear, Fp8Linear) for linear in linears(model)}
    assert kinds == {"decoder": True, "head": False} and model.dtype is torch.float32
    ours = decoder_logits(model, decoder_prompts()[:2])
    assert 0 < (ours - exact).pow(2).mean().sqrt() < 0.25 * exact.std()
    for linear in linears(model):
        if isinstance(linear, Fp8Linear):
            linear.kernels = False
    reference = decoder_logits(model, decoder_prompts()[:2])
    assert (ours - reference).pow(2).mean().sqrt() < 0.03 * exact.std()  # a rounding may fall to the other side


@torch.inference_mode()
@pytest.mark.parametrize("name", ["by tensor, static", "deepseek"])
def test_a_stored_model_is_multiplied_as_it_is_stored(name: str, tmp_path: Path) -> None:
    """The weights are those of the checkpoint bit for bit; only activations are rounded in addition."""
    quantization, scale, block = FP8[name]
    if block[1]:
        block = (16, 32)
        quantization = {**quantization, "weight_block_size": list(block)}
    stored, plain = map(read_checkpoint, in_fp8(quantization, scale, block, tmp_path))
    model = load_model(stored, SdpaBackend(), LinearFactory(fp8=()))
    exact = load_model(plain, SdpaBackend())
    for ours, theirs in zip(linears(model), linears(exact), strict=True):
        if isinstance(ours, Fp8Linear):
            high, wide = ours.block[0], ours.block[1] or ours.spec.inputs
            scales = ours.weight_scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:, : ours.spec.inputs]
            assert torch.equal(ours.weight.float() * scales[: ours.spec.num_outputs], theirs.weight), ours.spec.name
    assert sum(isinstance(one, Fp8Linear) for one in linears(model)) == 8
    found, expected = (decoder_logits(one, decoder_prompts()[:2]) for one in (model, exact))
    assert 0 < (found - expected).pow(2).mean().sqrt() < 0.25 * expected.std()


@torch.inference_mode()
def test_two_ranks_quantise_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_has_kernels", lambda device: False)  # ranks are threads; the interpreter runs one
    checkpoint = read_checkpoint(saved("llama-gqa").path)

    @torch.inference_mode()
    def logits(group: object) -> Tensor:
        linear = LinearFactory(fp8=PATTERNS, collective=group)  # type: ignore[arg-type]
        return decoder_logits(load_model(checkpoint, SdpaBackend(), linear), decoder_prompts())

    expected = decoder_logits(load_model(checkpoint, SdpaBackend()), decoder_prompts())
    ours, theirs = on_ranks(2, logits)
    assert torch.equal(ours, theirs)
    assert 0 < (ours - expected).pow(2).mean().sqrt() < 0.25 * expected.std()


def test_the_setting_is_for_gpus_and_a_cpu_is_told_of_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(saved("llama-gqa").path)

    def loaded(folder: str = path, **settings: str) -> object:
        config = EngineConfig(device="cpu", dtype="float32", kv_cache_memory=1 << 20, **settings)  # type: ignore[arg-type]
        return load(ModelSpec("m", folder, config)).info

    for backend in ("auto", "sdpa"):
        with pytest.raises(ConfigError, match=r"quantization fp8 .*8\.9 .* a CPU serves int8"):
            loaded(quantization="fp8", attention_backend=backend)
        with pytest.raises(ConfigError, match=r"kv_cache_dtype fp8 needs a GPU .*8\.9 .*; int8 is served"):
            loaded(kv_cache_dtype="fp8", attention_backend=backend)
    played = loaded(quantization="fp8", attention_backend="triton")  # in the interpreter
    assert (played.dtype, played.dtype_reason) == ("fp8", "asked for")  # type: ignore[attr-defined]
    monkeypatch.setattr(builder, "compute_first_token", compute_nothing)  # as the first backend did
    stored, _ = in_fp8(*FP8["by row"], tmp_path)
    kept = loaded(str(stored), attention_backend="triton")
    assert (kept.dtype, kept.dtype_reason) == ("fp8", "the checkpoint stores it so")  # type: ignore[attr-defined]
    assert loaded(str(stored), attention_backend="sdpa").dtype == "float32"  # type: ignore[attr-defined]


@pytest.mark.gpu
@no_gpu
def test_many_rows_are_multiplied_by_torch_as_few_are_by_triton() -> None:
    linear = filled(256, 512, None, GPU, bias=False)
    linear.dtype = torch.bfloat16
    x = outliers(40, 512, GPU).bfloat16()
    assert fp8.scales_rows(GPU) and linear.by_torch(x)
    few = torch.cat([linear(x[at : at + 10]) for at in range(0, 40, 10)])
    torch.testing.assert_close(linear(x), few, rtol=2e-2, atol=1e-2 * few.abs().max().item())


def test_each_kind_of_launch_is_compiled_at_start() -> None:
    for group in (0, 32, 128):
        kinds = [
            {triton_fp8.choose_tiles(rows, group) for rows in counts}
            for counts in (Fp8Linear.tiled_rows, range(1, 300))
        ]
        assert kinds[0] == kinds[1]
    checkpoint = read_checkpoint(saved("llama-gqa").path)
    model = load_model(checkpoint, SdpaBackend(), LinearFactory(fp8=PATTERNS))
    multiplied = []
    for linear in linears(model):
        linear.register_forward_hook(lambda linear, given, _: multiplied.append((linear.spec.name, len(given[0]))))
    assert (
        finish(compile_products(model)) == len(multiplied) == 4 * len(Fp8Linear.tiled_rows)
    )  # qkv, out, up and down of one layer
    assert finish(compile_products(load_model(checkpoint, SdpaBackend()))) == 0


def test_keys_with_outliers_keep_their_small_numbers_in_fp8_and_lose_them_in_int8() -> None:
    """The fp8 cache is for models with large keys in a few dimensions."""
    torch.manual_seed(0)
    rows = torch.randn(64, 2, 32)
    rows[..., 5] *= 300
    small = torch.arange(32) != 5
    errors = {}
    for dtype in (torch.int8, torch.float8_e4m3fn):
        pages = [torch.zeros(8, 8, 2, 32, dtype=dtype) for _ in range(2)]
        cache = LayerCache(pages[0], pages[1], (torch.zeros(8, 8, 2), torch.zeros(8, 8, 2)))
        cache.write(torch.arange(64), rows, rows)
        keys, values = cache.read(torch.arange(8)[None], 64)
        assert torch.equal(keys, values)
        errors[dtype] = (keys[0] - rows)[..., small].abs().mean() / rows[..., small].abs().mean()
    assert errors[torch.float8_e4m3fn] < 0.04 < 0.5 < errors[torch.int8]


def test_a_cache_in_fp8_takes_what_one_in_int8_does_and_moves_its_blocks() -> None:
    decoder = read_checkpoint(saved("llama-gqa").path).config.decoder
    assert decoder is not None
    caches = [KVCache(decoder, [4], 8, dtype, CPU) for dtype in (torch.float8_e4m3fn, torch.int8)]
    assert caches[0].nbytes == caches[1].nbytes == 4 * 8 * pools_of(paged_specs(decoder, "int8"))[0].token_bytes
    layer, rows = caches[0].layers[1], torch.randn(8, decoder.layers[1].attention.num_kv_heads, 8)
    layer.write(torch.arange(8, 16), rows, -rows)
    caches[0].copy_blocks(0, [3], [1])
    kept, copied = (layer.read(torch.tensor([[block]]), 8) for block in (1, 3))
    assert torch.equal(kept[0], copied[0]) and torch.equal(kept[1], -copied[0])
    assert ((kept[0][0] - rows).abs() <= rows.abs() / 15 + 1e-2).all() and copied[0].any()


def test_where_torch_scales_no_rows_triton_multiplies_and_it_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    fallbacks.forget()
    fp8.scales_rows.cache_clear()

    def scaled(x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        return ((x.float() * x_scales) @ (weight.float() * scales)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)  # torch 2.11 scales no rows on a CPU
    assert fp8.scales_rows(CPU)

    def refuse(*arguments: object, **named: object) -> Tensor:
        raise RuntimeError("no rowwise scaling here")

    fp8.scales_rows.cache_clear()
    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert not fp8.scales_rows(CPU)
    assert fallbacks.found() == ("fp8 products of many rows are Triton's: no rowwise scaling here",)
    fallbacks.forget()
    fp8.scales_rows.cache_clear()
