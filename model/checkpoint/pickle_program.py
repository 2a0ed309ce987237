"""Reads the pickles of state dicts without running them.

A pickle is a program for a stack machine. `Program` keeps a stack and a memo as the machine does, but a name that the
program mentions stays a name, and a call of one of the functions in `_call` becomes a description of its result.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triptych.model.families.table.rules import Shape

MAX_INSTRUCTIONS = 500_000  # some 35 a tensor
_MAX_DIMENSIONS = 16
# Kinds of numbers as safetensors calls them, by the names that PyTorch gives storages and dtypes.
_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
    "ByteStorage": "U8", "BoolStorage": "BOOL", "UntypedStorage": "U8",
}  # fmt: skip
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Storage:
    """Consecutive numbers of the file that tensors are views of."""

    key: str
    kind: str
    elements: int


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor of a storage; offset and strides count elements."""

    storage: Storage
    kind: str
    offset: int
    shape: Shape
    strides: Shape


@dataclass(frozen=True, slots=True)
class _Global:
    """A name that the program mentions; it stands for nothing until `_call` looks at it."""

    name: str


class Malformed(Exception):
    """The file is not what `torch.save` writes for a state dict; the message says what was found."""


def _rebuilt(arguments: tuple[Any, ...]) -> TensorView:
    """`_rebuild_tensor`, `_v2` and `_v3`: storage, offset, shape, strides, and for the last one a dtype at the end."""
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, Storage) or not _are_sizes(shape, strides, (offset,)) or len(shape) != len(strides):
        raise Malformed("a tensor is described wrongly")
    kind = storage.kind
    if len(arguments) == 7:
        if not isinstance(arguments[6], _Global) or arguments[6].name.removeprefix("torch.") not in _DTYPES:
            raise Malformed("a tensor has an unknown dtype")
        kind = _DTYPES[arguments[6].name.removeprefix("torch.")]
    return TensorView(storage, kind, offset, shape, strides)


def _are_sizes(*values: object) -> bool:
    return all(
        isinstance(value, tuple)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < 1 << 48 for size in value)
        for value in values
    )


def _call(function: object, arguments: object) -> object:
    """Return what a call of a known function stands for; raises `Malformed` for any other."""
    if not isinstance(function, _Global) or not isinstance(arguments, tuple):
        raise Malformed("it calls what is no function")
    name = function.name
    if name == "collections.OrderedDict" and (not arguments or arguments == ([],)):
        return {}
    if name in _REBUILD and _REBUILD[name] <= len(arguments) <= 7:
        return _rebuilt(arguments)
    if name == "torch._utils._rebuild_parameter" and arguments and isinstance(arguments[0], TensorView):
        return arguments[0]
    if name == "torch.Size" and len(arguments) == 1 and _are_sizes(arguments[0]):
        return arguments[0]
    raise Malformed(f"it calls {name[:80]}, which no state dict needs")


_REBUILD = {  # the number of arguments that are needed at least
    "torch._utils._rebuild_tensor": 4,
    "torch._utils._rebuild_tensor_v2": 4,
    "torch._utils._rebuild_tensor_v3": 7,
}


def _persistent(identifier: object) -> Storage:
    """A storage by `("storage", type, key, device, elements)`, in the older layout with a view, which must be None."""
    if not isinstance(identifier, tuple) or len(identifier) not in (5, 6) or identifier[0] != "storage":
        raise Malformed("it refers to something that is no storage")
    kind, key, elements = identifier[1], identifier[2], identifier[4]
    name = kind.name.rpartition(".")[2] if isinstance(kind, _Global) else ""
    if name not in _STORAGES or not isinstance(key, str) or not _are_sizes((elements,)):
        raise Malformed(f"it has a storage of unknown type {name[:40]!r}")
    if len(identifier) == 6 and identifier[5] is not None:
        raise Malformed("it has views of storages")
    return Storage(key, _STORAGES[name], elements)


_MARK = object()


