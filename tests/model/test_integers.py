"""Projections with integer weights on a GPU: the Triton kernels against torch in float32, and whole models."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

from tests.model.checkpoints import native_backends, saved
from tests.model.packers import CASES, folders
from tests.model.parity import decoder_logits, decoder_prompts
from tests.model.test_stored_formats import quantised
from tests.model.triton_cases import DEVICES, compute_nothing
from tests.parallel.ranks import on_ranks
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.formats import (
    FLOAT,
    INT8_ROWS,
    QUANTIZED_LAYERS,
    NumberKind,
    Storage,
    integers,
    integers_in_groups,
)
from triptych.model.engine import builder
from triptych.model.engine.builder import load
from triptych.model.engine.model_info import conversions
from triptych.model.engine.warmup import compile_products
from triptych.model.errors import ConfigError
from triptych.model.linear import integers as module
from triptych.model.linear import triton_integers
from triptych.model.linear.base import LinearSpec, Part, linears
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.integers import DequantizedIntegerLinear, IntegerLinear, integer_linear, rounded_in_groups
from triptych.model.linear.triton_integers import Tiles
from triptych.model.native.library import Kind
from triptych.model.network.weights import load_model
from triptych.model.system.background_work import finish

CPU = torch.device("cpu")
KINDS = {4: NumberKind.INT4, 8: NumberKind.INT8}
ROUNDED, ROUNDED_TO_8 = (
    tuple(zip(("decoder.layers.*", "head"), QUANTIZED_LAYERS[name], strict=True)) for name in ("int4-g32", "int8-g128")
)


def filled(
    n: int, k: int, bits: int, group: int, offsets: Tensor | bool | None = False, device: torch.device = CPU
) -> IntegerLinear:
    """Return a projection of random weights, rounded here, or of given integers: `offsets` [n, groups] or scales."""
    torch.manual_seed(1)
    storage = FLOAT
    if offsets is not False:
        storage = integers_in_groups(bits, group, offsets=offsets is not None)
    with torch.device("meta"):
        linear = integer_linear(
            LinearSpec("m", k, (Part(n),)), torch.float32, device, integers(KINDS[bits], group), storage
        )
    rows, groups = (slice(0, n),), -(-k // (group or k))
    if storage == FLOAT:
        weight = torch.randn(n, k)
        for first, last in ((n // 3, n), (0, n // 3)):
            linear.fill("m.weight", (slice(first, last),), weight[first:last])
    else:
        scales = (torch.rand(n, groups) + 0.5).half()
        linear.fill("m.weight_scale", rows, scales)
        if offsets is True:
            offsets = scales.float() * torch.randint(-8, 9, (n, groups))
        if offsets is not None:
            linear.fill("m.weight_offset", rows, offsets)
        most = 1 << (bits - 1)
        linear.fill("m.weight", rows, torch.randint(-most, most, (n, k), dtype=torch.int8))
    linear.fill("m.bias", rows, torch.randn(n))
    linear.finish()
    return linear


def must_be_near(linear: IntegerLinear, found: Tensor, x: Tensor) -> None:
    expected = linear.reference(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6 * expected.abs().max().item())
    assert (linear.reference(x * 1.1) - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("n", "k", "bits", "group", "offsets", "rows"),
    [
        (40, 272, 4, 64, False, 1),
        (33, 1000, 4, 32, False, 16),
        (70, 600, 4, 128, False, 20),
        (70, 512, 4, 128, True, 3),
        (33, 200, 4, 32, torch.randn(33, 7), 3),
        (33, 200, 4, 64, None, 70),
        (130, 200, 8, 0, False, 5),
        (33, 200, 8, 128, True, 17),
        (33, 200, 8, 32, None, 5),
        (40, 272, 4, 64, True, 257),
        (40, 272, 8, 32, torch.randn(40, 9), 257),
    ],
)
def test_the_kernel_multiplies_the_same_factors_as_torch(
    n: int, k: int, bits: int, group: int, offsets: Tensor | bool | None, rows: int, device: torch.device
) -> None:
    """Also where sizes are not multiples of tiles, and rows of x are not contiguous."""
    linear = filled(n, k, bits, group, offsets, device)
    x = torch.randn(rows, k + 8, device=device)[:, :k]
    must_be_near(linear, linear(x), x)
    assert linear.nbytes == sum(one.nbytes for one in linear.parameters())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 0)])
def test_parts_of_the_inputs_are_added_in_order_whichever_is_done_last(
    bits: int, group: int, device: torch.device
) -> None:
    """A row's bits do not depend on the number of rows in a tile."""
    linear = filled(70, 1100, bits, group, device=device)  # 18 or 9 spans: the last of 8 parts has none
    packed = (linear.weight, linear.weight_scale, None, linear.bias, bits, group)
    x = torch.randn(16, 1100, device=device)
    for parts in (2, 8):
        product = partial(triton_integers.multiply, tiles=Tiles(16, 64, 4, 4, parts))
        together = product(x, *packed)
        must_be_near(linear, together, x)
        for rows in (1, 7):
            assert torch.equal(product(x[3 : 3 + rows], *packed), together[3 : 3 + rows])
        assert not triton_integers.counters(device).any()


