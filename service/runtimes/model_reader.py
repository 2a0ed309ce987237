"""Reads models from folders and from the Hub, except their weights, at the start and while the service runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from model.api.messages import ModelSpec
from model.checkpoint import hub
from model.checkpoint.folder import read_checkpoint
from model.text.tokenizer import Tokenizer
from service.core.chat_template import ChatTemplate
from service.core.model_registry import ServedModel
from service.runtimes.hub_download import download
from service.settings.service_settings import LogFormat


def read_model(spec: ModelSpec) -> ServedModel:
    """Read a model's folder; raises `ConfigError`."""
    folder = Path(spec.path)
    return ServedModel(
        spec.name,
        read_checkpoint(folder, pickle=spec.engine.pickle),
        Tokenizer.from_folder(folder),
        spec.engine,
        ChatTemplate.from_folder(folder),
    )


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
