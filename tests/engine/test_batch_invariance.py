"""`--batch-invariant`: results have the same bits alone and in any batch, in every number format of the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.support import mixed
from tests.model.checkpoints import prompt, saved
from tests.model.tiled import emulated, needs_vectors
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import EncodeRequest, Request, token_source
from triptych.model.attention import selection
from triptych.model.engine.builder import LoadedModel, load
from triptych.model.errors import ConfigError
from triptych.model.linear.float import FloatLinear
from triptych.model.linear.native import NativeLinear
from triptych.model.native.library import Kind, Library, native

FORMATS = [
    (dtype, quantization, cache)
    for dtype in ("float32", "bfloat16")
    for quantization in ("none", "int8")
    for cache in ("auto", "int8")
] + [("bfloat16", "int4", "auto")]
# One kind runs every number format. The others run the two most different ones.
EACH = [("llama-gqa", *how) for how in FORMATS]
EACH += [
    (kind, *how) for kind in ("gemma2", "gemma4", "gpt2", "t5-relu", "marian") for how in (FORMATS[0], FORMATS[-2])
]
pytestmark = pytest.mark.skipif(not isinstance(native(), Library), reason=f"no native kernels: {native()}")


def loaded(kind: str, **settings: object) -> LoadedModel:
    given = {"device": "cpu", "block_size": 4, "kv_cache_memory": 4 << 20, "batch_invariant": True, **settings}
    config = EngineConfig(**given)  # type: ignore[arg-type]
    return load(ModelSpec(kind, str(saved(kind).path), config))


def generated(model: LoadedModel, requests: list[Request]) -> dict[str, list[tuple[int, object]]]:
    """Return each request's tokens with their log-probabilities."""
    assert model.generate is not None
    found: dict[str, list[tuple[int, object]]] = {request.request_id: [] for request in requests}
    for request in requests:
        model.generate.add(request)
    while model.generate.has_work:
        for output in model.generate.step()[0]:
            found[output.request_id] += zip(output.token_ids, output.logprobs or (), strict=True)
    return found


def depend_on_others(kind: str, **settings: object) -> list[str]:
    """Return the requests whose results in a batch differ from those of the request alone."""
    requests = [replace(one, params=replace(one.params, logprobs=3, max_tokens=6)) for one in mixed(kind, 10)]
    crowd = loaded(kind, max_num_seqs=7, max_num_batched_tokens=48, **settings)
    together = generated(crowd, requests)
    lonely = loaded(kind, prefix_caching=False, **settings)
    return [one.request_id for one in requests if generated(lonely, [one])[one.request_id] != together[one.request_id]]


@pytest.mark.parametrize(("kind", "dtype", "quantization", "cache"), EACH)
def test_generation(kind: str, dtype: str, quantization: str, cache: str) -> None:
    assert depend_on_others(kind, dtype=dtype, quantization=quantization, kv_cache_dtype=cache) == []


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")])
def test_generation_with_recurrent_layers_and_experts(dtype: str, quantization: str) -> None:
    """Check prompts cut into different chunks, with snapshots at different positions."""
    assert depend_on_others("qwen3-next", dtype=dtype, quantization=quantization) == []


@pytest.mark.parametrize("kind", ["opt-narrow", "gemma4"])
def test_generation_without_the_setting(kind: str) -> None:
    """Check decoders with matrices before or after their layers: the setting refuses, it changes no result."""
    assert depend_on_others(kind, dtype="float32", batch_invariant=False) == []


@needs_vectors
@pytest.mark.parametrize("kind", ["llama-gqa", "t5-relu"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_generation_where_there_are_tiles(kind: str, quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with and without `batch_invariant`: all bfloat16 products use tiles.

    The emulated tiles round sums to eighths. A row that used vector instructions instead would then differ visibly.
    """
    coarse = emulated("apart[0] + apart[1]", "__builtin_rintf(8.0f * (apart[0] + apart[1])) / 8.0f")
    monkeypatch.setattr(selection, "native", lambda: coarse)
    settings = {"dtype": "bfloat16", "quantization": quantization}
    assert depend_on_others(kind, **settings) == []
    assert depend_on_others(kind, batch_invariant=False, **settings) == []


@pytest.mark.parametrize(
    "kind", ["bert", "albert", "electra", "distilbert", "deberta-v2-convolution", "llama-gqa", "t5-relu"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encoding(kind: str, dtype: str) -> None:
    model = loaded(kind, dtype=dtype, max_num_batched_tokens=100)
    requests = [EncodeRequest(f"e{i}", kind, token_source(prompt(1 + (i * 7) % 30, i))) for i in range(12)]

    def encoded(asked: list[EncodeRequest]) -> dict[str, bytes]:
        for request in asked:
            model.encode.add(request)
        found = {}
        while model.encode.has_work:
            found |= {output.request_id: output.data for output in model.encode.step()[0]}
        return found

    together = encoded(requests)
    for request in requests:
        assert encoded([request])[request.request_id] == together[request.request_id] != b""


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("xlnet", {}, "the native kernels do not compute xlnet: layer 0 has XLNet's relative positions"),
        ("llama-gqa", {"attention_backend": "sdpa"}, "batch_invariant needs the native backend; .*: asked for"),
        ("llama-gqa", {"dtype": "float16"}, "batch_invariant needs the native backend; .* do not compute in float16"),
    ],
)
def test_settings_without_batch_invariance_are_refused(kind: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(kind, **settings)


@pytest.mark.parametrize("kind", ["xlnet", "xlnet-sequence"])
def test_int8_is_refused_where_matrices_would_not_be_quantised(kind: str) -> None:
    spec = ModelSpec(kind, str(saved(kind).path), EngineConfig(device="cpu", quantization="int8"))
    with pytest.raises(
        ConfigError, match="int8: the native kernels do not compute the encoder of xlnet, whose matrices"
    ):
        load(spec)


@pytest.mark.parametrize("kind", ["bert", "deberta-v2-convolution", "t5-relu", "llama-gqa"])
def test_model_reported_as_int8_has_int8_matrices(kind: str) -> None:
    config = EngineConfig(device="cpu", quantization="int8", kv_cache_memory=4 << 20)
    model = load(ModelSpec(kind, str(saved(kind).path), config))
    network = model.encode.model
    assert model.info.dtype == "int8"
    for stack in (network.encoder, network.decoder):
        for module in [] if stack is None else stack.modules():
            assert not isinstance(module, FloatLinear)
            assert not isinstance(module, NativeLinear) or module.matrix.dtype == Kind.INT8
