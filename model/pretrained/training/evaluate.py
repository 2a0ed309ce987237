"""Measures the figures of the model cards, on the saved folders with the engine that serves them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model.api.engine_config import EngineConfig
from model.api.request import SamplingParams
from model.llm import LLM
from model.pretrained.training import corpus, pairs

PIECE_CHARACTERS = 1_000  # of a text that is scored; far fewer tokens than the context length
HELD_OUT_PAIRS = 4_000


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


def exact_match(llm: LLM, held_out: Sequence[tuple[str, str]]) -> float:
    """Return the fraction of pairs whose written form greedy decoding gives exactly."""
    answers = llm.generate([spoken for spoken, _ in held_out], SamplingParams(max_tokens=96))
    right = [answer == written for answer, (_, written) in zip(answers, held_out, strict=True)]
    return sum(right) / len(right)


def evaluate_normalize(folder: Path) -> float:
    return exact_match(LLM(folder, EngineConfig(dtype="float32")), pairs.held_out_pairs(HELD_OUT_PAIRS))
