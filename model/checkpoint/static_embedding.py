"""Reads folders with a table of token vectors and no network, as if they had a config.json of a model.

sentence-transformers has them as a module (`modules.json`: StaticEmbedding), model2vec as a whole folder whose
config.json has a `model_type` of its own. Vectors are those of sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from triptych.model.api.request import Pooling
from triptych.model.checkpoint.json_files import read_json
from triptych.model.checkpoint.sentence_modules import STATIC, first_module
from triptych.model.checkpoint.sentence_transformers import SentenceSettings
from triptych.model.checkpoint.state_dict import read_state_dict
from triptych.model.checkpoint.weight_files import weight_files
from triptych.model.errors import ConfigError, listed

_MODEL2VEC = "model2vec"
_TABLES = ("embedding.weight", "embeddings")
_FOLDED = ("mapping", "weights")  # a row for each token, and its factor, of a smaller table
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def static_settings(whole: Path, path: Path, *, pickle: bool) -> dict[str, Any] | None:
    """Return the settings of token vectors in `path`, the network's folder in `whole`; None: it has something else.

    Raises `ConfigError` for tensors that are not served.
    """
    if first_module(whole) != STATIC and read_json(path / "config.json").get("model_type") != _MODEL2VEC:
        return None
    tensors = dict(_tensors(weight_files(path, pickle=pickle)))
    name = next((name for name in _TABLES if name in tensors), None)
    if name is None:
        raise ConfigError(f"its weights have no tensor {' or '.join(_TABLES)}, found {listed(sorted(tensors))}")
    if folded := [one for one in _FOLDED if one in tensors]:
        raise ConfigError(f"its weights have {' and '.join(folded)}: tokens that share rows of a table are not served")
    kind, shape = tensors[name]
    if len(shape) != 2 or kind not in _DTYPES:
        raise ConfigError(f"the tensor {name} must be a table of {', '.join(_DTYPES)}, found {kind} {list(shape)}")
    return dict(model_type="static_embedding", vocab_size=shape[0], hidden_size=shape[1], dtype=_DTYPES[kind])


def _tensors(files: Iterable[Path]) -> Iterable[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield the name, number format and shape of each stored tensor."""
    for file in files:
        if file.suffix == ".bin":
            yield from ((tensor.name, (tensor.kind, tensor.shape)) for tensor in read_state_dict(file))
            continue
        try:
            with safe_open(file, framework="numpy") as opened:
                slices = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118 (no mapping)
                yield from ((name, (one.get_dtype(), tuple(one.get_shape()))) for name, one in slices)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file.name} is not a valid safetensors file: {error}") from None


def as_static(sentences: SentenceSettings, whole: Path, path: Path) -> SentenceSettings:
    """Return the settings of a folder's vectors: the mean of those of a text's tokens, without special ones.

    A tokenizer.json that truncates does so here; without modules.json a config.json of model2vec normalises.
    """
    truncation = read_json(path / "tokenizer.json").get("truncation")
    length = truncation.get("max_length") if isinstance(truncation, dict) else None
    normalize = sentences.normalize
    if first_module(whole) is None:
        normalize = bool(read_json(path / "config.json").get("normalize", False))
    return replace(
        sentences,
        pooling=(Pooling.MEAN,),
        special_tokens=False,
        normalize=normalize,
        max_tokens=length if type(length) is int and length > 0 else None,
    )
