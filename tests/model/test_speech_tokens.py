"""Whisper's control tokens: read from published folders, refused from wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model.published_speech import PUBLISHED_SPEECH
from triptych.model.checkpoint.speech import SpeechTokens, read_speech_tokens
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.families import config_from_raw

RAW: dict[str, Any] = json.loads(PUBLISHED_SPEECH["whisper-tiny"].config)
# From generation_config.json of openai/whisper-tiny, with three of its 99 languages.
TINY: dict[str, Any] = {
    "alignment_heads": [[2, 2], [3, 0], [3, 2], [3, 3], [3, 4], [3, 5]],
    "begin_suppress_tokens": [220, 50257],
    "decoder_start_token_id": 50258,
    "eos_token_id": 50257,
    "forced_decoder_ids": [[1, None], [2, 50359]],
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 50259, "<|zh|>": 50260, "<|yue|>": 50357},
    "max_initial_timestamp_index": 50,
    "no_timestamps_token_id": 50363,
    "prev_sot_token_id": 50361,
    "return_timestamps": False,
    "suppress_tokens": [1, 2, 7, 50358],
    "task_to_id": {"transcribe": 50359, "translate": 50358},
}
TOKENS = {
    "<|endoftext|>": 50257,
    "<|startoftranscript|>": 50258,
    "<|en|>": 50259,
    "<|zh|>": 50260,
    "<|translate|>": 50358,
    "<|transcribe|>": 50359,
    "<|startoflm|>": 50360,
    "<|startofprev|>": 50361,
    "<|nospeech|>": 50362,
    "<|notimestamps|>": 50363,
    "<|0.00|>": 50364,
}


def read(
    folder: Path,
    generation: dict[str, Any],
    tokens: dict[str, int] | None = None,
    warnings: list[str] | None = None,
    **raw: Any,
) -> SpeechTokens | None:
    if tokens is not None:
        (folder / "added_tokens.json").write_text(json.dumps(tokens))
    settings = {**RAW, **raw}
    return read_speech_tokens(folder, settings, generation, config_of(settings), [] if warnings is None else warnings)


def config_of(raw: dict[str, Any]) -> ModelConfig:
    return config_from_raw(dict(raw), None)


@pytest.mark.parametrize("tokens", [None, TOKENS])
def test_a_published_folder(tokens: dict[str, int] | None, tmp_path: Path) -> None:
    found = read(tmp_path, TINY, tokens)
    assert found == SpeechTokens(
        start=50258,
        end=50257,
        no_timestamps=50363,
        previous=50361,
        no_speech=50362,
        languages={"en": 50259, "zh": 50260, "yue": 50357},
        tasks={"transcribe": 50359, "translate": 50358},
        max_initial_timestamp_index=50,
        suppressed=(1, 2, 7, 50358),
        suppressed_first=(220, 50257),
        alignment_heads=((2, 2), (3, 0), (3, 2), (3, 3), (3, 4), (3, 5)),
    )
    assert found.prompt("zh", timestamps=True) == (50258, 50260, 50359)
    assert found.prompt("en", "translate", timestamps=False) == (50258, 50259, 50358, 50363)
    assert found.timestamp_begin == found.timestamp_rules.timestamp_begin_id == 50364


@pytest.mark.parametrize("where", ["added_tokens.json", "tokenizer_config.json", "tokenizer.json"])
def test_what_generation_config_leaves_out_is_the_tokenizers(where: str, tmp_path: Path) -> None:
    content: dict[str, Any] = {
        "added_tokens.json": TOKENS,
        "tokenizer_config.json": {"added_tokens_decoder": {str(id): {"content": text} for text, id in TOKENS.items()}},
        "tokenizer.json": {"added_tokens": [{"id": id, "content": text} for text, id in TOKENS.items()]},
    }[where]
    content.get("added_tokens_decoder", {})["9" * 5000] = {"content": "no id"}
    (tmp_path / where).write_text(json.dumps(content))
    found = read(tmp_path, {})
    assert found is not None
    assert (found.no_timestamps, found.previous, found.no_speech) == (50363, 50361, 50362)
    assert found.languages == {"en": 50259, "zh": 50260} and found.tasks == {"transcribe": 50359, "translate": 50358}
    assert (found.default_language, found.default_task) == ("en", "transcribe")  # forced_decoder_ids of config.json
    assert found.alignment_heads == () and found.max_initial_timestamp_index is None


def test_a_model_of_english_only(tmp_path: Path) -> None:
    shifted = {text: id - 1 for text, id in TOKENS.items()}
    ids = {"vocab_size": 51864, "eos_token_id": 50256, "decoder_start_token_id": 50257}
    for generation in ({"no_timestamps_token_id": 50362, "is_multilingual": False}, {}):
        found = read(tmp_path, {**generation, "forced_decoder_ids": [[1, 50362]]}, shifted, **ids)
        assert found is not None and not found.is_multilingual and found.tasks == {}
        assert found.prompt(timestamps=False) == (50257, 50362)
        assert found.prompt(timestamps=True) == (50257,)
        assert (found.no_speech, found.previous) == (50361, 50360)


def test_a_folder_that_says_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, {}) is None


def test_defaults_of_a_finetuned_folder(tmp_path: Path) -> None:
    found = read(tmp_path, {**TINY, "language": "<|zh|>", "task": "translate", "return_timestamps": True})
    assert found is not None
    assert (found.default_language, found.default_task, found.return_timestamps) == ("zh", "translate", True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no_timestamps_token_id": 50362}, "no_timestamps_token_id is 50362, but <|notimestamps|> is 50363"),
        ({"no_timestamps_token_id": 70000}, "no_timestamps_token_id must be a token id below 51865"),
        ({"no_timestamps_token_id": True}, "no_timestamps_token_id must be a token id"),
        ({"prev_sot_token_id": 5}, "prev_sot_token_id is 5, but <|startofprev|> is 50361"),
        ({"lang_to_id": {"<|en|>": 50260}}, "lang_to_id.<|en|> is 50260, but the tokenizer says 50259"),
        ({"lang_to_id": {"<|fr|>": 50259, "<|de|>": 50259}}, "lang_to_id must map texts as <|en|>"),
        ({"lang_to_id": {"English!": 9}}, "lang_to_id must map texts as <|en|>"),
        ({"lang_to_id": [1]}, "lang_to_id must map texts to token ids"),
        ({"lang_to_id": {"<|fr|>": -1}}, "lang_to_id.<|fr|> must be a token id"),
        ({"task_to_id": {"transcribe": 7}}, "task_to_id.transcribe is 7, but the tokenizer says 50359"),
        ({"task_to_id": {"translate": 50358}}, "task_to_id has no transcribe"),
        ({"is_multilingual": 1}, "is_multilingual must be true or false"),
        ({"return_timestamps": "yes"}, "return_timestamps must be true or false"),
        ({"begin_suppress_tokens": ["a"]}, "begin_suppress_tokens must be a token id"),
        ({"max_initial_timestamp_index": 1501}, "max_initial_timestamp_index must be of a timestamp"),
        ({"forced_decoder_ids": [[1]]}, "forced_decoder_ids must be pairs"),
        ({"forced_decoder_ids": [[1, 10**6]]}, "forced_decoder_ids must be a token id"),
        ({"language": "fr"}, "language 'fr' is none of lang_to_id"),
        ({"task": "sing"}, "task must be one of transcribe, translate"),
    ],
)
def test_lying_settings_are_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, {**TINY, **change}, TOKENS)
    assert message in str(error.value)


def test_a_lying_tokenizer_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"<\|0.00\|>"):
        read(tmp_path, TINY, {**TOKENS, "<|0.00|>": 50300})
    with pytest.raises(ConfigError, match="median_filter_width must be odd"):
        read(tmp_path, TINY, TOKENS, median_filter_width=6)
    with pytest.raises(ConfigError, match="startoftranscript"):
        read(tmp_path, TINY, {**TOKENS, "<|startoftranscript|>": 9})


@pytest.mark.parametrize("heads", [[[4, 0]], [[0, 6]], [[3, 5], [20, 1]], [[0, 1, 2]], [[0.0, 1]], [3], {"0": 1}])
def test_alignment_heads_of_a_teacher_cost_the_times_of_words_alone(heads: object, tmp_path: Path) -> None:
    warnings: list[str] = []
    found = read(tmp_path, {**TINY, "alignment_heads": heads}, TOKENS, warnings)
    assert found is not None and found.alignment_heads == ()
    assert warnings == [
        "generation_config.json: alignment_heads must be pairs of one of 4 layers and a head that it has: "
        "times of words are not given"
    ]


def test_ids_beyond_the_vocabulary_forbid_nothing(tmp_path: Path) -> None:
    found = read(tmp_path, {**TINY, "suppress_tokens": [-1, 5, 10**6], "begin_suppress_tokens": []}, TOKENS)
    assert found is not None and (found.suppressed, found.suppressed_first) == ((5,), ())


@pytest.mark.parametrize(
    ("generation", "raw", "language", "task"),
    [
        ({"language": "english"}, {}, "en", "transcribe"),
        ({"language": "Chinese", "task": "translate"}, {}, "zh", "translate"),
        ({"language": "<|yue|>"}, {}, "yue", "transcribe"),
        ({"language": "zh", "forced_decoder_ids": [[1, 50259], [2, 50358]]}, {}, "zh", "transcribe"),
        ({"task": "translate", "forced_decoder_ids": [[1, 50259], [2, 50359]]}, {}, None, "translate"),
        ({"forced_decoder_ids": [[1, 50260], [2, 50358]]}, {}, "zh", "translate"),
        ({}, {"forced_decoder_ids": [[1, 50260], [2, 50359], [3, 50363]]}, "zh", "transcribe"),
        ({"forced_decoder_ids": None}, {"forced_decoder_ids": [[1, 50260]]}, "zh", "transcribe"),
        ({}, {"forced_decoder_ids": [[1, None], [2, 50359]]}, None, "transcribe"),
    ],
)
def test_what_a_folder_transcribes_by_itself(
    generation: dict[str, Any], raw: dict[str, Any], language: str | None, task: str, tmp_path: Path
) -> None:
    """In the order of `_retrieve_init_tokens`."""
    settings = {name: value for name, value in {**TINY, **generation}.items() if value is not None}
    if "forced_decoder_ids" not in generation or generation["forced_decoder_ids"] is None:
        settings.pop("forced_decoder_ids", None)
    found = read(tmp_path, settings, TOKENS, **{"forced_decoder_ids": None, **raw})
    assert found is not None and (found.default_language, found.default_task) == (language, task)


def test_languages_are_asked_for_by_code_or_name(tmp_path: Path) -> None:
    found = read(tmp_path, {**TINY, "language": "zh"}, TOKENS)
    assert found is not None
    asked = [found.language(one) for one in (None, "en", "English", "en-US", "Mandarin", "cantonese", "<|en|>")]
    assert asked == ["zh", "en", "en", "en", "zh", "yue", "en"]
    for wrong in ("french", "fr", "Klingon", ""):
        with pytest.raises(ValueError, match=r"language: the model has no .*; it has en, yue, zh"):
            found.language(wrong)
    with pytest.raises(ValueError, match="no task 'sing'"):
        found.task("sing")
