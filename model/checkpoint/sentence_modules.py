"""The modules of a sentence-transformers folder: which there are, in which order, and what they do to a vector.

`modules.json` lists them, each with a folder of its own. The network is first, in the folder itself or in one of its
own (`0_Transformer`). After the pooling come any number of projections, norms and normalisations, in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from triptych.model.checkpoint.json_files import read_json, read_json_value
from triptych.model.errors import ConfigError, listed, shown
from triptych.model.system.folder_files import has_file

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_NETWORKS = ("Transformer", "MLMTransformer", "CausalTransformer")
_VECTORS = ("Dense", "LayerNorm", "Normalize", "Dropout")  # which change the vector of a pooling
STATIC = "StaticEmbedding"  # vectors of tokens and their mean, without a network
JOINT = "CLIPModel"  # vectors of texts and images, which need no pooling
SERVED = (*_NETWORKS, STATIC, JOINT, "WeightedLayerPooling", "Pooling", "SpladePooling", *_VECTORS, "LogitScore")
# Kinds that are known and not served, with what they are.
REFUSED = {
    "WordEmbeddings": "vectors of words without a network",
    "BoW": "counts of words",
    "WordWeights": "weights of words",
    "CNN": "convolutions over vectors of words",
    "LSTM": "a recurrent network over vectors of words",
    "Router": "another route for each kind of input",
    "Asym": "another route for each kind of input",
    "SparseStaticEmbedding": "weights of tokens without a network",
    "SparseAutoEncoder": "a sparse code of a vector",
    "MultiVectorMask": "a choice of tokens that get vectors",
    "TokenPooling": "groups of tokens that get one vector",
    "HierarchicalTokenPooling": "groups of tokens that get one vector",
    "LambdaTokenPooling": "groups of tokens that get one vector",
}
_TASKS = {  # what a folder's Transformer returns, and the module that sentence-transformers had for it before
    "feature-extraction": "Transformer",
    "sequence-classification": "Transformer",
    "fill-mask": "MLMTransformer",
    "text-generation": "CausalTransformer",
}
# Functions of torch.nn without parameters that map each number by itself.
ACTIVATIONS = frozenset(
    """
    CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish ReLU ReLU6 SELU SiLU
    Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink
    """.split()  # noqa: SIM905 (a literal would be a page)
)
SCORE_ACTIVATIONS = ACTIVATIONS | {"LogSoftmax", "Softmax", "Softmin"}  # the others read all logits of an input


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A projection of vectors: `activation(W x + b)`, plus x with `residual`, itself or projected to the new width."""

    weights: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str = "Identity"  # of torch.nn
    residual: bool = False
    prefix: str = "linear."  # of its tensors' names
    among_others: bool = False  # the file has other tensors too


@dataclass(frozen=True, slots=True)
class VectorNorm:
    """LayerNorm of a vector."""

    weights: Path
    size: int


@dataclass(frozen=True, slots=True)
class UnitLength:
    """Normalisation that other modules follow."""


VectorStep = DenseConfig | VectorNorm | UnitLength


def network_folder(path: Path) -> str:
    """Return the folder within `path` that has the network: the first module's where `path` has no config.json.

    Raises `ConfigError` for a first module that is no network.
    """
    if not has_file(path / "modules.json"):
        return ""
    kind, folder = ([*_listed(path), ("", "")])[0]
    if kind in REFUSED or (kind and kind not in SERVED):
        raise ConfigError(_unknown([kind]))
    return "" if has_file(path / "config.json") and kind != STATIC else folder


def first_module(path: Path) -> str | None:
    """Return the kind of a folder's first module; None: it has no modules."""
    return next((kind for kind, _ in _listed(path)), None)


