"""After warm-up no request compiles an attention kernel: warm-up has launched every variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

from tests.engine.support import pools_for, request
from tests.model.checkpoints import loaded, prompt, saved
from tests.model.launches import noted
from triptych.model.api.request import EncodeRequest, EncodeTask, Pooling, image_source, token_source
from triptych.model.attention import triton
from triptych.model.attention.triton import TritonBackend
from triptych.model.attention.triton_kernels import INTERPRETED
from triptych.model.cache.kv_cache import KVCache
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.sentence_transformers import SentenceSettings
from triptych.model.config.attention import AttentionConfig
from triptych.model.config.cache import PoolSize, StateSize
from triptych.model.engine import warmup
from triptych.model.engine.encode_engine import EncodeEngine
from triptych.model.engine.execution.cuda_graphs import DecodeGraphs
from triptych.model.engine.execution.encoder_graphs import EncoderGraphs, can_record_batches
from triptych.model.engine.execution.mixed_graphs import MixedGraphs, can_record_prompts
from triptych.model.engine.execution.model_runner import ModelRunner
from triptych.model.engine.execution.sources import source_input
from triptych.model.engine.generate_builder import picture_patches
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.scheduler import Scheduler
from triptych.model.engine.warmup import compile_attention, compile_images
from triptych.model.linear import float as linear
from triptych.model.sampling.random_sampling import LIKELIEST_PARTS
from triptych.model.system.background_work import finish

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: kernels are compiled, see -m gpu")
CPU = torch.device("cpu")
CONTEXT, BUDGET, BLOCK = 2200, 1200, 16


def variants(seen: dict[str, dict[str, Any]]) -> set[str]:
    return set(seen)


def described(seen: dict[str, dict[str, Any]], keys: set[str]) -> Sequence[Any]:
    """Describe variants by plain numbers, for a failure message."""
    return [{name: v for name, v in seen[key].items() if not isinstance(v, Tensor)} for key in keys]


def serve(engine: GenerateEngine, lengths: Sequence[tuple[int, int]], kind: str, together: bool) -> None:
    """Run requests of these (prompt, output) lengths; with an encoder, (source, decoder prompt) lengths."""
    for number, (length, output) in enumerate(lengths):
        one = request(kind, f"r{number}", length, number, max_tokens=output)
        if one.source is not None:  # a source is read whole
            source = token_source(one.source.token_ids[:BUDGET])
            one = replace(one, prompt_token_ids=(0,) * length, source=source)
        engine.add(one)
        while not together and engine.has_work:
            engine.step()
    while engine.has_work:
        engine.step()


def recorded(run: Any) -> tuple[Tensor, Any]:
    result = run()
    return result, lambda: result.copy_(run())


@pytest.mark.parametrize(
    ("kind", "kv"),
    [
        ("llama-gqa", torch.float32),
        ("llama-mqa-head-dim", torch.int8),
        ("qwen3", torch.float32),
        ("mistral", torch.float32),
        ("gemma2", torch.float32),
        ("qwen3-5", torch.float32),
        ("t5-relu", torch.float32),
    ],
)
def test_traffic_launches_only_warmed_variants(kind: str, kv: torch.dtype) -> None:
    model = loaded(kind, TritonBackend())
    assert model.config.decoder is not None
    pools = pools_for(model.config.decoder, 1500)
    states = StateSize(12, 0) if model.config.decoder.recurrences else None
    blocks = BlockManager(pools, BLOCK, prefix_caching=False, states=states)
    cache = KVCache(model.config.decoder, [pool.num_pages for pool in pools], BLOCK, kv, CPU, num_states=24)
    with noted() as warmed:
        finish(compile_attention(model, cache, BUDGET, CONTEXT))
    with noted() as seen:
        graphs = DecodeGraphs(model, cache, max_num_seqs=12, max_model_len=CONTEXT, record=recorded)
        finish(graphs.record_each())
        mixed = MixedGraphs(model, cache, max_num_seqs=12, max_model_len=CONTEXT, record=recorded)
        if can_record_prompts(model):
            finish(mixed.record_each())
        for recording in (None, graphs):
            runner = ModelRunner(model, cache, blocks, recording)
            engine = GenerateEngine(kind, runner, Scheduler(blocks, 12, BUDGET), max_model_len=CONTEXT)
            alone = [(n, 2) for n in (1, 2, 9, 40, 300, 600, 1100, 1203, 1300, 2100)]
            serve(engine, alone, kind, together=False)
            serve(engine, [(n, 4) for n in (1, 3, 70, 500, 7, 600, 20, 33, 2, 1)], kind, together=True)
        encode = EncodeEngine(
            kind,
            model,
            CPU,
            max_num_seqs=8,
            max_num_batched_tokens=BUDGET,
            sentences=SentenceSettings((Pooling.MEAN,), normalize=True),
        )
        for lengths in [(1,), (2,), (12,), (40,), (150,), (600,), (1100,), (3, 9, 200), (600, 500), (1, 1)]:
            for number, length in enumerate(lengths):
                encode.add(EncodeRequest(f"e{number}", kind, token_source(prompt(length)), EncodeTask.EMBEDDING))
            while encode.has_work:
                encode.step()
    missed, idle = variants(seen) - variants(warmed), variants(warmed) - variants(seen)
    assert not missed, described(seen, missed)
    if kind not in (
        "qwen3",
        "gemma2",
    ):  # whose rows of 12 numbers look otherwise to Triton where there is only one of them
        assert not idle, described(warmed, idle)
    assert len(warmed) > 10


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_encoders_too(kind: str) -> None:
    model = loaded(kind, TritonBackend())
    longest = model.config.max_positions or 64
    with noted() as warmed:
        finish(compile_attention(model, None, longest, longest))
    encode = EncodeEngine(
        kind,
        model,
        CPU,
        max_num_seqs=8,
        max_num_batched_tokens=longest,
        sentences=SentenceSettings((Pooling.CLS,), normalize=True),
        images=read_checkpoint(saved(kind).path).images,
    )
    with noted() as seen:
        image = model.config.image
        for lengths in [(1,), (2,), (12,), (40,), (longest,), (3, 9), (1, 1)]:
            for number, length in enumerate(lengths):
                source = token_source(prompt(length))
                if image is not None:
                    shape = (image.channels, image.size, image.size)
                    source = image_source(bytes(image.pixel_bytes), shape, image.num_tokens)
                encode.add(EncodeRequest(f"e{number}", kind, source, EncodeTask.TOKENS))
            while encode.has_work:
                encode.step()
        if can_record_batches(model):
            batches = EncoderGraphs(model, max_num_seqs=8, max_num_tokens=4096, record=recorded, images=encode._images)
            finish(batches.record_each())
    assert variants(seen) == variants(warmed)


@pytest.mark.parametrize("kind", ["clip", "llava", "qwen2-5-vl-pictures"])
def test_stacks_that_see_images_too(kind: str) -> None:
    model, checkpoint = loaded(kind, TritonBackend()), read_checkpoint(saved(kind).path)
    with noted() as warmed:
        finish(compile_images(model, picture_patches(checkpoint)))
    with noted() as seen, torch.inference_mode():
        if model.tower is not None:
            for size in ((32, 32),) if kind == "llava" else ((8, 8), (16, 40), (64, 64)):
                model.begin_picture(torch.zeros(3, *size)).finish()
        else:
            image = model.config.image
            assert image is not None
            for count in (1, 3):
                one = image_source(bytes(image.pixel_bytes), (3, image.size, image.size), image.num_tokens)
                model.encode_images(source_input([one] * count, CPU, images=checkpoint.images))
    missed = variants(seen) - variants(warmed)
    assert not missed, described(seen, missed)
    assert seen


@pytest.mark.parametrize("begin", [1, 2, 3])
def test_parts_are_joined_by_one_variant_wherever_their_rows_begin(begin: int) -> None:
    """Check three heads of two parts: the prompt's weights start at 24 bytes, which is no multiple of 16."""
    mixed, weight, out = torch.zeros(5, 3, 2, 16), torch.zeros(5, 3, 2), torch.zeros(5, 3, 16)
    with noted() as seen:
        for first in (0, begin):
            triton._combine(mixed[first:], weight[first:], out[first:], AttentionConfig(3, 3, 16, 1.0))
    assert len(seen) == 1


