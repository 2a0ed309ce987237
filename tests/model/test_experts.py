"""Mixtures of experts: routing by the definition, GPU kernels, and refusals; `test_parity` compares the families."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.model.checkpoints import CPU, loaded, saved
from tests.model.triton_cases import DEVICES
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.attention.reference import ReferenceBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.attention import AttentionConfig
from triptych.model.config.formats import QUANTIZED_LAYERS
from triptych.model.config.layer import Activation, ExpertsConfig, GateClamp, LayerConfig, MLPConfig, Norms
from triptych.model.config.stack import StackConfig
from triptych.model.engine.builder import load
from triptych.model.engine.warmup import compile_products
from triptych.model.errors import ConfigError
from triptych.model.inspection.anatomy import describe_stack, dissect
from triptych.model.linear.base import LinearSpec, Part, Tiles, linears
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.float import ExpertsLinear
from triptych.model.network.build import build_model
from triptych.model.network.feed_forward import Experts, routes
from triptych.model.network.inputs import StepContext, packed_input
from triptych.model.system.background_work import finish

CONFIG = ExpertsConfig(5, 2, MLPConfig(6, Activation.SILU, gated=True, bias=True), renormalised=False)
VARIANTS = (
    CONFIG,
    replace(CONFIG, renormalised=True, router_bias=True),
    replace(CONFIG, mlp=replace(CONFIG.mlp, clamp=GateClamp(0.5, 1.7)), shared=MLPConfig(3, Activation.RELU)),
    replace(CONFIG, count=2, per_token=1, shared=MLPConfig(3, Activation.GELU), shared_gate=True),
)


def by_definition(experts: Experts, x: Tensor) -> Tensor:
    """Compute one token and one expert at a time."""
    config, found = experts.config, []
    for row in x:
        logits = experts.router.weight @ row + (experts.router.bias if config.router_bias else 0.0)
        order = sorted(range(config.count), key=lambda expert: (-float(logits[expert]), expert))[: config.per_token]
        scores = logits[order].softmax(0) if config.renormalised else logits.softmax(0)[order]
        total = torch.zeros_like(row)
        for score, expert in zip(scores, order, strict=True):
            up, down = (linear.weight.unflatten(0, (config.count, -1))[expert] for linear in (experts.up, experts.down))
            biases = [linear.bias.unflatten(0, (config.count, -1))[expert] for linear in (experts.up, experts.down)]
            gate, inner = (up @ row + biases[0]).chunk(2)
            if config.mlp.clamp is not None:
                limit, gain = config.mlp.clamp.limit, config.mlp.clamp.gain
                gate = gate.clamp(max=limit)
                hidden = (inner.clamp(-limit, limit) + 1) * gate * torch.sigmoid(gain * gate)
            else:
                hidden = gate * torch.sigmoid(gate) * inner
            total = total + score * (down @ hidden + biases[1])
        found.append(total)
    return torch.stack(found)


@pytest.mark.parametrize("config", VARIANTS)
def test_a_token_gets_its_experts_whoever_is_beside_it(config: ExpertsConfig) -> None:
    experts = Experts(config, 4, LinearFactory()).requires_grad_(False)
    for parameter in experts.parameters():
        parameter.normal_()
    x = torch.randn(9, 4)
    step = StepContext(packed_input([[1] * 9], CPU, causal=True), ReferenceBackend(), None, x.dtype)
    expected = by_definition(experts, x)
    if experts.shared is not None:
        shared = experts.shared(x, step)
        if experts.shared_gate is not None:
            shared = shared * torch.sigmoid(x @ experts.shared_gate.weight.T)
        expected = expected + shared
    torch.testing.assert_close(experts(x, step), expected)
    torch.testing.assert_close(experts(x[3:4], step), expected[3:4])


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    chosen = routes(CONFIG, torch.tensor([[1.0, 2.0, 1.0, 2.0, 2.0], [0.0] * 5]))
    assert chosen.starts.tolist() == [0, 1, 3, 3, 4, 4]  # 0: token 1; 1: tokens 0 and 1; 3: token 0
    assert chosen.tokens.tolist() == [1, 0, 1, 0]
    assert chosen.places.tolist() == [[1, 3], [0, 2]]


def test_sparse_mixer_routes_as_transformers_does() -> None:
    """Scores of both signs, equal ones, zeros, and ones at the edge of the tolerance."""
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = torch.cat((torch.randn(200, 5), torch.randn(50, 5) - 4, torch.randint(-2, 3, (200, 5)).float()))
    for tolerance in (0.0, 0.01, 0.25, 0.5):
        expected, experts = sparsemixer(logits, tolerance, training=False)
        found = routes(replace(CONFIG, mixer_tolerance=tolerance), logits)
        torch.testing.assert_close(found.weights, expected)
        order = torch.argsort(experts.flatten(), stable=True)
        assert torch.equal(found.tokens, order // 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"per_token": 3, "mixer_tolerance": 0.01},
            "SparseMixer chooses 2 experts of a token by logits alone, found 3",
        ),
        ({"per_token": 6}, "cannot choose 6 of 5 experts"),
        ({"count": 1}, "cannot choose 2 of 1 experts"),
        ({"count": 10**9}, "a layer has at most 4096 experts, found 1000000000"),
        ({"shared_gate": True}, "a gate of shared experts needs them"),
    ],
)
def test_experts_that_cannot_be_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)  # type: ignore[arg-type]


def test_a_stack_of_more_experts_than_there_can_be_is_refused() -> None:
    layer = LayerConfig(AttentionConfig(1, 1, 4, 0.5), replace(CONFIG, count=4096), (Norms(), Norms()))
    StackConfig((layer,) * 32, 4, causal=True)
    with pytest.raises(ConfigError, match="at most 131072 experts, found 135168"):
        StackConfig((layer,) * 33, 4, causal=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_multiplies_each_row_by_its_expert(dtype: torch.dtype, device: torch.device) -> None:
    triton_experts = pytest.importorskip("triptych.model.linear.triton_experts", reason="triton is not installed")
    spec = LinearSpec("m", 70, (Part(21),), experts=4)
    linear = ExpertsLinear(spec, dtype, device).requires_grad_(False).to(device, dtype)
    for parameter in linear.parameters():
        parameter.normal_()
    assert linear.bias is not None
    weight, bias, x = linear.weight.view(4, 21, 70), linear.bias.view(4, 21), torch.randn(50, 70).to(device, dtype)
    for bounds in ([0, 0, 33, 33, 50], [0, 1, 2, 3, 50], [0, 50, 50, 50, 50]):
        starts = torch.tensor(bounds, dtype=torch.int32, device=device)
        linear.kernels = False
        expected = linear.of_experts(x.float(), starts) if dtype is torch.float32 else linear.of_experts(x, starts)
        for tiles in (None, Tiles(16, 32, 32, 4, 2)):
            found = triton_experts.multiply(x, weight, bias, starts, tiles)
            atol = 2e-5 if dtype is torch.float32 else 0.13  # half a rounding step of numbers up to 32
            torch.testing.assert_close(found, expected, atol=atol, rtol=0)
        some = torch.tensor([min(bound, 31) for bound in bounds], dtype=torch.int32, device=device)
        rest = triton_experts.multiply(x, weight, bias, some, Tiles(16, 32, 32, 4, 2), out=torch.zeros_like(found))
        assert torch.equal(rest[:31], found[:31]) and not rest[31:].any()  # of experts that another rank has
        alone = torch.tensor([int(bound > 40) for bound in bounds], dtype=torch.int32, device=device)
        one = triton_experts.multiply(x[40:41], weight, bias, alone, Tiles(16, 32, 32, 4, 2))
        assert torch.equal(one[0], found[40])


def test_kernels_of_experts_are_compiled_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("mixtral")
    assert finish(compile_products(model)) == 0
    for linear in linears(model):
        if isinstance(linear, ExpertsLinear):
            linear.kernels = True
    asked = []
    monkeypatch.setattr(ExpertsLinear, "of_experts", lambda self, x, starts: asked.append((self.spec.inputs, len(x))))
    assert finish(compile_products(model)) == len(asked) == 6
    assert sorted(asked) == [(20, 1), (20, 81), (20, 321), (32, 1), (32, 81), (32, 321)]


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_a_gpu_keeps_no_experts_in_fewer_bits(quantization: str) -> None:
    engine = EngineConfig(device="cpu", attention_backend="triton", quantization=quantization)
    with pytest.raises(
        ConfigError, match=rf"quantization {quantization}: a GPU multiplies the experts of mixtral in floats"
    ):
        load(ModelSpec("m", str(saved("mixtral").path), engine))


def test_a_router_stays_in_floats() -> None:
    config = read_checkpoint(saved("qwen2-moe").path).config
    patterns = tuple((f"{stack}.layers.*", QUANTIZED_LAYERS["int8"][0]) for stack in config.stacks)
    factory = LinearFactory(torch.bfloat16, integers=patterns, fp8=("decoder.layers.*",))
    kinds = {
        linear.spec.name: type(linear).__name__ for linear in linears(build_model(config, ReferenceBackend(), factory))
    }
    assert kinds["decoder.layers.1.mlp.router"] == kinds["decoder.layers.1.mlp.shared_gate"] == "FloatLinear"
    assert kinds["decoder.layers.1.mlp.shared.up"] == "IntegerLinear"


def test_a_description_tells_experts_and_what_of_them_a_token_passes() -> None:
    config = read_checkpoint(saved("qwen2-moe").path).config
    anatomy = dissect(config)
    expert = 3 * 20 * 32
    assert anatomy.active_parameters == anatomy.total_parameters - 2 * (5 - 2) * expert  # two layers
    assert config.decoder is not None
    told = describe_stack(config.decoder)["MLP"]
    assert told == "48, gated silu (layer 0); 5 experts of 20, gated silu, 2 a token, one of 28 shared (layers 1-2)"
    assert dissect(read_checkpoint(saved("llama-gqa").path).config).active_parameters is None
