"""Compares folders whose config.json differs in one key with `transformers`, which reads the same file."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.model.checkpoints import CPU, KINDS, START, by_layer, randomise, reference_input, saved
from tests.model.parity import decoder_logits, decoder_prompts, encoder_decoder_logits, images, sources
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.families import FAMILIES, read_settings
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.inputs import packed_input
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_model

TOLERANCE = 2e-4


@dataclass(frozen=True)
class Outcome:
    """The result for a file: "equal", "differs", "refused" (by us), or "invalid" (also for the reference)."""

    kind: str
    reason: str = ""
    without_effect: bool = False  # the reference gives the same outputs as without the change


@cache
def kind_of(model_type: str) -> str | None:
    """Return the first kind of `tests.model.checkpoints` with this type, or None."""
    return next((kind for kind in KINDS if raw_of(kind).get("model_type") == model_type), None)


@cache
def _text(kind: str) -> str:
    return (saved(kind).path / "config.json").read_text(encoding="utf-8")


def raw_of(kind: str) -> dict[str, Any]:
    """Return the config.json of a kind."""
    found: dict[str, Any] = json.loads(_text(kind))
    return found


def compare(kind: str, changes: dict[str, Any], folder: Path, *, drop: tuple[str, ...] = ()) -> Outcome:
    """Write the kind's folder with a changed config.json to `folder`, and compare our outputs with the reference's."""
    raw = {key: value for key, value in raw_of(kind).items() if key not in drop} | changes
    try:
        ours = read_settings(raw)[0]
    except ConfigError as error:
        refusal = str(error)
    else:
        refusal = ""
    reference = _reference(kind, raw)
    if isinstance(reference, str):
        return Outcome("invalid", f"{reference}; ours: {refusal or 'accepted'}")
    theirs = _their_outputs(reference, ours if not refusal else read_checkpoint(saved(kind).path).config)
    if isinstance(theirs, str):
        return Outcome("invalid", f"{theirs}; ours: {refusal or 'accepted'}")
    before = _outputs_of_kind(kind)
    unchanged = theirs.shape == before.shape and bool(torch.equal(theirs, before))
    if refusal:
        return Outcome("refused", refusal, unchanged)
    if unchanged and ours == read_settings(raw_of(kind))[0]:
        return Outcome("equal", "", True)
    return _compare_outputs(folder, raw, reference, theirs, unchanged)


def _compare_outputs(folder: Path, raw: dict[str, Any], reference: Any, theirs: Tensor, unchanged: bool) -> Outcome:
    reference.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    try:
        checkpoint = read_checkpoint(folder)
        backend = by_layer(SdpaBackend(), checkpoint.config, torch.float32)
        found = _our_outputs(load_model(checkpoint, backend, LinearFactory(torch.float32)))
    except ConfigError as error:
        return Outcome("refused", str(error), unchanged)
    if found.shape != theirs.shape:
        return Outcome("differs", f"shape {tuple(found.shape)}, expected {tuple(theirs.shape)}", unchanged)
    error = (found - theirs).abs().max().item()
    return Outcome("equal" if error < TOLERANCE else "differs", f"by {error:.2g}", unchanged)


def _reference(kind: str, raw: dict[str, Any]) -> Any:
    """Return the library's model of a file, with the kind's weights where they fit; or the error as a text."""
    base = saved(kind).reference
    try:
        with quiet():
            config = type(base.config).from_dict(json.loads(json.dumps(raw)))
            config._attn_implementation = base.config._attn_implementation
            torch.manual_seed(0)
            model = type(base)(config).eval()
            try:
                kept = {name: one for name, one in base.state_dict().items() if "inv_freq" not in name}
                model.load_state_dict(kept, strict=False)
            except RuntimeError:
                randomise(model, std=0.2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return model.float().requires_grad_(False)


@contextmanager
def quiet() -> Iterator[None]:
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


@cache
def _outputs_of_kind(kind: str) -> Tensor:
    found = _their_outputs(saved(kind).reference, read_checkpoint(saved(kind).path).config)
    assert isinstance(found, Tensor), found
    return found


@torch.inference_mode()
def _their_outputs(reference: Any, config: ModelConfig) -> Tensor | str:
    """Return the library's logits, or hidden states of an encoder, for the inputs of `tests.model.parity`."""
    try:
        with quiet():
            prompts = decoder_prompts()
            if config.form == "decoder-only":
                return torch.cat([reference(input_ids=torch.tensor([ids])).logits[0] for ids in prompts])
            if config.form == "encoder-decoder":
                read = zip(sources(config), [(START, *ids) for ids in prompts], strict=True)
                rows = ((reference_input(source), torch.tensor([ids])) for source, ids in read)
                return torch.cat([reference(**given, decoder_input_ids=ids).logits[0] for given, ids in rows])
            given = (
                images(config.image)[1] if config.image else [dict(input_ids=torch.tensor([ids])) for ids in prompts]
            )
            return torch.cat([reference.base_model(**one).last_hidden_state[0] for one in given])
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _our_outputs(model: Transformer) -> Tensor:
    if model.config.form == "decoder-only":
        return decoder_logits(model, decoder_prompts())
    if model.config.form == "encoder-decoder":
        begins = [(START, *ids) for ids in decoder_prompts()]
        return encoder_decoder_logits(model, sources(model.config), begins)
    prompts, encoder = decoder_prompts(), model.config.encoder
    assert encoder is not None
    types = [(0,) * len(ids) for ids in prompts] if encoder.token_types else None
    with torch.inference_mode():
        if model.config.image is not None:
            return model.encode(images(model.config.image)[0])
        return model.encode(packed_input(prompts, CPU, causal=False, token_types=types))


def values_for(key: str, default: Any, current: Any) -> list[Any]:
    """Return values of a key that differ from the folder's."""
    value = default if current is None else current
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [2 * value or 1, value + 1, None]
    if isinstance(value, float):
        return [2 * value or 0.5, None]
    if isinstance(value, str):
        return ["relu" if key.endswith(("act", "activation", "activation_function")) else "x", None]
    return [] if isinstance(value, dict | list) else [True, 2, 0.5, "x"]


def served_types() -> list[str]:
    return [name for name in FAMILIES if kind_of(name) is not None]


os.environ.setdefault("HF_HUB_OFFLINE", "1")
