"""Products of integers that share scales in groups: exact against float64, and independent of other rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.model.checkpoints import native_backends
from triptych.model.config.formats import (
    FLOAT,
    INT8_ROWS,
    QUANTIZED_LAYERS,
    NumberFormat,
    NumberKind,
    Storage,
    integers_in_groups,
    joined,
)
from triptych.model.linear.base import Linear, LinearSpec, Part
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.native import GivenIntegersLinear, NativeLinear, packed_linear
from triptych.model.native.library import Kind, Library

KINDS = (Kind.INT4, Kind.INT8)
GROUPS = (32, 64, 128)
FLOATS = NumberFormat(NumberKind.FLOAT32, NumberKind.FLOAT32)
SHAPES = [(7, 5), (100, 37), (48, 1152)]

pytestmark = pytest.mark.skipif(not native_backends(), reason="there is no GCC here")


def library() -> Library:
    return native_backends()[0].library


def unpacked(linear: NativeLinear) -> tuple[Tensor, Tensor]:
    """Return integers `[n, groups, group]` and scales `[n, groups]` from panels as matrix.h describes."""
    n, group, groups = linear.spec.num_outputs, linear.group, linear.num_groups
    data = linear.arrays["data"]
    if linear.kind is Kind.INT4:
        pairs = data.view(-1, groups * group // 8, 16, 4)
        rows = torch.stack([pairs & 15, pairs >> 4], 2).permute(0, 3, 1, 2, 4).to(torch.int8) - 8
    else:
        rows = data.view(torch.int8).view(-1, groups * group // 4, 16, 4).permute(0, 2, 1, 3)
    scales = linear.arrays["scale"].view(torch.float32).view(-1, groups, 16).transpose(1, 2)
    return rows.reshape(-1, groups, group)[:n], scales.reshape(-1, groups)[:n]


def exact(linear: NativeLinear, x: Tensor) -> Tensor:
    """Return the product in float64 of the packed numbers with rows in 8 bits, with a scale for each group."""
    integers, scales = unpacked(linear)
    weight = integers * scales[:, :, None].double()
    if "offset" in linear.arrays:
        offsets = linear.arrays["offset"].view(torch.float32).view(-1, linear.num_groups, 16).transpose(1, 2)
        weight += offsets.reshape(-1, linear.num_groups)[: len(weight), :, None]
    groups = pad(x, (0, linear.num_groups * linear.group - x.shape[1])).unflatten(1, (-1, linear.group))
    most = groups.abs().amax(2)
    inverse = torch.where(most > 0, 127.0 / most, torch.zeros(()))
    rounded = (groups * inverse[:, :, None]).round().double() * (most / 127.0)[:, :, None]
    return rounded.flatten(1) @ weight.flatten(1).T


def must_be_exact_and_alone(linear: NativeLinear, x: Tensor) -> None:
    together, expected = linear(x), exact(linear, x)
    if linear.spec.bias:
        expected += linear.arrays["bias"].view(torch.float32)[: linear.spec.num_outputs]
    # a number halfway between two integers may be rounded either way here: that is half a step of a row's scale
    assert (together - expected).abs().max() < 1e-3 * expected.abs().max()
    assert (together - expected).abs().median() < 1e-6 * expected.abs().max()
    for first, last in ((0, 1), (49, 50), (7, 9), (0, 3), (46, 50), (0, 5), (10, 18), (0, 9), (33, 50), (0, 31)):
        assert torch.equal(linear(x[first:last]), together[first:last])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_exact_whatever_the_neighbours(n: int, k: int, group: int, kind: Kind) -> None:
    weight, bias = torch.randn(n, k) * torch.randn(n, 1).exp(), torch.randn(n)
    packed = packed_linear(library(), weight, bias if n % 2 else None, kind, group)
    must_be_exact_and_alone(packed, torch.randn(50, k))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("n", "k"), [(7, 5), (33, 700)])
def test_given_integers_are_multiplied_exactly(n: int, k: int, offsets: bool, group: int, bits: int) -> None:
    """Multiply integers, scales and zero points of a checkpoint; rows of one sign make offsets matter.

    Torch computes with the numbers that they stand for; scales have 16 bits like published ones.
    """
    storage, most = integers_in_groups(bits, group, offsets=offsets), 1 << (bits - 1)
    spec, groups = LinearSpec("matrix", k, (Part(n),), bias=n % 2 == 0), -(-k // group)
    given = torch.randint(-most, most, (n, k), dtype=torch.int8)
    given[n // 2] = -most
    scales = (torch.rand(n, groups) / most).half()
    zeros = torch.randint(-most, most, (n, groups))
    tensors = {"weight_scale": scales, "weight_offset": -scales.float() * zeros, "weight": given}
    factory = LinearFactory(stored_as={"matrix": storage}, library=library(), native=(("matrix", FLOATS),))
    linear, by_torch = factory(spec), replace(factory, native=())(spec)
    for one in (linear, by_torch):
        assert one.tensors().keys() - {"matrix.bias"} == {f"matrix.{name}" for name in storage.tensors}
        for name in storage.tensors:
            for first, last in ((n // 2, n), (0, 2), (2, n // 2)):
                one.fill(f"matrix.{name}", (slice(first, last),), tensors[name][first:last])
        one.finish()
    stood_for = (given - zeros.repeat_interleave(group, 1)[:, :k] * offsets) * spread(scales, group, k)
    assert torch.equal(by_torch.parameter("matrix.weight"), stood_for)
    assert isinstance(linear, GivenIntegersLinear)
    assert (linear.kind, linear.group) == (Kind.INT4 if bits == 4 else Kind.INT8, group)
    assert torch.equal(unpacked(linear)[0].flatten(1)[:, :k], given)
    assert torch.equal(unpacked(linear)[1][:, :groups], scales.float())
    assert linear.nbytes == sum(array.nbytes for array in linear.arrays.values())
    x = torch.randn(50, k)
    must_be_exact_and_alone(linear, torch.cat([x[:25], x[25:].abs()]))
    if not spec.bias:
        product = linear(x)
        assert (product - x @ stood_for.T).norm() < 0.01 * product.norm()


@pytest.mark.parametrize("storage", [INT8_ROWS, *(integers_in_groups(bits, 32, offsets=bits == 4) for bits in (4, 8))])
def test_experts_whose_integers_are_given_are_those_of_each_alone(storage: Storage) -> None:
    experts, outputs, inputs = 3, 21, 70
    groups = storage.scales_of(inputs)
    tensors = {
        "weight_scale": torch.rand(experts * outputs, groups) / 100,
        "weight_offset": torch.randn(experts * outputs, groups) / 10,
        "weight": torch.randint(-8, 8, (experts * outputs, inputs), dtype=torch.int8),
    }

    def made(name: str, rows: slice, count: int) -> Linear:
        factory = LinearFactory(stored_as={name: storage}, library=library(), native=(("*", FLOATS),))
        linear = factory(LinearSpec(name, inputs, (Part(outputs),), bias=False, experts=count))
        for tensor in storage.tensors:
            values = tensors[tensor][rows]
            for first, last in pairwise(range(0, len(values) + 1, 7)):
                linear.fill(f"{name}.{tensor}", (slice(first, last),), values[first:last])
        return linear

    x, starts = torch.randn(9, inputs), torch.tensor([0, 4, 4, 9])
    y = made("all", slice(None), experts).of_experts(x, starts)
    for expert, rows in ((0, slice(0, 4)), (2, slice(4, 9))):
        assert torch.equal(y[rows], made("one", slice(expert * outputs, (expert + 1) * outputs), 1)(x[rows]))


@pytest.mark.parametrize(
    "storage",
    [INT8_ROWS, integers_in_groups(4, 32, offsets=True), replace(FLOAT, nearest=(8, 32))],
    ids=lambda one: one.name,
)
def test_what_must_be_exact_is_in_floats_however_it_is_stored(storage: Storage) -> None:
    """An example is a router, whose rows C reads as floats."""
    outputs, inputs = 5, 70
    groups = storage.scales_of(inputs)
    tensors = {
        "weight_scale": torch.rand(outputs, groups),
        "weight_offset": torch.randn(outputs, groups),
        "weight": torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8),
    }
    int8 = QUANTIZED_LAYERS["int8"][0]
    factory = LinearFactory(stored_as={"m": storage}, library=library(), native=(("*", int8),))
    linear = factory(LinearSpec("m", inputs, (Part(outputs),), bias=False, exact=True))
    for tensor in storage.tensors:
        linear.fill(f"m.{tensor}", (slice(0, outputs),), tensors[tensor])
    stands_for = tensors["weight"].float()
    if storage.scale is not None:
        stands_for = stands_for * spread(tensors["weight_scale"], storage.block[1] or inputs, inputs)
    if storage.offset is not None:
        stands_for = stands_for + spread(tensors["weight_offset"], storage.block[1], inputs)
    assert isinstance(linear, NativeLinear) and linear.kind is Kind.F32
    x = torch.randn(9, inputs)
    torch.testing.assert_close(linear(x), x @ stands_for.T)


def spread(factors: Tensor, group: int, k: int) -> Tensor:
    return factors.float().repeat_interleave(group, 1)[:, :k]


def test_integers_that_are_fused_have_the_storage_that_holds_all() -> None:
    int4, int8 = integers_in_groups(4, 64, offsets=True), integers_in_groups(8, 128, offsets=False)
    assert joined([int4, int4]) == int4
    assert joined([int4, int8]) == joined([int8, int4]) == integers_in_groups(8, 64, offsets=True)
    assert joined([int4, FLOAT]) is None and joined([INT8_ROWS, int8]) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_packed_alike_whatever_their_order_and_number(kind: Kind, dtype: torch.dtype) -> None:
    n, k = 65, 200
    weight = torch.randn(n, k).to(dtype)
    weight[0], weight[-1, k // 2] = 0, 1e-38
    pieces = NativeLinear(LinearSpec("matrix", k, (Part(n),), bias=False), kind, dtype, library(), 64)
    for first, last in reversed(list(pairwise([0, 3, 33, 64, n]))):
        pieces.fill("matrix.weight", (slice(first, last),), weight.T.contiguous().T[first:last])
    whole = packed_linear(library(), weight, None, kind, 64)
    assert whole.arrays.keys() == pieces.arrays.keys() == {"data", "scale"}
    assert whole.nbytes == sum(array.nbytes for array in whole.arrays.values())
    for name, array in whole.arrays.items():
        assert torch.equal(array, pieces.arrays[name]), name
    integers, scales = unpacked(whole)
    assert not (integers[0] * scales[0, :, None]).any()


@pytest.mark.parametrize(("kind", "most"), [(Kind.INT4, 0.100), (Kind.INT8, 0.0070)])
def test_what_is_packed_is_close_to_the_weights(kind: Kind, most: float) -> None:
    weight = torch.randn(64, 512)
    integers, scales = unpacked(packed_linear(library(), weight, None, kind, 128))
    error = (integers * scales[:, :, None]).flatten(1) - weight
    assert error.norm() < most * weight.norm()


def test_the_scale_of_4_bits_loses_less_than_the_largest_value_would() -> None:
    weight = torch.randn(64, 512) ** 3  # with outliers
    groups = weight.unflatten(1, (-1, 32))
    integers, scales = unpacked(packed_linear(library(), weight, None, Kind.INT4, 32))
    ours = (integers * scales[:, :, None] - groups).pow(2).sum(2)
    at = groups.abs().argmax(2, keepdim=True)
    plain = groups.gather(2, at) / -8
    theirs = ((groups / plain).round().clamp(-8, 7) * plain - groups).pow(2).sum(2)
    assert bool((ours <= theirs * 1.0001).all())
    assert ours.sum() < 0.95 * theirs.sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [3, 40])
def test_what_is_no_number_spoils_its_row_alone(kind: Kind, bad: float, rows: int) -> None:
    packed, x = packed_linear(library(), torch.randn(20, 100), None, kind, 32), torch.randn(rows, 100)
    clean = packed(x)
    x[1, 36] = bad
    spoilt, others = packed(x), torch.arange(rows) != 1
    assert not spoilt[1].isfinite().any()
    assert torch.equal(spoilt[others], clean[others])


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_no_number_spoils_its_output_alone(kind: Kind) -> None:
    weight = torch.randn(40, 100)
    weight[17, 29] = float("nan")
    spoilt = packed_linear(library(), weight, None, kind, 64)(torch.randn(9, 100)).isnan()
    assert spoilt.all(dim=0).nonzero().flatten().tolist() == spoilt.any(dim=0).nonzero().flatten().tolist() == [17]


def test_an_outlier_costs_its_group_alone() -> None:
    """Scales for whole rows lose precision where one input is a hundred times larger than the others, as in OPT."""
    weight, x = torch.randn(64, 512) / 8, torch.randn(16, 512)
    x[:, 7] *= 300
    weight[:, 7] /= 300
    expected = x @ weight.T
    by_row, by_group = (
        (packed_linear(library(), weight, None, Kind.INT8, group)(x) - expected).norm() / expected.norm()
        for group in (0, 128)
    )
    assert by_group < 0.5 * by_row


@pytest.mark.parametrize(("kind", "group"), [*((kind, group) for kind in KINDS for group in GROUPS), (Kind.INT8, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_quantised_as_they_are_packed(kind: Kind, group: int, dtype: torch.dtype) -> None:
    n, k = 33, 200
    weight = (torch.randn(n, k) * torch.randn(n, 1).exp()).to(dtype)
    weight[0] = 0
    integers, scales = library().quantise_rows(weight, kind, group)
    packed = packed_linear(library(), weight, None, kind, group)
    if group:
        expected, expected_scales = unpacked(packed)
        assert torch.equal(scales, expected_scales[:, : scales.shape[1]])
        assert torch.equal(integers, expected.flatten(1)[:, :k])
        return
    given = NativeLinear(packed.spec, kind, dtype, library())
    library().pack_rows(given.matrix, 0, integers)
    assert torch.equal(given.arrays["data"], packed.arrays["data"])
    assert torch.equal(scales[:, 0], packed.arrays["scale"].view(torch.float32)[:n])


@pytest.mark.parametrize(
    ("kind", "group"), [(Kind.F32, 0), (Kind.BF16, 0), (Kind.INT8, 0), (Kind.INT8, 32), (Kind.INT4, 128)]
)
def test_rows_are_unpacked_as_they_were_packed(kind: Kind, group: int) -> None:
    for n, k in SHAPES:
        weight = torch.randn(n, k).bfloat16() if kind is Kind.BF16 else torch.randn(n, k)
        expected, ids = weight, torch.tensor([n - 1, 0, 3, 0, -1, n])
        if kind in KINDS:
            integers, scales = library().quantise_rows(weight, kind, group)
            expected = integers * scales.repeat_interleave(group or k, dim=1)[:, :k]
        found = packed_linear(library(), weight, None, kind, group).rows(ids)
        assert torch.equal(found[:4], expected[ids[:4]]) and not found[4:].any()


def test_errors_that_count_more_are_smaller() -> None:
    weight, counts = torch.randn(64, 256), torch.randn(256).exp().square()
    counts[64:128] = 0
    losses = []
    for weights in (None, counts, torch.ones(256)):
        integers, scales = library().quantise_rows(weight, Kind.INT4, 64, weights)
        error = (integers * scales.repeat_interleave(64, dim=1) - weight).square()
        losses.append((float((error * counts).sum()), float(error.sum())))
    plain, weighted, even = losses
    assert weighted[0] < 0.9 * plain[0]
    assert 0.99 * plain[1] < even[1] <= plain[1] < weighted[1]
    with pytest.raises(ValueError, match="for 4 bits"):
        library().quantise_rows(weight, Kind.INT8, 64, counts)


@pytest.mark.parametrize(
    ("kind", "group"), [(Kind.F32, 0), (Kind.BF16, 0), (Kind.INT8, 0), (Kind.INT8, 128), (Kind.INT4, 32)]
)
def test_each_expert_is_packed_as_a_matrix_of_its_own(kind: Kind, group: int) -> None:
    torch.manual_seed(0)
    experts, outputs, inputs = 3, 21, 70
    weight, bias, x = torch.randn(experts * outputs, inputs), torch.randn(experts * outputs), torch.randn(9, inputs)
    together = NativeLinear(
        LinearSpec("all", inputs, (Part(outputs),), experts=experts), kind, torch.float32, library(), group
    )
    for first, last in pairwise((0, 5, 30, 42, 63)):  # however many rows come at a time
        together.fill("all.weight", (slice(first, last),), weight[first:last])
        together.fill("all.bias", (slice(first, last),), bias[first:last])
    y = together.of_experts(x, torch.tensor([0, 4, 4, 9]))
    for expert, rows in ((0, slice(0, 4)), (2, slice(4, 9))):
        own = slice(expert * outputs, (expert + 1) * outputs)
        alone = packed_linear(library(), weight[own], bias[own], kind, group)
        assert torch.equal(y[rows], alone(x[rows]))
        assert torch.equal(y[rows.start], alone(x[rows.start : rows.start + 1])[0])
