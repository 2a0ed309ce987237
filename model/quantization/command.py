"""`triptych quantize`: from names and settings to a written folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint.folder import read_checkpoint
from model.checkpoint.tensor_sources import tensor_sources
from model.engine.dtypes import choose_dtype
from model.errors import ConfigError
from model.gguf.container import gguf_path
from model.native.library import native
from model.quantization.folder import Quantizer, Report, write_folder
from model.quantization.moments import input_moments, read_texts
from model.quantization.projections import FORMATS, find_projections


def quantize(
    folder: Path,
    out: Path,
    form: str,
    *,
    texts: Path | None = None,
    dtype: str = "auto",
    progress: Callable[[float, str], None] = lambda share, name: None,
) -> Report:
    """Write the checkpoint in `folder` to the new folder `out`, with projections in the format `form`.

    `dtype` is what weights are rounded to first, as while they are loaded; `texts` a file whose texts say how much the
    errors of each input count. Raises `ConfigError`.
    """
    if form not in FORMATS:
        raise ConfigError(f"format {form!r} cannot be written; expected one of {', '.join(FORMATS)}")
    if texts is not None and not form.startswith("int4"):
        raise ConfigError(f"texts are for the search of scales in 4 bits; {form} has none")
    if out.exists():
        raise ConfigError(f"{out} is there already: give the name of a new folder")
    library = native()
    if isinstance(library, str):
        raise ConfigError(f"quantising needs the native kernels: {library}")
    checkpoint = read_checkpoint(folder)
    if gguf_path(folder) is not None:
        raise ConfigError(f"{folder.name} is a GGUF file, whose formats are its own: quantise what it was made of")
    rounded = choose_dtype(dtype, checkpoint.config, torch.device("cpu")).dtype
    tensors = tensor_sources(checkpoint)
    projections = find_projections(checkpoint, tensors, form, rounded)
    moments: Mapping[str, Tensor] = {}
    if texts is not None:
        wanted = {projection.target for projection in projections.values()}
        moments = input_moments(folder, read_texts(texts), wanted, dtype)
    return write_folder(checkpoint, tensors, projections, out, form, Quantizer(library, rounded, moments), progress)
