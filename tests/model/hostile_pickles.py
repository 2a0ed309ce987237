"""Reads hostile and mutated files of `torch.save` under watch: `python -m tests.model.hostile_pickles COUNT SEED`.

Fails where a file makes the reader do anything but read: each of Python's audit events for opening, importing, running
and connecting counts. So does a file that takes longer than a second, or memory beyond its size and 256 MB.
"""

from __future__ import annotations

import collections
import io
import os
import random
import resource
import struct
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from triptych.model.checkpoint.state_dict import read_state_dict
from triptych.model.errors import CheckpointError

_WATCHED = ("exec", "import", "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pickle.", "code.")
_MEMORY = 256 << 20
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_HEADER = b"\x80\x02"
_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
_STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"


def saved(*, legacy: bool) -> bytes:
    state = collections.OrderedDict((f"layers.{i}.weight", torch.full((2, 3), float(i))) for i in range(8))
    state["embed.weight"] = torch.arange(12, dtype=torch.bfloat16).view(4, 3)
    state["position_ids"] = torch.arange(5)
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def archive(program: bytes, *, compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr("m/data.pkl", program)
        file.writestr("m/data/0", bytes(16))
    return buffer.getvalue()


def tensor(offset: bytes, shape: bytes, strides: bytes) -> bytes:
    """Return a state dict of one tensor over a storage of four floats."""
    described = _TENSOR + b"(" + _STORAGE + offset + shape + strides + b"\x89ccollections\nOrderedDict\n)RtR"
    return archive(_HEADER + b"}X\x01\x00\x00\x00w" + described + b"s.")


def hostile() -> Iterator[bytes]:
    """Yield programs that run code, and files that cost much time or memory."""
    payloads = [
        b"cos\nsystem\n(X\x0a\x00\x00\x00touch /tmptR.",
        b"cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
        b"c__builtin__\nexec\n(X\x01\x00\x00\x001tR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02ls\x85R.",
        b"(cos\nsystem\nX\x02\x00\x00\x00lso.",
        b"(X\x02\x00\x00\x00lsios\nsystem\n.",
        b"cos\nsystem\n)\x81.",
        b"ctorch\nload\n(X\x01\x00\x00\x00xtR.",
        b"ctorch.utils.model_zoo\nload_url\n(X\x08\x00\x00\x00http://xtR.",
        b"ccollections\nOrderedDict\n(]cos\nsystem\natR.",
        b"cnumpy\nload\n(X\x01\x00\x00\x00xtR.",
        b"}X\x01\x00\x00\x00acos\nsystem\ns.",
        b"cos\nsystem\n}b.",
        b"S'text'\n.",
        b"I1\n.",
        b"\x82\x01.",
        b"P0\n.",
    ]
    yield from (archive(payload if payload.startswith(b"\x80") else _HEADER + payload) for payload in payloads)
    yield from payloads
    one = b"\x85"
    yield tensor(b"K\x00", b"K\x04" + one, b"K\x01" + one)  # harmless
    yield tensor(b"K\x01", b"K\x04" + one, b"K\x01" + one)  # reads outside its storage
    yield tensor(b"K\x00", b"J\xff\xff\xff\xff" + one, b"K\x01" + one)  # a negative size
    yield tensor(b"K\x00", b"\x8a\x08" + b"\xff" * 7 + b"\x7f" + one, b"K\x00" + one)  # 2 ** 63 elements with stride 0
    yield tensor(b"K\x00", b"(" + b"K\x02" * 64 + b"t", b"(" + b"K\x00" * 64 + b"t")  # 2 ** 64 elements with stride 0
    yield tensor(b"K\x00", b"K\x04" + one, b"J\xff\xff\xff\xff" + one)  # a negative stride
    yield archive(_HEADER + b"X\xff\xff\xff\xff.")
    yield archive(_HEADER + b"\x8a\xff" + b"\x01" * 255 + b".")
    yield archive(_HEADER + b"(" * 4_000_000 + b".")
    yield archive(_HEADER + b"}" * 4_000_000 + b".")
    yield archive(b"\x80\x04" + b"}\x94" * 2_000_000 + b".")
    yield archive(_HEADER + b")" + b"\x85" * 499_000 + b".")  # nested tuples
    yield archive(_HEADER + b"]q\x00" + b"(h\x00h\x00h\x00e" * 80_000 + b".")  # a list that contains itself
    yield archive(_HEADER + b")q\x00" + b"h\x00h\x00h\x00h\x00\x87q\x00" * 80_000 + b".")  # triples at each step
    yield archive(_HEADER + b"}" + b"K\x00" * 3 + b"u.")
    yield archive(_HEADER + b"}." * 500, compression=zipfile.ZIP_DEFLATED)
    yield archive(bytes(200 << 20), compression=zipfile.ZIP_DEFLATED)
    yield _directory(300_000)
    whole = saved(legacy=False)
    yield whole[: len(whole) // 2]
    yield whole.replace(b"PK\x01\x02", b"PK\x01\x03")
    disks = whole.rindex(b"PK\x06\x07") + 16
    yield whole[:disks] + b"\x02" + whole[disks + 1 :]
    yield b""
    yield b"PK\x05\x06" + bytes(18)


def _directory(entries: int) -> bytes:
    """Return an archive that consists only of directory entries."""
    one = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *[0] * 6, *[0] * 3, *[0] * 5, 0, 0)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, entries & 0xFFFF, entries & 0xFFFF, len(one) * entries, 0, 0)
    return one * entries + end