def read_modules(path: Path, texts: dict[str, Any], raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the kind and folder of each module, in a served order; `texts` are the first one's settings.

    Modules without effect are left out. Raises `ConfigError`.
    """
    modules = [(_transformer(kind, texts), folder) for kind, folder in _listed(path)]
    refuse_multi_vector(found=any(kind == "MultiVectorMask" for kind, _ in modules))
    unknown = sorted({kind for kind, _ in modules} - {*SERVED})
    if unknown:
        raise ConfigError(_unknown(unknown))
    if raw.get("output_hidden_states") and any(kind == "WeightedLayerPooling" for kind, _ in modules):
        raise ConfigError("modules.json has WeightedLayerPooling, a mean of the layers' outputs, which is not served")
    without_effect = ("Dropout", "WeightedLayerPooling")  # the second where the network returns its last layer only
    modules = [(kind, folder) for kind, folder in modules if kind not in without_effect]
    _check_order([kind for kind, _ in modules])
    return modules


def refuse_multi_vector(*, found: bool) -> None:
    """Raise `ConfigError` for a folder of this class, which PyLate's and ColBERT's are not."""
    if found:
        raise ConfigError(
            "a MultiVectorEncoder of sentence-transformers (vectors of tokens, compared one by one) is not served; "
            "served for late interaction are folders of PyLate (modules.json with Transformer, Dense) and of ColBERT"
        )


def _listed(path: Path) -> list[tuple[str, str]]:
    found = read_json_value(path / "modules.json") if has_file(path / "modules.json") else []
    if not isinstance(found, list) or not all(isinstance(module, dict) for module in found):
        raise ConfigError("modules.json must hold a list of objects")
    modules = [(str(module.get("type")).rpartition(".")[2], str(module.get("path") or "")) for module in found]
    paths = [folder for _, folder in modules]
    outside = [one for one in paths if Path(one).is_absolute() or ".." in Path(one).parts or "\0" in one]
    if outside:
        raise ConfigError(f"modules.json names folders outside: {listed(outside)}")
    return modules


def _unknown(kinds: list[str]) -> str:
    named = [f"{kind} ({REFUSED[kind]})" if kind in REFUSED else kind for kind in kinds]
    return f"modules.json has {listed(named, longest=100)}; served are {', '.join(SERVED)}"


def _transformer(kind: str, texts: dict[str, Any]) -> str:
    """Name the first module by what it returns, for which sentence-transformers 6 has one class and a setting."""
    task = texts.get("transformer_task", "feature-extraction")
    if kind != "Transformer":
        return kind
    if task not in _TASKS:
        raise ConfigError(f"{NETWORK}: transformer_task {task!r} is not served")
    return _TASKS[task]


def _check_order(kinds: list[str]) -> None:
    if not kinds:
        return
    whole = {"MLMTransformer": "SpladePooling", "CausalTransformer": "LogitScore"}
    for network, last in whole.items():
        if {network, last} & {*kinds} and kinds != [network, last]:
            raise ConfigError(f"modules.json must have {network}, {last}, has {', '.join(kinds)}")
    if kinds[0] in whole:
        return
    if kinds[0] in (STATIC, JOINT):
        if not {*kinds[1:]} <= {*_VECTORS}:
            raise ConfigError(
                f"modules.json has the order {', '.join(kinds)}; after {kinds[0]} are served {', '.join(_VECTORS)}"
            )
        return
    first = ["Transformer", "Pooling"] if "Pooling" in kinds else ["Transformer"]
    rest = kinds[len(first) :]
    if kinds[: len(first)] != first or not {*rest} <= {*_VECTORS}:
        raise ConfigError(
            f"modules.json has the order {', '.join(kinds)}; served are Transformer, Pooling, then any of "
            f"{', '.join(_VECTORS)}"
        )


def read_step(path: Path, kind: str, folder: str, config: dict[str, Any], size: int, *, pickle: bool) -> VectorStep:
    """Return what a module of these settings does to vectors of `size` numbers; without `pickle` by safetensors."""
    names = {config.get(f"module_{side}_name") for side in ("input", "output")} - {None, "sentence_embedding"}
    if names:
        raise ConfigError(f"{folder}: reads or writes {listed(sorted(map(str, names)))}, which is not served")
    if kind == "Normalize":
        return UnitLength()
    served = WEIGHTS if pickle else WEIGHTS[:1]
    weights = next((path / folder / name for name in served if has_file(path / folder / name)), None)
    step = _norm(config, folder, size) if kind == "LayerNorm" else _dense(config, folder, size)
    if weights is None:
        refused = "; --no-pickle refuses pytorch_model.bin" if (path / folder / WEIGHTS[1]).is_file() else ""
        raise ConfigError(f"{folder}: no {' and no '.join(served)}{refused}")
    return step(weights)


def _norm(config: dict[str, Any], folder: str, size: int) -> Any:
    if config["dimension"] != size:
        raise ConfigError(f"{folder}: dimension must be {size}, found {config['dimension']}")
    return lambda weights: VectorNorm(weights, size)


def _dense(config: dict[str, Any], folder: str, size: int) -> Any:
    named = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = named.rpartition(".")[2]
    if activation not in ACTIVATIONS or not named.startswith("torch.nn."):
        raise ConfigError(f"{folder}: activation {named!r} is not served; served are {', '.join(sorted(ACTIVATIONS))}")
    if config["in_features"] != size:
        raise ConfigError(f"{folder}: in_features must be {size}, found {config['in_features']}")
    bias, residual = bool(config.get("bias", True)), bool(config.get("use_residual", False))
    return lambda weights: DenseConfig(weights, size, config["out_features"], bias, activation, residual)


# -- Every key of sentence-transformers' files, and what is done with it: a table that the documentation shows. Keys
# that no version of the library writes are named in a warning, as those that it computes with and we do not.

MODEL, NETWORK = "config_sentence_transformers.json", "sentence_bert_config.json"

# The names that the second file had by the network's type; the first that a folder has counts.
_FORMER = [
    f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]


def read_network_settings(network: Path) -> tuple[dict[str, Any], str]:
    """Return the settings of the first module, and the name of the file that has them."""
    found = ((read_json(network / name), name) for name in (NETWORK, *_FORMER))
    return next((one for one in found if one[0]), ({}, NETWORK))


_JOINT_TYPES = ("clip", "siglip", "siglip2")


def check_text_output(texts: Mapping[str, Any], raw: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` where the first module returns something else of texts than its task does by default."""
    text = (texts.get("modality_config") or {}).get("text")
    if text is None or (text["method"] == "get_text_features" and raw.get("model_type") in _JOINT_TYPES):
        return
    task = texts.get("transformer_task", "feature-extraction")
    usual = "last_hidden_state" if task == "feature-extraction" else "logits"
    if text["method"] != "forward" or text["method_output_name"] not in (usual, [usual]):
        found = f"{shown(text['method_output_name'])} of {shown(text['method'])}"
        raise ConfigError(f"{where}: modality_config.text is {found}, not served; served is {usual!r} of forward")


# Arguments of the tokenizer in `processing_kwargs` that change no ids of a text that fits, or are of a batch.
_OF_BATCHES = {"padding", "padding_side", "pad_to_multiple_of", "truncation", "logits_to_keep", "verbose"}
_OF_BATCHES |= {"return_tensors", "return_attention_mask", "return_length"}


def tokenizer_arguments(texts: Mapping[str, Any], where: str) -> tuple[int | None, bool, list[str]]:
    """Return the most tokens of a text, whether special ones are added, and a warning for other `processing_kwargs`.

    Raises `ConfigError` for values of a wrong type.
    """
    given = texts.get("processing_kwargs") or {}
    found = {**(given.get("text") or {}), **(given.get("common") or {})}
    length, special = found.pop("max_length", None), found.pop("add_special_tokens", True)
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(f"{where}: processing_kwargs: max_length must be a whole number, found {shown(length)}")
    if type(special) is not bool:
        value = shown(special)
        raise ConfigError(f"{where}: processing_kwargs: add_special_tokens must be true or false, found {value}")
    whole = {"truncation"} if found.get("truncation") in (False, "do_not_truncate") else set()
    left = sorted(found.keys() - _OF_BATCHES | whole)  # a text that is too long is refused or truncated
    ignored = [f"{where}: processing_kwargs that are not applied: {listed(left)}"] if left else []
    return length, special, ignored


class Fate(StrEnum):
    """How a key is handled."""

    SERVED = "served"
    WITHOUT_EFFECT = "without effect on vectors"
    WARNED = "not applied, with a warning"


def _of(fate: Fate, *keys: str) -> dict[str, Fate]:
    return dict.fromkeys(keys, fate)


# By file, or by the kind of the module whose config.json it is. A served key has its bad values refused.
KEYS: Mapping[str, Mapping[str, Fate]] = {
    MODEL: {
        **_of(Fate.SERVED, "prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim", "activation_fn"),
        **_of(Fate.SERVED, "query_prefix", "document_prefix", "query_length", "document_length", "do_query_expansion"),
        **_of(Fate.SERVED, "attend_to_expansion_tokens", "skiplist_words", "max_active_dims"),
        **_of(Fate.WITHOUT_EFFECT, "__version__", "model_type", "keep_in_fp32_modules"),
    },
    NETWORK: {
        **_of(Fate.SERVED, "max_seq_length", "do_lower_case", "transformer_task", "modality_config"),
        **_of(Fate.SERVED, "processing_kwargs"),
        **_of(Fate.WITHOUT_EFFECT, "unpad_inputs", "module_output_name"),
        **_of(Fate.WARNED, "query_length", "document_length", "query_expansion", "model_kwargs", "processor_kwargs"),
        **_of(Fate.WARNED, "config_kwargs", "model_args", "tokenizer_args", "config_args"),
    },
    "Pooling": {
        **_of(Fate.SERVED, "pooling_mode", "include_prompt", "pooling_mode_cls_token", "pooling_mode_max_tokens"),
        **_of(Fate.SERVED, "pooling_mode_mean_tokens", "pooling_mode_mean_sqrt_len_tokens"),
        **_of(Fate.SERVED, "pooling_mode_weightedmean_tokens", "pooling_mode_lasttoken"),
        **_of(Fate.WITHOUT_EFFECT, "embedding_dimension", "word_embedding_dimension"),
    },
    "Dense": _of(
        Fate.SERVED,
        *("in_features", "out_features", "bias", "activation_function", "use_residual"),
        *("module_input_name", "module_output_name"),
    ),
    "LayerNorm": _of(Fate.SERVED, "dimension"),
    "Normalize": _of(Fate.SERVED, "module_input_name", "module_output_name"),
    "SpladePooling": {
        **_of(Fate.SERVED, "pooling_strategy", "activation_function"),
        **_of(Fate.WITHOUT_EFFECT, "embedding_dimension", "word_embedding_dimension"),
    },
    "LogitScore": _of(Fate.SERVED, "true_token_id", "false_token_id", "module_input_name"),
}


def key_warnings(where: str, kind: str, config: Mapping[str, Any]) -> list[str]:
    """Return a warning for the keys of a file that are not applied; `where` names the file."""
    fates = KEYS[kind]
    given = [key for key, value in config.items() if value not in (None, False, {}, [])]
    found = sorted(key for key in given if fates.get(key, Fate.WARNED) is Fate.WARNED)
    return [f"{where}: keys that are not applied: {listed(found)}"] if found else []
