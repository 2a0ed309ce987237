"""The items of a workload. Item i of a seed is the same in every run and in every worker process.

An item is one request, or a conversation of several turns, where the prompt of a turn is everything before it and its
own text. Items are sampled from distributions, or read from JSON lines (`Recorded`).
"""

from __future__ import annotations

import bisect
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.loadtest.errors import UsageError
from triptych.loadtest.settings import Settings
from triptych.loadtest.settings import Workload as WorkloadSettings
from triptych.loadtest.workload import distributions
from triptych.loadtest.workload.prompts import Vocabulary

CONTEXT_SHARE = 0.95  # of the context for conversations: a reply may have more tokens when tokenised again
HABITS = ("cancel", "slow", "retry")


@dataclass(frozen=True, slots=True)
class Turn:
    """Holds the new part of one request. `prompt_tokens` counts `text`, or all `texts`, with special tokens."""

    text: str
    prompt_tokens: int
    output_tokens: int
    texts: tuple[str, ...] = ()  # of an embedding request
    think_s: float = 0.0  # between the end of the previous turn and this one


@dataclass(frozen=True, slots=True)
class Item:
    """Holds the turns of one item. `habit` is one of `HABITS` or empty; a canceller disconnects after the share
    `leave_at` of the output."""

    turns: tuple[Turn, ...]
    habit: str = ""
    leave_at: float = 0.0


