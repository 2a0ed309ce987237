"""Says what a path is that is no model folder, and what to do: an adapter, a Hub cache, a trainer's output, one file.

Only names of files are looked at, and the beginnings of some; a folder may hold anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from triptych.model.errors import listed
from triptych.model.system.folder_files import has_file

_POINTER = b"version https://git-lfs.github.com/spec/"
_MOST_ENTRIES = 2_000  # of a folder, that are looked at
_SHOWN = 3
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_GGUF_SHARD = re.compile(r".+-(?P<number>\d{5})-of-\d{5}\.gguf")
_CONFIG = "config.json"
_EXPECTED = "expected a folder with config.json and model.safetensors (or pytorch_model.bin), or a GGUF file"
_MODEL_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Formats that other libraries read, by patterns of their files: what they are, and where the model may be had.
_FORMATS = {
    ("model_index.json",): "a pipeline of diffusers: it makes images, and is not served",
    ("*.onnx", "onnx/*.onnx"): "a model in ONNX: serve the folder that it was exported from",
    ("openvino_model.xml", "openvino/*.xml"): "a model of OpenVINO: serve the folder that it was exported from",
    ("consolidated*.safetensors", "consolidated*.pth"): "weights in the authors' own format: serve the model's files "
    "for transformers, which are config.json and model*.safetensors",
    ("*.distcp", "*/*.distcp"): "a distributed checkpoint of PyTorch: merge it (`accelerate merge-weights`)",
    ("zero_to_fp32.py", "*/mp_rank_*", "*/zero_pp_rank_*"): "a checkpoint of DeepSpeed: run its zero_to_fp32.py, and "
    "serve the folder that it writes",
    ("tf_model*.h5", "saved_model.pb"): "a model of TensorFlow: convert it (from_pretrained with from_tf=True in "
    "transformers 4, then save_pretrained)",
    (
        "flax_model*.msgpack",
    ): "a model of Flax: convert it (from_pretrained with from_flax=True in transformers 4, then save_pretrained)",
    ("vocabulary.json", "vocabulary.txt", "shared_vocabulary.*"): "a model of CTranslate2 (faster-whisper): serve the "
    "folder that it was converted from",
    ("*.nemo",): "a model of NeMo, which is not served",
    ("rust_model.ot", "*.mlmodel", "*.mlpackage", "*.tflite"): "a model for another program: serve the folder that it "
    "was made from",
}
# Types of PEFT that change no matrix of the model.
_UNMERGED = (
    *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "ADAPTION_PROMPT", "CARTRIDGE"),
    *("POLY", "XLORA"),
)
_BESIDE_TOKENIZERS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("sentencepiece.bpe.model", "spm.model", "source.spm", "target.spm", "target_vocab.json"),
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt")


def lfs_pointer(file: Path) -> bool:
    """Return whether the file is what Git leaves in place of a large file that was not fetched."""
    with file.open("rb") as opened:
        return opened.read(len(_POINTER)) == _POINTER


def unfetched_tokenizer_files(folder: Path) -> list[str]:
    """Return the names of the files about a folder's tokenizer that are Git LFS pointers."""
    names = (*_TOKENIZERS, *_BESIDE_TOKENIZERS)
    return [name for name in names if has_file(folder / name) and lfs_pointer(folder / name)]


def describe_path(path: Path) -> str:
    """Say what a path is that is no folder with a config.json, and what to do."""
    if path.is_dir():
        return describe_folder(path)
    if path.is_symlink():
        return f"a link to {path.readlink()}, which is not there"
    if not path.is_file():
        what = "neither a folder nor a file" if path.exists() else "no such folder"
        return f"{what}; {_EXPECTED}"
    if lfs_pointer(path):
        return "a Git LFS pointer, not the file itself: run `git lfs pull`, or download the file again"
    if path.suffix in _MODEL_FILES:
        return f"a single file of weights: give the folder that has it and {_CONFIG}"
    return f"a file, and none that is served; {_EXPECTED}"


def describe_folder(path: Path) -> str:
    """Say what a folder is that lacks its config.json or its weights, and what to do."""
    names = sorted(entry.name for entry in islice(path.iterdir(), _MOST_ENTRIES))
    if not names:
        return "the folder is empty"
    for describe in (_links, _adapter, _hub_cache, _gguf_parts):
        if found := describe(path, names):
            return found
    has_config = _CONFIG in names
    parents = () if has_config else (_trainer, _folders)
    for describe in (*parents, _formats, _of_others, _weights_alone):
        if found := describe(path, names):
            return found
    if has_config:
        return f"no model.safetensors and no pytorch_model.bin, whole or in shards; {_others(names)}"
    if tokenizers := [name for name in _TOKENIZERS if name in names]:
        return f"{_shown(tokenizers)} alone: a tokenizer without a model; {_CONFIG} is missing"
    return f"{_CONFIG} is missing, found {_shown(names)}; {_EXPECTED}"


