"""A folder's generation_config.json, applied by the service and by `generate` in `transformers`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.model.checkpoints import copied, saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.request import TokenOutput
from triptych.model.llm import LLM
from triptych.service.core.models import ServedModel
from triptych.service.planning.checks import sampling_fields
from triptych.service.planning.requests import default_max_tokens, with_lengths
from triptych.service.schemas.bodies import GenerateBody

NEW = 12


@dataclass(frozen=True)
class Ours:
    """Outputs of this engine with a folder's defaults."""

    hypotheses: list[list[int]]
    scores: list[float | None]
    outputs: list[TokenOutput]


def ours(folder: Path, prompt: list[int], decoder_prompt: tuple[int, ...] = (), n: int = 1) -> Ours:
    """Generate with the folder's own settings."""
    llm = LLM(folder, EngineConfig(dtype="float32", kv_cache_memory=4 << 20, max_num_seqs=8))
    config = llm.checkpoint.config
    encodes = config.form == "encoder-decoder"
    begin = decoder_prompt or ((config.decoder_start_token_id or 0,) if encodes else ())
    served = ServedModel("m", llm.checkpoint, None)
    start = len(begin) if encodes else len(prompt)
    body, most = GenerateBody(prompt="x", n=n), default_max_tokens(served, start, NEW)
    assert most is not None
    sampling = sampling_fields(body, served)
    params = with_lengths(sampling, sampling.get("num_beams", 1), body, served, start, most)
    outputs = [one for _, one in llm.stream([prompt], params, decoder_prompt=begin)]
    llm.close()
    hypotheses: list[list[int]] = [[] for _ in range(n)]
    scores: list[float | None] = [None] * n
    for one in outputs:
        hypotheses[one.index] += one.token_ids
        scores[one.index] = one.score
    return Ours(hypotheses, scores, outputs)


def theirs(
    reference: Any, generation: dict[str, Any], prompt: list[int], decoder_prompt: tuple[int, ...] = (), n: int = 1
) -> tuple[list[list[int]], list[float]]:
    """Return what `generate` gives by a generation_config.json: tokens of each hypothesis, and scores of beams."""
    from transformers import GenerationConfig

    before = reference.generation_config
    # As read from a file, which has a list where Python has a tuple.
    reference.generation_config = GenerationConfig.from_dict(json.loads(json.dumps(generation)))
    asked: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": n}
    if not {"max_length", "max_new_tokens"} & generation.keys():
        asked["max_new_tokens"] = NEW
    if decoder_prompt:
        asked["decoder_input_ids"] = torch.tensor([decoder_prompt])
    try:
        with torch.inference_mode():
            ids = torch.tensor([prompt])  # all of it is read, also what looks like padding
            found = reference.generate(ids, attention_mask=torch.ones_like(ids), **asked)
    finally:
        reference.generation_config = before
    encodes = reference.config.is_encoder_decoder
    begin = (len(decoder_prompt) or 1) if encodes else len(prompt)
    scores = getattr(found, "sequences_scores", None)
    return [row[begin:] for row in found.sequences.tolist()], [] if scores is None else scores.tolist()


def ended(rows: list[list[int]], ends: set[int]) -> list[list[int]]:
    """Return rows up to their first end; what follows is padding."""
    return [row[: next((place + 1 for place, token in enumerate(row) if token in ends), len(row))] for row in rows]


def base(kind: str) -> dict[str, Any]:
    """Return the kind's token ids for beginning and end."""
    config = saved(kind).reference.config
    names = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id")
    return {name: value for name in names if (value := getattr(config, name, None)) is not None}


def folder_of(kind: str, into: Path, generation: dict[str, Any]) -> Path:
    """Return a copy of the kind's folder with this generation_config.json."""
    folder = copied(kind, into)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
