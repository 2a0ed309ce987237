"""The number of kernels that a recorded decode step launches for each layer on a GPU, and of its host's waits.

Launches are counted on a CPU: each computing operator of torch, each Triton kernel, and each function that is
compiled for GPUs (`triptych.model.network.fused_ops`) is one. Triton's kernels are counted and not run. The steps have
few keys, which are not split: joining parts would be one launch more.
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

from tests.engine.support import pools_for, request
from tests.model.checkpoints import CPU, loaded, saved
from tests.model.launches import KERNELS
from triptych.model.attention.triton import TritonBackend
from triptych.model.cache.kv_cache import KVCache
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.cache import StateSize
from triptych.model.config.formats import QUANTIZED_LAYERS
from triptych.model.engine.execution import step_logits
from triptych.model.engine.execution.cuda_graphs import DecodeGraphs
from triptych.model.engine.execution.model_runner import ModelRunner
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.scheduler import Scheduler
from triptych.model.linear import triton_fp8, triton_integers
from triptych.model.linear.factory import LinearFactory
from triptych.model.network import attention, feed_forward, fused_ops
from triptych.model.network.layer import Layer
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_model
from triptych.model.sampling import random_sampling, sampler, triton_sampling
from triptych.model.system.background_work import finish
from triptych.model.system.devices import HostCopy

ALLOCATES = ("empty", "new_empty")
SUMS = ("_add_rms", "_add_layer", "_add_offset_rms", "_norm_add_norm")
COMPILED = (
    *((fused_ops, name) for name in SUMS),
    (feed_forward, "gated"),
    (fused_ops, "_turns"),
    (attention, "sigmoid_gated"),
)


class Launches(TorchDispatchMode):
    """Counts launches by name while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._inside = 0  # nested calls of something that is one launch

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
    """Whether a result shares an argument's memory."""
    first = result[0] if isinstance(result, (tuple, list)) else result
    places = [arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)]
    return isinstance(first, Tensor) and first.untyped_storage().data_ptr() in places


PRODUCTS = {"grouped_product": triton_integers, "quantize": triton_fp8, "scaled_product": triton_fp8}


