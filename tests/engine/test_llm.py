"""The offline API, and how engines are built from a checkpoint folder."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.support import request, running
from tests.model.checkpoints import VOCAB, copied, loaded, prompt, reference_logits, saved
from tests.model.texts import bytes_tokenizer
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import FinishReason
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.engine.builder import load
from triptych.model.engine.planning.memory_plan import max_context
from triptych.model.errors import ConfigError, EngineDeadError
from triptych.model.llm import LLM

WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
SMALL = {"kv_cache_memory": 4 << 20, "device": "cpu", "dtype": "float32"}


@cache
def offline() -> LLM:
    return LLM(saved("llama").path, EngineConfig(**SMALL))


@pytest.mark.parametrize("kind", ["llama-gqa", "marian"])
def test_offline_generation_is_the_engines_and_becomes_text(kind: str, tmp_path: Path) -> None:
    folder = copied(kind, tmp_path)
    bytes_tokenizer()._tokenizer.save(str(folder / "tokenizer.json"))
    made = [request(kind, f"r{i}", 4 + i) for i in range(3)]
    direct = running(kind)
    for one in made:
        direct.engine.add(one)
    direct.run()
    llm = LLM(folder, EngineConfig(**SMALL))
    texts = llm.generate([one.prompt_token_ids for one in made], SamplingParams(max_tokens=12, ignore_eos=True))
    if kind == "llama-gqa":  # only the encoder-decoder can start without a prompt
        assert texts == [bytes_tokenizer().decode(direct.ids(one.request_id)) for one in made]
    assert all(texts)


def test_threads_share_a_model_and_get_what_they_asked_for() -> None:
    asked = [[prompt(10 + i), prompt(20 + i)] for i in range(6)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def ids(prompts: list[list[int]]) -> list[int]:
        return [id for position, output in offline().stream(prompts, params) for id in (position, *output.token_ids)]

    expected = [ids(one) for one in asked]
    vectors = [offline().encode(one) for one in asked]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ids, asked)), list(pool.map(offline().encode, asked))
    assert found[0] == expected
    assert all(map(np.array_equal, found[1], vectors))


def test_a_second_call_of_a_thread_that_reads_a_stream_is_refused() -> None:
    stream = offline().stream([prompt(5)], SamplingParams(max_tokens=4, ignore_eos=True))
    next(stream)
    for call in (lambda: next(offline().stream([prompt(6)])), lambda: offline().encode([prompt(7)])):
        with pytest.raises(ConfigError, match="read it to its end, or close it"):
            call()
    assert len(list(stream)) == 3
    abandoned = offline().stream([prompt(5)], SamplingParams(max_tokens=4))
    next(abandoned)
    del abandoned
    assert offline().encode([prompt(7)]).shape[0] == 1


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (None, None, "prompts: expected a text, or a list .* found NoneType"),
        (b"abc", None, "found bytes"),
        ([1, 2], None, "found int 1 at place 0"),
        ([[1], None], None, "found NoneType None at place 1"),
        ({"a": 1}, None, "found dict"),
        ([[1]], 5, "params: expected a SamplingParams or a dict of its fields, found int 5"),
        ([[1]], {"max_tokens": "2"}, "params: max_tokens: expected no text, found str '2'"),
        ([[1]], {"stop": "x"}, "params: stop: expected a list of texts, found str 'x'"),
        ([[1]], SamplingParams(temperature="1"), "params: temperature: expected no text"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_prompt_or_parameter_is_named(prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        offline().generate(prompts, params)


def test_inputs_are_needed_and_arrays_are_prompts() -> None:
    with pytest.raises(ConfigError, match="inputs: expected at least one"):
        offline().encode([])
    assert np.array_equal(offline().encode(np.array([prompt(4)])), offline().encode([prompt(4)]))


def test_nothing_is_said_behind_a_stop_string_that_drafts_go_beyond(tmp_path: Path) -> None:
    folder = copied("llama-gqa", tmp_path)
    bytes_tokenizer()._tokenizer.save(str(folder / "tokenizer.json"))
    llm = LLM(folder, EngineConfig(**SMALL))
    [said] = bytes_tokenizer().encode("5", add_special_tokens=False).ids
    params = SamplingParams(max_tokens=40, ignore_eos=True, logit_bias={said: 100.0}, stop=("555",))
    for drafts in (0, 8):
        asked = replace(params, num_speculative_tokens=drafts)
        outputs = [output for _, output in llm.stream([[said] * 20], asked)]
        assert [token for output in outputs for token in output.token_ids] == [said] * 3
        assert [output.finish_reason for output in outputs] == [None, None, FinishReason.STOP]


def test_offline_encoding_gives_one_vector_an_input() -> None:
    vectors = LLM(saved("bert").path, EngineConfig(**SMALL)).encode([prompt(4), prompt(9)])
    assert vectors.shape == (2, 32)
    assert vectors.dtype == np.float32


def test_an_input_longer_than_the_folder_allows_is_refused_offline(tmp_path: Path) -> None:
    folder = copied("bert", tmp_path)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 6}')
    llm = LLM(folder, EngineConfig(dtype="float32"))
    assert llm.encode([prompt(6)]).shape == (1, 32)
    with pytest.raises(ConfigError, match="takes 1 to 6 tokens, found 7"):
        llm.encode([prompt(7)])


def test_what_never_fits_is_refused_offline() -> None:
    llm = LLM(saved("llama").path, EngineConfig(**SMALL))
    with pytest.raises(ConfigError, match="1 to 127"):
        llm.generate([prompt(128)], SamplingParams())
    with pytest.raises(ConfigError, match="found 0"):
        llm.generate([()], SamplingParams())
    with pytest.raises(ConfigError, match="1 to 64 tokens, found 65"):
        LLM(saved("bert").path, EngineConfig(**SMALL)).encode([prompt(65)])
    reader = LLM(saved("marian").path, EngineConfig(**SMALL, max_num_batched_tokens=64))
    with pytest.raises(ConfigError, match="1 to 64"):
        reader.generate([prompt(65)], SamplingParams())
    assert reader.generate([prompt(64)], SamplingParams(max_tokens=2)) == [""]  # no tokenizer: ids only


def test_no_request_of_one_call_is_left_for_the_next() -> None:
    llm, params = LLM(saved("llama").path, EngineConfig(**SMALL)), SamplingParams(max_tokens=6, ignore_eos=True)
    wanted = [output.token_ids for _, output in llm.stream([prompt(5)], params)]
    for _ in llm.stream([prompt(7, 1), prompt(9, 2)], params):
        break
    with pytest.raises(ConfigError, match="1 to 127"):
        llm.generate([prompt(7, 1), prompt(128)], params)
    assert [output.token_ids for _, output in llm.stream([prompt(5)], params)] == wanted
    alone = llm.encode([prompt(5)])
    with pytest.raises(ConfigError, match="found 0"):
        llm.encode([prompt(7, 1), ()])
    assert np.array_equal(llm.encode([prompt(5)]), alone)


def test_a_prompt_whose_step_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(saved("llama").path, EngineConfig(**SMALL))

    def fails(*arguments: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as broken:
        broken.setattr("triptych.model.engine.execution.model_runner.ModelRunner.execute", fails)
        broken.setattr("triptych.model.engine.execution.model_runner.ModelRunner.launch", fails)
        broken.setattr("triptych.model.engine.execution.model_runner.ModelRunner.probe", lambda self: None)
        with pytest.raises(EngineDeadError, match="failed while the prompt was in it"):
            llm.generate([prompt(5)], SamplingParams(max_tokens=2))
    assert llm.generate([prompt(5)], SamplingParams(max_tokens=2)) == [""]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("beams", [1, 3])
def test_no_output_is_longer_than_the_context(kind: str, beams: int) -> None:
    llm = LLM(saved(kind).path, EngineConfig(**SMALL, max_model_len=32))
    tokens: dict[int, int] = {}
    for position, output in llm.stream(
        [prompt(5), prompt(31)], SamplingParams(max_tokens=80, num_beams=beams, ignore_eos=True)
    ):
        tokens[position] = tokens.get(position, 0) + len(output.token_ids)
    assert tokens == {0: 27, 1: 1}


def told(kind: str, tmp_path: Path, generation: dict[str, Any], **settings: int) -> LLM:
    """Return a model whose folder has these generation settings."""
    folder = copied(kind, tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return LLM(folder, EngineConfig(**{**SMALL, **settings}))


def tokens_of(llm: LLM, params: Any = None) -> list[int]:
    return [token for _, output in llm.stream([prompt(5)], params) for token in output.token_ids]


def test_a_folders_defaults_hold_where_the_fields_do_not_say(tmp_path: Path) -> None:
    sampled = {
        "do_sample": True,
        "temperature": 9.0,
        "max_new_tokens": 7,
        "eos_token_id": [],
        "repetition_penalty": 1.3,
    }
    llm = told("llama", tmp_path, sampled)
    by_hand = SamplingParams(max_tokens=7, temperature=9.0, top_k=50, repetition_penalty=1.3)
    assert tokens_of(llm) == tokens_of(llm, {}) == tokens_of(llm, by_hand)
    assert tokens_of(llm, {"seed": 1}) == tokens_of(llm, replace(by_hand, seed=1)) != tokens_of(llm)
    greedy = SamplingParams(max_tokens=7, repetition_penalty=1.3)
    assert tokens_of(llm, {"temperature": 0}) == tokens_of(llm, greedy) != tokens_of(llm)
    assert len(tokens_of(llm, SamplingParams(max_tokens=9))) == 9  # used unchanged
    assert len(tokens_of(llm, {"max_tokens": 3})) == 3
    with pytest.raises(ConfigError, match="max_token is no field of SamplingParams, which has allowed_token_ids"):
        llm.generate([prompt(5)], {"max_token": 3})


def test_lengths_of_a_folder_count_from_where_the_output_begins(tmp_path: Path) -> None:
    lengths = {"max_length": 9, "min_length": 9, "num_beams": 1}
    assert len(tokens_of(told("bart", tmp_path, lengths))) == 9 - 1
    assert (
        len(tokens_of(told("bart", tmp_path / "2", {"num_beams": 2, "max_new_tokens": 4, "min_new_tokens": 50}))) == 4
    )


@pytest.mark.parametrize("settings", [{"max_num_seqs": 4}, {"kv_cache_memory": 64 << 10}])
def test_a_folder_with_more_beams_than_fit_gets_as_many_as_do(settings: dict[str, int], tmp_path: Path) -> None:
    llm = told("llama", tmp_path, {"num_beams": 64, "max_new_tokens": 30}, **settings)
    fitting = llm.info.most_beams(64, 35)
    assert 1 < fitting <= 4
    assert tokens_of(llm) == tokens_of(llm, SamplingParams(max_tokens=30, num_beams=fitting))
    with pytest.raises(ConfigError, match=r"num_beams must be at most|64 beams of"):
        llm.generate([prompt(5)], {"num_beams": 64})


def test_a_text_alone_is_one_prompt_and_a_path_may_be_a_text(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    bytes_tokenizer()._tokenizer.save(str(folder / "tokenizer.json"))
    llm = LLM(str(folder), EngineConfig(**SMALL))
    assert len(llm.generate("lor", {"max_tokens": 4})) == len(llm.generate(["lor"], {"max_tokens": 4})) == 1
    assert np.array_equal(llm.encode("lor"), llm.encode(["lor"])) and llm.encode("lor").shape[0] == 1


@pytest.mark.parametrize(
    ("beams", "tokens", "settings", "message"),
    [
        (8, 4, {"max_num_seqs": 4}, "num_beams must be at most 4"),
        (8, 100, {"kv_cache_memory": 128 << 10}, "8 beams of 105 tokens need 56 blocks of KV cache, of"),
    ],
)
def test_beams_that_never_fit_are_refused_offline(
    beams: int, tokens: int, settings: dict[str, int], message: str
) -> None:
    llm = LLM(saved("llama").path, EngineConfig(**{**SMALL, **settings}))
    with pytest.raises(ConfigError, match=message):
        llm.generate([prompt(5)], SamplingParams(max_tokens=tokens, num_beams=beams))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be 1 to"),
        ({"temperature": float("nan")}, "temperature must be 0 to 100, found nan"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens \(9\) must be at most max_tokens \(8\)"),
        ({"num_speculative_tokens": 4, "num_beams": 2}, "num_speculative_tokens has no meaning with beam search"),
        ({"logprobs": 0, "num_beams": 2}, "logprobs has no meaning with beam search"),
        ({"prompt_logprobs": 1, "num_beams": 2}, "prompt_logprobs has no meaning with beam search"),
        ({"n": 3, "num_beams": 2}, r"n \(3\) must be at most num_beams \(2\)"),
        ({"stop": ("a", "")}, "stop must be no empty text"),
        ({"logit_bias": {3: 101.0}}, "logit_bias must be -100 to 100"),
        ({"stop_token_ids": (VOCAB,)}, f"stop_token_ids must be of token ids below {VOCAB}"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must be of token ids"),
        ({"begin_suppress_tokens": (10**6,)}, "begin_suppress_tokens must be of token ids"),
        ({"allowed_token_ids": (1,), "suppress_tokens": (1, 2)}, "suppress_tokens leaves no token"),
    ],
)
def test_sampling_parameters_are_checked_offline(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        offline().generate([prompt(3)], SamplingParams(**asked))
    assert offline().generate([prompt(3)], SamplingParams(max_tokens=2, temperature=1e-30)) == [""]


def test_an_encoder_does_not_generate() -> None:
    with pytest.raises(ConfigError, match="encoder-only"):
        LLM(saved("bert").path, EngineConfig(**SMALL)).generate([prompt(3)], SamplingParams())


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        LLM(saved("llama").path, EngineConfig(**SMALL)).generate(["text"], SamplingParams())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 500}, "beyond the model's 128 positions"),
        ({"kv_cache_memory": 1000}, "KV pool has room for 0 blocks"),
        ({"device": "abacus"}, "device must be"),
        pytest.param({"device": "cuda"}, "no usable CUDA device", marks=WITHOUT_CUDA),
    ],
)
def test_settings_that_do_not_fit_the_checkpoint(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(ModelSpec("m", str(saved("llama").path), EngineConfig(**{**SMALL, **settings})))


def test_the_pool_holds_at_least_one_full_request_and_at_most_what_can_run() -> None:
    def blocks(kind: str, **settings: object) -> int:
        config = EngineConfig(**{**SMALL, "block_size": 16, **settings})
        return load(ModelSpec("m", str(saved(kind).path), config)).info.num_blocks

    assert blocks("llama", max_num_seqs=2, max_num_batched_tokens=64) == 2 * 8
    assert blocks("marian", max_num_seqs=2, max_num_batched_tokens=64) == 2 * 16  # self and cross
    one = 2 * 2 * 32 * 4 * 16  # bytes of a block: K and V, layers, width, float32, tokens
    assert blocks("llama", kv_cache_memory=9 * one + 5) == 9
    with pytest.raises(ConfigError):
        blocks("llama", kv_cache_memory=8 * one - 1)


def test_positions_without_a_limit_take_the_batch_as_context() -> None:
    config, engine = loaded("t5-relu").config, EngineConfig(max_num_batched_tokens=77, max_num_seqs=4)
    assert max_context(engine, config, engine.limits()).tokens == 77


def test_greedy_tokens_are_transformers_argmax() -> None:
    run = running("llama")
    one = request("llama", "r", 6)
    run.engine.add(one)
    ids = run.run().ids("r")
    logits = reference_logits("llama", [*one.prompt_token_ids, *ids])
    assert ids == logits[5:-1].argmax(-1).tolist()


def test_a_dynamic_rotary_model_can_be_stretched(tmp_path: Path) -> None:
    """At exactly the served length, the base is that of `transformers`."""
    kind = "llama-dynamic"
    original = loaded(kind).config.max_positions
    assert original is not None
    _expect_logprobs_up_to(copied(kind, tmp_path), kind, 2 * original)


@pytest.mark.parametrize("kind", ["llama-yarn", "llama-linear"])
def test_a_model_is_served_up_to_what_its_positions_are_stretched_to(kind: str, tmp_path: Path) -> None:
    """Qwen's guides add YaRN to a config.json and leave `max_position_embeddings` as it is."""
    path = copied(kind, tmp_path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "max_position_embeddings": 16}))
    _expect_logprobs_up_to(path, kind, 64)


