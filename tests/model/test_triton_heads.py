"""One kernel norms and rotates heads and writes keys and values into their pages: results equal float64's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

from tests.model.triton_cases import DEVICES
from triptych.model.attention.base import HeadNorm, Preparation
from triptych.model.attention.triton_heads import prepare
from triptych.model.cache.kv_cache import LayerCache, plain
from triptych.model.network.positions import rotate

pytestmark = pytest.mark.usefixtures("poisoned")
BLOCK = 4


@dataclass(frozen=True)
class Heads:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    turned: int = 16  # rotated dimensions; 0: no rotation
    norm: str = ""  # rms, layer or layer-no-bias
    pages: str = "float32"  # "": packed rows
    interleaved: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        norm, pages, dtype = self.norm or "no-norm", self.pages or "packed", str(self.dtype).removeprefix("torch.")
        turned = f"turned{self.turned}" + "-interleaved" * self.interleaved
        return f"{self.heads}x{self.kv_heads}x{self.dim}-{turned}-{norm}-{pages}-{dtype}"


CASES = [
    Heads(),  # Llama
    Heads(norm="rms", heads=6, kv_heads=3, dim=24, turned=24),  # Qwen3; heads and dimensions that are no powers of two
    Heads(norm="rms", pages="int8", dtype=torch.bfloat16),
    Heads(norm="rms", pages="float8_e4m3fn", dtype=torch.bfloat16),
    Heads(turned=6, dim=20, kv_heads=4),  # GPT-NeoX turns a part
    Heads(turned=6, dim=20, norm="rms", interleaved=True),  # GPT-J turns neighbours
    Heads(turned=0, norm="layer"),
    Heads(turned=4, norm="layer", pages="int8"),
    Heads(turned=8, norm="layer-no-bias", pages=""),
    Heads(pages="", dtype=torch.float16),  # rotary encoders
    Heads(pages="", norm="rms", dtype=torch.bfloat16, heads=2, kv_heads=1, dim=12, turned=12),
    Heads(pages="bfloat16", norm="rms", dtype=torch.bfloat16, heads=5, kv_heads=1, dim=80, turned=32),
]


def make_norm(case: Heads, device: torch.device) -> HeadNorm | None:
    if not case.norm:
        return None
    gain = (1 + 0.3 * torch.randn(case.dim)).to(case.dtype).to(device)
    bias = (0.3 * torch.randn(case.dim)).to(case.dtype).to(device) if case.norm == "layer" else None
    return HeadNorm(gain, bias, 1e-2, centred=case.norm != "rms")


def exact(x: Tensor, norm: HeadNorm | None, rotary: tuple[Tensor, Tensor] | None, *, interleaved: bool) -> Tensor:
    x = x.double()
    if norm is not None:
        x = x - x.mean(-1, keepdim=True) if norm.centred else x
        x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.gain.double()
        x = x if norm.bias is None else x + norm.bias.double()
    if rotary is None:
        return x
    return rotate(x, (rotary[0].double(), rotary[1].double()), interleaved=interleaved)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_heads_are_prepared_and_kept(case: Heads, device: torch.device) -> None:
    torch.manual_seed(3)
    slots = torch.tensor([9, -1, 2, 7, -1], device=device)
    rows = len(slots)
    columns = torch.randn(rows, (case.heads + 2 * case.kv_heads) * case.dim).to(case.dtype).to(device)
    heads = columns.unflatten(-1, (-1, case.dim))
    query, key, value = heads.split((case.heads, case.kv_heads, case.kv_heads), dim=1)
    norms = (make_norm(case, device), make_norm(case, device))
    angles = torch.rand(rows, 1, case.turned) * 7
    rotary = (angles.cos().to(case.dtype).to(device), angles.sin().to(case.dtype).to(device)) if case.turned else None
    pages = None
    if case.pages:
        shape = (3, BLOCK, case.kv_heads, case.dim)
        kind = getattr(torch, case.pages)
        empty = torch.full(shape, 96, device=device).to(kind)
        scales = (torch.full(shape[:3], 5.0, device=device), torch.full(shape[:3], 5.0, device=device))
        pages = LayerCache(empty, empty.clone(), scales if kind.itemsize == 1 else None)
    found, keys = prepare(query, key, value, Preparation(*norms, rotary, case.interleaved), pages, slots)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[case.dtype]
    torch.testing.assert_close(
        found.double(), exact(query, norms[0], rotary, interleaved=case.interleaved), rtol=tolerance, atol=tolerance
    )
    assert found.dtype is case.dtype and found.is_contiguous()
    expected = exact(key, norms[1], rotary, interleaved=case.interleaved)
    if pages is None:
        torch.testing.assert_close(keys.double(), expected, rtol=tolerance, atol=tolerance)
        return
    there = slots[slots >= 0]
    table = torch.arange(3, device=device)[None]
    for kept, wanted in zip(pages.read(table, 3 * BLOCK), (expected, value.double()), strict=True):
        level = {"int8": 1.05 / 127 / 2, "float8_e4m3fn": 1.05 / 16}.get(case.pages, 0.0) * wanted.abs().amax().item()
        torch.testing.assert_close(
            kept[0, there].double(), wanted[slots >= 0], rtol=tolerance, atol=max(tolerance, level + 1e-5)
        )
    others = [at for at in range(3 * BLOCK) if at not in there.tolist()]
    for tensor in (pages.keys, pages.values):
        assert (plain(tensor).flatten(0, 1)[others].view(tensor.dtype).float() == 96).all()
    for scale in pages.scales or ():
        assert (scale.flatten(0, 1)[others] == 5.0).all()


def test_8_bits_are_those_that_the_cache_writes() -> None:
    """Keys without an effective norm or rotation are copied exactly, including ties."""
    torch.manual_seed(1)
    rows, heads, dim = 33, 3, 16
    key, value = (torch.randint(-254, 255, (rows, heads, dim)).float() / 4 for _ in range(2))
    shape = (rows, 1, heads, dim)
    made = [
        LayerCache(
            torch.zeros(shape, dtype=torch.int8),
            torch.zeros(shape, dtype=torch.int8),
            (torch.zeros(shape[:3]), torch.zeros(shape[:3])),
        )
        for _ in range(2)
    ]
    slots = torch.randperm(rows)
    still = (torch.ones(rows, 1, dim), torch.zeros(rows, 1, dim))
    prepare(key, key, value, Preparation(rotary=still), made[0], slots)
    made[1].write(slots, key, value)
    assert torch.equal(made[0].keys, made[1].keys) and torch.equal(made[0].values, made[1].values)
    assert made[0].scales is not None and made[1].scales is not None
    assert all(map(torch.equal, made[0].scales, made[1].scales))
