"""The process that checks kernels, with one that writes where it must not: `self_check --crash` starts it."""

from __future__ import annotations

import torch
import triton
from triton import language as tl

from triptych.model.kernel_check import child
from triptych.model.kernel_check.attention_checks import PreparationCheck


@triton.jit
def write_far(x, AWAY: tl.constexpr):
    """Write far beyond every allocation."""
    tl.store(x + tl.program_id(0).to(tl.int64) + AWAY, 1.0)


def crash(check: PreparationCheck, device: torch.device) -> None:
    write_far[(1,)](torch.zeros(1, device=device), AWAY=1 << 42)


def main() -> None:
    setattr(PreparationCheck, "run", crash)  # noqa: B010
    child.main()


if __name__ == "__main__":
    main()
