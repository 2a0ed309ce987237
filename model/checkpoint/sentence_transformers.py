"""What a sentence-transformers folder says of its vectors: pooling, modules after it, prompts, truncation."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open

from triptych.model.api.request import Pooling
from triptych.model.checkpoint.json_files import COLBERT, COLBERT_SETTINGS, SPARSE, read_json
from triptych.model.checkpoint.sentence_modules import (
    JOINT,
    KEYS,
    MODEL,
    NETWORK,
    SCORE_ACTIVATIONS,
    STATIC,
    DenseConfig,
    UnitLength,
    VectorStep,
    check_text_output,
    key_warnings,
    network_folder,
    read_modules,
    read_network_settings,
    read_step,
    refuse_multi_vector,
    tokenizer_arguments,
)
from triptych.model.checkpoint.state_dict import read_state_dict
from triptych.model.errors import ConfigError, shown
from triptych.model.system.folder_files import has_file

_MODES = {  # by the names of `pooling_mode`, and of the switches before it
    "cls": Pooling.CLS,
    "max": Pooling.MAX,
    "mean": Pooling.MEAN,
    "mean_sqrt_len": Pooling.MEAN_SQRT_LEN,
    "weightedmean": Pooling.WEIGHTED_MEAN,
    "lasttoken": Pooling.LAST,
}
_WITHOUT_SETTINGS = (
    "Transformer",
    "MLMTransformer",
    "CausalTransformer",
    STATIC,
    JOINT,
    "Normalize",
)  # or in files of other names
_LONGEST = 65_536  # tokens of a query, which are filled up, or of a document
_UNBOUNDED = 10**9  # tokenizers without a length have larger ones


class PromptTokenizer(Protocol):
    """The part of `triptych.model.text.tokenizer.Tokenizer` that tells how long a prompt is."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> Any: ...


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """How tokens get the vectors that queries and documents are compared by (Khattab and Zaharia 2020: ColBERT)."""

    dense: tuple[DenseConfig, ...]
    query_prefix: str = ""  # a token after the first one; empty: none
    document_prefix: str = ""
    query_length: int | None = None  # tokens, the prefix included
    document_length: int | None = None
    expands: bool = False  # queries are filled up to their length with mask tokens
    attends: bool = False  # the other tokens read those mask tokens
    skipped_words: tuple[str, ...] = ()  # tokens of documents that get no vector
    skips_first: bool = False  # nor does the first token

    def __post_init__(self) -> None:
        for name, length in (("query", self.query_length), ("document", self.document_length)):
            if length is not None and (type(length) is not int or not 4 <= length <= _LONGEST):
                raise ConfigError(f"the length of a {name} must be 4 to {_LONGEST} tokens, found {length!r}")
        texts = (self.query_prefix, self.document_prefix, *self.skipped_words)
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError("prefixes and skipped words of late interaction must be texts")

    def within(self, longest: int | None) -> LateInteraction:
        """Return the settings for a network of `longest` positions (None: any number); longer documents are truncated.

        Raises `ConfigError` where queries are filled up to more.
        """
        if longest is None or self.query_length is None or self.document_length is None:
            return self
        if self.query_length > longest:
            raise ConfigError(f"queries have {self.query_length} tokens, more than the {longest} that the model takes")
        return replace(self, document_length=min(self.document_length, longest))


@dataclass(frozen=True, slots=True)
class SpladeSettings:
    """How the logits of a masked-language-model head `[L, V]` become one sparse vector `[V]`."""

    sums: bool = False  # over the tokens; else the highest counts
    twice: bool = False  # log(1 + log(1 + relu(x))), not log(1 + relu(x))
    most_entries: int = 0  # the heaviest that a vector keeps (`max_active_dims`); 0: all


