"""Selection of the attention backend, and its logged reason."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

import pytest
import torch

import triptych.model.attention.selection as selection
from triptych.model.attention.base import AttentionBackend
from triptych.model.attention.layer_backends import PerLayerBackend, backend_of
from triptych.model.attention.reference import ReferenceBackend
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.attention.selection import Selection, select_backend, select_layers
from triptych.model.config.attention import AttentionConfig
from triptych.model.config.cache import PagedSpec
from triptych.model.config.layer import Activation, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import EmbeddingConfig, ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def installed(monkeypatch: pytest.MonkeyPatch, there: bool, capability: tuple[int, int] = (9, 0)) -> None:
    """Simulate a GPU of that capability, with Triton or without."""
    monkeypatch.setattr(selection, "find_spec", lambda name: ModuleSpec(name, None) if there else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(selection, "_tried", lambda device, dtype: None)


@with_triton
@pytest.mark.parametrize("wanted", ["auto", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_gets_triton(monkeypatch: pytest.MonkeyPatch, wanted: str, dtype: torch.dtype) -> None:
    installed(monkeypatch, True)
    found = select_backend(GPU, dtype, wanted)
    assert found.backend.name == "triton"
    assert found.reason == f"triton {sys.modules['triton'].__version__}: pages read in place"
    assert found.library is None


@pytest.mark.parametrize(
    ("there", "capability", "reason"),
    [
        (False, (9, 0), "triton is not installed (it comes with PyTorch's CUDA build)"),
        (True, (7, 5), "the GPU is older than compute capability 8.0"),
    ],
)
def test_a_gpu_without_it_gets_torch_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, there: bool, capability: tuple[int, int], reason: str
) -> None:
    installed(monkeypatch, there, capability)
    found = select_backend(GPU)
    assert (found.backend.name, found.reason) == ("sdpa", f"torch scaled_dot_product_attention: {reason}")
    with pytest.raises(ConfigError, match=f"the triton backend cannot be had: {reason[:20]}"):
        select_backend(GPU, wanted="triton")


def test_torch_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, True)
    for device in (CPU, GPU):
        assert select_backend(device, wanted="sdpa").reason == "torch scaled_dot_product_attention: asked for"
    with pytest.raises(ConfigError, match="no native backend for cuda"):
        select_backend(GPU, wanted="native")


def test_a_cpu_never_gets_triton_unasked_and_outside_of_tests_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, True)
    assert select_backend(CPU).backend.name != "triton"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="no Triton kernels for cpu"):
        select_backend(CPU, wanted="triton")


@with_triton
@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            RuntimeError("Failed to find C compiler. Please specify.\nmore"),
            "Failed to find C compiler. Please specify.",
        ),
        (OSError(30, "Read-only file system"), "[Errno 30] Read-only file system"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_what_stands_in_its_way_is_found_at_start(
    monkeypatch: pytest.MonkeyPatch, error: Exception, shown: str
) -> None:
    import triptych.model.attention.triton as triton_backend

    def fail(device: torch.device, dtype: torch.dtype) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_backend, "try_out", fail)
    found = select_backend(GPU)
    assert found.backend.name == "sdpa"
    assert found.reason == f"torch scaled_dot_product_attention: triton does not work here: {shown}"
    with pytest.raises(ConfigError, match="triton does not work here"):
        select_backend(GPU, wanted="triton")


@with_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_trial_passes_where_it_works(dtype: torch.dtype) -> None:
    import triptych.model.attention.triton as triton_backend

    triton_backend.try_out(torch.device("cuda" if torch.cuda.is_available() else "cpu"), dtype)


@with_triton
def test_the_interpreter_is_the_tests_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_backend(CPU, wanted="triton").backend.name == "triton"


class Narrow(ReferenceBackend):
    """A backend without wide heads and int8 pages."""

    name = "narrow"
    graph_safe = True
    gathers_pages = False

    def unsupported(self, layer: AttentionConfig, dtype: torch.dtype, cache: PagedSpec | None) -> str | None:
        if cache is not None and cache.dtype == "int8":
            return "pages are int8"
        return f"heads are {layer.head_dim} wide" if layer.head_dim > 8 else None


NARROW = Selection(Narrow(), "narrow kernels")


def decoder(*dims: int) -> ModelConfig:
    """Return a decoder whose layers have heads of these widths."""
    mlp, norms = MLPConfig(8, Activation.RELU), (Norms(), Norms())
    layers = tuple(LayerConfig(AttentionConfig(1, 1, dim, 1.0), mlp, norms) for dim in dims)
    return ModelConfig("any", EmbeddingConfig(10, 8), decoder=StackConfig(layers, 8, causal=True))


def chosen(found: Selection, config: ModelConfig) -> list[str]:
    assert config.decoder is not None
    return [backend_of(found.backend, layer.attention).name for layer in config.decoder.layers]


def test_a_backend_that_can_computes_every_layer() -> None:
    found = select_layers(NARROW, decoder(8, 4), torch.float32, torch.float32)
    assert (found.backend, found.reason, found.preferred) == (NARROW.backend, "narrow kernels", "narrow")


def test_each_layer_has_the_first_backend_that_can_and_the_reason_is_told() -> None:
    config = decoder(8, 16, 4, 16, 32)
    found = select_layers(NARROW, config, torch.float32, torch.float32)
    assert chosen(found, config) == ["narrow", "sdpa", "narrow", "sdpa", "sdpa"]
    assert found.reason == (
        "narrow kernels; sdpa in decoder layers 1, 3, as heads are 16 wide; "
        "sdpa in decoder layer 4, as heads are 32 wide"
    )
    backend: AttentionBackend = found.backend
    assert isinstance(backend, PerLayerBackend)
    assert (backend.name, backend.graph_safe, backend.gathers_pages) == ("narrow, sdpa", False, True)
    assert found.preferred == "narrow"


def test_torch_alone_where_no_layer_can() -> None:
    found = select_layers(NARROW, decoder(16, 16), torch.float32, torch.float32)
    assert isinstance(found.backend, SdpaBackend)
    assert found.reason == "torch scaled_dot_product_attention: heads are 16 wide"


def test_pages_count_in_decoders() -> None:
    found = select_layers(NARROW, decoder(8), torch.float32, torch.int8)
    assert found.reason == "torch scaled_dot_product_attention: pages are int8"


def test_a_layer_is_forwarded_to_its_own_backend() -> None:
    class Marked(SdpaBackend):
        def __init__(self, mark: float) -> None:
            self.mark = mark

        def forward(self, *arguments: object) -> torch.Tensor:  # type: ignore[override]
            return torch.tensor(self.mark)

    configs = [AttentionConfig(1, 1, dim, 1.0) for dim in (4, 8)]
    backend = PerLayerBackend({config: Marked(config.head_dim) for config in configs})
    for config in configs:
        assert backend.forward(*[None] * 5, config) == config.head_dim  # type: ignore[arg-type]
    assert backend.unsupported(AttentionConfig(1, 1, 5, 1.0), torch.float32, None) == "no backend was chosen for it"
