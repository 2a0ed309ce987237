"""Writers of GGUF files for tests: of given tensors and metadata, or of a tiny checkpoint as llama.cpp converts it.

tests/data/gguf_conversions.json has what llama.cpp's own converter (`convert_hf_to_gguf.py` of the sources in
llama-cpp-python 0.3.36) makes of the tiny checkpoints: the metadata, and for each tensor its new name, its name in the
checkpoint and the conversion. A layer's number is `{}` there. `tests/data/record_gguf_conversions.py` wrote it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.model.checkpoints import saved
from triptych.model.gguf.types import BLOCK_TYPES

_TYPES = {"UINT8": 0, "INT8": 1, "UINT32": 4, "INT32": 5, "FLOAT32": 6, "FLOAT64": 12, "BOOL": 7, "STRING": 8}
_TYPES["ARRAY"] = 9
_FORMATS = {"UINT8": "<B", "INT8": "<b", "UINT32": "<I", "INT32": "<i", "FLOAT32": "<f", "FLOAT64": "<d", "BOOL": "<?"}
_NUMBERS = {kind.name: number for number, kind in BLOCK_TYPES.items()}
CONVERSIONS = Path(__file__).parent.parent / "data" / "gguf_conversions.json"
Metadata = Mapping[str, tuple[str, Any]]
Blocks = tuple[str, tuple[int, ...], bytes]  # type, shape, data


def write_gguf(path: Path, metadata: Metadata, tensors: Mapping[str, Tensor | Blocks], *, version: int = 3) -> Path:
    """Write a GGUF file: tensors as float32, blocks as they are."""
    blocks = {name: _floats(one) if isinstance(one, Tensor) else one for name, one in tensors.items()}
    header = b"GGUF" + struct.pack("<IQQ", version, len(blocks), len(metadata))
    for key, (kind, value) in metadata.items():
        header += _string(key) + struct.pack("<I", _TYPES[kind]) + _value(kind, value)
    offset = 0
    for name, (kind, shape, data) in blocks.items():
        header += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header += struct.pack("<IQ", _NUMBERS[kind], offset)
        offset += len(data) + -len(data) % 32
    body = b"".join(data + bytes(-len(data) % 32) for _, _, data in blocks.values())
    path.write_bytes(header + bytes(-len(header) % 32) + body)
    return path


def _floats(tensor: Tensor) -> Blocks:
    return "F32", tuple(tensor.shape), tensor.contiguous().float().numpy().tobytes()


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: str, value: Any) -> bytes:
    if kind == "STRING":
        return _string(value)
    if kind != "ARRAY":
        return struct.pack(_FORMATS[kind], value)
    element, values = value if isinstance(value, tuple) else (_element(value), value)
    return struct.pack("<IQ", _TYPES[element], len(values)) + b"".join(_value(element, one) for one in values)


def _element(values: Sequence[Any]) -> str:
    return {str: "STRING", bool: "BOOL", float: "FLOAT32", int: "INT32"}[type(values[0])]


@cache
def conversions() -> dict[str, Any]:
    """Return llama.cpp's conversions of the tiny checkpoints by kind."""
    found: dict[str, Any] = json.loads(CONVERSIONS.read_text())
    return found


def converted(
    kind: str, into: Path, stored_as: Callable[[str, Tensor], Tensor | Blocks] | None = None, **changes: tuple[str, Any]
) -> Path:
    """Write the file that llama.cpp would write; `changes` overrides metadata, by keys without the architecture's name.

    `stored_as` returns what is written for a tensor, given its name.
    """
    known = conversions()[kind]
    stored = {name: one for file in saved(kind).path.glob("*.safetensors") for name, one in load_file(file).items()}
    metadata = {key: (str(kind), value) for key, (kind, value) in known["metadata"].items()}
    architecture = metadata["general.architecture"][1]
    metadata |= {f"{architecture}.{key.replace('__', '.')}": change for key, change in changes.items()}
    tensors: dict[str, Tensor] = {}
    for name, source in known["tensors"].items():
        if isinstance(source[0], float):
            tensors[name] = torch.tensor(source)
            continue
        layers = [""] if "{}" not in name else [str(layer) for layer in range(16)]
        for layer in layers:
            theirs = source[0].replace("{}", layer)
            experts = [one for expert in range(16) if (one := theirs.replace("*", str(expert))) in stored]
            if "*" in theirs and experts:
                tensors[name.replace("{}", layer)] = torch.stack([stored[one] for one in experts])
            elif theirs in stored:
                tensors[name.replace("{}", layer)] = changed(stored[theirs], *source[1:])
    written = tensors if stored_as is None else {name: stored_as(name, one) for name, one in tensors.items()}
    return write_gguf(into / f"{kind}.gguf", metadata, written)


def changed(tensor: Tensor, how: str = "") -> Tensor:
    """Return the tensor after a conversion that gguf_conversions.json describes in words."""
    if how in _PLAIN_CHANGES:
        return _PLAIN_CHANGES[how](tensor)
    numbers = [int(word) for word in how.split() if word.isdecimal()]
    if how.endswith("heads in turns"):
        return tensor.unflatten(0, (numbers[0], 2, -1)).transpose(1, 2).reshape(tensor.shape)
    if how.startswith("part by part"):  # in each group: several queries, one key and one value
        groups, queries = (*numbers, 1)[:2]
        parts = tensor.unflatten(0, (groups, queries + 2, -1)).split([queries, 1, 1], dim=1)
        return torch.cat([part.flatten(0, 2) for part in parts])
    if how.startswith(("q k v of", "z of")):  # for each key head, parts of the given numbers of rows
        heads, *sizes = numbers
        parts = tensor.unflatten(0, (heads, -1)).split(sizes, dim=1)
        return torch.cat([part.flatten(0, 1) for part in (parts[3:] if how[0] == "z" else parts[:3])])
    heads, shared, size, first = numbers  # "values of": the first value head of each key head, then the second of each
    kind = how.split("after", 1)[1].split(maxsplit=1)[1:]
    tensor = tensor.t() if kind == ["columns"] else tensor
    values = tensor[first:].unflatten(0, (heads, shared, size)).transpose(0, 1).flatten(0, 2)
    found = torch.cat([tensor[:first], values])
    return found.t() if kind == ["columns"] else changed(found, *kind)


_PLAIN_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda tensor: tensor,
    "plus one": lambda tensor: tensor.float() + 1,
    "last rows": lambda tensor: tensor[2:],
    "transposed": lambda tensor: tensor.t(),
    "squeezed": lambda tensor: tensor.squeeze(),
    "minus exponential": lambda tensor: -torch.exp(tensor),
    "first half": lambda tensor: tensor.chunk(2, dim=1)[0],  # of each expert's rows
    "second half": lambda tensor: tensor.chunk(2, dim=1)[1],
    "upper rows": lambda tensor: tensor.chunk(2)[0],
    "lower rows": lambda tensor: tensor.chunk(2)[1],
    "experts transposed": lambda tensor: tensor.transpose(1, 2),
    "even rows": lambda tensor: tensor.transpose(1, 2)[:, ::2],  # of each expert, transposed
    "odd rows": lambda tensor: tensor.transpose(1, 2)[:, 1::2],
    "even columns": lambda tensor: tensor[:, ::2],
    "odd columns": lambda tensor: tensor[:, 1::2],
}
