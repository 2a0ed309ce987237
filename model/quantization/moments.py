"""Measures the second moments of the inputs of each projection while a model reads texts.

The squared error of an output is, if inputs were independent, the sum over inputs of their second moments times the
squared errors of the weights that they are multiplied with. So a search for scales that weighs errors by these moments
minimises what the next layer sees, rather than what weights lose. Each expert of a layer has moments of its own, of the
rows that are routed to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.errors import ConfigError
from triptych.model.linear.base import Linear, linears
from triptych.model.llm import LLM

MAX_TEXTS = 256  # of a file, the first ones
TEXT_TOKENS = 512  # of a text; what is longer is cut into several
ANSWER_TOKENS = 64  # that an encoder-decoder writes for each: its decoder's inputs
_KV_BYTES = 1 << 30
EXPERT_ROWS = 16  # average rows of its layer that each expert's own are mixed with: texts leave some experts out
FLOOR = 0.01  # of the mean, which is added: inputs that the texts leave at rest count a little too


def read_texts(file: Path) -> list[str]:
    """Return the texts of a file, which blank lines divide; raises `ConfigError`."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"texts: {file} cannot be read: {error}") from None
    texts = [text for text in content.split("\n\n") if text.strip()]
    if not texts:
        raise ConfigError(f"texts: {file} holds no text")
    return texts


def input_moments(
    folder: Path, texts: Sequence[str], projections: Collection[str], dtype: str = "auto"
) -> dict[str, Tensor]:
    """Return the weight of each input of these projections by name, float32 `[inputs]`, or `[experts, inputs]`.

    The model is loaded for it, in floats. Raises `ConfigError`.
    """
    engine = EngineConfig(device="cpu", dtype=dtype, attention_backend="sdpa", kv_cache_memory=_KV_BYTES)
    llm = LLM(folder, engine)
    try:
        inputs = [piece for text in texts for piece in _pieces(llm, text)][:MAX_TEXTS]
        with torch.inference_mode():
            sums = _Sums(llm.network, projections)
            if llm.info.form == "encoder-decoder":
                llm.generate(inputs, SamplingParams(max_tokens=ANSWER_TOKENS))
            else:
                llm.encode(inputs)
            sums.close()
    finally:
        llm.close()
    return sums.weights()


def _pieces(llm: LLM, text: str) -> list[Sequence[int]]:
    """Return the tokens of a text, in parts that are not too long."""
    if llm.tokenizer is None:
        raise ConfigError(f"texts: {llm.info.name} has no tokenizer")
    longest = min(TEXT_TOKENS, llm.info.max_model_len - 1)
    ids = llm.tokenizer.encode(text).ids
    return [ids[first : first + longest] for first in range(0, len(ids), longest)]


class _Sums:
    """Sums of squares of what projections read, `[experts, inputs]`, as long as it is not closed."""

    def __init__(self, network: nn.Module, projections: Collection[str]) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._hooks = list[RemovableHandle]()
        self._watched = list[Linear]()
        for linear in linears(network):
            if linear.spec.name in projections and linear.spec.experts > 1:
                self._watch(linear)
            elif linear.spec.name in projections:
                self._hooks.append(linear.register_forward_pre_hook(self._read))

    def _read(self, linear: nn.Module, given: tuple[Any, ...]) -> None:
        assert isinstance(linear, Linear)
        rows: Tensor = given[0].detach().flatten(0, -2)
        self._add(linear, rows, torch.tensor([0, len(rows)]))

    def _watch(self, linear: Linear) -> None:
        """Add what experts read too, which no hook of a module sees."""
        compute = linear.of_experts

        def watched(rows: Tensor, starts: Tensor) -> Tensor:
            self._add(linear, rows, starts)
            return compute(rows, starts)

        linear.of_experts = watched  # type: ignore[method-assign, assignment]
        self._watched.append(linear)

    def _add(self, linear: Linear, rows: Tensor, starts: Tensor) -> None:
        """Add rows in the order of their experts, which begin at `starts`."""
        name, counts = linear.spec.name, starts.diff()
        experts = torch.arange(len(counts)).repeat_interleave(counts)
        squares = rows.float().square().double()
        sums = torch.zeros(len(counts), rows.shape[1], dtype=torch.float64).index_add_(0, experts, squares)
        self._sums[name] = self._sums.get(name, torch.zeros_like(sums)) + sums
        self._counts[name] = self._counts.get(name, torch.zeros_like(counts)) + counts

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for linear in self._watched:
            del linear.of_experts

    def weights(self) -> dict[str, Tensor]:
        return {name: _weights(sums, self._counts[name][:, None]) for name, sums in self._sums.items()}


def _weights(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the weight of each input, from sums of squares `[experts, inputs]` over numbers of rows `[experts, 1]`."""
    mean = sums.sum(0) / counts.sum()
    moments = mean
    if len(sums) > 1:
        moments = (sums + EXPERT_ROWS * mean) / (counts + EXPERT_ROWS)
    return (moments + FLOOR * moments.mean(-1, keepdim=True)).float()
