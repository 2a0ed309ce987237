"""The models of the service: their descriptions and states, the requests that hold them, and the choice of a model.

Models come and go while the service runs. `Models` is the front process's only registry of them;
`triptych.service.lifecycle.model_loader` loads and unloads them. A `ServedModel` has what is known without the engine:
the checkpoint's description, the tokenizer, the engine settings. `EngineClient.models` has what the engine determines
when it loads a model (context length, KV blocks).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum

from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.checkpoint.folder import Checkpoint
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.text.infilling import Infilling
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.chat.chat_template import ChatTemplate
from triptych.service.core.errors import (
    ApiError,
    invalid,
    listed,
    model_not_allowed,
    not_found,
    shorten,
    unavailable,
    unknown_model,
)
from triptych.service.core.models_folder import Stamp
from triptych.service.core.pair_template import PairTemplate
from triptych.service.core.request_context import RequestContext, current


class Task(StrEnum):
    GENERATE = "generate"
    ENCODE = "encode"
    TOKENIZE = "tokenize"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model under the name that clients use; without a tokenizer it reads and returns only token ids."""

    name: str
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    engine: EngineConfig = field(default_factory=EngineConfig)
    chat: ChatTemplate | None = None
    chat_problem: str = ""  # why its chat template cannot be used
    pairs: PairTemplate | None = None  # a reranker's template of query and document; None: the tokenizer joins them
    examples: tuple[str, ...] = ()  # texts of its card that show what it is for
    adapter_of: str = ""  # the model that a LoRA adapter is computed with; empty: it is a model
    adapter_path: str = ""  # the adapter's folder
    loaded: bool = True  # False: only the checkpoint is known; the model is loaded when a request needs it

    def adapted(self, spec: ModelSpec) -> ServedModel:
        """Return an adapter of this model: requests to it are checked as those to the model."""
        return replace(self, name=spec.name, adapter_of=self.name, adapter_path=spec.path)

    @property
    def example(self) -> str:
        """The first text of its card; "" if there is none."""
        return next(iter(self.examples), "")

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def vocab_size(self) -> int:
        return self.config.embedding.vocab_size

    @property
    def source_vocab_size(self) -> int:
        """The vocabulary size of prompts and inputs, which differs from that of outputs in some translators."""
        return self.config.source_vocab_size

    @property
    def is_encoder_decoder(self) -> bool:
        return self.config.encoder is not None and self.config.decoder is not None

    @property
    def reads_text(self) -> bool:
        """Whether a prompt or an input may be text or images; a model that transcribes reads only audio."""
        return self.config.audio is None

    def check_reads_text(self, param: str) -> None:
        """Raise a 400 that names the prompt or input `param` if the model reads only audio."""
        if not self.reads_text:
            message = f"{param}: model {self.name} transcribes speech: send a file as audio, in base64"
            raise invalid(message, param, "wrong_task")

    @property
    def token_types(self) -> int:
        """The number of segments (token type ids) that the model distinguishes; 0: it has none."""
        encoder = self.config.encoder
        return 0 if encoder is None else encoder.token_types

    @property
    def hidden_size(self) -> int:
        """The width of the hidden states that /encode returns for tokens."""
        return self.config.text_stack.hidden_size

    def padded(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return a text's token ids as the model was trained on them: filled up, where it reads what fills them up."""
        joint, tokenizer = self.config.joint, self.tokenizer
        if joint is None or not joint.padded or tokenizer is None:
            return ids
        fill = self.config.pad_token_id if tokenizer.pad_id is None else tokenizer.pad_id
        filling = (fill or 0,) * max(0, (self.config.max_positions or 0) - len(ids))
        return (*filling, *ids) if tokenizer.pads_left else (*ids, *filling)

    def vector_size(self, *, own_pooling: bool) -> int:
        """Return the dimensions of an embedding by the checkpoint's own pooling and projections, or by another one."""
        return self.checkpoint.sentences.output_size(self.config.vector_size) if own_pooling else self.hidden_size

    def serves(self, task: Task) -> bool:
        """Return whether the model can do the task, or might be able to once it is loaded."""
        if task is Task.GENERATE:
            return self.config.can_generate
        return task is Task.ENCODE or self.tokenizer is not None or not self.loaded

    def for_task(self, name: str | None) -> ServedModel:
        """Return the model with the sampling defaults of a task of its checkpoint; raises a 400 for an unknown task."""
        if name is None:
            return self
        task = self.checkpoint.tasks.get(name)
        if task is None:
            known = ", ".join(sorted(self.checkpoint.tasks)) or "none"
            raise invalid(f"task: model {self.name} has no task {shorten(name)}; it has {known}", "task")
        return replace(self, checkpoint=replace(self.checkpoint, sampling_defaults=task.sampling_defaults))

    def require_embedder(self) -> None:
        """Raise a 400 for a model that writes text: its folder does not declare embeddings."""
        if self.config.can_generate:
            raise invalid(
                f"model {self.name} writes text and was not trained to make vectors: its folder has no "
                "modules.json, its GGUF file no pooling_type; POST /encode returns its hidden states",
                *("model", "wrong_task"),
            )

    @property
    def infilling(self) -> Infilling | None:
        """What makes prompts for the middle of a text; None if the model cannot fill it in."""
        return None if self.tokenizer is None else self.tokenizer.infilling(sentinels=self.is_encoder_decoder)

    def require_tokenizer(self, param: str) -> Tokenizer:
        """Return the tokenizer; raises a 400 that names the text field `param` if there is none."""
        if self.tokenizer is None:
            raise invalid(f"{param}: model {self.name} has no tokenizer; send token ids", param, "no_tokenizer")
        return self.tokenizer


class State(StrEnum):
    """The state of a model; an available model is loaded when a request names it."""

    LOADED = "loaded"
    LOADING = "loading"
    UNLOADING = "unloading"
    AVAILABLE = "available"
    UNLOADED = "unloaded"  # a model given at the start and unloaded by request, until it is loaded by request
    FAILED = "failed"


class Origin(StrEnum):
    """The source of a model's name."""

    START = "start"  # the command line or the configuration file
    MODELS_DIR = "models-dir"
    REQUEST = "request"  # POST /models/load


@dataclass(eq=False, slots=True)
class Model:
    """A known model: its origin, its state, and the number of requests that hold it."""

    spec: ModelSpec  # with the path as given: a folder, or a name on the Hub
    origin: Origin
    pinned: bool
    keep_alive_s: float | None = None  # idle time after which it is unloaded, by a client; None: by the settings
    state: State = State.AVAILABLE
    served: ServedModel | None = None  # description for requests; None: they may not name the model
    refusal: ApiError | None = None  # error for requests that name the model, if they may not
    given_path: str | None = None  # path as an operator gave it
    stamp: Stamp = ()  # of the files of `spec`, if they are watched
    changed: bool = False  # whether its files are others than those that were loaded
    missed: int = 0  # consecutive scans without its folder, if that is watched
    with_base: bool = False  # whether an adapter went because its base model did, and comes back with that
    reason: str = ""  # why it failed or is unloaded
    error: ApiError | None = None  # of the last failed load, for its requester
    retry_at: float = 0.0  # by `time.monotonic()`: earliest time to load a failed model again for a request
    users: int = 0  # requests that hold it
    used_at: float = field(default_factory=time.monotonic)  # when it was last used or loaded, or became known
    task: asyncio.Task[None] | None = None  # its loading or unloading
    leaving: asyncio.Task[None] | None = None  # of a loaded one: waits for its last request, to unload it; no new ones
    unused: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.unused.set()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def form(self) -> str:
        """The form of the Transformer; empty if requests may not name the model."""
        return "" if self.served is None else self.served.config.form

    @property
    def is_evictable(self) -> bool:
        """Whether the model may be evicted, that is, unloaded without a request to do so."""
        return self.state is State.LOADED and not self.pinned and not self.users

    # -- states

    def serve(self, served: ServedModel) -> None:
        """Mark the model as loaded by the engine."""
        self.state, self.served, self.refusal = State.LOADED, served, None
        self.changed = self.with_base = False
        self.used_at = time.monotonic()

    def offer(self, checkpoint: Checkpoint) -> None:
        """Let requests name the model, which the engine has not loaded."""
        base = self.spec.adapter_of or ""
        self.served, self.refusal = ServedModel(self.name, checkpoint, None, adapter_of=base, loaded=False), None

    def refuse(self, error: ApiError) -> None:
        """Answer requests that name the model with `error`."""
        self.served, self.refusal = None, error

    def fail(self, error: ApiError, retry_s: float) -> None:
        """Record why loading failed; requests get this reason until loading is tried again."""
        self.state, self.error, self.reason = State.FAILED, error, error.message
        self.retry_at = time.monotonic() + retry_s

    def failure(self) -> ApiError:
        """Return the error for a request that needs this failed model."""
        seconds = max(1, round(min(self.retry_at - time.monotonic(), 60.0)))
        message = f"model {self.name} could not be loaded: {self.reason}"
        return unavailable(message, "model_failed", seconds)

    # -- requests that hold it

    def hold(self, context: RequestContext) -> None:
        """Keep the model until the request's reply has been sent: it is not evicted, and unloading waits for it."""
        self.users += 1
        self.unused.clear()
        self.used_at = time.monotonic()
        context.on_end.append(self._release)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the model in the block, as a request does."""
        self.users += 1
        self.unused.clear()
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        self.users -= 1
        self.used_at = time.monotonic()
        if not self.users:
            self.unused.set()


class Models:
    """The registry of all known models by name, and the routes of models of other applications."""

    def __init__(self, models: Iterable[ServedModel], elsewhere: Mapping[str, str] | None = None) -> None:
        """`models` that are marked as loaded are so at the start. Raises `ConfigError` if two have one name."""
        self._models: dict[str, Model] = {}
        self.elsewhere = dict(elsewhere or {})  # name: route
        for served in models:
            if served.name in self._models:
                raise ConfigError(f"two models are named {served.name}")
            path, base = served.adapter_path or str(served.checkpoint.path), served.adapter_of or None
            spec = ModelSpec(served.name, path, served.engine, adapter_of=base)
            state = State.LOADED if served.loaded else State.AVAILABLE
            self._models[served.name] = Model(spec, Origin.START, pinned=False, state=state, served=served)

    def __iter__(self) -> Iterator[Model]:
        """Iterate over all known models; they may change during the iteration."""
        return iter(list(self._models.values()))

    def __getitem__(self, name: str) -> Model:
        return self._models[name]

    def get(self, name: str) -> Model | None:
        return self._models.get(name)

    def add(self, model: Model) -> None:
        """Make a model known; it replaces a model of the same name."""
        self._models[model.name] = model

    def forget(self, model: Model) -> None:
        """Remove a model that is not loaded, unless another model has its name."""
        if self._models.get(model.name) is model:
            del self._models[model.name]

    # -- models that requests may name

    @property
    def loaded(self) -> list[ServedModel]:
        """The models that accept requests."""
        return [one.served for one in self._models.values() if one.served is not None and one.served.loaded]

    @property
    def available(self) -> list[ServedModel]:
        """The models that would be loaded if a request named them."""
        return [one.served for one in self._models.values() if one.served is not None and not one.served.loaded]

    @property
    def candidates(self) -> list[ServedModel]:
        """The models that the current request may name: loaded ones, then available ones."""
        return [one for one in (*self.loaded, *self.available) if _may_use(one.name)]

    @property
    def names(self) -> list[str]:
        """The names of `candidates`."""
        return [one.name for one in self.candidates]

    def served(self, name: str) -> ServedModel | None:
        """Return the loaded model of this name, or None."""
        found = self.candidate(name)
        return found if found is not None and found.loaded else None

    def candidate(self, name: str) -> ServedModel | None:
        """Return the model of this name if requests may name it, else None."""
        found = self._models.get(name)
        return None if found is None else found.served

    def knows(self, name: str) -> bool:
        """Return whether a model has this name, including models that do not serve now or are served elsewhere."""
        found = self._models.get(name)
        return name in self.elsewhere or (found is not None and (found.served or found.refusal) is not None)

    def hold_loaded(self, name: str | None, task: Task, context: RequestContext) -> bool:
        """Make the request hold the model that it names, if the model is loaded; return whether it is."""
        if name is not None and self.served(name) is None:
            return False
        model = self._models[self.choose(name, task)]
        if model.state is not State.LOADED or model.leaving is not None:
            return False
        self.hold(model, context)
        return True

    def hold(self, model: Model, context: RequestContext) -> None:
        """Keep a model, and the model that an adapter is computed with, until the request's reply has been sent."""
        model.hold(context)
        if (base := self._models.get(model.spec.adapter_of or "")) is not None:
            base.hold(context)

    def adapters_of(self, model: Model) -> list[Model]:
        """Return the known adapters of a model."""
        return [one for one in self if one.spec.adapter_of == model.name]

    def choose(self, name: str | None, task: Task) -> str:
        """Return `name`, or the name of the only model for the task; raises `ApiError` 404, 403, 400 or 503.

        The model may not be loaded yet.
        """
        if name is None:
            return self._only_one_for(task)
        found = self.candidate(name)
        if found is None or not _may_use(name):
            raise self.unknown(name)
        if not found.serves(task):
            raise self._wrong_task(found, task)
        return name

    def only_one(self, able: Callable[[ServedModel], bool], what: str) -> str:
        """Return the name of the only model that is `able`, loaded or not; raises a 400 unless exactly one is.

        `what` completes the sentence "no model ...".
        """
        names = [one.name for one in self.candidates if able(one) and not one.adapter_of]
        if len(names) == 1:
            return names[0]
        if not names:
            raise invalid(f"no model {what}", "model", "wrong_task")
        raise invalid(f"model is required: more than one {what}: {listed(names)}", "model", "missing_field")

    def require(
        self,
        name: str,
        able: Callable[[ServedModel], bool],
        what: str,
        lack: Callable[[ServedModel], str] | None = None,
    ) -> None:
        """Raise a 400 if the model is known and not `able`; `lack` returns what its folder lacks, or ""."""
        found = self.candidate(name)
        if found is not None and not able(found):
            if lack is not None and (missing := lack(found)):
                raise invalid(f"model {name} cannot be used: {missing}", "model", "wrong_task")
            names = listed(one.name for one in self.candidates if able(one))
            raise invalid(f"model {name} is not one that {what}; models that do: {names}", "model", "wrong_task")

    def adapter(self, field: str, wanted: str | int, base: str | None) -> str:
        """Return the name of an adapter that a request gives by name, or by its place among those of a model.

        `base` is the model that the request names too. Raises a 400 that names the field. A name that is not known is
        returned as it is: a folder may have an adapter of this name now.
        """
        if isinstance(wanted, int):
            known = [one.name for one in self.candidates if one.adapter_of and base in (None, one.adapter_of, one.name)]
            if wanted >= len(known):
                raise invalid(f"{field}: there is no adapter {wanted}; GET /lora-adapters lists {len(known)}", field)
            return known[wanted]
        found = self.candidate(wanted)
        if found is not None and not found.adapter_of and wanted != base:
            raise invalid(f"{field}: {wanted} is a model, and no adapter", field, "model_not_found")
        if found is not None and found.adapter_of and base not in (None, found.adapter_of, wanted):
            raise invalid(f"{field}: {wanted} is an adapter of {found.adapter_of}, not of {base}", field)
        return wanted

    def resolve(self, name: str | None, task: Task) -> ServedModel:
        """Return the model that `choose` finds; raises `ApiError` as `choose` does, and a 503 if it is not loaded."""
        chosen = self.choose(name, task)
        model = self.served(chosen)
        if model is None:
            raise unavailable(f"model {chosen} is not loaded", "model_not_ready")
        return model

    def unknown(self, name: str) -> ApiError:
        """Return the error for a name that requests may not use."""
        found, context = self._models.get(name), current()
        if context is not None and found is not None and found.served is not None and not _may_use(name):
            return model_not_allowed(name, context.tenant.name)
        if found is not None and found.refusal is not None:
            return found.refusal
        if name in self.elsewhere:
            message = f"model {name} is served below {self.elsewhere[name]}: send the request there"
            return not_found(message, code="model_not_found", param="model")
        return unknown_model(name, self.names)

    def _only_one_for(self, task: Task) -> str:
        """Return the name of the only model for the task.

        For embeddings it is the only encoder, or the only encoder without a classifier, although other models have
        hidden states too. Models that read only audio count only if no other model can do the task, and for tokens.
        """
        candidates = [one for one in self.candidates if not one.adapter_of]  # an adapter is meant by its name alone
        encoders = [one for one in candidates if one.config.form == "encoder-only"]
        for made_for in (encoders, [one for one in encoders if one.config.classifier is None]):
            if task is Task.ENCODE and len(made_for) == 1:
                return made_for[0].name
        able = [one.name for one in candidates if one.serves(task)]
        readers = [one.name for one in candidates if one.name in able and one.reads_text]
        chosen = able if task is Task.TOKENIZE else readers or able
        return self.only_one(lambda one: one.name in chosen, f"can {task}")

    def _wrong_task(self, found: ServedModel, task: Task) -> ApiError:
        if task is Task.TOKENIZE:
            return invalid(f"model {found.name} has no tokenizer", "model", "no_tokenizer")
        able = [one.name for one in self.candidates if one.serves(task)]
        message = f"model {found.name} is {found.config.form} and cannot {task}; models that can: {listed(able)}"
        return invalid(message, "model", "wrong_task")


def _may_use(name: str) -> bool:
    """Return whether the key of the current request may use a model."""
    context = current()
    return context is None or context.tenant.may_use(name)
