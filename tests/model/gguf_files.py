"""Writes GGUF files for tests: of given tensors and metadata, or of a tiny checkpoint as llama.cpp converts it.

tests/data/gguf_conversions.json has what llama.cpp's own converter (`convert_hf_to_gguf.py` of the sources in
llama-cpp-python 0.3.36) makes of the tiny checkpoints: the metadata, and each tensor's name beside the name in the
checkpoint and what is done to it, found by comparing the numbers. A layer's number is `{}` there.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from model.gguf.types import BLOCK_TYPES
from tests.model.checkpoints import saved

_TYPES = {"UINT8": 0, "INT8": 1, "UINT32": 4, "INT32": 5, "FLOAT32": 6, "BOOL": 7, "STRING": 8, "ARRAY": 9}
_FORMATS = {"UINT8": "<B", "INT8": "<b", "UINT32": "<I", "INT32": "<i", "FLOAT32": "<f", "BOOL": "<?"}
_NUMBERS = {kind.name: number for number, kind in BLOCK_TYPES.items()}
_DATA = Path(__file__).parent.parent / "data" / "gguf_conversions.json"
Metadata = Mapping[str, tuple[str, Any]]
Blocks = tuple[str, tuple[int, ...], bytes]  # type, shape, data


def write_gguf(path: Path, metadata: Metadata, tensors: Mapping[str, Tensor | Blocks], *, version: int = 3) -> Path:
    """Write a file: float32 of tensors, and blocks as they are given."""
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
    """What llama.cpp makes of tiny checkpoints, by their kinds."""
    found: dict[str, Any] = json.loads(_DATA.read_text())
    return found


def converted(kind: str, into: Path, **changes: tuple[str, Any]) -> Path:
    """Write the file that llama.cpp would; `changes` are of the metadata behind the architecture's name."""
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
                tensors[name.replace("{}", layer)] = _changed(stored[theirs], *source[1:])
    return write_gguf(into / f"{kind}.gguf", metadata, tensors)


def _changed(tensor: Tensor, how: str = "") -> Tensor:
    """What the conversion does to a tensor."""
    if how.endswith("heads in turns"):
        heads = int(how.split()[0])
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    if how in ("first half", "second half"):  # of each expert's rows
        return tensor.chunk(2, dim=1)[how == "second half"]
    return {"": tensor, "plus one": tensor.float() + 1, "last rows": tensor[2:]}[how]
