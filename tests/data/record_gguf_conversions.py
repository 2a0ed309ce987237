"""How gguf_conversions.json was made: llama.cpp's own converter, from llama-cpp-python's sources, converts checkpoints.

pip download --no-deps --no-binary :all: llama-cpp-python
python -m tests.data.record_gguf_conversions FOLDER KIND...

FOLDER is `vendor/llama.cpp` of the unpacked sources, KIND a row of `tests.model.checkpoints`. What the converter does
to a tensor is found by comparing the numbers with each change that `tests.model.gguf_files` knows.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.model.checkpoints import saved
from tests.model.gguf_files import CONVERSIONS, changed

# What published folders say, and `transformers` 5 does not write.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "eurobert": {"classifier_pooling": "mean"},
    "gpt2": {"n_ctx": 128},
    "gpt-neox": {"rotary_pct": 0.5},
    "gpt-neox-sequential": {"rotary_pct": 0.25},
    "falcon": {"num_kv_heads": None},
    "mpt": {"architectures": ["MPTForCausalLM"]},
    "cohere2-windows": {"rotary_pct": 1.0},
    "modernbert-plain": {"global_attn_every_n_layers": 3, "layer_norm_eps": 1e-5},
    "glm": {"seq_length": 128, "layernorm_epsilon": 1.5625e-07},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "minimax-m2": {"rotary_dim": 12},
    "hunyuan": {
        "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10_000.0},
    },
    "hunyuan-moe": {
        **{"moe_intermediate_size": [20] * 2, "moe_topk": [2] * 2, "num_shared_expert": [1] * 2},
        "num_local_experts": 5,
    },
    "gemma4-unified": {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "moe_intermediate_size": None},
}
_TOKENIZER = {"model": {"vocab": {f"t{token}": token for token in range(97)}}, "added_tokens": []}


def convert(kind: str, into: Path, llama_cpp: Path) -> Path:
    """Convert a row's checkpoint to float32, without a vocabulary."""
    for folder in (llama_cpp / "gguf-py", llama_cpp):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    logging.disable(logging.WARNING)
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from conversion.base import TextModel

    with tempfile.TemporaryDirectory() as place, torch.inference_mode():
        folder = Path(shutil.copytree(saved(kind).path, Path(place) / kind))
        raw = ModelBase.load_hparams(folder, False) | _PUBLISHED.get(kind, {})
        (folder / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
        found = get_model_class(get_model_architecture(raw, ModelType.TEXT))
        plain = {"set_vocab": TextModel._set_vocab_none, "model_arch": found.model_arch}
        for inner in vars(found).values():  # classes of models that have one name
            if isinstance(inner, type) and issubclass(inner, TextModel):
                inner.set_vocab = TextModel._set_vocab_none
        if hasattr(found, "no_mtp"):
            plain["no_mtp"] = True
        converter = type(found.__name__, (found,), plain)
        path = into / f"{kind}.gguf"
        converter(folder, gguf.LlamaFileType.ALL_F32, path, eager=True, hparams=raw).write()
    return path


def record(kind: str, path: Path) -> dict[str, Any]:
    """Return the metadata, and where the numbers of each tensor come from."""
    import gguf

    reader = gguf.GGUFReader(str(path))
    stored = {name: one for file in saved(kind).path.glob("*.safetensors") for name, one in load_file(file).items()}
    raw = json.loads((saved(kind).path / "config.json").read_text())
    raw = {**raw, **raw.get("text_config", {})}
    tensors: dict[str, Any] = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(tensor.data.copy())
        pattern = re.sub(r"(?<=blk\.)\d+", "{}", tensor.name)
        layer = re.search(r"(?<=blk\.)\d+", tensor.name)
        tensors[pattern] = _source(tensor.name, values, stored, raw, layer[0] if layer else None)
    return {"metadata": dict(_metadata(reader)), "tensors": tensors}


def _metadata(reader: Any) -> Iterator[tuple[str, list[Any]]]:
    for key, one in reader.fields.items():
        if key.startswith("GGUF.") or (key.startswith("general.") and key != "general.architecture"):
            continue
        yield key, [one.types[0].name, one.contents()]


def _source(name: str, values: Tensor, stored: dict[str, Tensor], raw: dict[str, Any], layer: str | None) -> list[Any]:
    for theirs, tensor in stored.items():
        if layer is not None and f".{layer}." not in theirs:
            continue
        for how in _changes(raw):
            try:
                made = changed(tensor, how)
            except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
                continue
            if made.shape == values.shape and torch.allclose(made.float(), values, atol=1e-6):
                source = theirs if layer is None else re.sub(rf"\.{layer}\.", ".{}.", theirs, count=1)
                return [source, how] if how else [source]
    for theirs, experts in _experts(stored, layer):
        if experts.shape == values.shape and torch.equal(experts, values):
            return [theirs, "stacked"]
    if values.ndim == 1 and layer is None:
        return values.tolist()
    raise ValueError(f"{name} {list(values.shape)}: no tensor of the checkpoint becomes it")


def _experts(stored: dict[str, Tensor], layer: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yield matrices of experts that the checkpoint has one by one, stacked."""
    for name in stored:
        if layer is not None and ".experts.0." in name and f".{layer}." in name:
            each = (name.replace(".experts.0.", f".experts.{expert}.") for expert in range(16))
            pattern = name.replace(f".{layer}.", ".{}.", 1).replace(".experts.0.", ".experts.*.")
            yield pattern, torch.stack([stored[one] for one in each if one in stored])


def _changes(raw: dict[str, Any]) -> Iterator[str]:
    yield from ("", "plus one", "last rows", "transposed", "squeezed", "minus exponential")
    yield from ("first half", "second half", "experts transposed", "upper rows", "lower rows")
    yield from ("even rows", "odd rows", "even columns", "odd columns")
    heads = {raw.get(name) for name in ("num_attention_heads", "num_key_value_heads", "n_head", "num_kv_heads")} - {
        None
    }
    for count in sorted(heads | {1}):
        yield f"{count} heads in turns"
        yield f"part by part of {count} heads"
        for queries in (2, 3, 6):
            yield f"part by part of {count} groups of {queries}"
    if keys := raw.get("linear_num_key_heads"):
        values, dim = raw["linear_num_value_heads"] // keys, raw["linear_value_head_dim"]
        key_rows = 2 * keys * raw["linear_key_head_dim"]
        for size in (1, dim):
            for first in (0, key_rows):
                for more in ("", " minus exponential", " squeezed", " columns"):
                    yield f"values of {keys} x {values} x {size} after {first}{more}"
        parts = (raw["linear_key_head_dim"],) * 2 + (values * dim,) * 2
        yield f"q k v of {keys} heads {' '.join(map(str, parts))}"
        yield f"z of {keys} heads {' '.join(map(str, parts))}"


def main() -> None:
    llama_cpp, *kinds = sys.argv[1:]
    known = json.loads(CONVERSIONS.read_text())
    with tempfile.TemporaryDirectory() as place:
        for kind in kinds:
            known[kind] = record(kind, convert(kind, Path(place), Path(llama_cpp)))
    lines = (f"{json.dumps(kind)}: {json.dumps(one)}" for kind, one in known.items())
    CONVERSIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
