"""The files that a model's folder is read from: one list for those that read, download and copy them.

Patterns are of `fnmatch`, whose `*` goes into folders too.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

SPARSE, COLBERT = "sparse_linear.pt", "colbert_linear.pt"  # BGE-M3's projections
COLBERT_SETTINGS = "artifact.metadata"
SETTINGS = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja", COLBERT_SETTINGS)
SAFETENSORS = ("model.safetensors", "model-*.safetensors")
PICKLES = ("pytorch_model.bin", "pytorch_model-*.bin")
_MODULE = "[0-9]*_*/"  # a folder of a module of sentence-transformers
MODULE_SAFETENSORS = tuple(_MODULE + name for name in SAFETENSORS)
MODULE_PICKLES = (SPARSE, COLBERT, *(_MODULE + name for name in PICKLES))


def is_read(name: str) -> bool:
    """Return whether a file of this name within the folder may be read."""
    patterns = (*SETTINGS, *SAFETENSORS, *PICKLES, *MODULE_SAFETENSORS, *MODULE_PICKLES)
    return any(fnmatchcase(name, pattern) for pattern in patterns)
