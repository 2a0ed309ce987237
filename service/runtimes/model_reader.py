"""Reads models from folders and from the Hub, except their weights, at the start and while the service runs."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

from model.api.messages import ModelSpec
from model.checkpoint import hub
from model.checkpoint.folder import errors_about, read_checkpoint
from model.errors import ConfigError
from model.text.tokenizer import Tokenizer
from service.chat.template_probe import read_chat_template
from service.core.models import ServedModel
from service.core.pair_template import PairTemplate
from service.runtimes.hub_download import download
from service.settings.service_settings import LogFormat

logger = logging.getLogger(__name__)


def read_model(spec: ModelSpec) -> ServedModel:
    """Read a model's folder; raises `ConfigError` with the model's name."""
    with errors_about(spec.name):
        return _read_model(spec)


def _read_model(spec: ModelSpec) -> ServedModel:
    folder = Path(spec.path)
    checkpoint = read_checkpoint(folder, pickle=spec.engine.pickle)
    tokenizer = Tokenizer.from_folder(checkpoint.network_path)
    sentences, chat, problem, pairs = checkpoint.sentences, None, "", None
    if sentences.messages is not None:
        pairs = PairTemplate.from_folder(folder, sentences.messages, sentences.prompt(None))
    elif checkpoint.config.can_generate:
        try:
            with errors_about(""):
                chat = read_chat_template(folder)
        except ConfigError as error:  # the model serves all else
            problem = f"model {spec.name}: {error}"
            logger.warning("model %s serves no chats: %s", spec.name, error)
    return ServedModel(spec.name, checkpoint, tokenizer, spec.engine, chat, problem, pairs)


class FolderReader:
    """Implements `ModelReader`: reads in threads, downloads in processes."""

    def __init__(self, max_download: int, log_format: LogFormat) -> None:
        """`max_download`: bytes of one model of the Hub."""
        self._max_download = max_download
        self._log_format = log_format

    async def locate(self, spec: ModelSpec) -> ModelSpec:
        if not hub.is_hub_name(spec.path):
            return spec
        found = await download(
            spec.path, pickle=spec.engine.pickle, max_bytes=self._max_download, log_format=self._log_format
        )
        return replace(spec, path=str(found))

    async def read(self, spec: ModelSpec) -> ServedModel:
        return await asyncio.to_thread(read_model, spec)
