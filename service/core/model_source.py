"""What a model can be loaded from: the interface between the service and the reading of folders and downloads.

`service.runtimes.model_reader` implements it; tests of HTTP semantics have one that reads nothing.
"""

from __future__ import annotations

from typing import Protocol

from model.api.messages import ModelSpec
from service.core.models import ServedModel


class ModelReader(Protocol):
    """Reads models, except their weights, which the engine reads."""

    async def locate(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec with a folder of this machine as its path, after a download if there has to be one.

        Raises `ConfigError`. Cancelling ends the download.
        """

    async def read(self, spec: ModelSpec) -> ServedModel:
        """Read the checkpoint's description, tokenizer and chat template from its folder; raises `ConfigError`."""
