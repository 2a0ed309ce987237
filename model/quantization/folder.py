"""Writes a folder with the projections of a checkpoint as integers, which is served like any other.

Matrices are read, rounded and written some rows at a time, so a model of any size takes some megabytes of memory. The
integers and scales are those that `--quantization` makes of the same weights while it loads them, by the same C code.
The folder appears under its name when all of it is there.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

from triptych.model.checkpoint.folder import Checkpoint, read_checkpoint
from triptych.model.checkpoint.json_files import PICKLES, SAFETENSORS, read_json, read_json_value
from triptych.model.checkpoint.tensor_files import BUFFER_BYTES, StoredTensor, TensorReader, TensorSource
from triptych.model.checkpoint.tensor_sources import tensor_sources
from triptych.model.config.formats import QUANTIZED_LAYERS, NumberKind
from triptych.model.engine.planning.kernels import choose_dtype
from triptych.model.errors import ConfigError
from triptych.model.gguf.paths import gguf_path
from triptych.model.native.library import Kind, Library, native
from triptych.model.quantization.moments import input_moments, read_texts
from triptych.model.quantization.projections import Projection, describe, find_projections
from triptych.model.quantization.safetensors_file import Described, SafetensorsFile

SHARD_BYTES = 5_000_000_000  # of a file of weights, unless a single tensor has more
# Files that are not copied: the network's weights in all formats, and the settings of how they are stored.
_REPLACED = (
    *(*SAFETENSORS, *PICKLES, "consolidated*", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.ot"),
    *("*.index.json", "quantize_config.json", "quant_config.json", "config.json"),
)


@dataclass(frozen=True, slots=True)
class Loss:
    """The error of rounding one matrix: sums of squares."""

    error: float
    weights: float

    @property
    def relative(self) -> float:
        """The norm of the error by that of the weights."""
        return math.sqrt(self.error / self.weights) if self.weights else 0.0


@dataclass(slots=True)
class Report:
    """What a conversion wrote."""

    bytes_before: int = 0
    bytes_after: int = 0
    losses: dict[str, Loss] = field(default_factory=dict)  # by stored name

    @property
    def loss(self) -> Loss:
        """The loss of all matrices together."""
        losses = self.losses.values()
        return Loss(sum(loss.error for loss in losses), sum(loss.weights for loss in losses))


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Rounds projections, whose weights are first rounded to the dtype that they would be served in."""

    library: Library
    dtype: torch.dtype
    moments: Mapping[str, Tensor] = field(default_factory=dict)  # second moments of projections' inputs, by target

    def rows(self, projection: Projection, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Integers int8 `[count, inputs]` and scales `[count, groups]` of rows of a projection."""
        if rows.dtype is not torch.bfloat16:
            rows = rows.to(self.dtype)
        weights = self.moments.get(projection.target) if projection.kind is Kind.INT4 else None
        if weights is not None and projection.expert is not None:
            weights = weights[projection.expert]
        return self.library.quantise_rows(rows.contiguous(), projection.kind, projection.group, weights)


def write_folder(
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorSource],
    projections: Mapping[str, Projection],
    out: Path,
    form: str,
    quantizer: Quantizer,
    progress: Callable[[float, str], None] = lambda share, name: None,
) -> Report:
    """Write the folder `out`, which must not be there; raises `ConfigError`, and leaves nothing then.

    `tensors` are the checkpoint's; its `projections` become integers of the format `form`. `progress` gets the share
    that is done, from 0 to 1, and what is next.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} is there already: give the name of a new folder")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no folder, so {out.name} cannot be written there")
    copied = _copied_files(checkpoint.path, checkpoint.network_path, checkpoint.weight_files)
    network = checkpoint.network_path.relative_to(checkpoint.path)
    made = None
    try:
        made = Path(mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        made.chmod(0o755)
        (made / network).mkdir(exist_ok=True)
        report = _write_weights(made / network, tensors, projections, quantizer, progress)
        for name, file in copied.items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, made / name)
        config = read_json(checkpoint.network_path / "config.json", required=True)
        for former in ("compression_config", "transformers_weights"):
            config.pop(former, None)
        config["quantization_config"] = describe(projections, tensors, form)
        _write_json(made / network / "config.json", config)
        made.rename(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from None
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
    return report


def _write_weights(
    folder: Path,
    tensors: Mapping[str, TensorSource],
    projections: Mapping[str, Projection],
    quantizer: Quantizer,
    progress: Callable[[float, str], None],
) -> Report:
    report, done = Report(bytes_before=sum(map(_nbytes, tensors.values()))), 0
    shards = list(_shards(tensors, projections))
    names = [f"model-{at:05}-of-{len(shards):05}.safetensors" for at in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else ["model.safetensors"]
    places: dict[str, str] = {}
    with TensorReader(tensors) as reader:
        for file_name, shard in zip(names, shards, strict=True):
            described = [one for name in shard for one in _written(tensors[name], projections.get(name))]
            report.bytes_after += sum(one.nbytes for one in described)
            places |= dict.fromkeys((one.name for one in described), file_name)
            with SafetensorsFile(folder / file_name, described) as file:
                for name in shard:
                    progress(done / report.bytes_before, name)
                    if name in projections:
                        report.losses[name] = _quantise(file, reader, projections[name], quantizer)
                    else:
                        _copy(file, reader, tensors[name])
                    done += _nbytes(tensors[name])
    if len(shards) > 1:
        index = {"metadata": {"total_size": report.bytes_after}, "weight_map": dict(sorted(places.items()))}
        _write_json(folder / "model.safetensors.index.json", index)
    return report


def _shards(tensors: Mapping[str, TensorSource], projections: Mapping[str, Projection]) -> Iterator[Sequence[str]]:
    """Yield the stored tensors of each file that is written, in the order that they are read in."""
    shard: list[str] = []
    size = 0
    for name in sorted(tensors, key=lambda name: _place(tensors[name])):
        more = sum(one.nbytes for one in _written(tensors[name], projections.get(name)))
        if shard and size + more > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += more
    yield shard


def _place(tensor: TensorSource) -> tuple[str, int, str]:
    return (str(tensor.path), tensor.offset, "") if isinstance(tensor, StoredTensor) else ("", 0, tensor.name)


def _written(tensor: TensorSource, projection: Projection | None) -> list[Described]:
    """Return the tensors of the folder that a stored tensor becomes."""
    return (
        [Described(tensor.name, tensor.kind, tensor.shape)] if projection is None else [*projection.tensors().values()]
    )


def _nbytes(tensor: TensorSource) -> int:
    return Described(tensor.name, tensor.kind, tensor.shape).nbytes


def _quantise(file: SafetensorsFile, reader: TensorReader, projection: Projection, quantizer: Quantizer) -> Loss:
    """Write a matrix as integers and scales."""
    written = projection.tensors()
    integers_of, scales_of = written["integers"], written["scale"]
    outputs, inputs = projection.shape
    line, scale_line = integers_of.nbytes // outputs, scales_of.nbytes // outputs
    error = weights = 0.0
    for first, rows in _rows(reader, projection):
        integers, scales = quantizer.rows(projection, rows)
        file.write(integers_of.name, first * line, _bytes(_packed(integers, projection)))
        file.write(scales_of.name, first * scale_line, _bytes(scales))
        exact = rows.float()
        spread = scales.repeat_interleave(projection.group or inputs, dim=1)[:, :inputs]
        error += float((integers * spread - exact).square().sum(dtype=torch.float64))
        weights += float(exact.square().sum(dtype=torch.float64))
    if "shape" in written:
        file.write(written["shape"].name, 0, _bytes(torch.tensor([outputs, inputs])))
    return Loss(error, weights)


def _rows(reader: TensorReader, projection: Projection) -> Iterator[tuple[int, Tensor]]:
    """Yield some rows `[count, inputs]` after the other; each is valid until the next."""
    stored, width = projection.source, projection.source.shape[1]
    if not projection.transposed:
        yield from reader.rows(stored, width, 0, stored.shape[0])
        return
    step = max(1, BUFFER_BYTES // (4 * stored.shape[0]))
    for first in range(0, width, step):
        columns = slice(first, min(first + step, width))
        yield first, reader.region(stored, width, columns, 0, stored.shape[0]).t().contiguous()


def _packed(integers: Tensor, projection: Projection) -> Tensor:
    """Return the bytes of integers as they are stored: in words they are unsigned, the first in the lowest bits."""
    if not projection.packed:
        return integers
    if projection.bits == 8:
        return integers.view(torch.uint8) ^ 128
    pairs = (integers + 8).view(torch.uint8).unflatten(1, (-1, 2))
    return pairs[:, :, 0] | pairs[:, :, 1] << 4


def _copy(file: SafetensorsFile, reader: TensorReader, tensor: TensorSource) -> None:
    """Write a tensor as it is."""
    if isinstance(tensor, StoredTensor) and tensor.strides is None:
        at = 0
        with tensor.path.open("rb") as stored:
            stored.seek(tensor.offset)
            left = _nbytes(tensor)
            while left:
                data = stored.read(min(left, BUFFER_BYTES))
                if not data:
                    raise ConfigError(f"{tensor.path.name} became shorter while {tensor.name} was read")
                file.write(tensor.name, at, memoryview(data))
                at, left = at + len(data), left - len(data)
        return
    rows, width = (tensor.shape[0], math.prod(tensor.shape[1:])) if tensor.shape else (1, 1)
    for first, part in reader.rows(tensor, width, 0, rows):
        file.write(tensor.name, first * width * tensor.dtype.itemsize, _bytes(part))


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def _copied_files(folder: Path, network: Path, weights: Collection[Path]) -> dict[Path, Path]:
    """Return the files other than weights, by names in the folder: the tokenizer, settings, modules, texts for people.

    `network` is the folder of the network's files, `weights` those that were read. Raises `ConfigError` where a link or
    a module's path leads out of the folder: what it leads to was not meant to be in the new one. A snapshot of the
    Hub's cache has its files in `blobs`, outside of it.
    """
    wanted = ("*", "additional_chat_templates/*.jinja")
    files = [file for at in {folder, network} for pattern in wanted for file in at.glob(pattern)]
    replaced = {file for file in files for pattern in _REPLACED if fnmatchcase(file.name, pattern)}
    others = {*files} - replaced - {*weights}
    own = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        own.append(folder.resolve().parents[1] / "blobs")
    found = {}
    for file in sorted({*others, *_module_files(folder, network)}):
        if not file.is_file() or file.name.startswith("."):
            continue
        name = file.relative_to(folder)
        if ".." in name.parts or not any(file.resolve().is_relative_to(one) for one in own):
            raise ConfigError(f"{folder.name}/{name} leads out of the folder, so it is not copied: put the file there")
        found[name] = file
    return found


def _module_files(folder: Path, network: Path) -> Iterator[Path]:
    """Yield what is in the folders of sentence-transformers' modules, weights included."""
    file = folder / "modules.json"
    names = {str(module.get("path", "")) for module in read_json_value(file)} if file.is_file() else set()
    for name in names:
        if folder / name != network:
            yield from (folder / name).glob("*")


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# -- `triptych quantize`: from names and settings to a written folder.


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
    if form not in QUANTIZED_LAYERS:
        raise ConfigError(f"format {form!r} cannot be written; expected one of {', '.join(QUANTIZED_LAYERS)}")
    if texts is not None and QUANTIZED_LAYERS[form][0].weight is not NumberKind.INT4:
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
