"""The blocking, offline API: one model, no server.

llm = LLM(Path("checkpoint"))
for output in llm.stream(["def add(a, b):"], SamplingParams(max_tokens=32)): ...
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.checkpoint import read_checkpoint
from model.config import ConfigError
from model.engine.config import EngineConfig
from model.engine.loading import load
from model.engine.protocol import ModelSpec
from model.request import EncodeRequest, FinishReason, Request, SamplingParams, TokenOutput
from model.tokenizer import Detokenizer, Tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A checkpoint folder, ready to generate and encode in this process.

    Set `GOMP_SPINCOUNT=2000` in the environment before anything imports torch: OpenMP reads it only then.
    """

    def __init__(self, path: Path, engine: EngineConfig | None = None) -> None:
        self.checkpoint = read_checkpoint(path)
        self.tokenizer = Tokenizer.from_folder(path)
        loaded = load(ModelSpec(path.name, str(path), engine or EngineConfig()))
        self.info = loaded.info
        self._loaded = loaded
        self._generate = loaded.generate
        self._encode = loaded.encode

    def close(self) -> None:
        """End the processes of the other ranks, where the model has any; they end with this process anyway."""
        self._loaded.close()

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[str]:
        """The whole text for each prompt (its first sequence)."""
        texts = [""] * len(prompts)
        for position, output in self.stream(prompts, params):
            if output.index == 0:
                texts[position] += output.text
        return texts

    def stream(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[tuple[int, TokenOutput]]:
        """(position of the prompt, output) as they come; text is filled where the model has a tokenizer."""
        engine = self._generate
        if engine is None:
            raise ConfigError(f"{self.info.name} is {self.info.form} and does not generate")
        if params.grammar and self.tokenizer is None:
            raise ConfigError(f"{self.info.name} has no tokenizer.json: no grammar can be followed")
        detokenizers: dict[tuple[int, int], Detokenizer] = {}
        for position, prompt in enumerate(prompts):
            engine.add(self._request(position, prompt, params))
        while engine.has_work:
            engine.wait_prepared(1.0)
            outputs, _ = engine.step()
            self._loaded.check()
            for output in outputs:
                if output.error is not None:
                    raise ConfigError(f"the output cannot match: {output.error}")
                position = int(output.request_id)
                if self.tokenizer is not None:
                    key = (position, output.index)
                    if key not in detokenizers:
                        detokenizers[key] = Detokenizer.of(self.tokenizer, params)
                    if detokenizers[key].fill(output):
                        engine.abort(output.request_id, output.index, FinishReason.STOP)
                yield position, output

    def encode(self, inputs: Sequence[Prompt]) -> NDArray[np.float32]:
        """Pooled vectors `[N, d]`."""
        for position, text in enumerate(inputs):
            ids, types = self._ids(text)
            self._check_length(ids, self.info.max_model_len)
            self._encode.add(
                EncodeRequest(str(position), self.info.name, ids, token_type_ids=types, arrival_time=time.monotonic())
            )
        vectors: dict[int, NDArray[np.float32]] = {}
        while self._encode.has_work:
            outputs, _ = self._encode.step()
            self._loaded.check()
            for output in outputs:
                vectors[int(output.request_id)] = np.frombuffer(output.data, np.float32)
        return np.stack([vectors[position] for position in range(len(inputs))])

    def _request(self, position: int, prompt: Prompt, params: SamplingParams) -> Request:
        ids, _ = self._ids(prompt)
        start = self.checkpoint.config.decoder_start_token_id
        begins = (start,) if self.checkpoint.config.encoder is not None and start is not None else ()
        longest = self.info.max_model_len
        # A source is read in one step; a decoder's prompt leaves room for a token.
        self._check_length(ids, min(longest, self.info.max_num_batched_tokens) if begins else longest - 1)
        return Request(str(position), self.info.name, ids, params, begins, arrival_time=time.monotonic())

    def _check_length(self, ids: Sequence[int], limit: int) -> None:
        """Refuse what the engine could never take on; online the service does."""
        if not 0 < len(ids) <= limit:
            raise ConfigError(f"{self.info.name} takes 1 to {limit} tokens, found {len(ids)}")

    def _ids(self, prompt: Prompt) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if not isinstance(prompt, str):
            return tuple(prompt), ()
        if self.tokenizer is None:
            raise ConfigError(f"{self.info.name} has no tokenizer.json: give token ids")
        encoded = self.tokenizer.encode(prompt)
        return encoded.ids, encoded.type_ids
