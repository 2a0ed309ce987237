"""The registry of served models, which finds the model for a request.

Models come and go while the service runs. An available one is known by its checkpoint, and loaded when a request needs
it. A `ServedModel` holds what is known without the engine: the checkpoint's description, the tokenizer, the engine
settings. What the engine determines when it loads (context length, KV blocks) is in `EngineClient.models`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from model.api.engine_config import EngineConfig
from model.checkpoint.folder import Checkpoint
from model.config.model import ModelConfig
from model.errors import ConfigError
from model.text.tokenizer import Tokenizer
from service.core.chat_template import ChatTemplate
from service.core.errors import ApiError, invalid, listed, not_found, shorten, unavailable, unknown_model
from service.core.pair_template import PairTemplate


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
    chat_problem: str = ""  # why its chat template cannot be used
    pairs: PairTemplate | None = None  # how a reranker reads a query and a document; None: as the tokenizer joins them
    loaded: bool = True  # False: what its checkpoint tells; it is loaded when a request needs it

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def vocab_size(self) -> int:
        return self.config.embedding.vocab_size

    @property
    def source_vocab_size(self) -> int:
        """The vocabulary of prompts and texts that are read, which is not that of outputs in some translators."""
        return self.config.source_vocab_size

    @property
    def is_encoder_decoder(self) -> bool:
        return self.config.encoder is not None and self.config.decoder is not None

    @property
    def reads_text(self) -> bool:
        """Whether a prompt or an input may be text or images; a model that transcribes reads sound alone."""
        return self.config.audio is None

    @property
    def token_types(self) -> int:
        """The number of segments (token type ids) that the model distinguishes; 0: it has none."""
        encoder = self.config.encoder
        return 0 if encoder is None else encoder.token_types

    @property
    def hidden_size(self) -> int:
        """The width of the hidden states that /encode gives for tokens."""
        return next(iter(self.config.stacks.values())).hidden_size

    def vector_size(self, *, own_pooling: bool) -> int:
        """Return the dimensions of an embedding, by the checkpoint's own pooling and projections or by another one."""
        return self.checkpoint.sentences.output_size(self.hidden_size) if own_pooling else self.hidden_size

    def serves(self, task: Task) -> bool:
        """Return whether the model can do the task; one that is not loaded, whether it may."""
        if task is Task.GENERATE:
            return self.config.can_generate
        return task is Task.ENCODE or self.tokenizer is not None or not self.loaded

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
    """Holds the loaded and the available models by name, and the routes of models of other applications."""

    def __init__(self, models: Iterable[ServedModel], elsewhere: Mapping[str, str] | None = None) -> None:
        self._models: dict[str, ServedModel] = {}
        self._available: dict[str, ServedModel] = {}
        self._refused: dict[str, ApiError] = {}  # names that are known but do not serve now, with the error to raise
        self.elsewhere = dict(elsewhere or {})  # name: route
        for model in models:
            if model.name in self._models:
                raise ConfigError(f"two models are named {model.name}")
            self._models[model.name] = model

    def __iter__(self) -> Iterator[ServedModel]:
        """Iterate over the loaded models."""
        return iter(self._models.values())

    @property
    def names(self) -> list[str]:
        """The models that requests may name: loaded ones, then available ones."""
        return [*self._models, *self._available]

    @property
    def candidates(self) -> list[ServedModel]:
        """The models that requests may name: loaded ones, then available ones."""
        return [*self._models.values(), *self._available.values()]

    @property
    def available(self) -> Mapping[str, ServedModel]:
        """The models that would be loaded if a request named them."""
        return self._available

    def get(self, name: str) -> ServedModel | None:
        """Return a loaded model."""
        return self._models.get(name)

    def candidate(self, name: str) -> ServedModel | None:
        """Return a model that requests may name."""
        return self._models.get(name) or self._available.get(name)

    def knows(self, name: str) -> bool:
        """Return whether a model has this name, be it one that does not serve now or that is served elsewhere."""
        return self.candidate(name) is not None or name in self._refused or name in self.elsewhere

    def add(self, model: ServedModel) -> None:
        """Serve a model that has been loaded."""
        self.remove(model.name)
        self._models[model.name] = model

    def offer(self, name: str, checkpoint: Checkpoint) -> None:
        """List a model that is loaded when a request needs it."""
        self.remove(name)
        self._available[name] = ServedModel(name, checkpoint, None, loaded=False)

    def refuse(self, name: str, error: ApiError) -> None:
        """Answer requests for a model with `error` from now on."""
        self.remove(name)
        self._refused[name] = error

    def remove(self, name: str) -> None:
        """Forget a model."""
        for names in (self._models, self._available, self._refused):
            names.pop(name, None)

    def choose(self, name: str | None, task: Task) -> str:
        """Return `name`, or the name of the only model for the task; raises `ApiError` 404, 400 or 503.

        The model may be one that is not loaded yet.
        """
        if name is None:
            return self._only_one_for(task)
        found = self.candidate(name)
        if found is None:
            raise self.unknown(name)
        if not found.serves(task):
            raise self._wrong_task(found, task)
        return name

    def only_one(self, able: Callable[[ServedModel], bool], what: str) -> str:
        """Return the name of the only model that is `able`, loaded or not; raises a 400 if there is none, or several.

        `what` completes the sentence "no model ...".
        """
        names = [one.name for one in self.candidates if able(one)]
        if len(names) == 1:
            return names[0]
        if not names:
            raise invalid(f"no model {what}", "model", "wrong_task")
        raise invalid(f"model is required: not only one {what}: {listed(names)}", "model", "missing_field")

    def require(
        self,
        name: str,
        able: Callable[[ServedModel], bool],
        what: str,
        lack: Callable[[ServedModel], str] | None = None,
    ) -> None:
        """Raise a 400 if a model that requests may name is not `able`; `lack` says what its folder lacks, or ""."""
        found = self.candidate(name)
        if found is not None and not able(found):
            if lack is not None and (missing := lack(found)):
                raise invalid(f"model {name} cannot be used: {missing}", "model", "wrong_task")
            names = listed(one.name for one in self.candidates if able(one))
            raise invalid(f"model {name} is none that {what}; models that do: {names}", "model", "wrong_task")

    def resolve(self, name: str | None, task: Task) -> ServedModel:
        """Return the loaded model that `choose` finds; raises `ApiError` as it does, a 503 if it is not loaded."""
        chosen = self.choose(name, task)
        model = self._models.get(chosen)
        if model is None:
            raise unavailable(f"model {chosen} is not loaded", "model_not_ready")
        return model

    def unknown(self, name: str) -> ApiError:
        """Return the error for a model that this application does not serve, or not now."""
        if name in self._refused:
            return self._refused[name]
        if name in self.elsewhere:
            message = f"model {name} is served below {self.elsewhere[name]}: send the request there"
            return not_found(message, code="model_not_found", param="model")
        return unknown_model(name, self.names)

    def _only_one_for(self, task: Task) -> str:
        """Return the only model for the task, of which one that reads sound alone is none: its routes are others.

        Vectors come from the only encoder, of several from the only one that classifies nothing, though others have
        hidden states too.
        """
        encoders = [one for one in self.candidates if one.config.form == "encoder-only"]
        for made_for in (encoders, [one for one in encoders if one.config.classifier is None]):
            if task is Task.ENCODE and len(made_for) == 1:
                return made_for[0].name
        able = [one.name for one in self.candidates if one.serves(task)]
        readers = [one.name for one in self.candidates if one.name in able and one.reads_text]
        chosen = able if task is Task.TOKENIZE else readers or able
        return self.only_one(lambda one: one.name in chosen, f"can {task}")

    def _wrong_task(self, found: ServedModel, task: Task) -> ApiError:
        if task is Task.TOKENIZE:
            return invalid(f"model {found.name} has no tokenizer", "model", "no_tokenizer")
        able = [one.name for one in self.candidates if one.serves(task)]
        message = f"model {found.name} is {found.config.form} and cannot {task}; models that can: {listed(able)}"
        return invalid(message, "model", "wrong_task")