def mutated(count: int, seed: int) -> Iterator[bytes]:
    """Yield good files with bytes changed, removed, inserted and exchanged."""
    chance = random.Random(seed)
    originals = [saved(legacy=False), saved(legacy=True), tensor(b"K\x00", b"K\x04\x85", b"K\x01\x85")]
    for _ in range(count):
        data = bytearray(chance.choice(originals))
        begin = data.find(b"\x80\x02") if chance.random() < 0.8 else 0  # most changes go to the program
        for _ in range(chance.choice((1, 1, 2, 4, 16))):
            at = min(len(data) - 1, begin + chance.randrange(900))
            kind = chance.randrange(4)
            if kind == 0:
                data[at] = chance.randrange(256)
            elif kind == 1:
                del data[at : at + chance.randrange(1, 9)]
            elif kind == 2:
                data[at:at] = chance.randbytes(chance.randrange(1, 9))
            else:
                other = min(len(data) - 9, begin + chance.randrange(900))
                data[at : at + 8] = data[other : other + 8]
        yield bytes(data)


def check(files: Iterator[bytes]) -> int:
    """Read all files and return how many were refused."""
    events: list[str] = []
    watching = False

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if watching and (event.startswith(_WATCHED) or (event == "open" and arguments[2] & _WRITING)):
            events.append(f"{event} {arguments!r}")

    sys.addaudithook(hook)
    refused = 0
    with TemporaryDirectory() as folder:
        path = Path(folder) / "pytorch_model.bin"
        path.write_bytes(tensor(b"K\x00", b"K\x04\x85", b"K\x01\x85"))
        read_state_dict(path)  # Python imports an encoding for the first archive
        for number, data in enumerate(files):
            path.write_bytes(data)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            began = time.process_time()
            watching = True
            try:
                read_state_dict(path)
            except CheckpointError:
                refused += 1
            finally:
                watching = False
            seconds = time.process_time() - began
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
            assert not events, f"file {number}: {events[:3]}"
            assert seconds < 3, f"file {number} took {seconds:.2f} s"
            assert grown <= len(data) + _MEMORY, f"file {number} took {grown >> 20} MB"
    return refused


if __name__ == "__main__":
    print(check(hostile()), check(mutated(int(sys.argv[1]), int(sys.argv[2]))))
