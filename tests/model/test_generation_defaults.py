"""What a folder's generation_config.json and config.json say of generation, and what of it is not served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model.api.engine_config import EngineConfig
from model.api.messages import ModelSpec
from model.checkpoint.folder import read_checkpoint
from model.checkpoint.generation_config import GenerationTask
from model.engine.builder import load
from model.errors import ConfigError
from tests.model.checkpoints import copied
from tests.model.test_checkpoint import edit_json


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 5}, {}),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 5}, {"temperature": 1.0, "top_k": 5}),
        ({"max_new_tokens": 9, "repetition_penalty": 1.2}, {"max_tokens": 9, "repetition_penalty": 1.2}),
    ],
)
def test_sampling_defaults_come_from_the_generation_config(
    generation: dict[str, object], defaults: dict[str, object], tmp_path: Path
) -> None:
    folder = copied("llama", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert read_checkpoint(folder).sampling_defaults == defaults


def test_settings_that_would_change_outputs_and_are_not_served_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied("marian", tmp_path)
    neutral = {"encoder_no_repeat_ngram_size": 0, "guidance_scale": None, "num_beam_groups": 1, "sequence_bias": {}}
    edit = {"encoder_repetition_penalty": 1.2, "stop_strings": ["x"]}
    (folder / "generation_config.json").write_text(json.dumps(neutral))
    assert read_checkpoint(folder).not_served == ()
    (folder / "generation_config.json").write_text(json.dumps(neutral | edit))
    load(ModelSpec("mine", str(folder), EngineConfig(kv_cache_memory=1 << 18)))
    assert (
        "mine: its settings of generation ask for what is not served: encoder_repetition_penalty, stop_str"
        in caplog.text
    )


# As T5 and BART's summarizer have them.
TASKS = {
    "summarization": {
        **{"early_stopping": True, "length_penalty": 2.0, "max_length": 200, "min_length": 30, "num_beams": 4},
        **{"no_repeat_ngram_size": 3, "prefix": "summarize: "},
    },
    "translation_en_to_de": {"max_length": 300, "num_beams": 4, "prefix": "translate English to German: "},
    "text2text-generation": {"num_beams": 2, "diversity_penalty": 0.5, "bad_words_ids": [[7]], "num_beam_groups": 1},
}


def test_tasks_have_their_settings_over_those_of_generation(tmp_path: Path) -> None:
    folder = copied("t5-relu", tmp_path)
    edit_json(folder / "config.json", task_specific_params=TASKS, prefix=" ", num_beams=8, diversity_penalty=0.25)
    (folder / "generation_config.json").write_text('{"max_length": 20, "repetition_penalty": 1.5}')
    found = read_checkpoint(folder)
    beams = {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "no_repeat_ngram_size": 3}
    everywhere = {"repetition_penalty": 1.5}
    assert found.sampling_defaults == {**everywhere, "max_length": 20, "num_beams": 8}
    assert found.tasks == {
        "summarization": GenerationTask("summarize: ", {**everywhere, **beams, "max_length": 200, "min_tokens": 29}),
        "translation_en_to_de": GenerationTask(
            "translate English to German: ", {**everywhere, "max_length": 300, "num_beams": 4}
        ),
        "text2text-generation": GenerationTask(" ", {**everywhere, "max_length": 20, "num_beams": 2}),
    }
    told = ("bad_words_ids", "diversity_penalty")
    assert found.not_served == ("diversity_penalty", *(f"text2text-generation.{name}" for name in told))


def test_a_minimum_that_counts_the_prompt_is_told(tmp_path: Path) -> None:
    folder = copied("gpt2", tmp_path)
    edit_json(
        folder / "config.json",
        task_specific_params={"text-generation": {"do_sample": True, "max_length": 50, "min_length": 9}},
    )
    found = read_checkpoint(folder)
    assert found.tasks["text-generation"].sampling_defaults == {"temperature": 1.0, "max_length": 50}
    assert found.not_served == ("text-generation.min_length",)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([], None),
        (["summarization"], "task_specific_params must map names of tasks to their settings"),
        ({"summarization": 3}, "task_specific_params must map"),
        ({"summarization": {"num_beams": "4"}}, r"task_specific_params\.summarization: num_beams must be a number"),
        ({"summarization": {"prefix": 4}}, r"task_specific_params\.summarization: prefix must be a text, found 4"),
    ],
)
def test_malformed_tasks_are_named(tasks: object, message: str | None, tmp_path: Path) -> None:
    folder = copied("t5-relu", tmp_path)
    edit_json(folder / "config.json", task_specific_params=tasks)
    if message is None:
        assert read_checkpoint(folder).tasks == {}
        return
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(folder)


def test_generation_config_overrules_token_ids(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert read_checkpoint(folder).config.eos_token_ids == (2, 7)


def test_banned_words_of_one_token_are_suppressed_and_longer_ones_kept_whole(tmp_path: Path) -> None:
    folder = copied("marian", tmp_path)
    edit_json(folder / "config.json", bad_words_ids=[[0], [9], [0, 9, 4]])
    (folder / "generation_config.json").unlink()
    rules = read_checkpoint(folder).config.generation
    assert (rules.suppressed, rules.banned_sequences) == ((0, 9), ((0, 9, 4),))
    edit_json(folder / "config.json", bad_words_ids=[[0], []])
    with pytest.raises(ConfigError, match="bad_words_ids"):
        read_checkpoint(folder)


def test_the_oldest_name_of_the_forced_first_token_holds_where_there_is_no_newer_file(tmp_path: Path) -> None:
    """As `transformers` reads BART's first folders."""
    folder = copied("bart", tmp_path)
    changes = {"forced_bos_token_id": None, "force_bos_token_to_be_generated": True, "bos_token_id": 5}
    edit_json(folder / "config.json", **changes)
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert read_checkpoint(folder).config.generation.forced_first == 5
    (folder / "generation_config.json").write_text('{"bos_token_id": 5}')
    assert read_checkpoint(folder).config.generation.forced_first is None
