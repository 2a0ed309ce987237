"""Recorded batches give the results of launched ones, and read nothing but their static row.

As in test_overlap, a replay calls the recorded function again: it has the same buffers, and lengths of the recording.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.bench.gpu.shapes import GPU_MODELS
from lab.bench.models import config_of
from tests.engine.support import pools_for, request
from tests.engine.test_overlap import LengthsBackend, recorded, tokens_of
from tests.model.checkpoints import CPU, loaded, prompt, saved
from triptych.model.api.engine_config import BatchLimits, EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import EncodeRequest, EncodeTask, Pooling, Source, token_source
from triptych.model.attention.base import AttentionMetadata
from triptych.model.attention.selection import Selection
from triptych.model.cache.kv_cache import KVCache
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.sentence_transformers import SentenceSettings
from triptych.model.engine import builder
from triptych.model.engine.encode_engine import EncodeEngine
from triptych.model.engine.execution import encoder_graphs
from triptych.model.engine.execution.encoder_graphs import (
    BatchSize,
    EncoderGraphs,
    batch_sizes,
    can_record_batches,
    most_tokens,
    pack_texts,
)
from triptych.model.engine.execution.model_runner import ModelRunner
from triptych.model.engine.execution.sources import blank_source, source_input
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.planning import kernels
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.scheduler import Scheduler
from triptych.model.network.transformer import Transformer
from triptych.model.system.background_work import finish

SEQS, BUDGET = 12, 256


class TextsBackend(LengthsBackend):
    """A backend that reads the lengths of packed texts, too, only on the device. Rows without keys become zeros."""

    def forward(self, query, key, value, cache, metadata, config, bias=None, sinks=None) -> Tensor:  # type: ignore[no-untyped-def]
        lengths = metadata.device_lengths
        if lengths is None or metadata.block_tables is not None:
            return super().forward(query, key, value, cache, metadata, config, bias, sinks)
        starts, kv_lens = lengths.cu_seqlens_q.tolist(), lengths.kv_lens.tolist()
        assert starts[-1] == len(query) and starts == sorted(starts) and len(starts) == len(kv_lens) + 1
        rows = [range(start, start + count) for start, count in zip(starts, kv_lens, strict=False)]
        assert all(count in (0, end - start) for start, end, count in zip(starts, starts[1:], kv_lens, strict=False))
        assert max(kv_lens) <= min(lengths.max_q_len, lengths.max_kv_len)
        read = [row for text in rows for row in text]
        out = torch.zeros_like(query)
        if read:
            lens = tuple(count for count in kv_lens if count)
            known = AttentionMetadata(lens, lens, metadata.causal)
            out[read] = super().forward(query[read], key[read], value[read], None, known, config, bias, sinks)
        return out


class Replays(EncoderGraphs):
    """Recorded batches that note their sizes."""

    def __init__(self, model: Transformer, **settings: Any) -> None:
        super().__init__(model, record=recorded, **settings)
        finish(self.record_each())
        self.ran: list[BatchSize] = []

    def run(self, size: BatchSize, sources: Any) -> Tensor:
        self.ran.append(size)
        return super().run(size, sources)


@pytest.fixture(autouse=True)
def small_models_count_as_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_graphs, "most_tokens", lambda config: 192)


def graphs_of(kind: str) -> Replays:
    model = loaded(kind, TextsBackend())
    model.config = replace(model.config, head=None) if model.encoder is None else model.config
    assert can_record_batches(model)
    return Replays(model, max_num_seqs=SEQS, max_num_tokens=BUDGET)


def engine(graphs: EncoderGraphs, *, launched: bool) -> EncodeEngine:
    return EncodeEngine(
        "m",
        graphs._model,
        CPU,
        max_num_seqs=SEQS,
        max_num_batched_tokens=BUDGET,
        sentences=SentenceSettings((Pooling.MEAN,), normalize=True),
        graphs=None if launched else graphs,
    )


def encoded(made: EncodeEngine, batches: list[list[EncodeRequest]]) -> list[np.ndarray]:
    found = {}
    for batch in batches:
        for one in batch:
            made.add(one)
        while made.has_work:
            found |= {output.request_id: output for output in made.step()[0]}
    return [
        np.frombuffer(found[one.request_id].data, "<f4").reshape(found[one.request_id].shape)
        for batch in batches
        for one in batch
    ]


def batches_of(seed: int, longest: int, vocabulary: int, num_types: int, count: int) -> list[list[EncodeRequest]]:
    """Return batches of one to nine texts, some with token types, some too large for every recorded size."""
    rng, made = random.Random(seed), []
    for number in range(count):
        batch = []
        for place in range(rng.choice((1, 1, 2, 5, 9))):
            ids = tuple(rng.randrange(vocabulary) for _ in range(rng.randint(1, longest)))
            types = tuple(rng.randrange(num_types) for _ in ids) if rng.random() < 0.3 and num_types else ()
            task = rng.choice((EncodeTask.EMBEDDING, EncodeTask.TOKENS))
            batch.append(EncodeRequest(f"{number}-{place}", "m", token_source(ids, types), task))
        made.append(batch)
    return made


@pytest.mark.parametrize(
    "kind",
    ["bert", "roberta", "modernbert", "nomic-bert", "esm", "albert", "t5-encoder", "marian", "qwen3", "phi3-longrope"],
)
def test_recorded_batches_give_the_vectors_of_launched_ones(kind: str) -> None:
    graphs = graphs_of(kind)
    config = graphs._model.config
    longest, num_types = min(40, config.max_positions or 40), next(iter(config.stacks.values())).token_types
    batches = batches_of(len(kind), longest, config.source_vocab_size, num_types, 12)
    expected = encoded(engine(graphs, launched=True), batches)
    assert not graphs.ran
    found = encoded(engine(graphs, launched=False), batches)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6, rtol=1e-5)
    assert len({size.segments for size in graphs.ran}) > 1 and len({size.tokens for size in graphs.ran}) > 2


def test_a_batch_that_no_size_holds_is_launched() -> None:
    graphs = graphs_of("bert")
    sizes = [graphs.size_of([token_source((1,) * length)] * count) for length, count in ((40, 6), (1, 13), (1, 12))]
    assert sizes == [None, None, BatchSize(192, 12)]
    (vector,) = encoded(engine(graphs, launched=False), [[EncodeRequest("r", "m", token_source(prompt(9)))]])
    assert graphs.ran == [BatchSize(16, 1)] and np.isfinite(vector).all()


def test_unread_tokens_are_launched() -> None:
    graphs = graphs_of("bert")
    unread = EncodeRequest("r", "m", token_source(prompt(9)), EncodeTask.TOKENS, unread=3)
    found = encoded(engine(graphs, launched=False), [[unread]])
    assert not graphs.ran
    np.testing.assert_array_equal(found[0], encoded(engine(graphs, launched=True), [[unread]])[0])


def test_a_broken_input_fails_alone_in_a_recorded_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_of("bert")
    made = engine(graphs, launched=False)
    for number, ids in enumerate(((5, 6), (5, 10_000), (7,))):  # a token id beyond the vocabulary
        made.add(EncodeRequest(str(number), "m", token_source(ids)))
    outputs, _ = made.step()
    reasons = {output.request_id: str(output.finish_reason) for output in outputs}
    assert reasons == {"0": "stop", "1": "error", "2": "stop"}


@pytest.mark.parametrize("kind", ["vit", "whisper"])
def test_images_and_windows_of_sound(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(kind, TextsBackend())
    blank, rng = blank_source(model.config), np.random.default_rng(0)
    monkeypatch.setattr(encoder_graphs, "most_tokens", lambda config: 4 * blank.num_positions)
    images = read_checkpoint(saved(kind).path).images
    graphs = Replays(model, max_num_seqs=SEQS, max_num_tokens=4096, images=images)
    assert graphs.sizes == [BatchSize(count * blank.num_positions, count) for count in (1, 2, 4)]

    def source() -> Source:
        if kind == "vit":
            return replace(blank, features=rng.bytes(len(blank.features)))
        return replace(blank, features=rng.normal(size=len(blank.features) // 4).astype("<f4").tobytes())

    for count in (4, 1, 3, 2):
        sources = [source() for _ in range(count)]
        size = graphs.size_of(sources)
        assert size is not None
        with torch.inference_mode():
            expected = model.encode(source_input(sources, CPU, images=images))
            torch.testing.assert_close(graphs.run(size, sources), expected, atol=2e-5, rtol=1e-4)
    assert graphs.size_of([blank] * 5) is None


@pytest.mark.parametrize("kind", ["bart", "t5-relu", "marian"])
def test_sources_of_a_recorded_batch_give_the_same_tokens(kind: str) -> None:
    graphs, model = graphs_of(kind), loaded(kind, TextsBackend())
    assert model.config.decoder is not None

    def generated(recorded_batches: EncoderGraphs | None) -> Any:
        pools = pools_for(model.config.decoder, 300)
        blocks = BlockManager(pools, 4)
        cache = KVCache(model.config.decoder, [pool.num_pages for pool in pools], 4, torch.float32, CPU)
        runner = ModelRunner(model, cache, blocks, encoder_graphs=recorded_batches)
        made = GenerateEngine(kind, runner, Scheduler(blocks, 8, 64), max_model_len=64)
        for number in range(6):
            made.add(request(kind, f"r{number}", 3 + 5 * number, number, max_tokens=6, logprobs=0))
        found: dict[tuple[str, int], list[Any]] = {}
        while made.has_work:
            for output in made.step()[0]:
                found.setdefault((output.request_id, output.index), []).append(output)
        return tokens_of(found)

    expected = generated(None)
    assert not graphs.ran
    assert generated(graphs) == expected
    assert graphs.ran


def test_which_encoders_are_recorded() -> None:
    backend = TextsBackend()
    for kind, fit in (("bert", True), ("bart", True), ("llama-gqa", False), ("vit", True), ("whisper", True)):
        assert can_record_batches(loaded(kind, backend)) == fit, kind
    assert not can_record_batches(
        loaded("deberta-v2-convolution", backend)
    )  # its convolution reads lengths on the host
    assert not can_record_batches(loaded("bert"))  # by a backend that does
    embeds = loaded("qwen3-next", backend)
    embeds.config = replace(embeds.config, head=None)
    assert not can_record_batches(embeds)  # recurrent layers do


def test_a_row_holds_texts_and_one_segment_of_padding() -> None:
    size = BatchSize(16, 4)
    row = pack_texts(size, [token_source((5, 6, 7)), token_source((8, 9), (0, 1))])
    assert len(row) == size.integers
    fields = size.split(row)
    assert fields.ids.tolist() == [5, 6, 7, 8, 9] + [0] * 11
    assert fields.positions.tolist() == [0, 1, 2, 0, 1] + [0] * 11
    assert fields.types.tolist() == [0, 0, 0, 0, 1] + [0] * 11
    assert fields.contexts.tolist() == [3, 3, 3, 2, 2] + [0] * 11
    assert fields.starts.tolist() == [0, 3, 5, 5, 5, 16]
    assert fields.lengths.tolist() == [3, 2, 0, 0, 0]
    row = pack_texts(size, [token_source((5, 6, 7)), token_source((6, 9))], padding=6)
    assert size.split(row).positions.tolist() == [0, -1, 1, -1, 0] + [0] * 11


def test_sizes_are_those_of_one_text_of_few_and_of_many() -> None:
    sizes = batch_sizes(4096, 256)
    assert sizes == sorted(sizes) and len(sizes) < 40
    assert [size.tokens for size in sizes if size.segments == 1] == [16, 32, 64, 128, 256, 512]
    assert {size.segments for size in sizes if size.tokens == 4096} == {32, 256}
    assert {size.segments for size in sizes if size.tokens == 128} == {1, 8}
    assert {size.segments for size in batch_sizes(4096, 4)} == {1, 4}
    assert batch_sizes(100, 256) == [BatchSize(*one) for one in ((16, 1), (32, 1), (64, 1), (64, 8))]
    assert batch_sizes(10, 256) == []


def test_large_batches_of_large_models_are_not_recorded() -> None:
    most = {name: most_tokens(config_of(GPU_MODELS[name])) for name in ("bert-base", "bart-large", "llama-8b")}
    assert most["bert-base"] == 4096
    assert 1024 < most["bart-large"] < 4096
    assert 64 < most["llama-8b"] < 512


def test_a_loaded_model_records_before_its_cache_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the order, what is told, and that `cuda_graphs` turns it off; only the device is a CPU."""
    done: list[str] = []
    real: Callable[..., Any] = builder._recorded_batches

    def recording(engine: EngineConfig, model: Transformer, limits: BatchLimits, *_: Any) -> Any:
        done.append("records")
        return real(engine, model, limits, torch.device("cuda"))

    chosen = Selection(TextsBackend(), "asked for", preferred="sdpa")
    monkeypatch.setattr(kernels, "select_backend", lambda *_: chosen)
    monkeypatch.setattr(builder, "CudaRecorder", lambda *_: recorded)
    monkeypatch.setattr(builder, "_recorded_batches", recording)
    monkeypatch.setattr(builder, "measure_pool", lambda *_: done.append("measures") or 1 << 20)
    monkeypatch.setattr(builder, "_plan_for_cpu", lambda *_: (None, 0))
    settings = EngineConfig(device="cpu", dtype="float32", max_num_seqs=4, max_num_batched_tokens=128)
    found = builder.load(ModelSpec("m", str(saved("bart").path), settings))
    assert done == ["records", "measures"]
    assert found.info.recorded_batches == len(batch_sizes(128, 4)) > 5
    off = builder.load(ModelSpec("m", str(saved("bart").path), replace(settings, cuda_graphs=False)))
    assert off.info.recorded_batches == 0


def test_a_failed_recording_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(run: Callable[[], Tensor]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(builder, "CudaRecorder", lambda *_: failing)
    limits, model = BatchLimits(4, 128, 8, 256), loaded("bert", TextsBackend())
    graphs, why = finish(builder._recorded_batches(EngineConfig(), model, limits, torch.device("cuda")))
    assert (graphs, why) == (None, "operation not permitted when stream is capturing")
    slow = builder.slow_ways(
        EngineConfig(), Selection(TextsBackend(), ""), {"batches to encode": why}, torch.device("cuda")
    )
    assert slow == (f"batches to encode are launched kernel by kernel: {why}",)
