"""Warms a GPU up when a model is loaded: compiles its kernels and makes the libraries' handles, which takes seconds.

Attention kernels are compiled once for each kind of launch (`CompiledBackend`). Each kind is launched over one or two
tokens, and so is each kind of product in fp8 and in integers. A few requests then run the rest: other products, fused
operations, sampling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from triptych.model.api.request import EncodeRequest, EncodeTask, Request
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.attention.base import AttentionMetadata, CompiledBackend, DeviceLengths
from triptych.model.attention.layer_backends import backend_of
from triptych.model.cache.kv_cache import KVCache, whole_segments
from triptych.model.config.attention import AttentionConfig, BucketBiasConfig
from triptych.model.engine.encode_engine import EncodeEngine
from triptych.model.engine.execution.model_runner import ModelRunner
from triptych.model.engine.execution.sources import blank_source
from triptych.model.engine.execution.step_logits import candidate_columns
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.speculation.model_drafts import COMPUTED_AT_ONCE
from triptych.model.linear.base import CompiledLinear, linears
from triptych.model.linear.factory import ParallelLinear
from triptych.model.linear.float import ExpertsLinear, row_kernel_kind
from triptych.model.network.inputs import CrossInput, StackInput
from triptych.model.network.stack import Stack, StackPass
from triptych.model.network.transformer import Transformer
from triptych.model.sampling.random_sampling import LIKELIEST_PARTS, likeliest
from triptych.model.sampling.sampler import SamplingRow, sample
from triptych.model.system.background_work import Work

LENGTHS = (3, 40, 200)  # tokens of the requests

logger = logging.getLogger(__name__)


def warm_up(
    encode: EncodeEngine, generate: GenerateEngine | None, max_model_len: int, most_patches: int = 0
) -> Work[None]:
    """Compile every attention kernel that a request can need, then run some requests and forget them.

    `most_patches` are those of the largest picture in a prompt, if the model reads any.
    """
    began = time.monotonic()
    cache = generate.runner.cache if generate is not None and isinstance(generate.runner, ModelRunner) else None
    most_queries = min(max_model_len, encode.max_num_batched_tokens)
    launched = yield from compile_attention(encode.model, cache, most_queries, max_model_len)
    launched += yield from compile_images(encode.model, most_patches)
    launched += yield from compile_own_kernels(encode.model)
    if generate is not None:
        launched += yield from _compile_draft_model(generate)
        compile_sampling(encode.model)
    if not encode.model.config.only_images:
        for length in LENGTHS:
            tokens = min(length, encode.max_num_batched_tokens, encode.model.config.max_positions or length)
            source = blank_source(encode.model.config, tokens)
            encode.add(EncodeRequest("warm-up", encode.name, source, EncodeTask.TOKENS))
            while encode.has_work:
                encode.step()
            yield None
    if generate is not None:
        for together in (LENGTHS[:1], LENGTHS[1:], LENGTHS):
            for number, length in enumerate(together):
                generate.add(_request(generate, encode, length, number))
            while generate.has_work:
                generate.step()
                yield None
        generate.block_manager.clear_cache()
    logger.info("%s is warm after %.1f s, %d kinds of launches", encode.name, time.monotonic() - began, launched)


def _compile_draft_model(generate: GenerateEngine) -> Work[int]:
    """Compile the kernels of a draft model: the requests of the warm-up end before it would propose tokens."""
    draft = generate.runner.draft_model if isinstance(generate.runner, ModelRunner) else None
    if draft is None or generate.speculation.draft_context is None:
        return 0
    most_keys = generate.speculation.draft_context
    launched = yield from compile_attention(draft.model, draft.cache, min(most_keys, COMPUTED_AT_ONCE), most_keys)
    return launched + (yield from compile_products(draft.model))


def compile_attention(model: Transformer, cache: KVCache | None, most_queries: int, most_keys: int) -> Work[int]:
    """Launch attention for each kind of launch; return the number of kinds. `cache`: that of a model that generates.

    Each is launched with one token and with two: Triton compiles for the distance between rows, which a tensor of one
    row does not have. Nothing is written or read: the tokens have no slot and see no key.
    """
    launches = 0
    encoder, decoder = model.encoder, model.decoder
    stack = encoder if encoder is not None else decoder
    assert stack is not None
    reached = dict.fromkeys(_bounds(model, stack, most_queries, most_queries))
    length = model.config.source_positions
    if length is not None:  # only into how many parts keys are split varies
        reached = dict.fromkeys((length, keys) for _, keys in _bounds(model, stack, length, length))
    for bounds in reached:
        if length is not None:
            _encode_blank(model, length, bounds)
        else:
            _encode_tokens(model, stack, bounds)
        launches += 1
        yield None
    if cache is not None and decoder is not None:
        reached = dict.fromkeys(_bounds(model, decoder, most_queries, most_keys, cache))
        if encoder is not None:
            most_keys = length or most_keys
            reached |= dict.fromkeys(_bounds(model, decoder, most_queries, most_keys, cache, cross=True))
        for bounds in reached:
            _decode_tokens(model, cache, bounds)
            launches += 1
            yield None
    return launches


def compile_images(model: Transformer, most_patches: int = 0) -> Work[int]:
    """Launch attention for each kind of launch of a vision stack and a tower; return the number of kinds.

    `most_patches` are those of the largest picture in a prompt, if the model reads any.
    """
    image, pictures, launches = model.config.image, model.config.pictures, 0
    if pictures is not None and most_patches:
        most_patches += pictures.patches.first
    for stack, most in ((model.vision, 0 if image is None else image.num_tokens), (model.tower, most_patches)):
        if stack is None or not most:
            continue
        for bounds in dict.fromkeys(_bounds(model, stack, most, most)):
            _encode_patches(model, stack, bounds)
            launches += 1
            yield None
    if model.tower is not None and most_patches:  # rows of pictures are rotated by coordinates
        _decode_places(model)
    return launches


def compile_own_kernels(model: Transformer) -> Work[int]:
    """Compile what a rank launches without the others: products, and the reduction of its part of the logits.

    Other ranks than the first do this when they load; rank 0's warm-up reaches only what they compute together.
    """
    launched = yield from compile_products(model)
    if model.linear.collective is not None and model.head is not None:
        first, last = model.vocabulary[model.linear.shard.rank]
        for count in LIKELIEST_PARTS:
            likeliest(_own_logits(model, count))
            likeliest(torch.zeros(count, last - first, dtype=model.dtype, device=model.device))
            launched += 1
            yield None
    return launched


def compile_products(model: Transformer) -> Work[int]:
    """Multiply by one projection of each kind, in each kind of launch; return the number of launches.

    The kinds are fp8, integers, experts and floats of one row; projections of a kind share compiled kernels.
    """
    products = (linear.product if isinstance(linear, ParallelLinear) else linear for linear in linears(model))
    kinds = {one.compiled_for: one for one in products if isinstance(one, CompiledLinear)}
    for linear in kinds.values():
        for rows in linear.tiled_rows:
            with torch.inference_mode():
                linear(torch.zeros(rows, linear.spec.inputs, dtype=model.dtype, device=linear.device))
        yield None
    of_experts = {one.compiled_for: one for one in linears(model) if isinstance(one, ExpertsLinear) and one.kernels}
    for experts in of_experts.values():
        for rows in experts.tiled_rows:
            starts = torch.full((experts.spec.experts + 1,), rows, dtype=torch.int32, device=experts.device)
            with torch.inference_mode():
                rows_of_all = torch.zeros(rows, experts.spec.inputs, dtype=model.dtype, device=experts.device)
                experts.of_experts(rows_of_all, starts)
        yield None
    floats = {kind: one for one in linears(model) if (kind := row_kernel_kind(one)) is not None}
    for one in floats.values():
        with torch.inference_mode():
            one(torch.zeros(1, one.spec.inputs, dtype=model.dtype, device=one.device))
        yield None
    launched = [linear.tiled_rows for linear in kinds.values()] + [one.tiled_rows for one in of_experts.values()]
    return sum(map(len, launched)) + len(floats)


@torch.inference_mode()
def compile_sampling(model: Transformer) -> None:
    """Sample from logits in the network's dtype, and in float32, which penalties, grammars and ranks return."""
    device, vocabulary = model.device, model.config.embedding.vocab_size
    rows = [SamplingRow(SamplingParams(temperature=1.0, top_p=0.9), 0, (0,), 1)] * 2
    kinds = [(model.dtype, vocabulary), (torch.float32, vocabulary), (torch.float32, candidate_columns(model))]
    for dtype, columns in dict.fromkeys(kinds):
        if columns:
            sample(torch.zeros(2, columns, dtype=dtype, device=device), rows)
            for count in LIKELIEST_PARTS:
                likeliest(torch.zeros(count, columns, dtype=dtype, device=device))
    if model.linear.collective is None:
        sample(_own_logits(model, 2), rows)
        for count in LIKELIEST_PARTS:
            likeliest(_own_logits(model, count))


