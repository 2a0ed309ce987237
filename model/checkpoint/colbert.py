"""Reads folders as ColBERT itself writes them: the projection of tokens among the network's tensors, as `linear`.

How queries and documents are read is in `artifact.metadata`, or ColBERT's defaults (Santhanam et al. 2022: ColBERTv2).
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open

from model.checkpoint.json_files import COLBERT_SETTINGS, read_json
from model.checkpoint.sentence_modules import DenseConfig
from model.checkpoint.sentence_transformers import LateInteraction
from model.checkpoint.state_dict import read_state_dict
from model.errors import ConfigError

_WEIGHT, _BIAS = "linear.weight", "linear.bias"


def read_colbert(path: Path, files: Iterable[Path], hidden_size: int) -> LateInteraction | None:
    """Return the folder's settings; None if its weights have no projection. Raises `ConfigError`."""
    found = next(((file, shapes) for file in files if _WEIGHT in (shapes := _projection(file))), None)
    if found is None:
        return None
    file, shapes = found
    shape = shapes[_WEIGHT]
    if len(shape) != 2 or shape[1] != hidden_size:
        raise ConfigError(f"{path.name}: {_WEIGHT} must have {hidden_size} columns, found the shape {shape}")
    metadata = read_json(path / COLBERT_SETTINGS)
    dense = DenseConfig(file, hidden_size, shape[0], _BIAS in shapes, among_others=True)
    return LateInteraction(
        (dense,),
        query_prefix=metadata.get("query_token_id", "[unused0]"),
        document_prefix=metadata.get("doc_token_id", "[unused1]"),
        query_length=metadata.get("query_maxlen", 32),
        document_length=metadata.get("doc_maxlen", 220),
        expands=True,
        attends=bool(metadata.get("attend_to_mask_tokens", False)),
        skipped_words=tuple(string.punctuation) if metadata.get("mask_punctuation", True) else (),
    )


def _projection(file: Path) -> dict[str, list[int]]:
    """Return the shapes of the projection's tensors that a file has, by name."""
    if file.suffix == ".bin":
        return {one.name: list(one.shape) for one in read_state_dict(file) if one.name in (_WEIGHT, _BIAS)}
    with safe_open(file, framework="numpy") as tensors:
        return {name: tensors.get_slice(name).get_shape() for name in (_WEIGHT, _BIAS) if name in tensors.keys()}  # noqa: SIM118