class Program:
    """Reads the pickles (protocol 2 to 5) of state dicts without running them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = MAX_INSTRUCTIONS  # of all pickles of the file
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, at: int) -> tuple[object, int]:
        """Return the value of the pickle that begins at byte `at`, and where the next one begins."""
        self._at, self._stack, self._memo = at, [], {}
        try:
            while True:
                self._left -= 1
                if self._left < 0:
                    raise Malformed(f"it has more than {MAX_INSTRUCTIONS} instructions")
                code = self._data[self._at]
                self._at += 1
                if code == 0x2E:  # STOP
                    return self._stack.pop(), self._at
                handler = _HANDLERS.get(code)
                if handler is None:
                    raise Malformed(f"it has the instruction {bytes([code])!r}, which no state dict needs")
                handler(self)
        except (IndexError, KeyError, TypeError, UnicodeDecodeError, struct.error):
            raise Malformed("its pickle is damaged") from None

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if count < 0 or end > len(self._data):
            raise Malformed("its pickle ends too early")
        found = self._data[self._at : end]
        self._at = end
        return found

    def _number(self, count: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._take(count), "little", signed=signed)

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + 1000)
        if end < 0:
            raise Malformed("its pickle ends too early")
        found = self._data[self._at : end].decode("ascii")
        self._at = end + 1
        return found

    def _from_mark(self) -> list[Any]:
        """Remove and return the values above the last mark, and the mark."""
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise Malformed("its pickle is damaged")
        found = self._stack[at + 1 :]
        del self._stack[at:]
        return found

    def push(self, value: object) -> None:
        self._stack.append(value)

    def constant(self, make: Callable[[], object]) -> None:
        self._stack.append(make())

    def integer(self, count: int, *, signed: bool = False) -> None:
        self._stack.append(self._number(count, signed=signed))

    def long(self, length_bytes: int) -> None:
        length = self._number(length_bytes)
        if length > 16:
            raise Malformed("it has an integer of more than 16 bytes")
        self._stack.append(self._number(length, signed=True))

    def real(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def text(self, length_bytes: int) -> None:
        self._stack.append(self._take(self._number(length_bytes)).decode("utf-8", "surrogatepass"))

    def tuple_of(self, count: int | None) -> None:
        if count is None:
            self._stack.append(tuple(self._from_mark()))
            return
        if len(self._stack) < count:
            raise Malformed("its pickle is damaged")
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._stack.append(items)

    def put(self, length_bytes: int) -> None:
        self._memo[self._number(length_bytes)] = self._stack[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, length_bytes: int) -> None:
        self._stack.append(self._memo[self._number(length_bytes)])

    def named(self) -> None:
        self._stack.append(_Global(f"{self._line()}.{self._line()}"))

    def named_on_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise Malformed("its pickle is damaged")
        self._stack.append(_Global(f"{module}.{name}"))

    def reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self._stack.append(_call(function, arguments))

    def persistent(self) -> None:
        self._stack.append(_persistent(self._stack.pop()))

    def build(self) -> None:
        """Attributes of an object: the `_metadata` of a state dict, or a parameter's; they are no weights."""
        self._stack.pop()
        if not isinstance(self._stack[-1], dict | TensorView):
            raise Malformed("it sets attributes of something else than a state dict")

    def set_items(self, *, single: bool) -> None:
        items = [self._stack.pop(-2), self._stack.pop()] if single else self._from_mark()
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise Malformed("its pickle is damaged")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int):
                raise Malformed("a dictionary's key is neither a text nor a number")
            target[key] = value

    def append(self, *, single: bool) -> None:
        items = [self._stack.pop()] if single else self._from_mark()
        target = self._stack[-1]
        if not isinstance(target, list):
            raise Malformed("its pickle is damaged")
        target.extend(items)

    def skip(self, count: int) -> None:
        """Protocol number, or the length of a frame."""
        self._take(count)

    def pop(self) -> None:
        self._stack.pop()


_HANDLERS: dict[int, Callable[[Program], None]] = {
    ord("\x80"): lambda program: program.skip(1),  # PROTO
    ord("\x95"): lambda program: program.skip(8),  # FRAME
    ord("("): lambda program: program.push(_MARK),
    ord("0"): Program.pop,
    ord("N"): lambda program: program.push(None),
    ord("\x88"): lambda program: program.push(True),
    ord("\x89"): lambda program: program.push(False),
    ord("}"): lambda program: program.constant(dict),
    ord("]"): lambda program: program.constant(list),
    ord(")"): lambda program: program.push(()),
    ord("K"): lambda program: program.integer(1),  # BININT1
    ord("M"): lambda program: program.integer(2),  # BININT2
    ord("J"): lambda program: program.integer(4, signed=True),  # BININT
    ord("\x8a"): lambda program: program.long(1),  # LONG1
    ord("G"): Program.real,  # BINFLOAT
    ord("X"): lambda program: program.text(4),  # BINUNICODE
    ord("\x8c"): lambda program: program.text(1),  # SHORT_BINUNICODE
    ord("T"): lambda program: program.text(4),  # BINSTRING, of Python 2
    ord("U"): lambda program: program.text(1),  # SHORT_BINSTRING
    ord("t"): lambda program: program.tuple_of(None),
    ord("\x85"): lambda program: program.tuple_of(1),
    ord("\x86"): lambda program: program.tuple_of(2),
    ord("\x87"): lambda program: program.tuple_of(3),
    ord("q"): lambda program: program.put(1),  # BINPUT
    ord("r"): lambda program: program.put(4),  # LONG_BINPUT
    ord("\x94"): Program.memoize,
    ord("h"): lambda program: program.get(1),  # BINGET
    ord("j"): lambda program: program.get(4),  # LONG_BINGET
    ord("c"): Program.named,  # GLOBAL
    ord("\x93"): Program.named_on_stack,  # STACK_GLOBAL
    ord("R"): Program.reduce,
    ord("Q"): Program.persistent,  # BINPERSID
    ord("b"): Program.build,
    ord("s"): lambda program: program.set_items(single=True),
    ord("u"): lambda program: program.set_items(single=False),
    ord("a"): lambda program: program.append(single=True),
    ord("e"): lambda program: program.append(single=False),
}