@torch.inference_mode()
def _own_logits(model: Transformer, rows: int) -> Tensor:
    """Return a rank's logits as its head makes them: kernels are compiled for the distance between rows, too."""
    assert model.head is not None
    hidden = torch.zeros(rows, model.head.spec.inputs, dtype=model.dtype, device=model.device)
    return model.partial_logits(hidden)


def _bounds(
    model: Transformer,
    stack: Stack,
    most_queries: int,
    most_keys: int,
    cache: KVCache | None = None,
    *,
    cross: bool = False,
) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the launches of all layers' self-attention, or of their cross-attention."""
    found = (layer.cross if cross else layer.mixer for layer in stack.config.layers)
    for attention in dict.fromkeys(found):
        if not isinstance(attention, AttentionConfig):
            continue
        backend = backend_of(model.backend, attention)
        if isinstance(backend, CompiledBackend):
            yield from backend.launch_bounds(
                attention,
                model.dtype,
                model.device,
                most_queries=most_queries,
                most_keys=most_keys,
                biased=isinstance(attention.position, BucketBiasConfig),
                paged=cache is not None,
            )


@torch.inference_mode()
def _encode_blank(model: Transformer, length: int, bounds: tuple[int, int]) -> None:
    """Encode a blank image or window of audio."""
    image, audio, device = model.config.image, model.config.audio, model.device
    inputs = _packed(length, [length], bounds, device, causal=False)
    if image is not None:
        inputs = replace(inputs, pixels=torch.zeros(1, image.channels, image.size, image.size, device=device))
    if audio is not None:
        inputs = replace(inputs, frames=torch.zeros(1, audio.num_mel_bins, audio.num_frames, device=device))
    model.encode(inputs)