@dataclass(frozen=True, slots=True)
class MessageSettings:
    """How a reranker's chat template gets a query and a document: as messages of roles of these names."""

    structured: bool = False  # contents are lists of parts
    variables: dict[str, Any] = field(default_factory=dict)  # of the template, in addition to the messages


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """How hidden states become one vector; `pooling` is empty where the folder says nothing of it."""

    pooling: tuple[Pooling, ...] = ()  # several are concatenated
    include_prompt: bool = True  # whether a prompt's tokens are pooled too
    steps: tuple[VectorStep, ...] = ()  # what follows the pooling
    normalize: bool = False  # after all steps
    special_tokens: bool = True  # that the tokenizer puts around a text are read
    truncate_dim: int | None = None  # of the numbers that all of this leaves the first count; None: all
    max_tokens: int | None = None  # of an input, special tokens included
    lower_case: bool = False  # texts are put in lower case before they are tokenised
    prompts: dict[str, str] = field(default_factory=dict)  # put in front of texts, by name
    adapters: tuple[str, ...] = ()  # of the network, by the tasks that they were trained for
    default_prompt: str | None = None  # the name of the prompt of a request that names none
    similarity: str | None = None  # the function that the vectors were trained for
    splade: SpladeSettings = SpladeSettings()
    score_tokens: tuple[int, ...] = ()  # of a reranker made of a language model: "yes", and "no" if there is one
    messages: MessageSettings | None = None  # how a pair becomes a text of the chat template; None: it does not
    activation: str | None = None  # of torch.nn: a cross-encoder's logits to scores; None: the folder names none
    token_weight: DenseConfig | None = None  # a token's own weight in a sparse vector (BGE-M3)
    late: LateInteraction | None = None
    warnings: tuple[str, ...] = ()  # sentences on what is not applied

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that a request may name: those that have an adapter or a prompt."""
        return tuple(dict.fromkeys([*self.adapters, *sorted(self.prompts)]))

    def prompt(self, name: str | None, task: str | None = None) -> str:
        """Return the prompt of this name, without a name the task's or the default one; empty if there is none."""
        if name is None:
            name = task if task in self.prompts else self.default_prompt
        return "" if name is None else self.prompts[name]

    def adapter(self, task: str | None) -> int | None:
        """Return which of the adapters a task has; None: it has none."""
        return self.adapters.index(task) if task in self.adapters else None

    def prepare(self, text: str, prompt: str = "") -> str:
        """Return the text as the model was trained on it: after `prompt`, in lower case if it was."""
        return (prompt + text).lower() if self.lower_case else prompt + text

    def unpooled_tokens(self, tokenizer: PromptTokenizer, prompt: str) -> int:
        """Return how many first tokens of a text the pooling leaves out, because they are its prompt's."""
        if self.include_prompt or not prompt:
            return 0
        prompt = self.prepare(prompt)
        whole = tokenizer.encode(prompt).ids
        plain = tokenizer.encode(prompt, add_special_tokens=False).ids
        starts = range(len(whole) - len(plain) + 1)
        start = next((at for at in starts if whole[at : at + len(plain)] == plain), 0)  # after special tokens
        return start + len(plain)

    def output_size(self, hidden_size: int) -> int:
        """Return the number of dimensions of a vector by default."""
        dense = [step.outputs for step in self.steps if isinstance(step, DenseConfig)]
        size = dense[-1] if dense else hidden_size * max(1, len(self.pooling))
        return size if self.truncate_dim is None else min(size, self.truncate_dim)


def read_sentence_settings(
    path: Path, raw: Mapping[str, Any], hidden_size: int, *, pickle: bool = True
) -> SentenceSettings:
    """Read the folder's settings, those of a folder without any included; `raw` is config.json. Raises `ConfigError`.

    Without `pickle`, projections are taken from safetensors alone, and not from pytorch_model.bin.
    """
    try:
        return _read(path, raw, hidden_size, pickle)
    except (TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"modules.json or a module's config.json is malformed: {error}") from None


