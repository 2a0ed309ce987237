"""Settings of generation_config.json and config.json: those that become defaults, and those that are not served."""

from __future__ import annotations

import ast
import json
import math
import re
from pathlib import Path

import pytest

from tests.model.checkpoints import copied
from tests.model.test_checkpoint import edit_json
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.checkpoint.folder import Checkpoint, read_checkpoint
from triptych.model.checkpoint.generation_config import SETTINGS, SPEECH_SETTINGS, GenerationTask
from triptych.model.config.model import GenerationRules
from triptych.model.engine.builder import load
from triptych.model.errors import ConfigError
from triptych.service.runtimes.model_reader import read_model

BEAMS = {"num_beams": 4, "early_stopping": True, "max_length": 2**31 - 1}


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 5}, {}),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50}),
        ({"do_sample": True, "top_k": 0, "top_p": 1.0, "typical_p": 1}, {"temperature": 1.0}),
        ({"do_sample": True, "top_k": None, "top_p": 0.0}, {"temperature": 1.0, "top_k": 50, "top_p": 1e-9}),
        ({"do_sample": 1, "temperature": 0.7, "eta_cutoff": 0.1}, {}),
        (
            {"do_sample": True, "top_k": 0, "epsilon_cutoff": 0.01, "eta_cutoff": 1.5},
            {"temperature": 1.0, "epsilon_cutoff": 0.01},
        ),
        ({"min_new_tokens": 0, "min_length": 7}, {"min_tokens": 0}),
        ({"num_beams": 4.0, "early_stopping": 1, "max_length": 1e20}, BEAMS),
        ({"renormalize_logits": True, "encoder_no_repeat_ngram_size": 3}, None),
        ({"exponential_decay_length_penalty": [5, 1.5]}, {"exponential_decay_length_penalty": (5, 1.5)}),
        ({"do_sample": True, "top_k": 5}, {"temperature": 1.0, "top_k": 5}),
        ({"max_new_tokens": 9, "repetition_penalty": 1.2}, {"max_tokens": 9, "repetition_penalty": 1.2}),
    ],
)
def test_sampling_defaults_come_from_the_generation_config(
    generation: dict[str, object], defaults: dict[str, object] | None, tmp_path: Path
) -> None:
    folder = copied("llama", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert read_checkpoint(folder).sampling_defaults == (generation if defaults is None else defaults)


def test_settings_that_would_change_outputs_and_are_not_served_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied("marian", tmp_path)
    neutral = {"encoder_no_repeat_ngram_size": 0, "guidance_scale": None, "num_beam_groups": 1, "sequence_bias": {}}
    edit = {"guidance_scale": 1.2, "stop_strings": ["x"]}
    (folder / "generation_config.json").write_text(json.dumps(neutral))
    assert read_checkpoint(folder).warnings == []
    (folder / "generation_config.json").write_text(json.dumps(neutral | edit))
    load(ModelSpec("mine", str(folder), EngineConfig(kv_cache_memory=1 << 18)))
    assert "mine: settings of generation that are not served: guidance_scale, stop_strings" in caplog.text


def not_served(found: Checkpoint) -> tuple[str, ...]:
    """Return the settings that a folder's only warning names; empty without a warning."""
    assert len(found.warnings) < 2
    said = "".join(found.warnings).removeprefix("settings of generation that are not served: ")
    return tuple(said.split(", ")) if said else ()


# Settings of T5 and of BART's summarizer.
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
    edit_json(folder / "config.json", task_specific_params=TASKS, prefix=" ", num_beams=7)
    generation = {"max_length": 20, "repetition_penalty": 1.5, "num_beams": 8, "diversity_penalty": 0.25}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    found = read_checkpoint(folder)
    beams = {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "no_repeat_ngram_size": 3}
    everywhere = {"repetition_penalty": 1.5}
    assert found.sampling_defaults == {**everywhere, "max_length": 20, "num_beams": 8}
    assert found.tasks == {
        "summarization": GenerationTask("summarize: ", {**everywhere, **beams, "max_length": 200, "min_length": 30}),
        "translation_en_to_de": GenerationTask(
            "translate English to German: ", {**everywhere, "max_length": 300, "num_beams": 4}
        ),
        "text2text-generation": GenerationTask(" ", {**everywhere, "max_length": 20, "num_beams": 2}),
    }
    told = ("bad_words_ids", "diversity_penalty")
    assert not_served(found) == ("diversity_penalty", *(f"text2text-generation.{name}" for name in told))


def test_a_minimum_that_counts_the_prompt_is_a_default(tmp_path: Path) -> None:
    folder = copied("gpt2", tmp_path)
    edit_json(
        folder / "config.json",
        task_specific_params={"text-generation": {"do_sample": True, "max_length": 50, "min_length": 9}},
    )
    found = read_checkpoint(folder)
    sampled = {"temperature": 1.0, "top_k": 50}
    assert found.tasks["text-generation"].sampling_defaults == {**sampled, "max_length": 50, "min_length": 9}
    assert not_served(found) == ()


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
    """`transformers` reads BART's first folders so."""
    folder = copied("bart", tmp_path)
    changes = {"forced_bos_token_id": None, "force_bos_token_to_be_generated": True, "bos_token_id": 5}
    edit_json(folder / "config.json", **changes)
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert read_checkpoint(folder).config.generation.forced_first == 5
    (folder / "generation_config.json").write_text('{"bos_token_id": 5}')
    assert read_checkpoint(folder).config.generation.forced_first is None


def test_a_folder_with_more_beams_than_the_service_allows_is_served_with_fewer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied("marian", tmp_path)
    edit_json(folder / "config.json", task_specific_params={"shorten": {"num_beams": 12}, "write": {"num_beams": 2}})
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 64}))
    for max_num_seqs, setting, most in ((None, "max_beams", 8), (4, "max_num_seqs", 4)):
        caplog.clear()
        found = read_model(ModelSpec("t", str(folder), EngineConfig(max_num_seqs=max_num_seqs)), 8).checkpoint
        assert found.sampling_defaults["num_beams"] == most
        assert [task.sampling_defaults["num_beams"] for task in found.tasks.values()] == [most, 2]
        [line] = [record.getMessage() for record in caplog.records if record.name == read_model.__module__]
        assert line == (
            f"model t: its folder's num_beams is 64, more than {setting} ({most}): "
            f"requests without num_beams get {most} beams"
        )
    caplog.clear()
    assert read_model(ModelSpec("t", str(folder)), 64).checkpoint.sampling_defaults["num_beams"] == 64
    assert not [record for record in caplog.records if record.name == read_model.__module__]