def test_what_decodes_beside_a_prompt_is_launched_as_decoding() -> None:
    """Check that decodes use tiles of one query and the prompt large ones, in separate launches."""
    model = loaded("llama-gqa", TritonBackend())
    assert model.config.decoder is not None
    blocks = BlockManager([PoolSize(200)], BLOCK)
    runner = ModelRunner(model, KVCache(model.config.decoder, [200], BLOCK, torch.float32, CPU), blocks)
    engine = GenerateEngine("llama-gqa", runner, Scheduler(blocks, 12, BUDGET), max_model_len=CONTEXT)
    with noted():
        engine.add(request("llama-gqa", "long", 150, 0, max_tokens=3))
        for number in range(3):
            engine.add(request("llama-gqa", f"r{number}", 5, number, max_tokens=9))
        engine.step()
    engine.add(request("llama-gqa", "prompt", 100, 5, max_tokens=3))
    with noted() as seen:
        engine.step()
    launches = [arguments for key, arguments in seen.items() if key.startswith("attend")]
    assert [arguments["SINGLE"] for arguments in launches] == [True, False]
    assert [len(arguments["kv_lens"]) for arguments in launches] == [4, 1]
    assert [arguments["BLOCK_M"] for arguments in launches] == [16, 32]


def test_sampling_is_warmed_for_rows_that_are_longer_than_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the strides of logits whose number is no multiple of 8, as a GPU multiplies them."""
    seen: set[tuple[int, ...]] = set()
    model = loaded("gpt2")
    assert model.head is not None
    monkeypatch.setattr(linear, "product", linear.unaligned_product)
    monkeypatch.setattr(warmup, "likeliest", lambda logits: seen.add((len(logits), *logits.stride())))
    monkeypatch.setattr(warmup, "sample", lambda logits, rows: seen.add((len(logits), *logits.stride())))
    warmup.compile_sampling(model)
    with torch.inference_mode():
        for rows in (2, *LIKELIEST_PARTS):
            stride = model.logits(torch.zeros(rows, model.head.spec.inputs)).stride()
            assert stride[0] > model.config.embedding.vocab_size
            assert {(rows, *stride), (rows, model.config.embedding.vocab_size, 1)} <= seen
