"""Comparison of the whole engine on this device with torch in float32 on the CPU, with the same weights.

Each scenario runs twice: as in serving, with overlapped and recorded steps, to compare tokens; and with
log-probabilities, which detect a wrong page even if tokens of random weights do not. The result also says whether the
event that the scenario tests has occurred.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.bench.gpu.cases import Case
from lab.bench.gpu.engines import (
    GREEDY,
    BatchResult,
    BenchModel,
    BenchRequest,
    add,
    bench_requests,
    build_engines,
    finish,
    require_graphs,
)
from lab.bench.gpu.figures import Figures
from lab.bench.gpu.fp8 import in_fp8, need_fp8
from lab.bench.gpu.integers import in_integers, need_integers
from lab.bench.gpu.machine import Bench
from lab.bench.gpu.shapes import GPU_MODELS, tiny_shape
from lab.bench.models import config_of, random_model
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.request import EncodeRequest, EncodeTask, ImageSpan, image_source, token_source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.attention.selection import Selection, select_backend, select_layers
from triptych.model.config.cache import StateSize, cached_elements, state_bytes
from triptych.model.engine.execution.pictures import Coordinates
from triptych.model.network.inputs import GivenRows, packed_input
from triptych.model.network.transformer import Transformer

CPU = torch.device("cpu")
_CONTEXT = 256
_BLOCK = 16
_GAIN = 4.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Describes the requests to both engines, and the allowed difference."""

    model: str = "llama-1b"
    params: Sequence[SamplingParams] = (GREEDY,)  # of the requests, cyclically
    dtype: torch.dtype = torch.float32
    settings: dict[str, Any] = field(default_factory=dict)
    lengths: Sequence[tuple[int, int]] = ((7, 30), (150, 12), (33, 24), (64, 20), (90, 16), (128, 10))
    rounds: int = 1  # repetitions of the same requests
    tokens_equal: float = 1.0  # share of the tokens
    logprobs_within: float = 1e-3
    seconds: float = 30.0  # most of them the CPU's, with one thread
    unrecorded: bool = False  # compare with steps on this device that are not recorded, too
    happened: Callable[[BenchModel], Figures] = lambda ready: {}  # figures that may not be 0


def _hits(ready: BenchModel) -> Figures:
    return {"prefix_hits": ready.engine.stats().prefix_hits}


def _preemptions(ready: BenchModel) -> Figures:
    return {"preemptions": ready.engine.stats().preemptions}


_DRAWN = [
    replace(GREEDY, temperature=0.8, top_p=0.9),
    replace(GREEDY, temperature=1.0, top_k=40),
    replace(GREEDY, temperature=0.7, min_p=0.05),
    GREEDY,
]
_FEW_STEPS = ((7, 14), (150, 6), (33, 10), (64, 8), (90, 7), (128, 5))  # a CPU reads all experts in each
SCENARIOS = {
    "chunked prompts": Scenario(settings={"max_num_batched_tokens": 48}),
    "prefix hits": Scenario(settings={"prefix_caching": True}, rounds=2, happened=_hits),
    "preemption": Scenario(lengths=[(40, 60)] * 4, settings={"blocks": 17}, happened=_preemptions),
    # Rounding to 8 bits can differ if float32 differs in its last bit.
    "int8 KV": Scenario(settings={"kv_cache_dtype": "int8"}, tokens_equal=0.9, logprobs_within=0.05),
    "fp8 KV": Scenario(settings={"kv_cache_dtype": "fp8"}, tokens_equal=0.9, logprobs_within=0.05),
    # Hopper adds fp8 products in 14 bits: outputs of a prompt are off by 1e-4, which changes what the next
    # layer rounds to 8 bits. On an H200 28 % of tokens were equal (a first other one changes the rest), 0.097 apart.
    "fp8 weights": Scenario(settings={"quantization": "fp8"}, tokens_equal=0.2, logprobs_within=0.15, seconds=75),
    "int4 weights": Scenario(settings={"quantization": "int4"}, tokens_equal=0.9, logprobs_within=0.05, seconds=90),
    "head 128, q and k normalised": Scenario("qwen3-0.6b"),
    "windows in some layers, softcaps": Scenario("gemma2-2b"),
    "windows in some layers, two rotary bases": Scenario("gemma3-1b"),
    "recurrent layers": Scenario("qwen3.5-9b", settings={"prefix_caching": True}, rounds=2, happened=_hits),
    "experts": Scenario("qwen3-30b-a3b", lengths=_FEW_STEPS, unrecorded=True),
    "experts with biases, clamps, sinks": Scenario("gpt-oss-20b", lengths=_FEW_STEPS, unrecorded=True),
    "sampling with seeds": Scenario(params=_DRAWN, tokens_equal=0.98),
    "encoder-decoder, BART": Scenario("bart-large"),
    "encoder-decoder, T5": Scenario("t5-xl"),
    "beams": Scenario("bart-large", params=[replace(GREEDY, num_beams=4)]),
    # Nearly equal scores change order, on a CPU too: there 79 % of tokens, log-probabilities within 0.03.
    "fp8 weights and KV, bfloat16": Scenario(
        dtype=torch.bfloat16,
        settings={"quantization": "fp8", "kv_cache_dtype": "fp8"},
        tokens_equal=0.3,
        logprobs_within=0.2,
        seconds=75,
    ),
    "bfloat16": Scenario(dtype=torch.bfloat16, tokens_equal=0.3, logprobs_within=0.1),
}


