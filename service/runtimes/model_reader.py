"""Reads models from folders and from the Hub, without their weights, at the start and on demand."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from triptych.model.api.messages import ModelSpec
from triptych.model.checkpoint import hub_names
from triptych.model.checkpoint.adapter_folder import check_base, read_adapter_settings
from triptych.model.checkpoint.folder import Checkpoint, errors_about, read_checkpoint
from triptych.model.checkpoint.json_files import CARD
from triptych.model.errors import ConfigError
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.chat.template_probe import read_chat_template
from triptych.service.core.models import ServedModel
from triptych.service.core.pair_template import PairTemplate
from triptych.service.runtimes.hub_download import download
from triptych.service.settings.service_settings import Limits, LogFormat

logger = logging.getLogger(__name__)


def read_model(spec: ModelSpec, max_beams: int = Limits().max_beams) -> ServedModel:
    """Read a model's folder; raises `ConfigError` with the model's name.

    A request without `num_beams` gets at most `max_beams`.
    """
    with errors_about(spec.name):
        return _read_model(spec, max_beams)


def read_adapted(spec: ModelSpec, base: ServedModel) -> ServedModel:
    """Read the folder of a LoRA adapter of a model; raises `ConfigError` with the adapter's name."""
    with errors_about(spec.name):
        check_base(base.config, split=spec.engine.tensor_parallel_size > 1)
        read_adapter_settings(Path(spec.path), pickle=spec.engine.pickle)
    return base.adapted(spec)


def _read_model(spec: ModelSpec, max_beams: int) -> ServedModel:
    folder = Path(spec.path)
    checkpoint = read_checkpoint(folder, pickle=spec.engine.pickle, pictures=spec.engine.pictures)
    checkpoint = _bound_beams(spec, checkpoint, max_beams)
    tokenizer = Tokenizer.from_folder(checkpoint.network_path, special_tokens=checkpoint.sentences.special_tokens)
    sentences, chat, problem, pairs = checkpoint.sentences, None, "", None
    if sentences.messages is not None:
        pairs = PairTemplate.from_folder(folder, sentences.messages, sentences.prompt(None))
    elif checkpoint.config.can_generate:
        try:
            with errors_about(""):
                chat = read_chat_template(folder)
        except ConfigError as error:  # the model serves everything else
            problem = f"model {spec.name}: {error}"
            logger.warning("model %s serves no chats: %s", spec.name, error)
    examples = card_examples(folder)
    return ServedModel(spec.name, checkpoint, tokenizer, spec.engine, chat, problem, pairs, examples)


def _bound_beams(spec: ModelSpec, checkpoint: Checkpoint, max_beams: int) -> Checkpoint:
    """Limit the checkpoint's default number of beams to what the service allows a request."""
    settings, most = "max_beams", max_beams
    if spec.engine.max_num_seqs is not None and spec.engine.max_num_seqs < max_beams:
        settings, most = "max_num_seqs", spec.engine.max_num_seqs
    if checkpoint.most_beams > most:
        logger.warning(
            "model %s: its folder's num_beams is %d, more than %s (%d): requests without num_beams get %d beams",
            *(spec.name, checkpoint.most_beams, settings, most, most),
        )
    return checkpoint.with_most_beams(most)


class FolderReader:
    """The `ModelReader` of both runtimes: reads in threads, downloads in processes."""

    def __init__(self, max_download: int, log_format: LogFormat, max_beams: int) -> None:
        """`max_download`: maximum bytes of one model of the Hub."""
        self._max_download = max_download
        self._max_beams = max_beams
        self._log_format = log_format

    async def locate(self, spec: ModelSpec) -> ModelSpec:
        if not hub_names.is_hub_name(spec.path):
            return spec
        found = await download(
            spec.path, pickle=spec.engine.pickle, max_bytes=self._max_download, log_format=self._log_format
        )
        return replace(spec, path=str(found))

    async def read(self, spec: ModelSpec, base: ServedModel | None = None) -> ServedModel:
        if base is not None:
            return await asyncio.to_thread(read_adapted, spec, base)
        return await asyncio.to_thread(read_model, spec, self._max_beams)


_MOST_BYTES = 1 << 16  # of README.md that are read
_MOST_CHARACTERS = 400  # of an example
_MOST_EXAMPLES = 4


def card_examples(path: Path) -> tuple[str, ...]:
    """Return the first example texts of a checkpoint's card."""
    file = (path if path.is_dir() else path.parent) / CARD
    try:
        if not file.is_file():  # a pipe would be read forever
            return ()
        with file.open("rb") as opened:
            head = opened.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ()
    start, _, rest = head.replace("\r\n", "\n").partition("---\n")
    matter, end, _ = rest.partition("\n---")
    return _texts(matter) if not start and end else ()


def _texts(matter: str) -> tuple[str, ...]:
    import yaml

    try:
        found: Any = yaml.load(matter, yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError):  # of "!!bool x"
        return ()
    widget = found.get("widget") if isinstance(found, dict) else None
    listed = widget if isinstance(widget, list) else []
    texts = [one.get("text") if isinstance(one, dict) else one for one in listed]
    found = [text for text in texts if isinstance(text, str) and 0 < len(text) <= _MOST_CHARACTERS]
    return tuple(found[:_MOST_EXAMPLES])
