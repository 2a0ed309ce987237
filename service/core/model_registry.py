"""The registry of served models, which finds the model for a request.

A `ServedModel` holds what is known without the engine: the checkpoint's description, the tokenizer, the engine
settings. What the engine determines when it loads (context length, KV blocks) is in `EngineClient.models`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from model.api.engine_config import EngineConfig
from model.checkpoint.folder import Checkpoint
from model.config.model import ModelConfig
from model.errors import ConfigError
from model.text.tokenizer import Tokenizer
from service.core.chat_template import ChatTemplate
from service.core.errors import ApiError, invalid, not_found, shorten, unknown_model


class Task(StrEnum):
    GENERATE = "generate"
    ENCODE = "encode"
    TOKENIZE = "tokenize"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Describes a model under the name that clients use; without a tokenizer it takes and returns token ids only."""

    name: str
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    engine: EngineConfig = field(default_factory=EngineConfig)
    chat: ChatTemplate | None = None

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def vocab_size(self) -> int:
        return self.config.embedding.vocab_size

    @property
    def is_encoder_decoder(self) -> bool:
        return self.config.encoder is not None and self.config.decoder is not None

    @property
    def token_types(self) -> int:
        """The number of segments (token type ids) that the model distinguishes; 0: it has none."""
        encoder = self.config.encoder
        return 0 if encoder is None else encoder.token_types

    @property
    def hidden_size(self) -> int:
        """The width of the hidden states that /encode gives for tokens."""
        return next(iter(self.config.stacks.values())).hidden_size

    def serves(self, task: Task) -> bool:
        if task is Task.GENERATE:
            return self.config.can_generate
        return task is Task.ENCODE or self.tokenizer is not None

    def for_task(self, name: str | None) -> ServedModel:
        """Return the model with the sampling defaults of a task of its checkpoint; raises a 400 if it has none such."""
        if name is None:
            return self
        task = self.checkpoint.tasks.get(name)
        if task is None:
            known = ", ".join(sorted(self.checkpoint.tasks)) or "none"
            raise invalid(f"task: model {self.name} has no task {shorten(name)}; it has {known}", "task")
        return replace(self, checkpoint=replace(self.checkpoint, sampling_defaults=task.sampling_defaults))

    def require_tokenizer(self, param: str) -> Tokenizer:
        """Return the tokenizer; raises a 400 that names the field with text, if there is none."""
        if self.tokenizer is None:
            raise invalid(f"{param}: model {self.name} has no tokenizer; send token ids", param, "no_tokenizer")
        return self.tokenizer


class Registry:
    """Holds the served models by name, in the order given, and the routes of models of other applications."""

    def __init__(self, models: Iterable[ServedModel], elsewhere: Mapping[str, str] | None = None) -> None:
        self._models: dict[str, ServedModel] = {}
        self.elsewhere = dict(elsewhere or {})  # name: route
        for model in models:
            if model.name in self._models:
                raise ConfigError(f"two models are named {model.name}")
            self._models[model.name] = model

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    @property
    def names(self) -> list[str]:
        return list(self._models)

    def resolve(self, name: str | None, task: Task) -> ServedModel:
        """Return the model called `name`, or the only one for the task; raises `ApiError` 404 or 400 naming `model`."""
        if name is None:
            return self._only(task)
        model = self._models.get(name)
        if model is None:
            raise self.unknown(name)
        if not model.serves(task):
            raise self._wrong_task(model, task)
        return model

    def unknown(self, name: str) -> ApiError:
        """Return the 404 for a model that this application does not serve."""
        if name in self.elsewhere:
            message = f"model {name} is served below {self.elsewhere[name]}: send the request there"
            return not_found(message, code="model_not_found", param="model")
        return unknown_model(name, self._models)

    def _only(self, task: Task) -> ServedModel:
        able = [model for model in self._models.values() if model.serves(task)]
        native = [model for model in able if model.config.form == "encoder-only"] if task is Task.ENCODE else []
        for found in (native, able):
            if len(found) == 1:
                return found[0]
        if not able:
            raise invalid(f"no loaded model can {task}", "model", "wrong_task")
        names = ", ".join(model.name for model in able)
        raise invalid(f"model is required: several can {task}: {names}", "model", "missing_field")

    def _wrong_task(self, model: ServedModel, task: Task) -> ApiError:
        if task is Task.TOKENIZE:
            return invalid(f"model {model.name} has no tokenizer", "model", "no_tokenizer")
        able = ", ".join(other.name for other in self._models.values() if other.serves(task)) or "none"
        message = f"model {model.name} is {model.config.form} and cannot {task}; models that can: {able}"
        return invalid(message, "model", "wrong_task")