def cases(bench: Bench) -> list[Case]:
    found = [
        Case(f"engine, {name}", partial(_compare, scenario=scenario), scenario.seconds)
        for name, scenario in SCENARIOS.items()
        if bench.cuda or scenario.dtype is torch.float32
    ]
    return [*found, Case("engine, encoder", _encoder, 20), Case("engine, pictures", _pictures, 20)]


def to_compile() -> list[str]:
    """Return the cases that compile all that the others do, too."""
    firsts: dict[tuple[object, ...], str] = {}
    for name, one in SCENARIOS.items():
        kinds = [one.settings.get(kind) for kind in ("kv_cache_dtype", "quantization")]
        firsts.setdefault((one.model, one.dtype, *kinds), f"engine, {name}")
    return [*firsts.values(), "engine, encoder"]


def compile_case(bench: Bench, name: str) -> None:
    """Do what a case does on this device, without comparing it."""
    name = name.removeprefix("engine, ")
    if name == "encoder":
        _encoding_engine(bench, Scenario("bert-base"), bench.device)
    else:
        _run(_engine(bench, SCENARIOS[name], bench.device, SCENARIOS[name].dtype), SCENARIOS[name], logprobs=None)


def shape(bench: Bench, name: str) -> dict[str, Any]:
    """Return a published shape with two layers and a small vocabulary, so that a CPU computes it in seconds."""
    raw = GPU_MODELS[name]
    if bench.tiny:
        return tiny_shape(raw)
    layers = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
    # Windows that the prompts cross, and a layer of each kind.
    changes = {**dict.fromkeys(layers, 2), "vocab_size": 8192, "sliding_window": 48, "sliding_window_pattern": 2}
    changes["full_attention_interval"] = 2
    changes |= {"num_experts": 16, "num_local_experts": 8}  # more than a token takes
    return {key: changes.get(key, value) for key, value in raw.items()}


def _compare(bench: Bench, *, scenario: Scenario) -> Figures:
    """Run both engines in both ways and compare them."""
    fast = _engine(bench, scenario, bench.device, scenario.dtype)
    slow = _engine(bench, scenario, CPU, torch.float32)
    if bench.cuda:
        require_graphs(fast)
    found: Figures = {"backend": fast.loaded.info.attention_backend, "graphs": fast.runner.graphs is not None}
    same = total = 0
    for _ in range(scenario.rounds):
        ours, theirs = (_run(ready, scenario, logprobs=None) for ready in (fast, slow))
        pairs = [(ours.outputs[name], tokens) for name, tokens in theirs.outputs.items()]
        same += sum(a == b for one, other in pairs for a, b in zip(one, other, strict=False))
        total += sum(len(other) for _, other in pairs)
    found |= {"tokens": total, "tokens_equal": same / total, **scenario.happened(fast)}
    found["distinct"] = len({token for tokens in theirs.outputs.values() for token in tokens})
    recorded = ours
    right = same / total >= scenario.tokens_equal and all(scenario.happened(fast).values())
    if any(params.num_beams > 1 for params in scenario.params):
        found["scores_within"] = apart = max(abs(ours.scores[name] - score) for name, score in theirs.scores.items())
    else:
        ours, theirs = (_run(ready, scenario, logprobs=0) for ready in (fast, slow))
        found["logprobs_within"] = apart = _apart(ours, theirs)
    right = right and apart <= scenario.logprobs_within
    if scenario.unrecorded:
        found |= (plain := _unrecorded(bench, scenario, recorded.outputs, ours))
        right = right and plain["unrecorded_equal"] and plain["unrecorded_within"] <= scenario.logprobs_within
    return {"ok": right, **found}


