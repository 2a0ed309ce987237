"""How many kernels a recorded decode step launches for each layer on a GPU.

Counted on a CPU: each operator of torch that computes something, each kernel of Triton, and each function that a GPU
gets compiled (`model.network.fused_ops`) is one launch. Triton's kernels are counted and not run. Of few keys, which
are not split: the sum of parts would be one launch more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

from model.attention.triton import TritonBackend
from model.cache.paged import KVCache
from model.engine.execution.cuda_graphs import DecodeGraphs
from model.network import attention, fused_ops, mlp
from model.network.layer import Layer
from tests.engine.support import pools_for
from tests.model.checkpoints import CPU, loaded
from tests.model.launches import KERNELS

ALLOCATES = ("empty", "new_empty")
SUMS = ("_add_rms", "_add_layer", "_add_offset_rms", "_norm_add_norm")
COMPILED = (*((fused_ops, name) for name in SUMS), (mlp, "gated"), (attention, "rotate_both"))


class Launches(TorchDispatchMode):
    """Counts by name what is launched while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._inside = 0  # of something that is one launch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if not (self._inside or name.startswith(ALLOCATES) or (is_view(result, args) and not name.endswith("_"))):
            self.found[name] += 1
        return result

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.found[function.__name__] += 1
            self._inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._inside -= 1

        return call

    def kernel(self, name: str) -> Any:
        class Kernel:
            def __getitem__(_, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *args, **kwargs: self.found.update([name])

        return Kernel()


def is_view(result: Any, args: Any) -> bool:
    """Whether what came back lies where an argument lies."""
    first = result[0] if isinstance(result, (tuple, list)) else result
    places = [arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)]
    return isinstance(first, Tensor) and first.untyped_storage().data_ptr() in places


def of_each_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """What each layer launches in a recorded step."""
    launches = Launches()
    for name, module in KERNELS.items():
        monkeypatch.setattr(module, name, launches.kernel(name))
    for module, name in COMPILED:
        monkeypatch.setattr(module, name, launches.compiled(getattr(module, name)))
    layers: list[Counter[str]] = []
    advance = Layer.advance

    def counted(self: Layer, *args: Any) -> Any:
        launches.found = Counter()
        result = advance(self, *args)
        layers.append(launches.found)
        launches.found = Counter()
        return result

    monkeypatch.setattr(Layer, "advance", counted)
    model = loaded(kind, TritonBackend(), torch.bfloat16)
    assert model.decoder is not None
    pools = pools_for(model.decoder.config, 20)
    cache = KVCache(model.decoder.config, [pool.num_pages for pool in pools], 16, torch.bfloat16, CPU)

    def record(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        run()  # what is made once is made
        layers.clear()
        with launches:
            return run(), lambda: None

    DecodeGraphs(model, cache, max_num_seqs=1, max_model_len=64, record=record).record_all()
    return layers


EXPECTED = {
    "llama-gqa": 9,
    "qwen3": 9,
    "gemma3": 9,
    "gpt-neox": 10,
    "gpt2": 9,
    "bart": 13,
    "t5-relu": 13,
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_launches_of_a_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, second, *_ = of_each_layer(kind, monkeypatch)
    assert sum(second.values()) == EXPECTED[kind], second