def _read(path: Path, raw: Mapping[str, Any], hidden_size: int, pickle: bool) -> SentenceSettings:
    names, network = read_json(path / MODEL), path / network_folder(path)
    texts, where = read_network_settings(network)
    check_text_output(texts, raw, where)
    longest, special, ignored = tokenizer_arguments(texts, where)
    refuse_multi_vector(found=names.get("model_type") == "MultiVectorEncoder" and "query_prefix" not in names)
    prompts = _prompts(raw, names)
    default = names.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ConfigError(f"default_prompt_name {default!r} is none of its prompts")
    warnings = [*key_warnings(MODEL, MODEL, names), *key_warnings(where, NETWORK, texts), *ignored]
    if not pickle:
        refused = [name for name in (SPARSE, COLBERT) if (path / name).is_file()]
        warnings += [f"{', '.join(refused)}: not read, as --no-pickle says"] if refused else []
    pooling: tuple[Pooling, ...] = ()
    include_prompt, steps, splade = True, list[VectorStep](), SpladeSettings()
    score_tokens: tuple[int, ...] = ()
    size = hidden_size
    for kind, folder in read_modules(path, texts, raw):
        config = read_json(path / folder / "config.json", required=kind not in _WITHOUT_SETTINGS)
        if kind in KEYS and Path(folder) != Path():
            warnings += key_warnings(f"{folder}/config.json", kind, config)
        if kind == "Pooling":
            pooling, include_prompt = _pooling(config, folder), config.get("include_prompt", True)
            size = hidden_size * len(pooling)
        elif kind == STATIC:
            pooling = (Pooling.MEAN,)
        elif kind == JOINT:
            if raw.get("model_type") != "clip":
                found = shown(raw.get("model_type"))
                raise ConfigError(f"modules.json has {JOINT}, whose config.json must be of a clip, found {found}")
            pooling = (Pooling.LAST,)  # of a request that asks for another: the network has its own
        elif kind in ("Dense", "LayerNorm", "Normalize"):
            step = read_step(path, kind, folder, config, size, pickle=pickle)
            steps.append(step)
            size = step.outputs if isinstance(step, DenseConfig) else size
        elif kind == "LogitScore":
            score_tokens = _score_tokens(config, folder)
        elif kind == "SpladePooling":
            splade = _splade(config, folder)
    normalize = bool(steps) and isinstance(steps[-1], UnitLength)
    while steps and isinstance(steps[-1], UnitLength):
        steps.pop()
    return SentenceSettings(
        pooling=pooling,
        include_prompt=include_prompt,
        steps=tuple(steps) if pooling else (),
        normalize=normalize,
        truncate_dim=_count(names, "truncate_dim"),
        special_tokens=special,
        max_tokens=longest or _count(texts, "max_seq_length", where) or _tokenizer_length(path, network),
        lower_case=bool(texts.get("do_lower_case", False)),
        prompts=prompts,
        default_prompt=default,
        similarity=names.get("similarity_fn_name"),
        splade=replace(splade, most_entries=_count(names, "max_active_dims") or 0),
        score_tokens=score_tokens,
        messages=_messages(texts, where),
        activation=_activation(names, raw),
        token_weight=_linear(path, SPARSE, hidden_size, pickle=pickle),
        warnings=tuple(warnings),
        late=_late(path, names, () if pooling else tuple(steps), hidden_size, pickle=pickle),
    )


def _count(settings: Mapping[str, Any], key: str, where: str = MODEL) -> int | None:
    value = settings.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"{where}: {key} must be a whole number from 1 on, found {shown(value)}")
    return value


def _prompts(raw: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, str]:
    """Return the prompts by name, those of config.json's `task_instructions` too; null is none, as in the library."""
    found: dict[str, str] = {}
    given = {"config.json: task_instructions": raw.get("task_instructions"), f"{MODEL}: prompts": names.get("prompts")}
    for where, value in given.items():
        texts = value or {}
        if not isinstance(texts, dict) or not all(isinstance(text, str | None) for text in texts.values()):
            raise ConfigError(f"{where} must be texts by name, found {shown(value)}")
        found |= {name: text or "" for name, text in texts.items()}
    return found


def _tokenizer_length(path: Path, network: Path) -> int | None:
    """Return the length of an input that the tokenizer's settings give a folder with modules; None: they give none."""
    if not has_file(path / "modules.json"):
        return None
    length = read_json(network / "tokenizer_config.json").get("model_max_length")
    return length if type(length) is int and 0 < length < _UNBOUNDED else None


def _activation(names: dict[str, Any], raw: Mapping[str, Any]) -> str | None:
    """Return a cross-encoder's activation; its versions have written it in three places."""
    section = raw.get("sentence_transformers") or {}
    named = (
        names.get("activation_fn") or section.get("activation_fn") or raw.get("sbert_ce_default_activation_function")
    )
    if named is None:
        return None
    module, _, kind = str(named).rpartition(".")
    if kind not in SCORE_ACTIVATIONS or not module.startswith("torch.nn"):
        served = ", ".join(sorted(SCORE_ACTIVATIONS))
        raise ConfigError(f"activation_fn {str(named)[:100]!r} is not served; served are torch.nn's {served}")
    return kind