def _unrecorded(bench: Bench, scenario: Scenario, outputs: dict[str, list[int]], ours: BatchResult) -> Figures:
    """Return whether this device gives the same tokens without CUDA graphs, and how far log-probabilities are apart."""
    settings = {**scenario.settings, "cuda_graphs": False}
    plain = _engine(bench, replace(scenario, settings=settings), bench.device, scenario.dtype)
    assert plain.runner.graphs is None
    equal = _run(plain, scenario, logprobs=None).outputs == outputs
    return {"unrecorded_equal": equal, "unrecorded_within": _apart(ours, _run(plain, scenario, logprobs=0))}


def _engine(bench: Bench, scenario: Scenario, device: torch.device, dtype: torch.dtype) -> BenchModel:
    """Return the scenario's model, with weights generated on the CPU, since a GPU's generator differs."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "prefix_caching": False, **scenario.settings}
    reference = device is CPU and dtype is torch.float32
    raw = shape(bench, scenario.model)
    reads_fp8 = device.type == "cuda" or settings.get("kv_cache_dtype") != "fp8"  # the C kernels read no such pages
    selection = _selection(raw, device, dtype, reference=reference or not reads_fp8)
    model = _varied(random_model(raw, selection.backend, torch.float32, CPU, device)).to(device, dtype)
    if settings.get("quantization") == "fp8":
        need_fp8(bench)
        model = in_fp8(model)
    elif "quantization" in settings:
        need_integers(bench)
        model = in_integers(model, settings["quantization"])
    blocks = settings.pop("blocks", 4 * _CONTEXT // _BLOCK * (2 if model.encoder is not None else 1))
    decoder = model.config.decoder
    assert decoder is not None
    pool = blocks * _BLOCK * cached_elements(decoder) * dtype.itemsize
    pool += StateSize(settings["max_num_seqs"], settings["max_num_seqs"]).num_slots * state_bytes(decoder)
    config = EngineConfig(
        device=str(device), max_model_len=_CONTEXT, block_size=_BLOCK, kv_cache_memory=pool, **settings
    )
    return build_engines(scenario.model, model, selection, config)


def _selection(raw: dict[str, Any], device: torch.device, dtype: torch.dtype, *, reference: bool) -> Selection:
    if reference:
        return Selection(SdpaBackend(), "the reference")
    return select_layers(select_backend(device, dtype), config_of(raw), dtype, dtype)


def _varied(model: Transformer) -> Transformer:
    """Scale up matrices before norms: otherwise a tied head repeats its input token."""
    for stack in (model.encoder, model.decoder):
        if stack is not None and stack.config.layers[0].norms[0].pre is None:
            for parameter in stack.parameters():
                parameter.mul_(_GAIN if parameter.dim() == 2 else 1.0)
    return model


def _run(ready: BenchModel, scenario: Scenario, logprobs: int | None) -> BatchResult:
    """Run all requests at once; from the fourth on they share a prefix with the second."""
    given = bench_requests(ready, scenario.lengths)
    shared = given[1].prompt[:48]
    given[3:] = [BenchRequest((*shared, *ask.prompt[48:]), ask.wanted) for ask in given[3:]]
    params = [
        replace(scenario.params[at % len(scenario.params)], logprobs=logprobs, ignore_eos=True)
        for at in range(len(given))
    ]
    add(ready, given, params)
    return finish(ready)


def _apart(ours: BatchResult, theirs: BatchResult) -> float:
    """Return the largest difference of a log-probability, up to the first different token."""
    worst = 0.0
    for name, tokens in theirs.outputs.items():
        pairs = zip(tokens, ours.outputs[name], theirs.logprobs[name], ours.logprobs[name], strict=False)
        for token, other, logprob, found in pairs:
            if token != other:
                break
            worst = max(worst, abs(logprob - found))
    return worst


def _encoder(bench: Bench) -> Figures:
    """Compare the vectors of all tokens of texts of different lengths, alone and together."""
    scenario, vectors = Scenario("bert-base"), []
    for device in (bench.device, CPU):
        ready = _encoding_engine(bench, scenario, device)
        if device.type == "cuda":
            require_graphs(ready)
        rng = random.Random(0)
        found: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
        for lengths in ((5, 200, 64, 1, 130), (9,), (100,), (3,) * 20):  # which recorded batches of several sizes hold
            for number, length in enumerate(lengths, len(found)):
                text = ready.prompt(rng, length)
                ready.loaded.encode.add(EncodeRequest(str(number), "bert-base", token_source(text), EncodeTask.TOKENS))
            while ready.loaded.encode.has_work:
                for output in ready.loaded.encode.step()[0]:
                    found[output.request_id] = np.frombuffer(output.data, np.float32)
        vectors.append(np.concatenate([found[name] for name in sorted(found)]))
    apart = float(np.abs(vectors[0] - vectors[1]).max())
    return {"ok": apart <= 1e-3, "within": apart, "largest": float(np.abs(vectors[1]).max())}


def _encoding_engine(bench: Bench, scenario: Scenario, device: torch.device) -> BenchModel:
    reference = device is CPU
    raw = shape(bench, scenario.model)
    selection = _selection(raw, device, torch.float32, reference=reference)
    model = random_model(raw, selection.backend, torch.float32, CPU).to(device)
    return build_engines(scenario.model, model, selection, EngineConfig(device=str(device), max_model_len=_CONTEXT))


# A prompt with a picture: heads of 128 and of 80 in the tower, patches in windows, positions of three coordinates.
_PICTURES: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 160,
        "intermediate_size": 320,
        "num_heads": 2,
        "out_hidden_size": 256,
        "in_channels": 3,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    },
    "image_token_id": 0,
}
_SHAPE, _BEFORE, _AFTER = (3, 112, 140), 3, 4  # of the picture, and texts around it


def _pictures(bench: Bench) -> Figures:
    """Compare the rows of a picture, and the hidden states of a prompt with it, relative to the largest number."""
    found = []
    for device in (bench.device, CPU):
        selection = _selection(_PICTURES, device, torch.float32, reference=device is CPU)
        model = random_model(_PICTURES, selection.backend, torch.float32, CPU, device)
        for stack in (model.tower, model.decoder):  # scores of small weights would be nearly equal at all positions
            assert stack is not None
            for parameter in stack.parameters():
                parameter.mul_(_GAIN if parameter.dim() == 2 else 1.0)
        model = model.to(device)
        found.append(_read_picture(model, device))
    apart = [((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in zip(*found, strict=True)]
    return {"ok": max(apart) <= 1e-3, "rows_within": apart[0], "within": apart[1]}


@torch.inference_mode()
def _read_picture(model: Transformer, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a picture's rows, and what the decoder makes of a prompt with them."""
    assert model.config.pictures is not None
    patches = model.config.pictures.patches
    pixels = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0)).to(device)
    rows = model.begin_picture(pixels).finish()
    image = ImageSpan(_BEFORE, image_source(b"", _SHAPE, len(rows)))
    length = image.stop + _AFTER
    known = torch.from_numpy(Coordinates.of([image], length, patches).of_prompt).to(device)
    given = GivenRows(torch.arange(image.start, image.stop, device=device), rows)
    inputs = packed_input([range(length)], device, causal=True)
    hidden = model.decode(replace(inputs, positions=known[0], coordinates=known, given=given))
    return rows.cpu(), hidden.cpu()
