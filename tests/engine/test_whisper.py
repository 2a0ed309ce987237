"""Whisper: windows of sound give the outputs of `transformers`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.engine.support import request, running
from tests.model.checkpoints import (
    AUDIO,
    CPU,
    START,
    VOCAB,
    copied,
    loaded,
    native_backends,
    reference_input,
    saved,
    source_of,
)
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.request import EncodeRequest, EncodeTask, FinishReason, Source, audio_source, token_source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.engine.execution.sources import source_input
from triptych.model.engine.scheduling.scheduled_step import StepBudget
from triptych.model.engine.scheduling.source_blocks import SourcePasses
from triptych.model.errors import ConfigError
from triptych.model.llm import LLM

AUDIO_CONFIG = AUDIO["whisper"]
BEGIN = (START, 5, 9)  # language and task follow the start token
RULES = {"suppress_tokens": [4, 11, 30, 31, 47], "begin_suppress_tokens": [2, 20, 21]}
NEW = 14


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = copied("whisper", tmp_path_factory.mktemp("whisper"))
    (folder / "generation_config.json").write_text(json.dumps({**RULES, "eos_token_id": 2, "max_length": 128}))
    return LLM(folder, EngineConfig(dtype="float32", max_num_seqs=10, block_size=4, kv_cache_memory=1 << 22))


def windows(count: int) -> list[Source]:
    return [source_of(AUDIO_CONFIG, seed, seed) for seed in range(count)]


def theirs(window: Source, **settings: Any) -> list[int]:
    """Return what the library's general search generates; Whisper's own handles languages and long recordings."""
    from transformers import GenerationMixin  # takes 2 s in each worker

    found = GenerationMixin.generate(
        saved("whisper").reference,
        **reference_input(window),
        decoder_input_ids=torch.tensor([BEGIN]),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=1,
        **RULES,
        **settings,
    )
    ids = found[0].tolist()[len(BEGIN) :]
    return ids[: ids.index(2) + 1] if 2 in ids else ids


@pytest.mark.parametrize("num_beams", [1, 5])
def test_outputs_equal_transformers(llm: LLM, num_beams: int) -> None:
    read = windows(4)
    outputs = llm.stream(read, SamplingParams(max_tokens=NEW, num_beams=num_beams), decoder_prompt=BEGIN)
    ids: list[list[int]] = [[] for _ in read]
    for place, output in outputs:
        ids[place] += output.token_ids
    expected = [theirs(window, num_beams=num_beams) for window in read]
    assert ids == expected
    assert len(set(map(tuple, ids))) > 1


def test_a_window_is_encoded_once_for_all_that_read_it() -> None:
    run = running("whisper", num_blocks=30, max_num_seqs=3)
    requests = [request("whisper", f"r{number}", 0, 3, max_tokens=12 + number) for number in range(5)]
    encoded = 0
    for one in requests:
        run.engine.add(one)
    while run.engine.has_work:
        outputs, stats = run.engine.step()
        run.outputs += outputs
        encoded += stats.num_whole_tokens if stats is not None else 0
    assert encoded == AUDIO_CONFIG.num_positions
    assert max(run.runner.worst("whisper", one, run.ids(one.request_id)) for one in requests) < 1e-4


@pytest.mark.parametrize("kind", ["whisper", "t5-relu"])
def test_a_source_in_parts_is_the_same_bit_for_bit(kind: str) -> None:
    """Check the logits while a stream decodes in every step between the parts."""
    rows = []
    for limit in (None, 1):
        run = running(kind, backend=native_backends()[0])
        run.engine.scheduler.source_passes = SourcePasses(2)
        requests = [request(kind, f"r{number}", 9, number, max_tokens=6) for number in range(3)]
        run.engine.add(requests[0])
        run.step()
        for one in requests[1:]:
            run.engine.add(one)
        whole = []
        for _ in range(8):
            outputs, stats = run.engine.step(StepBudget(whole_tokens=limit))
            run.outputs += outputs
            whole.append(stats.num_whole_tokens if stats is not None else 0)
        run.run()
        if limit:
            length = AUDIO_CONFIG.num_positions if kind == "whisper" else 9
            assert whole[:5] == [length // 2, length - length // 2, length // 2, length - length // 2, 0]
        rows.append([row for one in requests for _, row in run.runner.rows[one.request_id]])
    assert torch.equal(torch.stack(rows[0]), torch.stack(rows[1]))


@torch.inference_mode()
def test_layers_that_are_computed_are_not_computed_again() -> None:
    """Check advancing past the last layer: a more urgent request may compute layers for one with the same source."""
    model, inputs = loaded("whisper"), source_input(windows(1), CPU)
    begun = model.begin(inputs)
    for _ in range(3):  # of two layers
        begun.advance(1)
    assert torch.equal(begun.finish(), model.encode(inputs))


def test_vectors_of_a_window_are_the_encoders(llm: LLM) -> None:
    engine = llm._encode
    for place, window in enumerate(read := windows(3)):
        engine.add(EncodeRequest(str(place), engine.name, window, EncodeTask.TOKENS))
    outputs = {output.request_id: output for output in engine.step()[0]}
    for place, window in enumerate(read):
        output = outputs[str(place)]
        ours = torch.frombuffer(bytearray(output.data), dtype=torch.float32).view(output.shape)
        (features,) = reference_input(window).values()
        expected = saved("whisper").reference.model.encoder(features).last_hidden_state[0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def test_what_cannot_be_read_is_refused(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)
    (window,) = windows(1)
    short = audio_source(window.features[: 4 * 10 * 24], (10, 24), 12)
    cases: list[tuple[Any, tuple[int, ...], str]] = [
        ((3, 4), (), "reads sound"),
        (token_source((3, 4)), (), "reads sound"),
        (short, (), r"windows of \(10, 26\), found \(10, 24\)"),
        (window, (START, VOCAB), "outside the vocabulary"),
        (window, (START,) * 128, "takes 1 to 127 tokens"),
    ]
    for prompt, begin, message in cases:
        with pytest.raises(ConfigError, match=message):
            list(llm.stream([prompt], params, decoder_prompt=begin))
    [(_, output)] = llm.stream([window], SamplingParams(max_tokens=1))
    assert output.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        *({"quantization": name} for name in ("int8", "int4")),
        {"dtype": "float32", "kv_cache_dtype": "int8"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_number_formats_stay_close(settings: dict[str, Any]) -> None:
    """Check that the first log-probabilities correlate with float32's, and that beams agree alone and together."""
    exact, near = (
        LLM(saved("whisper").path, EngineConfig(kv_cache_memory=1 << 22, **one))
        for one in ({"dtype": "float32"}, settings)
    )
    tops = []
    for llm in (exact, near):
        params = SamplingParams(max_tokens=1, logprobs=VOCAB, ignore_eos=True)
        [(_, output)] = llm.stream(windows(1), params, decoder_prompt=BEGIN)
        assert output.logprobs is not None
        tops.append(dict(output.logprobs[0].top))
    common = sorted(tops[0].keys() & tops[1].keys())
    ours, expected = (torch.tensor([top[token] for token in common]) for top in reversed(tops))
    assert len(common) > VOCAB // 2
    assert torch.corrcoef(torch.stack((ours, expected)))[0, 1] > (0.99 if "kv_cache_dtype" in settings else 0.8)
    params = SamplingParams(max_tokens=6, num_beams=5, ignore_eos=True)
    alone = [[output.token_ids for _, output in near.stream([one], params, decoder_prompt=BEGIN)] for one in windows(3)]
    found: list[list[Any]] = [[], [], []]
    for place, output in near.stream(windows(3), params, decoder_prompt=BEGIN):
        found[place].append(output.token_ids)
    assert found == alone  # a row's bits do not depend on the others