class ItemSource:
    """Makes items by their number."""

    def __init__(self, settings: Settings, vocabulary: Vocabulary) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        workload = settings.workload
        self._prompt = distributions.parse(workload.prompt_tokens, "--prompt-tokens")
        self._output = distributions.parse(workload.output_tokens, "--output-tokens")
        self._turns = distributions.parse(workload.turns, "--turns")
        self._texts = distributions.parse(workload.texts, "--texts")
        self._prefixes = self._make_prefixes()
        self._popularity = list(itertools.accumulate((k + 1) ** -workload.zipf for k in range(workload.prefixes)))
        self._replayed = read_replay(workload) if workload.kind == "replay" else []

    def item(self, index: int) -> Item:
        """Return item `index`; of a replay, the line of that number, cyclically."""
        rng = random.Random(f"{self._settings.seed}/{index}")
        habit, leave_at = self._habit(rng), rng.random()
        if self._replayed:
            return Item((self._replay(self._replayed[index % len(self._replayed)], rng),), habit, leave_at)
        if self._settings.embeds:
            return Item((self._embedding(rng),), habit, leave_at)
        turns = self._turns(rng) if self._settings.workload.kind == "conversation" else 1
        return Item(self._conversation(rng, turns), habit, leave_at)

    def _conversation(self, rng: random.Random, count: int) -> tuple[Turn, ...]:
        """Return at most `count` turns, as many as fit the context."""
        workload, room = self._settings.workload, self._settings.max_model_len or 10**9
        room = int(CONTEXT_SHARE * room) if count > 1 else room
        turns: list[Turn] = []
        for number in range(count):
            prefix = self._prefix(rng) if not turns else None
            prompt = self._prompt(rng) + (workload.prefix_tokens if prefix else 0)
            output = self._output_for(prompt, rng)
            if prompt + output > room:
                if turns:
                    break
                output = min(output, max(1, room // 2))
                prompt = max(1, room - output)
            text = self._text(rng, prompt, prefix, opening=not turns)
            think_s = rng.expovariate(1 / workload.think_s) if number and workload.think_s else 0.0
            turns.append(Turn(text, prompt, output, think_s=think_s))
            room -= prompt + output
        return tuple(turns)

    def _output_for(self, prompt: int, rng: random.Random) -> int:
        workload = self._settings.workload
        if workload.kind != "seq2seq":
            return self._output(rng)
        return max(1, round(prompt * workload.ratio * rng.lognormvariate(0, workload.ratio_sigma)))

    def _text(self, rng: random.Random, tokens: int, prefix: str | None, *, opening: bool) -> str:
        if prefix is None:
            return self._vocabulary.text(rng, tokens, opening=opening)
        rest = tokens - self._settings.workload.prefix_tokens
        return f"{prefix} {self._vocabulary.text(rng, rest, opening=False)}".rstrip()

    def _embedding(self, rng: random.Random) -> Turn:
        sizes = [self._prompt(rng) for _ in range(self._texts(rng))]
        if self._settings.max_model_len:
            sizes = [min(size, self._settings.max_model_len) for size in sizes]
        texts = tuple(self._vocabulary.text(rng, size) for size in sizes)
        return Turn("", sum(sizes), 0, texts=texts)

    def _make_prefixes(self) -> list[str]:
        workload = self._settings.workload
        rngs = (random.Random(f"{self._settings.seed}/prefix/{k}") for k in range(workload.prefixes))
        return [self._vocabulary.text(rng, workload.prefix_tokens) for rng in rngs]

    def _prefix(self, rng: random.Random) -> str | None:
        """Return a shared prefix, chosen by Zipf's law."""
        if not self._prefixes:
            return None
        return self._prefixes[bisect.bisect(self._popularity, rng.random() * self._popularity[-1])]

    def _habit(self, rng: random.Random) -> str:
        clients, drawn = self._settings.clients, rng.random()
        for habit, share in zip(HABITS, (clients.cancel, clients.slow, clients.retry), strict=True):
            if drawn < share:
                return habit
            drawn -= share
        return ""

    def _replay(self, line: Recorded, rng: random.Random) -> Turn:
        output = line.output_tokens or self._output(rng)
        if line.texts:
            return Turn("", 0, 0, texts=line.texts)
        if line.prompt is not None:
            return Turn(line.prompt, 0, output)
        return Turn(self._vocabulary.text(rng, line.prompt_tokens), line.prompt_tokens, output)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Holds a line of a replay: a text, several texts, or the length of a text to be made."""

    at: float
    prompt: str | None
    texts: tuple[str, ...]
    prompt_tokens: int
    output_tokens: int


def read_replay(workload: WorkloadSettings) -> list[Recorded]:
    """Read the lines of `workload.file`, sorted by time, the first at 0. Raises `UsageError` naming file, line and
    field.

    Fields: `timestamp` (seconds) or `timestamp_ms`; one of `prompt` (or `source`), `input` (texts), `prompt_tokens` (or
    `input_length`); `output_tokens` (or `max_tokens`, `output_length`), else `--output-tokens`.
    """
    path = Path(workload.file)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--file: found {workload.file!r}, expected a file of JSON lines ({error})") from None
    found = [_recorded(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UsageError(f"--file: {path} is empty; expected JSON lines")
    found.sort(key=lambda one: one.at)
    first = found[0].at
    return [
        Recorded((one.at - first) / workload.speed, one.prompt, one.texts, one.prompt_tokens, one.output_tokens)
        for one in found
    ]


def _recorded(line: str, where: str) -> Recorded:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: expected a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected a JSON object, found {type(value).__name__}")
    prompt = _field(value, ("prompt", "source"), str, where)
    given = _field(value, ("input",), (str, list), where) or []
    texts = (given,) if isinstance(given, str) else tuple(map(str, given))
    prompt_tokens = _field(value, ("prompt_tokens", "input_length"), int, where) or 0
    if prompt is None and not texts and prompt_tokens < 1:
        raise UsageError(
            f"{where}: found no prompt; expected one of prompt, source, input, prompt_tokens, input_length"
        )
    output_tokens = _field(value, ("output_tokens", "max_tokens", "output_length"), int, where) or 0
    at = _field(value, ("timestamp",), (int, float), where)
    ms = _field(value, ("timestamp_ms",), (int, float), where)
    return Recorded(float(at if at is not None else (ms or 0) / 1000), prompt, texts, prompt_tokens, output_tokens)


def _field(value: dict[str, Any], names: tuple[str, ...], kind: Any, where: str) -> Any:
    """Return the value of the first of `names` that exists, of type `kind`; None if none does."""
    name = next((name for name in names if value.get(name) is not None), None)
    if name is None:
        return None
    if not isinstance(value[name], kind) or isinstance(value[name], bool):
        raise UsageError(f"{where}: {name}: found {value[name]!r}, expected {_named(kind)}")
    return value[name]


def _named(kind: Any) -> str:
    return " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
