"""How much the inputs of each projection weigh, measured while the model reads texts.

The squared error of an output is, if inputs were independent, the sum over inputs of their second moments times the
squared errors of the weights that they are multiplied with. So a search for scales that weighs errors by these moments
minimises what the next layer sees, rather than what weights lose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.api.engine_config import EngineConfig
from model.api.request import SamplingParams
from model.errors import ConfigError
from model.linear.base import Linear, linears
from model.llm import LLM

MAX_TEXTS = 256  # of a file, the first ones
TEXT_TOKENS = 512  # of a text; what is longer is cut into several
ANSWER_TOKENS = 64  # that an encoder-decoder writes for each: its decoder's inputs
_KV_BYTES = 1 << 30
FLOOR = 0.01  # of the mean, which is added: inputs that the texts leave at rest count a little too


def read_texts(file: Path) -> list[str]:
    """The texts of a file, which blank lines divide; raises `ConfigError`."""
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
    """The weight of each input of these projections, float32 `[inputs]`, by name; raises `ConfigError`.

    The model is loaded for it, in floats.
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
    """The tokens of a text, in parts that are not too long."""
    if llm.tokenizer is None:
        raise ConfigError(f"texts: {llm.info.name} has no tokenizer")
    longest = min(TEXT_TOKENS, llm.info.max_model_len - 1)
    ids = llm.tokenizer.encode(text).ids
    return [ids[first : first + longest] for first in range(0, len(ids), longest)]


class _Sums:
    """Sums of squares of what projections read, as long as it is not closed."""

    def __init__(self, network: nn.Module, projections: Collection[str]) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count: dict[str, int] = {}
        self._hooks = [
            linear.register_forward_pre_hook(self._add)
            for linear in linears(network)
            if linear.spec.name in projections
        ]

    def _add(self, linear: nn.Module, given: tuple[Any, ...]) -> None:
        assert isinstance(linear, Linear)
        rows: Tensor = given[0].detach().flatten(0, -2).float()
        name, squares = linear.spec.name, rows.square().sum(0, dtype=torch.float64)
        self._sums[name] = self._sums.get(name, torch.zeros_like(squares)) + squares
        self._count[name] = self._count.get(name, 0) + len(rows)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def weights(self) -> dict[str, Tensor]:
        found: Mapping[str, Tensor] = {name: total / self._count[name] for name, total in self._sums.items()}
        return {name: (moment + FLOOR * moment.mean()).float() for name, moment in found.items()}