def _links(path: Path, names: list[str]) -> str:
    """Links to files that are gone, as in a Hub cache whose blobs were deleted."""
    broken = [name for name in names if (path / name).is_symlink() and not (path / name).exists()]
    return f"{_shown(broken)}: links to files that are not there; download the model again" if broken else ""


def _adapter(path: Path, names: list[str]) -> str:
    if "adapter_config.json" not in names:
        return ""
    base = _text_in(path / "adapter_config.json", "base_model_name_or_path")
    of = f" of {base[:100]}" if base else ""
    kind = _text_in(path / "adapter_config.json", "peft_type")[:40] or "LORA"
    if kind in _UNMERGED:
        return f"an adapter of PEFT's type {kind}{of}, not a model: such an adapter is not served, and cannot be merged"
    merge = "merge it into that model (PEFT: merge_and_unload, then save_pretrained) and serve the result"
    if kind != "LORA":
        return f"an adapter of PEFT's type {kind}{of}, not a model: {merge}"
    with_base = f"serve that model with --lora NAME={path}"
    return f"a LoRA adapter{of}, not a model: {with_base}, or {merge}"


def _hub_cache(path: Path, names: list[str]) -> str:
    if "snapshots" in names and (path / "snapshots").is_dir():
        commits = sorted(entry.name for entry in (path / "snapshots").iterdir())
        main = path / "refs" / "main"
        commit = main.read_text(errors="replace")[:40] if main.is_file() else ""
        commit = commit if commit in commits else (commits[-1] if commits else "")
        return (
            f"a model's folder in the Hub's cache: give {path / 'snapshots' / commit}"
            if commit
            else ("a model's folder in the Hub's cache, without a snapshot: download the model again")
        )
    if repositories := [name for name in names if name.startswith("models--")]:
        known = ["hf:" + name.removeprefix("models--").replace("--", "/", 1) for name in repositories]
        return f"the Hub's cache, of {len(known)} models: give one by its name, {_shown(known)}"
    return ""


def _gguf_parts(path: Path, names: list[str]) -> str:
    parts = [match for name in names if (match := _GGUF_SHARD.fullmatch(name)) is not None]
    if not parts or any(int(match["number"]) == 1 for match in parts):
        return ""
    first = re.sub(r"-\d{5}-of-", "-00001-of-", parts[0].string)
    return f"parts of a GGUF model, and the first is missing, {first}: copy or download it again"


def _trainer(path: Path, names: list[str]) -> str:
    found = sorted((int(match[1]), name) for name in names if (match := _CHECKPOINT.fullmatch(name)) is not None)
    found = [(step, name) for step, name in found if (path / name).is_dir()]
    if not found:
        return ""
    return f"a trainer's output with {len(found)} checkpoints: give one of them, the last is {path / found[-1][1]}"


def _folders(path: Path, names: list[str]) -> str:
    models = [name for name in names if (path / name / _CONFIG).is_file()]
    if not models:
        return ""
    if len(models) == 1:
        return f"the model is in a folder in it: give {path / models[0]}"
    return f"a folder of {len(models)} models: give one of them, {_shown(models)}, or all with --models-dir {path}"


def _formats(path: Path, names: list[str]) -> str:
    for patterns, what in _FORMATS.items():
        if any(next(path.glob(pattern), None) is not None for pattern in patterns):
            return what
    return ""


def _of_others(path: Path, names: list[str]) -> str:
    if _CONFIG not in names or _text_in(path / _CONFIG, "model_type"):
        return ""
    return f"{_CONFIG} has no model_type, and no weights have a usual name: a model for another program"


def _weights_alone(path: Path, names: list[str]) -> str:
    """Weights of a name that is not looked for, or without a config.json."""
    weights = [name for name in names if name.endswith(_MODEL_FILES) and name != "training_args.bin"]
    if not weights:
        return ""
    if _CONFIG not in names:
        return f"weights ({_shown(weights)}) without {_CONFIG}: copy or download it from where they are from"
    return (
        f"no model.safetensors and no pytorch_model.bin, found {_shown(weights)}: if that is the model, call "
        "safetensors model.safetensors, and a state dict of torch.save pytorch_model.bin"
    )


def _others(names: list[str]) -> str:
    found = [
        name for name in names if not name.endswith((".json", ".txt", ".md", ".jinja")) and not name.startswith(".")
    ]
    return f"found {_shown(found)}" if found else "download or copy the weights"


def _shown(names: Iterable[str]) -> str:
    return listed(names, most=_SHOWN, longest=80)


def _text_in(file: Path, key: str) -> str:
    """Return a text of a small JSON object; "" where there is none."""
    if not file.is_file():  # a pipe would be read forever
        return ""
    try:
        with file.open("rb") as opened:
            found = json.loads(opened.read(1 << 20))
    except (OSError, ValueError, RecursionError):
        return ""
    value = found.get(key) if isinstance(found, dict) else None
    return value if isinstance(value, str) else ""