def test_tiles_of_few_rows_do_not_depend_on_their_number() -> None:
    for outputs, spans in ((1024, 8), (4096, 112), (28672, 32), (151936, 8)):
        tiles = [triton_integers.choose_tiles(rows, outputs, spans, CPU) for rows in range(1, 300)]
        assert len(set(tiles[:16])) == len(set(tiles[16:64])) == 1
        assert set(tiles) == {triton_integers.choose_tiles(rows, outputs, spans, CPU) for rows in (1, 17, 65)}
        for one in set(tiles):
            assert one.parts == 1 or 132 <= -(-outputs // one.outputs) * one.parts <= 3 * 132 or spans // one.parts < 8


class Registers(dict[str, int]):
    """An interpreter of PTX instructions on 32-bit registers."""

    def run(self, text: str) -> None:
        for line in re.findall(r"[^;{}]+", text):
            name, *arguments = re.split(r"[\s,]+", line.strip())
            if name and not name.startswith(".reg"):
                to, *values = arguments
                self[to] = getattr(self, name.replace(".", "_"))(*map(self.value, values)) & 0xFFFFFFFF

    def value(self, name: str) -> int:
        return self[name] if name in self else int(name, 0)

    mov_b32 = staticmethod(lambda a: a)
    shr_u32 = staticmethod(lambda a, count: a >> count)

    @staticmethod
    def lop3_b32(a: int, b: int, c: int, table: int) -> int:
        rows = ((a, 0xF0), (b, 0xCC), (c, 0xAA))  # what the table is of these is the operation
        assert table == (rows[0][1] & rows[1][1]) | rows[2][1]
        return (a & b) | c

    @staticmethod
    def prmt_b32(a: int, b: int, selector: int) -> int:
        both = a.to_bytes(4, "little") + b.to_bytes(4, "little")
        return int.from_bytes((both[selector >> 4 * at & 7] for at in range(4)), "little")

    def fma_rn_bf16x2(self, *words: int) -> int:
        return self._fma(torch.bfloat16, *words)

    def fma_rn_f16x2(self, *words: int) -> int:
        return self._fma(torch.float16, *words)

    @staticmethod
    def _fma(dtype: torch.dtype, *words: int) -> int:
        a, b, c = torch.tensor(words, dtype=torch.uint32).view(dtype).double().view(3, 2)
        return int((a * b + c).to(dtype).view(torch.int32).item()) & 0xFFFFFFFF


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpus_instructions_unpack_what_the_interpreter_does(dtype: torch.dtype) -> None:
    """Four bytes a word, of every value: the low halves go to the first two registers, the high ones to the others."""
    text = {torch.bfloat16: triton_integers.UNPACK_BFLOAT16, torch.float16: triton_integers.UNPACK_FLOAT16}[dtype].value
    for first in range(0, 256, 4):
        data = torch.arange(first, first + 4).to(torch.uint8)[[2, 0, 3, 1]]
        registers = Registers({"$4": int.from_bytes(bytes(data.tolist()), "little")})
        registers.run(text)
        found = torch.tensor([registers[f"${at}"] for at in range(4)], dtype=torch.uint32).view(dtype)
        assert torch.equal(found, torch.cat([(data & 15).to(dtype) - 8, (data >> 4).to(dtype) - 8]))


@pytest.mark.parametrize(("bits", "kind"), [(4, Kind.INT4), (8, Kind.INT8)])
def test_weights_are_rounded_as_in_c(bits: int, kind: Kind) -> None:
    """Weights get equal integers except where two scales are as good; an infinite weight spoils only its group."""
    from tests.model.test_native_groups import unpacked
    from triptych.model.linear.native import packed_linear

    if not native_backends():
        pytest.skip("there is no GCC here")
    weight = torch.randn(64, 320) * torch.randn(64, 1).exp()
    weight[3, :70] = 0
    theirs, scales = unpacked(packed_linear(native_backends()[0].library, weight, None, kind, 64))
    numbers, found = rounded_in_groups(weight, bits, 64)
    same = (numbers == theirs.flatten(1)).unflatten(1, (-1, 64)).all(-1)
    assert same.float().mean() > 0.95
    torch.testing.assert_close(found[same], scales[same], rtol=1e-5, atol=0)
    whole = [scale.repeat_interleave(64, 1) * one for scale, one in ((found, numbers), (scales, theirs.flatten(1)))]
    errors = [(one - weight).norm().item() for one in whole]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
    weight[5, 100] = torch.inf
    numbers, found = rounded_in_groups(weight, bits, 64)
    assert not found[5, 1].isfinite() and found.isfinite().sum() == found.numel() - 1 and not numbers[5, 64:128].any()


def test_factors_are_kept_in_the_fewest_bits_that_hold_them() -> None:
    exact, whole, floats = (filled(8, 64, 4, 32, offsets) for offsets in (None, True, torch.randn(8, 2)))
    assert exact.weight_scale.dtype is torch.float16 and exact.weight_offset is None
    assert whole.weight_offset is not None and whole.weight_offset.dtype is torch.int8
    assert floats.weight_offset is not None and floats.weight_offset.dtype is torch.float32
    assert exact.weight.nbytes == 8 * 32 and exact.weight_scale.shape == (2, 8)
    for linear in (exact, whole, floats):
        kept = {name: (array.dtype, tuple(array.shape)) for name, array in linear.filled_arrays().items()}
        assert linear.array_specs() == kept
        storage = integers_in_groups(4, 32, offsets=linear.weight_offset is not None)
        with torch.device("meta"):  # as when a plan is made
            planned = integer_linear(linear.spec, torch.float32, CPU, integers(NumberKind.INT4, 32), storage)
        assert planned.nbytes >= linear.nbytes


@torch.inference_mode()
def test_a_models_layers_and_its_head_are_rounded() -> None:
    checkpoint = read_checkpoint(saved("llama-gqa").path)
    exact = load_model(checkpoint, SdpaBackend())
    model = load_model(checkpoint, SdpaBackend(), LinearFactory(integers=ROUNDED))
    kinds = {one.spec.name.partition(".")[0]: one.bits for one in linears(model) if isinstance(one, IntegerLinear)}
    assert kinds == {"decoder": 4, "head": 8} and model.dtype is torch.float32
    for ours, theirs in zip(linears(model), linears(exact), strict=True):
        assert isinstance(ours, IntegerLinear)
        weight = theirs.parameter(theirs.spec.weight)
        assert 0 < (ours.weights() - weight).norm() < (0.1 if ours.bits == 4 else 0.01) * weight.norm()
        weight.copy_(ours.weights())
    found, expected = (decoder_logits(one, decoder_prompts()) for one in (model, exact))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_what_is_stored_in_integers_is_multiplied_as_it_is(tmp_path: Path) -> None:
    """Stored integers are used bit for bit without a setting; other projections are rounded from their floats."""
    checkpoint = read_checkpoint(quantised("llama-gqa", tmp_path))
    model, exact = (load_model(checkpoint, SdpaBackend(), LinearFactory(integers=one)) for one in ((), None))
    kept = [one for one in linears(model) if isinstance(one, IntegerLinear)]
    assert {one.bits for one in kept} == {8} and len(kept) == 8
    for ours, theirs in zip(linears(model), linears(exact), strict=True):
        if isinstance(ours, IntegerLinear):
            assert torch.equal(ours.weights(), theirs.parameter("weight"))
    found, expected = (decoder_logits(one, decoder_prompts()) for one in (model, exact))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    spec, asked = LinearSpec("m", 64, (Part(8),), bias=False), integers(NumberKind.INT4, 32)
    block = Storage("fp8", NumberKind.FLOAT8, "weight_scale", (1, 32))
    factory = LinearFactory(integers=(("*", asked),), stored_as={"m": block})
    with torch.device("meta"):
        one = factory(spec)
    assert isinstance(one, DequantizedIntegerLinear)
    scales, weight = torch.rand(8, 2), torch.randn(8, 64).to(torch.float8_e4m3fn)
    one.fill("m.weight_scale", (slice(0, 8),), scales)
    one.fill("m.weight", (slice(0, 8),), weight)
    one.finish()
    wanted = weight.float() * scales.repeat_interleave(32, 1)
    assert (one.weights() - wanted).norm() < 0.1 * wanted.norm()
    with torch.device("meta"):
        stored = LinearFactory(integers=(("*", asked),), stored_as={"m": INT8_ROWS})(spec)
    assert isinstance(stored, IntegerLinear) and (stored.bits, stored.group) == (8, 0)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16 asymmetric", "w8a8 groups"])
def test_published_formats_are_multiplied_as_they_are_stored(name: str, tmp_path: Path) -> None:
    """Zero points take 8 bits, scales 16."""
    stored, _ = folders(CASES[name], tmp_path)
    ours, theirs = (
        load_model(read_checkpoint(stored), SdpaBackend(), LinearFactory(integers=one)) for one in ((), None)
    )
    kept = 0
    for one, other in zip(linears(ours), linears(theirs), strict=True):
        if isinstance(one, IntegerLinear):
            assert torch.equal(one.weights(), other.parameter("weight")) and one.bits == CASES[name].bits
            assert one.weight_scale.dtype.itemsize == 2
            assert one.weight_offset is None or one.weight_offset.dtype is torch.int8
            kept += 1
    assert kept == 4
    found, expected = (decoder_logits(model, decoder_prompts()) for model in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_groups_cannot_express_is_kept_in_the_nearest_that_can(tmp_path: Path) -> None:
    """As in C, inputs in another order than groups get 8 bits, unless another format is set."""
    checkpoint = read_checkpoint(folders(CASES["gptq act-order"], tmp_path)[0])
    for asked, kept in (((), {(8, 128)}), (ROUNDED, {(4, 32), (8, 128)})):
        linear = LinearFactory(integers=asked, quantization="int4-g32" if asked else "none")
        model = load_model(checkpoint, SdpaBackend(), linear)
        assert {(one.bits, one.group) for one in linears(model) if isinstance(one, IntegerLinear)} == kept
        assert len(conversions(checkpoint.config, linear)) == 1


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama-gqa", "gpt2"])
def test_two_ranks_round_their_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is included, whose rows may be the token table's."""
    monkeypatch.setattr(module, "unsupported", lambda device: "ranks are threads here, the interpreter has one")
    checkpoint = read_checkpoint(saved(kind).path)

    @torch.inference_mode()
    def logits(group: object) -> Tensor:
        linear = LinearFactory(integers=ROUNDED_TO_8, collective=group)  # type: ignore[arg-type]
        model = load_model(checkpoint, SdpaBackend(), linear)
        assert isinstance(model.head, IntegerLinear)
        return decoder_logits(model, decoder_prompts())

    expected = decoder_logits(load_model(checkpoint, SdpaBackend()), decoder_prompts())
    ours, theirs = on_ranks(2, logits)
    assert torch.equal(ours, theirs)
    assert 0 < (ours - expected).pow(2).mean().sqrt() < 0.05 * expected.std()


def test_integers_are_served_where_triton_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(saved("llama-gqa").path)

    def loaded(folder: str = path, **settings: str) -> object:
        config = EngineConfig(device="cpu", dtype="float32", kv_cache_memory=1 << 20, **settings)  # type: ignore[arg-type]
        return load(ModelSpec("m", folder, config)).info

    with pytest.raises(ConfigError, match="quantization int4 needs the native backend, or a GPU and Triton: on a CPU"):
        loaded(quantization="int4", attention_backend="sdpa")
    for name in ("int4", "int8"):
        played = loaded(quantization=name, attention_backend="triton")  # in the interpreter
        assert (played.dtype, played.dtype_reason) == (name, "asked for")  # type: ignore[attr-defined]
    monkeypatch.setattr(builder, "compute_first_token", compute_nothing)  # as the one before did
    stored = str(quantised("llama-gqa", tmp_path))
    kept = loaded(stored, attention_backend="triton")
    assert (kept.dtype, kept.dtype_reason) == ("int8", "the checkpoint stores it so")  # type: ignore[attr-defined]
    assert loaded(stored, attention_backend="sdpa").dtype == "float32"  # type: ignore[attr-defined]


def test_each_kind_of_launch_is_compiled_at_start() -> None:
    checkpoint = read_checkpoint(saved("llama-gqa").path)
    model = load_model(checkpoint, SdpaBackend(), LinearFactory(integers=ROUNDED))
    multiplied = []
    for linear in linears(model):
        linear.register_forward_hook(lambda linear, given, _: multiplied.append((linear.spec.name, len(given[0]))))
    assert (
        finish(compile_products(model)) == len(multiplied) == 5 * len(IntegerLinear.tiled_rows)
    )  # of one layer, and the head
