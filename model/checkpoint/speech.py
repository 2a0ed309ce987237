"""Reads the tokens that tell a model of speech what to do: generation_config.json's, completed by the tokenizer's.

The names in the files are Whisper's. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.model.api.languages import language_code
from triptych.model.api.timestamp_rules import TimestampRules
from triptych.model.checkpoint.json_files import read_json
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError, listed
from triptych.model.families.table.helpers import ids

TASKS = ("transcribe", "translate")
_GENERATION = "generation_config.json"
NO_SPEECH_TOKENS = f"{_GENERATION} has no no_timestamps_token_id, and the tokenizer no <|notimestamps|>"
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_MULTILINGUAL_VOCAB = 51865  # OpenAI's English-only models have a token less


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """The token ids by which Whisper is told what to do, and says when something was said.

    A prompt is `[previous, text before] start [language task] [no_timestamps]`; timestamps are the ids from
    `timestamp_begin` up.
    """

    start: int  # <|startoftranscript|>, the decoder's start token
    end: int  # <|endoftext|>
    no_timestamps: int
    previous: int  # <|startofprev|>
    no_speech: int  # <|nospeech|>, or <|nocaptions|>
    languages: Mapping[str, int]  # by code, as `en`; empty: a model of English only, which is told no task either
    tasks: Mapping[str, int]  # of TASKS
    default_language: str | None = None  # None: it is detected
    default_task: str = "transcribe"
    forces_task: bool = False  # an older folder, whose `forced_decoder_ids` say the task
    return_timestamps: bool = False
    max_initial_timestamp_index: int | None = None
    suppressed: tuple[int, ...] = ()  # never generated
    suppressed_first: tuple[int, ...] = ()  # not as the first token
    alignment_heads: tuple[tuple[int, int], ...] = ()  # (layer, head) whose cross attention follows the audio
    median_filter_width: int = 7  # positions, of the filter over what these heads attend to

    @property
    def is_multilingual(self) -> bool:
        return bool(self.languages)

    @property
    def timestamp_begin(self) -> int:
        """The id of <|0.00|>."""
        return self.no_timestamps + 1

    @property
    def timestamp_rules(self) -> TimestampRules:
        """The rules of an output with timestamps."""
        return TimestampRules(self.timestamp_begin, self.no_timestamps, self.end, self.max_initial_timestamp_index)

    def language(self, given: str | None) -> str | None:
        """Return the code of a language given by code or English name, by default the folder's; None: find it out.

        Raises `ValueError` for one that the model does not have.
        """
        if given is None:
            return self.default_language
        code = language_code(given)
        if not self.is_multilingual and code == "en":
            return None
        if code not in self.languages:
            known = listed(sorted(self.languages), most=120) if self.is_multilingual else "en"
            raise ValueError(f"language: the model has no {given[:60]!r}; it has {known}")
        return code

    def task(self, given: str | None, language: str | None = None) -> str:
        """Return a task, by default the folder's; raises `ValueError` for one that the model does not have.

        `language` is the one that is asked for: with it `forced_decoder_ids` do not count, as in the reference.
        """
        if given not in (None, "transcribe", *self.tasks):
            raise ValueError(
                "task: the model transcribes and does not translate" if given in TASKS else f"no task {given!r}"
            )
        return given or (TASKS[0] if self.forces_task and language is not None else self.default_task)

    def prompt(self, language: str | None = None, task: str | None = None, *, timestamps: bool) -> tuple[int, ...]:
        """Return the beginning of the decoder's tokens; a model of English only takes no language and no task.

        Raises `KeyError` for a language or a task that the model does not have.
        """
        told: tuple[int, ...] = ()
        if language is not None:
            told = (self.languages[language], self.tasks[task or self.default_task])
        return (self.start, *told, *(() if timestamps else (self.no_timestamps,)))


def read_speech_tokens(
    path: Path, raw: Mapping[str, Any], generation: Mapping[str, Any], config: ModelConfig, warnings: list[str]
) -> SpeechTokens | None:
    """Read a folder's speech tokens; `raw` is config.json, `generation` has the settings of generation.

    Returns None for a folder that has neither tokenizer nor settings of them. Raises `ConfigError` naming the field
    whose value cannot be, or is another than the tokenizer's. What only times of words need is told in `warnings`.
    """
    added = special_tokens(path)
    if "no_timestamps_token_id" not in generation and "<|notimestamps|>" not in added:
        return None
    reader = _Reader(generation, added, config)
    no_timestamps = reader.token("no_timestamps_token_id", "<|notimestamps|>")
    languages, tasks = reader.languages(no_timestamps), reader.tasks()
    reader.check_timestamps(no_timestamps)
    if languages and "transcribe" not in tasks:
        raise ConfigError(f"{_GENERATION}: task_to_id has no transcribe")
    language, task = reader.told(raw, languages, tasks)
    width = raw.get("median_filter_width", 7)
    if not _is_id(width, 100) or width % 2 == 0:
        raise ConfigError(f"config.json: median_filter_width must be odd and below 100, found {width!r}")
    return SpeechTokens(
        start=reader.token("decoder_start_token_id", "<|startoftranscript|>"),
        end=reader.token("eos_token_id", "<|endoftext|>"),
        no_timestamps=no_timestamps,
        previous=reader.token("prev_sot_token_id", "<|startofprev|>", otherwise=no_timestamps - 2),
        no_speech=reader.token("", "<|nospeech|>", "<|nocaptions|>", otherwise=no_timestamps - 1),
        languages=languages,
        tasks=tasks if languages else {},
        default_language=language if languages else None,
        default_task=task if languages else "transcribe",
        forces_task=task != TASKS[0] and generation.get("task") is None,
        return_timestamps=reader.flag("return_timestamps") or False,
        max_initial_timestamp_index=reader.max_initial(no_timestamps),
        suppressed=reader.ids("suppress_tokens"),
        suppressed_first=reader.ids("begin_suppress_tokens"),
        alignment_heads=reader.alignment_heads(warnings),
        median_filter_width=width,
    )


def special_tokens(path: Path) -> dict[str, int]:
    """Return the ids of a folder's added tokens by their texts; none where no file has them. Raises `ConfigError`."""
    pairs: Iterable[tuple[object, object]] = ()
    decoder = read_json(path / "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(decoder, dict):
        pairs = ((_text_of(entry), int(id)) for id, entry in decoder.items() if _is_id_text(id))
    elif listed := read_json(path / "added_tokens.json"):
        pairs = listed.items()
    elif isinstance(entries := read_json(path / "tokenizer.json").get("added_tokens"), list):
        pairs = ((_text_of(entry), entry.get("id")) for entry in entries if isinstance(entry, dict))
    return {text: id for text, id in pairs if isinstance(text, str) and isinstance(id, int)}


def _is_id_text(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def _text_of(entry: object) -> object:
    return entry.get("content") if isinstance(entry, dict) else None


class _Reader:
    """Fields of generation_config.json, each checked against the vocabulary and the tokenizer's added tokens."""

    def __init__(self, generation: Mapping[str, Any], added: Mapping[str, int], config: ModelConfig) -> None:
        self._generation = generation
        self._added = added
        self._config = config
        self._vocab_size = config.embedding.vocab_size

    def token(self, field: str, *texts: str, otherwise: int | None = None) -> int:
        """Return the id of a token by its field or its texts, which must agree. Raises `ConfigError`."""
        value = self._generation.get(field)
        if field == "decoder_start_token_id":
            value = self._config.decoder_start_token_id
        elif field == "eos_token_id":
            value = next(iter(self._config.eos_token_ids), None)
        known = next((self._added[text] for text in texts if text in self._added), None)
        found = next((one for one in (value, known, otherwise) if one is not None), None)
        if found is None:
            raise ConfigError(f"{_GENERATION}: {field} is missing, and the tokenizer has no {texts[0]}")
        self._check(found, field if value is not None else texts[0])
        if known is not None and found != known:
            raise ConfigError(f"{_GENERATION}: {field} is {found}, but {texts[0]} is {known}")
        return found

    def languages(self, no_timestamps: int) -> dict[str, int]:
        """Return the ids of the languages by their codes; none of a model of English only."""
        if self.flag("is_multilingual") is False:
            return {}
        given = self._generation.get("lang_to_id")
        if given is None:
            if self._vocab_size < _MULTILINGUAL_VOCAB and self.flag("is_multilingual") is None:
                return {}
            given = {text: id for text, id in self._added.items() if _LANGUAGE.fullmatch(text) and id < no_timestamps}
        found: dict[str, int] = {}
        for text, token in self._map("lang_to_id", given):
            code = _language_code(text)
            if code is None or token in found.values():
                raise ConfigError(f"{_GENERATION}: lang_to_id must map texts as <|en|> to ids, found {text!r}")
            found[code] = token
        return found

    def tasks(self) -> dict[str, int]:
        given = self._generation.get("task_to_id")
        if given is None:
            given = {task: self._added[f"<|{task}|>"] for task in TASKS if f"<|{task}|>" in self._added}
        found = dict(self._map("task_to_id", given))
        return {task: found[task] for task in TASKS if task in found}

    def _map(self, field: str, given: object) -> Iterable[tuple[str, int]]:
        """Return the pairs of a field that maps texts to ids, checked."""
        if not isinstance(given, dict):
            raise ConfigError(f"{_GENERATION}: {field} must map texts to token ids")
        for text, token in given.items():
            self._check(token, f"{field}.{text}")
            known = self._added.get(text, self._added.get(f"<|{text}|>"))
            if known is not None and known != token:
                raise ConfigError(f"{_GENERATION}: {field}.{text} is {token}, but the tokenizer says {known}")
            yield text, token

    def check_timestamps(self, no_timestamps: int) -> None:
        """Raise `ConfigError` unless timestamps follow after `no_timestamps`, up to the end of the vocabulary."""
        zero = self._added.get("<|0.00|>", no_timestamps + 1)
        if zero != no_timestamps + 1 or zero >= self._vocab_size:
            raise ConfigError(
                f"{_GENERATION}: no_timestamps_token_id is {no_timestamps}, but <|0.00|>, which follows it, is {zero} "
                f"of {self._vocab_size}"
            )

    def told(
        self, raw: Mapping[str, Any], languages: Mapping[str, int], tasks: Mapping[str, int]
    ) -> tuple[str | None, str]:
        """Return the folder's language and task; `raw` is config.json.

        Older folders have both as tokens, which count only where neither is named, as in the reference.
        """
        language, task = self._generation.get("language"), self._generation.get("task")
        if language is None and task is None:
            forced = self._forced(raw)
            code = next((code for code, token in languages.items() if token in forced), None)
            return code, next((name for name, token in tasks.items() if token in forced and name in TASKS), TASKS[0])
        if task is not None and task not in TASKS:
            raise ConfigError(f"{_GENERATION}: task must be one of {', '.join(TASKS)}, found {task!r}"[:300])
        if language is None or not languages:
            return None, task or TASKS[0]
        code = _code_of(language)
        if code not in languages:
            raise ConfigError(f"{_GENERATION}: language {language!r} is none of lang_to_id"[:300])
        return code, task or TASKS[0]

    def _forced(self, raw: Mapping[str, Any]) -> list[int]:
        """Return the tokens that older folders begin outputs with: `[[1, language], [2, task], ...]`."""
        pairs = self._generation.get("forced_decoder_ids") or raw.get("forced_decoder_ids") or []
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ConfigError(f"{_GENERATION}: forced_decoder_ids must be pairs of a place and a token id")
        for _, token in pairs:
            if token is not None:
                self._check(token, "forced_decoder_ids")
        return [token for _, token in pairs if token is not None]

    def flag(self, field: str) -> bool | None:
        value = self._generation.get(field)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{_GENERATION}: {field} must be true or false, found {value!r}")
        return value

    def max_initial(self, no_timestamps: int) -> int | None:
        value = self._generation.get("max_initial_timestamp_index")
        if value is not None and not _is_id(value, self._vocab_size - no_timestamps - 1):
            raise ConfigError(f"{_GENERATION}: max_initial_timestamp_index must be of a timestamp, found {value!r}")
        return value

    def ids(self, field: str) -> tuple[int, ...]:
        """Return those of a field's token ids that the vocabulary has; -1, for example, forbids nothing."""
        return tuple(token for token in ids(self._generation.get(field), field) if _is_id(token, self._vocab_size))

    def alignment_heads(self, warnings: list[str]) -> tuple[tuple[int, int], ...]:
        """Return the heads whose attention follows the audio; none, with a warning, where some are not there.

        Distilled models often name those of their teacher.
        """
        given = self._generation.get("alignment_heads") or []
        decoder = self._config.decoder_stack
        heads = [layer.attention.num_heads for layer in decoder.layers]
        pairs = isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given)
        if not pairs or not all(_is_id(at, len(heads)) and _is_id(head, heads[at]) for at, head in given):
            warnings.append(
                f"{_GENERATION}: alignment_heads must be pairs of one of {len(heads)} layers and a head that it has: "
                "times of words are not given"
            )
            return ()
        return tuple((layer, head) for layer, head in given)

    def _check(self, token: object, field: str) -> None:
        if not _is_id(token, self._vocab_size):
            raise ConfigError(f"{_GENERATION}: {field} must be a token id below {self._vocab_size}, found {token!r}")


def _is_id(value: object, size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size


def _language_code(text: object) -> str | None:
    """Return `en` of `<|en|>` or `en`; None of anything else."""
    found = (
        _LANGUAGE.fullmatch(text if str(text).startswith("<|") else f"<|{text}|>") if isinstance(text, str) else None
    )
    return found[1] if found else None


def _code_of(language: object) -> str | None:
    """Return the code of a folder's language, which is `<|en|>`, `en` or `English`."""
    return language_code(language) if isinstance(language, str) else None