def _expect_logprobs_up_to(path: Path, kind: str, context: int) -> None:
    """Compare a prompt that fills a context with the reference; a longer context is refused."""
    ids = prompt(context - 1, 3)
    llm = LLM(path, EngineConfig(dtype="float32", max_model_len=context))
    [(_, output)] = llm.stream([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    ours = [entry.logprob for entry in output.prompt_logprobs if entry is not None]
    theirs = reference_logits(kind, (*ids, 1)).log_softmax(-1)[:-2].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    assert ours == pytest.approx(theirs.tolist(), abs=1e-4)
    with pytest.raises(ConfigError, match="is beyond the model's"):
        LLM(path, EngineConfig(max_model_len=context + 1))


@pytest.mark.parametrize("wrong", [VOCAB, -1, 2**70, 1.0, True, "5", None])
def test_an_id_beyond_the_vocabulary_is_refused_and_the_engine_goes_on(wrong: Any) -> None:
    llm = offline()
    for ask in (lambda ids: llm.generate([ids], SamplingParams(max_tokens=2)), lambda ids: llm.encode([ids])):
        with pytest.raises(ConfigError, match=f"token 2 of a prompt must be an id from 0 to {VOCAB - 1}, found"):
            ask([3, 4, wrong])
    assert [output.token_ids for _, output in llm.stream([[3, np.int64(4)]], SamplingParams(max_tokens=1))]