def test_every_key_of_the_installed_class_has_an_entry() -> None:
    from transformers import GenerationConfig

    assert set(SETTINGS) == set(GenerationConfig().to_dict()) - {"_from_model_config"}


def test_every_key_that_whisper_reads_has_an_entry() -> None:
    from transformers.models.whisper import generation_whisper

    tree = list(ast.walk(ast.parse(Path(generation_whisper.__file__).read_text())))
    fields = [(node.value, node.attr) for node in tree if isinstance(node, ast.Attribute)]
    calls = [node for node in tree if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr")]
    fields += [(one.args[0], ast.literal_eval(one.args[1])) for one in calls if isinstance(one.args[1], ast.Constant)]
    read = {name for owner, name in fields if ast.unparse(owner).endswith("generation_config")}
    assert {name for name in read if not name.startswith("_")} <= SETTINGS.keys() | SPEECH_SETTINGS.keys()
    assert SPEECH_SETTINGS.keys() - {"max_initial_timestamp_index"} <= read  # its logits processor reads this one


@pytest.mark.parametrize(
    ("generation", "told"),
    [
        ({"do_sample": True, "num_beams": 4}, ("do_sample with num_beams",)),
        ({"do_sample": True, "num_beams": 1, "top_h": 0.4}, ("top_h",)),
        ({"top_h": 0.4, "num_beam_groups": 1}, ()),
        ({"max_time": 3, "penalty_alpha": 0.6, "token_healing": True}, ("max_time", "penalty_alpha", "token_healing")),
        ({"cache_implementation": "static", "num_return_sequences": 4, "output_scores": True}, ()),
    ],
)
def test_what_is_not_served_is_told(generation: dict[str, object], told: tuple[str, ...], tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    found = read_checkpoint(folder)
    assert not_served(found) == told


def test_unknown_settings_are_named_once(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    names = {f"of_a_trainer_{number:02}": number for number in range(30)} | {"_private": 1, "off": None}
    (folder / "generation_config.json").write_text(json.dumps(names))
    [warning] = read_checkpoint(folder).warnings
    assert warning.startswith("generation_config.json: unknown settings are ignored: of_a_trainer_00, of_a_trainer_01")
    assert warning.endswith("and 18 more") and "_private" not in warning


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, found 'hot'"),
        ({"temperature": -1}, "temperature must be 0 to 100, found -1"),
        ({"num_beams": True}, "num_beams must be a number"),
        ({"num_beams": 0}, "num_beams must be 1 to"),
        ({"num_beams": 2.5}, "num_beams must be a whole number, found 2.5"),
        ({"max_length": 0}, "max_length must be 1 to"),
        ({"max_length": float("nan")}, "max_length must be a whole number, found nan"),
        ({"max_new_tokens": -3}, "max_new_tokens must be 1 to"),
        ({"min_p": 2, "do_sample": True}, "min_p must be 0 to 1, found 2"),
        ({"typical_p": 0, "do_sample": True}, "typical_p must be above 0"),
        ({"early_stopping": "soon"}, 'early_stopping must be true, false or "never"'),
        ({"exponential_decay_length_penalty": [5]}, "exponential_decay_length_penalty must be a number of tokens"),
        ({"exponential_decay_length_penalty": [-5, 1.1]}, "exponential_decay_length_penalty must be a number of tok"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id or a list of them, found '2'"),
        ({"eos_token_id": [[2]]}, "eos_token_id must be a token id"),
        ({"eos_token_id": True}, "eos_token_id must be a token id"),
        ({"suppress_tokens": [1.5]}, "suppress_tokens must be a token id"),
        ({"begin_suppress_tokens": [None]}, "begin_suppress_tokens must be a token id"),
        ({"bad_words_ids": [5]}, "bad_words_ids must be a list of lists of token ids"),
        ({"bad_words_ids": [[5, "a"]]}, "bad_words_ids must be a token id"),
        ({"bad_words_ids": {"5": 6}}, "bad_words_ids must be a list of lists"),
        ({"forced_eos_token_id": [2, 3]}, "forced_eos_token_id with several ids is not served"),
        ({"decoder_start_token_id": [2, 3]}, "decoder_start_token_id with several ids is not served"),
        ({"sequence_bias": [[[5]]]}, "sequence_bias must be pairs"),
        ({"sequence_bias": {"5": 1.0}}, "sequence_bias must be pairs"),
        ({"sequence_bias": [[[5], 10**400]]}, "sequence_bias must be pairs"),
        ({"sequence_bias": [[[5], math.nan]]}, "sequence_bias must be pairs"),
    ],
)
def test_values_that_cannot_be_are_refused_by_file_and_key(
    generation: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = copied("llama", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(ConfigError, match="generation_config.json: " + re.escape(message)):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("generation", "rules", "warned"),
    [
        ({"eos_token_id": [2, 500]}, GenerationRules(), "eos_token_id: 500 cannot occur"),
        ({"eos_token_id": -1}, GenerationRules(), "eos_token_id: -1 cannot occur"),
        ({"eos_token_id": []}, GenerationRules(), None),
        ({"eos_token_id": 2.0}, GenerationRules(), None),
        ({"suppress_tokens": []}, GenerationRules(), None),
        ({"suppress_tokens": [-1, 5]}, GenerationRules(suppressed=(5,)), "suppress_tokens or bad_words_ids: -1"),
        ({"suppress_tokens": list(range(500, 520))}, GenerationRules(), "500, 501, 502, 503 and 16 more"),
        ({"begin_suppress_tokens": [500, 6]}, GenerationRules(suppressed_first=(6,)), "begin_suppress_tokens: 500"),
        ({"bad_words_ids": [[500], [3, 600], [3, 4]]}, GenerationRules(banned_sequences=((3, 4),)), "600 cannot occur"),
        (
            {"sequence_bias": [[[5], 2.0], [[5, 500], 1.0]]},
            GenerationRules(biases=(((5,), 2.0),)),
            "sequence_bias: 500",
        ),
        ({"sequence_bias": {"(5, 6)": -1.5}}, GenerationRules(biases=(((5, 6), -1.5),)), None),
        ({"forced_eos_token_id": [7]}, GenerationRules(forced_last=7), None),
    ],
)
def test_ids_beyond_the_vocabulary_ban_nothing(
    generation: dict[str, object], rules: GenerationRules, warned: str | None, tmp_path: Path
) -> None:
    folder = copied("llama", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    found = read_checkpoint(folder)
    assert found.config.generation == rules and all(id < 500 for id in found.config.eos_token_ids)
    assert bool(found.warnings) == (warned is not None) and (warned or "") in " ".join(found.warnings)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"forced_eos_token_id": 500}, "forced_eos_token_id must be a token id below"),
        ({"forced_bos_token_id": -1}, "forced_bos_token_id must be a token id below"),
        ({"decoder_start_token_id": 500}, "decoder_start_token_id must be a token id below"),
        ({"suppress_tokens": list(range(500))}, "leave none of"),
    ],
)
def test_ids_that_outputs_need_are_refused(generation: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = copied("bart", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(folder)


LEFT = {"num_beams": 4, "no_repeat_ngram_size": 3, "repetition_penalty": 1.5, "forced_eos_token_id": 7, "max_length": 9}


def test_config_json_is_asked_only_without_the_newer_file(tmp_path: Path) -> None:
    folder = copied("bart", tmp_path)
    edit_json(folder / "config.json", **LEFT, suppress_tokens=[5], bad_words_ids=[[6]], eos_token_id=8)
    newer = folder / "generation_config.json"
    newer.write_text("{}")
    found = read_checkpoint(folder)
    assert found.sampling_defaults == {} and found.config.generation == GenerationRules()
    assert found.config.eos_token_ids == (8,)  # without an end token an output would not end
    newer.unlink()
    found = read_checkpoint(folder)
    lengths = {name: value for name, value in LEFT.items() if name != "forced_eos_token_id"}
    assert {name: found.sampling_defaults.get(name) for name in lengths} == lengths
    assert (found.config.generation.forced_last, found.config.generation.suppressed) == (7, (5, 6))


def test_padding_of_batches_is_no_part_of_the_network(tmp_path: Path) -> None:
    """As in the reference, M2M-100 counts positions from the padding token of config.json."""
    folder = copied("m2m-100", tmp_path)
    before = read_checkpoint(folder).config
    own = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(own | {"pad_token_id": 7}))
    assert read_checkpoint(folder).config == before


def test_a_model_that_generates_nothing_has_no_settings_of_generation(tmp_path: Path) -> None:
    folder = copied("roberta", tmp_path)
    before = read_checkpoint(folder)
    settings = {"pad_token_id": 7, "eos_token_id": [3, 500], "suppress_tokens": "no", "unknown": 1, "num_beams": 4}
    (folder / "generation_config.json").write_text(json.dumps(settings | {"suppress_tokens": [4]}))
    found = read_checkpoint(folder)
    assert (found.config, found.sampling_defaults, found.warnings) == (before.config, {}, before.warnings)
