"""Compiles what models' checks launch for an absent GPU: `python -m tests.model.compiled_checks 90 MODEL...`.

In a process without TRITON_INTERPRET. Nothing is computed, so numbers are not compared. It prints what cannot be
compiled.
"""

from __future__ import annotations

import sys

import torch

from lab.bench.gpu.pretended import compiled, pretend
from lab.bench.gpu.self_check import checks_of
from triptych.model.kernel_check import attention_checks, product_checks, step_checks
from triptych.model.kernel_check.check import WrongNumbersError


def main() -> None:
    capability, names = int(sys.argv[1]), sys.argv[2:]
    pretend(capability)
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    for module in (attention_checks, product_checks, step_checks):
        module.compare = lambda *_: None  # type: ignore[attr-defined]
    variants = 0
    for name in names:
        for check in checks_of(name, torch.device("cuda"), torch.bfloat16, tiny=False):
            with compiled() as found:
                try:
                    check.run(torch.device("cpu"))
                except WrongNumbersError:
                    pass  # exact results are compared by themselves
                except Exception as error:
                    print(f"{name}: {check}: {type(error).__name__}: {error}")
            variants += len(found)
    print(f"{variants} variants")


if __name__ == "__main__":
    main()