@torch.inference_mode()
def _encode_tokens(model: Transformer, stack: Stack, bounds: tuple[int, int]) -> None:
    """Encode tokens without a cache: separate texts if the bounds are those of single queries, else one text."""
    device = model.device
    for tokens in (1, 2):
        lengths = [1] * tokens if bounds[0] == 1 else [tokens]
        inputs = _packed(tokens, lengths, bounds, device, causal=stack.config.causal)
        if model.encoder is None:
            model.decode(inputs)
        else:
            model.encode(inputs)


@torch.inference_mode()
def _encode_patches(model: Transformer, stack: Stack, bounds: tuple[int, int]) -> None:
    """Take patches of images through the layers of a stack, as `_encode_tokens`."""
    device = model.device
    for count in (1, 2):
        inputs = _packed(count, [1] * count if bounds[0] == 1 else [count], bounds, device, causal=False)
        places = torch.zeros(2, count, dtype=torch.int64, device=device)
        inputs = replace(inputs, coordinates=places, other_pools=(inputs.metadata,))  # of windows
        x = torch.zeros(count, stack.config.hidden_size, dtype=model.dtype, device=device)
        StackPass(stack, x, inputs, model.backend).finish()


@torch.inference_mode()
def _decode_places(model: Transformer) -> None:
    """Decode two tokens whose positions have coordinates, without a cache."""
    inputs = _packed(2, [2], (2, 2), model.device, causal=True)
    model.decode(replace(inputs, coordinates=torch.zeros(3, 2, dtype=torch.int64, device=model.device)))


def _packed(tokens: int, lens: list[int], bounds: tuple[int, int], device: torch.device, *, causal: bool) -> StackInput:
    metadata = AttentionMetadata(tuple(lens), tuple(lens), causal, device)
    known = metadata.on_device()
    metadata.device_lengths = replace(known, max_q_len=bounds[0], max_kv_len=bounds[1])
    zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
    return StackInput(zeros, zeros, metadata)


@torch.inference_mode()
def _decode_tokens(model: Transformer, cache: KVCache, bounds: tuple[int, int]) -> None:
    """Decode over the cache: separate sequences if the bounds are those of single queries, else one sequence."""
    device = cache.device
    for tokens in (1, 2):
        lens = (1,) * tokens if bounds[0] == 1 else (tokens,)
        zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
        starts = torch.tensor([0, *accumulate(lens)], dtype=torch.int64, device=device)
        lengths = DeviceLengths(starts, zeros[: len(lens)], *bounds)
        slots, tables = zeros - 1, zeros[: len(lens), None]
        others, cross = len(cache.pools) - 1, None  # which have tables and slots like the first
        if model.encoder is not None:
            source = AttentionMetadata(lens, lens, False, device, tables, None, lengths)
            cross = CrossInput(source, other_pools=(source,) * others)
        own = AttentionMetadata(lens, lens, True, device, tables, slots, lengths)
        inputs = StackInput(zeros, zeros, own, other_pools=(own,) * others, states=whole_segments(lens))
        model.decode(inputs, cache, cross)


def _request(generate: GenerateEngine, encode: EncodeEngine, length: int, number: int) -> Request:
    most = min(generate.max_model_len - 2, encode.max_num_batched_tokens)
    prompt = (0,) * max(1, min(length, most))
    start = encode.model.config.decoder_start_token_id
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=float(number % 2), top_p=0.9)
    source = None
    if encode.model.config.encoder is not None and start is not None:
        prompt, source = (start,), blank_source(encode.model.config, len(prompt))
    return Request(f"warm-up-{number}", generate.name, prompt, params, source, cache_salt=f"warm-up-{length}")