def _score_tokens(config: dict[str, Any], where: str) -> tuple[int, ...]:
    name = config.get("module_input_name", "causal_logits")
    if name != "causal_logits":
        raise ConfigError(f"{where}: LogitScore of {name!r} is not served")
    tokens = (config["true_token_id"], config.get("false_token_id"))
    if not all(type(token) is int for token in tokens if token is not None):
        raise ConfigError(f"{where}: true_token_id and false_token_id must be token ids, found {shown(tokens)}")
    return tuple(token for token in tokens if token is not None)


def _messages(texts: dict[str, Any], where: str) -> MessageSettings | None:
    """Read what the first module does with pairs. Raises `ConfigError` for vectors of texts in a chat template."""
    message = (texts.get("modality_config") or {}).get("message")
    if message is None:
        return None
    if texts.get("transformer_task", "feature-extraction") not in ("text-generation", "sequence-classification"):
        raise ConfigError(f"{where}: vectors of texts that stand in a chat template are not served")
    kind = message.get("format", "flat")
    if kind not in ("flat", "structured"):
        raise ConfigError(f"{where}: messages of format {kind!r} are not served")
    variables = dict((texts.get("processing_kwargs") or {}).get("chat_template") or {})
    return MessageSettings(kind == "structured", variables)


def _late(
    path: Path, names: dict[str, Any], steps: tuple[VectorStep, ...], hidden_size: int, *, pickle: bool
) -> LateInteraction | None:
    """Projections without a pooling before them, with the settings of pylate; or BGE-M3's matrix."""
    dense = tuple(step for step in steps if isinstance(step, DenseConfig))
    if len(dense) != len(steps):
        raise ConfigError("modules.json has no Pooling: before LayerNorm and Normalize it must have one")
    if not dense:
        found = _linear(path, COLBERT, hidden_size, pickle=pickle)
        return None if found is None else LateInteraction((found,), skips_first=True)
    words = names.get("skiplist_words")
    return LateInteraction(
        dense,
        query_prefix=names.get("query_prefix", "[Q] ") or "",
        document_prefix=names.get("document_prefix", "[D] ") or "",
        query_length=names.get("query_length") or 32,
        document_length=names.get("document_length") or 180,
        expands=names.get("do_query_expansion", True),
        attends=bool(names.get("attend_to_expansion_tokens", False)),
        skipped_words=tuple(string.punctuation if words is None else words),
    )


def _linear(path: Path, name: str, hidden_size: int, *, pickle: bool) -> DenseConfig | None:
    """Read a projection apart from the model, a file of `torch.save` with a weight and a bias; None if it is not there.

    Without `pickle` the file is not read: the folder then has no such vectors.
    """
    file = path / name
    if not pickle or not has_file(file):
        return None
    shapes = {tensor.name: tensor.shape for tensor in read_state_dict(file)}
    shape = shapes.get("weight", ())
    if len(shape) != 2 or shape[1] != hidden_size:
        raise ConfigError(f"{name} must have a weight of {hidden_size} columns, found {shapes}")
    return DenseConfig(file, hidden_size, shape[0], "bias" in shapes, prefix="")


def _splade(config: dict[str, Any], where: str) -> SpladeSettings:
    strategy, function = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if strategy not in ("max", "sum") or function not in ("relu", "log1p_relu"):
        raise ConfigError(f"{where}: SpladePooling by {strategy!r} of {function!r} is not served")
    return SpladeSettings(sums=strategy == "sum", twice=function == "log1p_relu")


def _pooling(config: dict[str, Any], where: str) -> tuple[Pooling, ...]:
    """Return the modes of `pooling_mode`, or of older switches `pooling_mode_NAME_tokens`; without any, the mean."""
    named = config.get("pooling_mode")
    if named is not None:
        modes = [named] if isinstance(named, str) else list(named)
    else:
        switches = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
        modes = [name.removeprefix("pooling_mode_").removesuffix("_token") for name in switches] or ["mean"]
    modes = [mode.removesuffix("_tokens") for mode in modes]
    unknown = [mode for mode in modes if mode not in _MODES]
    if unknown or not modes:
        found = ", ".join(unknown) or "none"
        raise ConfigError(f"{where}: pooling must be one or more of {', '.join(_MODES)}, found {found}")
    return tuple(_MODES[mode] for mode in (modes if named is not None else _MODES) if mode in modes)


# -- Reads folders as ColBERT itself writes them: the projection of tokens among the network's tensors, as `linear`. How
# queries and documents are read is in `artifact.metadata`, or ColBERT's defaults (Santhanam et al. 2022: ColBERTv2).

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
