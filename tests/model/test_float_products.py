"""Products of floats on a GPU: the kernel of one row in the interpreter, and outputs that 8 does not divide."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from triptych.model.linear import float as float_linear
from triptych.model.linear.base import LinearSpec, Part
from triptych.model.linear.float import FloatLinear, row_kernel_kind, unaligned_product

CUDA = torch.device("cuda")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(7, 1100), (64, 2048), (33, 40)])
def test_one_row_is_multiplied_in_float32(outputs: int, inputs: int, bias: bool) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from triptych.model.linear.triton_floats import multiply_row

    torch.manual_seed(0)
    x, weight, b = torch.randn(1, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    x, weight, b = x.half(), weight.half(), b.half()
    found = multiply_row(x, weight, b if bias else None)
    expected = functional.linear(x.float(), weight.float(), b.float() if bias else None)
    assert found.dtype is torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=2**-10, atol=1e-3)


@pytest.mark.parametrize("outputs", [50_257, 4_097])
def test_outputs_that_8_does_not_divide_are_multiplied_in_two_parts(outputs: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 16), torch.randn(outputs, 16), torch.randn(outputs)
    found = unaligned_product(x, weight, bias)
    assert found.shape == (3, outputs) and found.stride(0) % 64 == 0
    torch.testing.assert_close(found, functional.linear(x, weight, bias))


def test_a_small_matrix_or_another_device_has_no_kernel_of_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(outputs: int, device: torch.device) -> object:
        return row_kernel_kind(FloatLinear(LinearSpec("a", 1024, (Part(outputs),)), torch.float16, device))

    assert kind(1024, CUDA) == (True, True, True)
    assert kind(1031, CUDA) == (True, False, True)
    assert kind(1000, CUDA) is None
    assert kind(1024, torch.device("cpu")) is None
    monkeypatch.setattr(float_linear, "has_triton", lambda device: True)
    weight = torch.empty(1024, 1024, dtype=torch.float16)
    assert float_linear.has_row_kernel(weight[:1], weight)
    assert not float_linear.has_row_kernel(weight[:2], weight)
    assert not float_linear.has_row_kernel(weight[:1].bfloat16(), weight)
