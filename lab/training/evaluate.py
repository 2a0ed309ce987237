"""Measures the figures of the model cards, on the saved folders with the engine that serves them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.training import chat, conversations, corpus, pairs
from lab.training.vocabulary import TURN_END
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.llm import LLM

PIECE_CHARACTERS = 1_000  # of a text that is scored; far fewer tokens than the context length
HELD_OUT_PAIRS = 4_000
HELD_OUT_CONVERSATIONS = 2_000
WRITTEN = SamplingParams(max_tokens=96)  # of a pair's written form


@dataclass(frozen=True, slots=True)
class BitsPerByte:
    """A language model's log2 loss divided by the UTF-8 bytes of the text."""

    sample: float  # of the committed held-out sample
    held_out: float  # of all held-out modules of this interpreter


def pieces(text: str, size: int = PIECE_CHARACTERS) -> list[str]:
    """Split the text into pieces of whole lines, of at most about `size` characters each."""
    complete, current = [], ""
    for line in text.splitlines(keepends=True):
        if current and len(current) + len(line) > size:
            complete.append(current)
            current = ""
        current += line
    return [*complete, current] if current else complete


def bits_per_byte(llm: LLM, texts: Sequence[str]) -> float:
    """Compute the bits per byte of the texts, each scored alone from the start token."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    nats = 0.0
    for _, output in llm.stream(texts, params):
        nats -= sum(entry.logprob for entry in output.prompt_logprobs or () if entry is not None)
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def evaluate_code(folder: Path) -> BitsPerByte:
    llm = LLM(folder, EngineConfig(dtype="float32"))
    everything = [piece for d in corpus.documents(held_out=True) for piece in pieces(d.text)]
    longest = llm.info.max_model_len - 1
    assert llm.tokenizer is not None
    fitting = [text for text in everything if len(llm.tokenizer.encode(text).ids) < longest]
    return BitsPerByte(bits_per_byte(llm, pieces(corpus.held_out_sample())), bits_per_byte(llm, fitting))


def exact_match(llm: LLM, held_out: Sequence[tuple[str, str]], params: SamplingParams) -> float:
    """Return the fraction of pairs of a prompt and a text whose text greedy decoding gives exactly."""
    answers = llm.generate([given for given, _ in held_out], params)
    right = [answer == expected for answer, (_, expected) in zip(answers, held_out, strict=True)]
    return sum(right) / len(right)


def evaluate_normalize(folder: Path) -> float:
    llm = LLM(folder, EngineConfig(dtype="float32"))
    return exact_match(llm, pairs.held_out_pairs(HELD_OUT_PAIRS), WRITTEN)


def evaluate_assistant(folder: Path) -> float:
    drawn = map(chat.rendered, conversations.held_out_conversations(HELD_OUT_CONVERSATIONS))
    held_out = [(prompt, reply.removesuffix(TURN_END)) for prompt, reply in drawn]
    params = SamplingParams(max_tokens=160, skip_special_tokens=False)
    return exact_match(LLM(folder, EngineConfig(dtype="float32")), held_out, params)