def of_each_layer(
    kind: str, monkeypatch: pytest.MonkeyPatch, linear: LinearFactory | None = None
) -> list[Counter[str]]:
    """Return the launches of each layer in a recorded step."""
    launches = Launches()
    for name, module in (KERNELS | PRODUCTS).items():
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
    linear = linear or LinearFactory(torch.bfloat16)
    model = load_model(read_checkpoint(saved(kind).path), TritonBackend(), linear)
    assert model.decoder is not None
    pools = pools_for(model.decoder.config, 20)
    cache = KVCache(model.decoder.config, [pool.num_pages for pool in pools], 16, torch.bfloat16, CPU, num_states=4)

    def record(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        run()  # what is made once is made
        layers.clear()
        with launches:
            return run(), lambda: None

    finish(DecodeGraphs(model, cache, max_num_seqs=1, max_model_len=64, record=record).record_each())
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
    first, second, *_ = of_each_layer(kind, monkeypatch)
    assert sum(second.values()) == EXPECTED[kind], second
    # One launch makes the angles of a step; the first layer has a norm of its own in addition, or T5's table.
    assert first["turns"] == (kind in ("llama-gqa", "qwen3", "gemma3", "gpt-neox"))
    assert sum(first.values()) <= EXPECTED[kind] + first["turns"] + 2, first


def test_launches_of_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch between its projections; in addition the MLP's three launches, and two sums with norms."""
    _, attends, recurs = of_each_layer("qwen3-5", monkeypatch)
    assert recurs["step_states"] == 1
    assert sum(recurs.values()) == 9, recurs
    assert sum(attends.values()) == EXPECTED["qwen3"] + 2, attends  # the angles of a step, the gate of its outputs


@pytest.mark.parametrize("name", ["int4", "int8-g128", "fp8"])
def test_launches_of_a_layer_with_weights_in_fewer_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers need no launches more; fp8 quantises the inputs, once for each of the four products."""
    patterns = ("decoder.layers.*",)
    linear = LinearFactory(torch.bfloat16, fp8=patterns)
    if name != "fp8":
        linear = LinearFactory(torch.bfloat16, integers=((*patterns, QUANTIZED_LAYERS[name][0]),))
    _, layer, *_ = of_each_layer("qwen3", monkeypatch, linear)
    products = {"quantize": 4, "scaled_product": 4} if name == "fp8" else {"grouped_product": 4}
    assert {kernel: count for kernel, count in layer.items() if kernel in PRODUCTS} == products
    assert sum(layer.values()) == EXPECTED["qwen3"] - 4 + sum(products.values()), layer


class Waits(TorchDispatchMode):
    """Counts operations that make a host wait for its device: reads of values, and shapes that depend on values."""

    OPERATORS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "unique", "equal", "allclose")
    METHODS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.steps = 0
        self._on = False
        for name in self.METHODS:
            monkeypatch.setattr(Tensor, name, self._counted(name, getattr(Tensor, name)))

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.found[name] += self._on
            return method(*args, **kwargs)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name.startswith("index") and any(
            isinstance(one, Tensor) and one.dtype is torch.bool
            for one in (args[1] if isinstance(args[1], list) else ())
        )
        self.found[name] += name.startswith(self.OPERATORS) or masks
        return func(*args, **(kwargs or {}))

    def within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            self._on = True
            try:
                with self:
                    return function(*args, **kwargs)
            finally:
                self._on = False

        return call


class FirstTokens:
    """A fake of the sampling kernel that always draws token 0."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(logits: Tensor, tokens: Tensor, *_: Any, **__: Any) -> None:
            tokens.zero_()

        return launch


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("graphs", [False, True], ids=["", "graphs"])
@pytest.mark.parametrize("kind", ["llama-gqa", "qwen3-5"])
def test_a_steady_decode_waits_once_a_step(
    kind: str, params: Any, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the tokens of the previous step; nothing else between a step's inputs and its tokens waits."""
    for name, module in KERNELS.items():
        monkeypatch.setattr(module, name, Launches().kernel(name))
    monkeypatch.setattr(triton_sampling, "sampling_kernel", FirstTokens())
    monkeypatch.setattr(random_sampling, "_kernel", lambda device: triton_sampling)
    monkeypatch.setattr(sampler, "likeliest", lambda logits: logits.nan_to_num().argmax(dim=-1))  # as on a GPU
    model = loaded(kind, TritonBackend())
    assert model.decoder is not None
    pools = pools_for(model.decoder.config, 60)
    states = StateSize(4, 4) if model.decoder.config.recurrences else None
    cache = KVCache(model.decoder.config, [pool.num_pages for pool in pools], 4, torch.float32, CPU, num_states=12)
    recorded = DecodeGraphs(model, cache, max_num_seqs=4, max_model_len=64, record=replaying) if graphs else None
    if recorded is not None:
        finish(recorded.record_each())
    blocks = BlockManager(pools, 4, states=states)
    runner, scheduler = ModelRunner(model, cache, blocks, recorded), Scheduler(blocks, 4, 64)
    engine = GenerateEngine(kind, runner, scheduler, max_model_len=64, overlap=True)
    for number in range(3):
        engine.add(request(kind, f"r{number}", 5 + number, number, max_tokens=30, **params))
    for _ in range(4):
        engine.step()
    waits, read = Waits(monkeypatch), Counter[str]()
    if graphs:
        monkeypatch.setattr(runner._program, "run", waits.within(runner._program.run))
    else:
        monkeypatch.setattr(Transformer, "decode", waits.within(Transformer.decode))
    for part in ("process_logits", "choose"):
        monkeypatch.setattr(step_logits, part, waits.within(getattr(step_logits, part)))
    get = HostCopy.get
    monkeypatch.setattr(HostCopy, "get", lambda self: read.update(["get"]) or get(self))
    for _ in range(6):
        engine.step()
    assert waits.steps == 3 * 6
    assert +waits.found == Counter()
    assert read["get"] == 6


def replaying(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
    result = run()
    return result, lambda: result.copy_(run())
