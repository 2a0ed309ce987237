"""The weights of a network in one file, which every process that loads the model maps.

A file of the weights cache is found by two digests. The layout is everything but the checkpoint's bytes that the file's
depend on: which stored tensor goes where, number formats, the C library with its CPU, the code in between. The content
is the checkpoint's bytes. So a file is what packing would give now, bit for bit, or it is not found.

`pack` reads the checkpoint and writes the file: into the cache, else without a name. Its arrays are given back for
their places in the file once they are written there. `python -m triptych.model.pack` calls it in a process of its own.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from triptych.model.attention.base import AttentionBackend
from triptych.model.checkpoint.content import content_digest, signs_of
from triptych.model.checkpoint.folder import Checkpoint
from triptych.model.checkpoint.packed_file import ArraySpec, PackedFileError, PackedFileWriter, Table, read_table
from triptych.model.checkpoint.tensor_files import DecodedTensor
from triptych.model.checkpoint.weights_cache import WeightsCache
from triptych.model.errors import ConfigError
from triptych.model.linear.base import Linear, linears
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.build import build_model, plain_parameters
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import TOKEN_TABLES, WeightSources, adopt_parameters, fill_weights, plan_sources
from triptych.model.system.mapped_file import MappedFile

_CODE = ("checkpoint", "config", "families", "linear", "network", "system")  # the Python that weights pass through

logger = logging.getLogger(__name__)


class PackedWeights:
    """Gives the network of a checkpoint its weights, on a CPU and on one rank."""

    def __init__(
        self,
        weights_cache: WeightsCache | None,
        checkpoint: Checkpoint,
        backend: AttentionBackend,
        linear: LinearFactory,
    ) -> None:
        """Look for the packed weights, without reading them. Raises `CheckpointError` as `load_model` does."""
        self.network = build_model(checkpoint.config, backend, linear)
        self.cache = weights_cache
        self.outcome = ""  # what became of the cache: mapped, written, or why not
        self._files = checkpoint.weight_files
        self._name = checkpoint.path.name
        self._sources = plan_sources(self.network, checkpoint)
        self._holders = list(_holders(self.network, self._sources.table_dtype))
        self._specs = {name: spec for holder in self._holders for name, spec in holder.specs.items()}
        self._layout = _layout(self.network, self._sources, self._specs) if weights_cache is not None else ""
        self._signs = signs_of(self._files)
        self._found = self._find(self._known_content())

    @property
    def is_found(self) -> bool:
        """Whether the packed weights are there, so that they need only be mapped."""
        return self._found is not None

    @property
    def size(self) -> int:
        """Bytes of the packed weights."""
        return sum(spec.nbytes for spec in self._specs.values())

    @property
    def resident(self) -> int:
        """Bytes of the packed weights that are in memory already, maybe because others use them."""
        return 0 if self._found is None else self._found.mapped.resident

    @property
    def others_in_use(self) -> int:
        """Bytes of other packed weights that are mapped, which Linux may count as available."""
        if self.cache is None:
            return 0
        return self.cache.in_use(None if self._found is None else self._found.name)

    def read_ahead(self) -> None:
        """Have the weights that were found in memory. Those that cannot be read are removed, and are not found then."""
        if self._found is None:
            return
        try:
            self._found.read_ahead()
        except OSError as error:
            if self.cache is not None and self._found.name:
                self.cache.discard(self._found.name, f"cannot be read: {error}")
            self._found = None

    def load(self) -> Transformer:
        """Map the weights that were found, or read them here; raises `CheckpointError`."""
        self.read_ahead()
        if self._found is None and self.cache is None:
            fill_weights(self.network, self._name, self._sources)
        elif self._found is None:
            self._pack(threads=1)
        return self.map() if self._found is not None else self._complete()

    def map(self) -> Transformer:
        """Take the weights from the file that was found, packed or received."""
        found, began = self._found, time.monotonic()
        assert found is not None
        for holder in self._holders:
            holder.adopt(found.arrays(holder))
        seconds = time.monotonic() - began
        logger.info("%s: %.2f GB of packed weights mapped in %.2f s", self._name, found.table.size / 1e9, seconds)
        self.outcome = self.outcome or ("mapped" if self.cache is not None else "")
        return self._complete()

    def _complete(self) -> Transformer:
        return self.network.requires_grad_(False).eval()

    def receive(self, file: int, outcome: str) -> None:
        """Take an open file that another process has packed; raises `ConfigError` if it is not of these weights."""
        found = _Found.of("", file, self._specs)
        if isinstance(found, str):
            raise ConfigError(f"{self._name}: the packed weights cannot be mapped: the file {found}")
        self._found, self.outcome = found, outcome

    def pack(self, threads: int) -> int:
        """Return an open file with the weights. Of processes that share a cache only one packs at a time.

        Raises `CheckpointError`, and `OSError` where there is no room for a file.
        """
        self._pack(threads)
        if self._found is None:
            self._found = self._write_unnamed()
        return self._found.mapped.file

    def _pack(self, threads: int) -> None:
        """Find the weights, or read the checkpoint and write what it becomes into the cache, if it has room."""
        with self._locked() as may_write:
            content = self._known_content()
            if content is None and self.cache is not None and self.cache.has(self._layout):  # maybe by another path
                content = self._digest(threads)
            self._found = self._find(content)
            self.read_ahead()
            if self._found is None:
                self._read(content, keep=may_write, threads=threads)
            else:
                self.outcome = "mapped"

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        if self.cache is None:
            yield False
        else:
            with self.cache.locked() as may_write:
                yield may_write

    def _known_content(self) -> str | None:
        return None if self.cache is None else self.cache.content(self._signs)

    def _find(self, content: str | None) -> _Found | None:
        packed = None if content is None or self.cache is None else self.cache.open(self._layout, content)
        if packed is None or self.cache is None:
            return None
        with packed:
            found = _Found.of(packed.name, packed.file, self._specs)
        if isinstance(found, str):
            self.cache.discard(packed.name, found)
            return None
        return found

    def _read(self, content: str | None, *, keep: bool, threads: int) -> None:
        """Read the checkpoint, and keep in the cache what it becomes."""
        with ThreadPoolExecutor(1, "hash") as pool:  # while it is packed, so the files are read from the disk once
            digest = None
            if keep and content is None and threads > 1:
                digest = pool.submit(self._digest, threads=1)
            fill_weights(self.network, self._name, self._sources)
            if self.cache is None:
                return
            try:
                if not keep:
                    raise OSError("it cannot be written")
                if content is None:
                    content = self._digest(threads=1) if digest is None else digest.result()
                if content is None or signs_of(self._files).digest != self._signs.digest:
                    raise OSError("the checkpoint changed while it was read")
                with self.cache.new_file(self._layout, content, self._specs) as new:
                    self._found = self._write(new.file, new.writer)
                self.outcome = "written"
            except OSError as error:
                self.outcome = f"not kept: {error}"
                logger.warning("%s: its packed weights are not kept in the weights cache: %s", self._name, error)

    def _write_unnamed(self) -> _Found:
        table = Table.of({}, self._specs)
        for make in (_unnamed_file, _file_in_memory):
            with suppress(OSError), os.fdopen(make(), "r+b", buffering=0) as file:
                return self._write(file.fileno(), PackedFileWriter(file.fileno(), table, lasting=False))
        raise OSError(errno.ENOSPC, f"no room for {table.size / 1e9:.2f} GB of packed weights")

    def _write(self, file: int, writer: PackedFileWriter) -> _Found:
        """Write the arrays; each holder's are given back for the file's when they are written."""
        began, table = time.monotonic(), writer.table
        found = _Found("", table, MappedFile(file, table.size))
        waiting = {name: holder for holder in self._holders for name in holder.specs}
        left = {id(holder): len(holder.specs) for holder in self._holders}

        def written(name: str) -> None:
            holder = waiting[name]
            left[id(holder)] -= 1
            if not left[id(holder)]:
                holder.adopt(found.arrays(holder))

        writer.write(((name, _bytes(waiting[name].arrays()[name])) for name in table.places), written)
        seconds = time.monotonic() - began
        logger.info("%s: %.2f GB of packed weights written in %.1f s", self._name, table.size / 1e9, seconds)
        return found

    def _digest(self, threads: int) -> str | None:
        """Return the content of the files; None if they change meanwhile."""
        content = content_digest(self._files, threads)
        if self.cache is None or signs_of(self._files).digest != self._signs.digest:
            return None
        self.cache.remember(self._signs, content)
        return content


@dataclass(frozen=True, slots=True)
class _Holder:
    """A holder of some of the arrays: a projection, or the network with its plain parameters."""

    specs: Mapping[str, ArraySpec]  # by the names in the file
    arrays: Callable[[], Mapping[str, Tensor]]
    adopt: Callable[[Mapping[str, Tensor]], None]


@dataclass(frozen=True, slots=True)
class _Found:
    """A file of packed weights, mapped."""

    name: str  # in the cache
    table: Table
    mapped: MappedFile

    @classmethod
    def of(cls, name: str, file: int, specs: Mapping[str, ArraySpec]) -> _Found | str:
        """Map an open file of arrays with these specs, or say why it cannot be."""
        try:
            table = read_table(file)
            if {name: place.spec for name, place in table.places.items()} != specs:
                return "holds other arrays than expected"
            return cls(name, table, MappedFile(file, table.size))
        except (OSError, PackedFileError) as error:
            return str(error)

    def arrays(self, holder: _Holder) -> dict[str, Tensor]:
        """Return the arrays of a holder as tensors over the file."""
        return {name: self._array(name) for name in holder.specs}

    def read_ahead(self) -> None:
        """Have all in memory, tables of tokens only in the file's cache: a step reads a row for each token."""
        tables = [place for name, place in self.table.places.items() if name in TOKEN_TABLES]
        self.mapped.read_ahead(range(place.offset, place.offset + place.spec.nbytes) for place in tables)

    def _array(self, name: str) -> Tensor:
        place = self.table.places[name]
        dtype: torch.dtype = getattr(torch, place.spec.dtype)
        return self.mapped.tensor(place.offset, place.spec.nbytes).view(dtype).view(place.spec.shape)


def _holders(network: Transformer, table_dtype: torch.dtype) -> Iterator[_Holder]:
    """Plain parameters first; projections in the order of the network."""
    dtype = network.linear.dtype
    plain = {
        name: _spec(table_dtype if name in TOKEN_TABLES else dtype, tuple(parameter.shape))
        for name, parameter in plain_parameters(network).items()
    }
    yield _Holder(
        plain,
        lambda: {name: parameter.detach() for name, parameter in plain_parameters(network).items()},
        lambda arrays: adopt_parameters(network, arrays, table_dtype),
    )
    for linear in linears(network):
        yield _linear_holder(linear)


def _linear_holder(linear: Linear) -> _Holder:
    prefix = f"{linear.spec.name}:"
    return _Holder(
        {prefix + name: _spec(*spec) for name, spec in linear.array_specs().items()},
        lambda: {prefix + name: array for name, array in linear.filled_arrays().items()},
        lambda arrays: linear.adopt({name.removeprefix(prefix): array for name, array in arrays.items()}),
    )


def _spec(dtype: torch.dtype, shape: tuple[int, ...]) -> ArraySpec:
    return ArraySpec(str(dtype).removeprefix("torch."), shape, math.prod(shape) * dtype.itemsize)


def _unnamed_file() -> int:
    """Open a file without a name in the folder for temporary files: on a disk it has huge pages."""
    return os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _file_in_memory() -> int:
    return os.memfd_create("triptych-weights", os.MFD_CLOEXEC)


def _bytes(array: Tensor) -> memoryview:
    data = array.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(data.data)


def _layout(network: Transformer, sources: WeightSources, specs: Mapping[str, ArraySpec]) -> str:
    """Return a digest of everything that the packed bytes depend on, except the checkpoint."""
    linear, state = network.linear, sha256()
    library = linear.library.identity if linear.library is not None else "no library"
    state.update(f"{torch.__version__} {library} {_code()} {linear.dtype} {sources.table_dtype}\n".encode())
    for name, rule in sources.rules:
        stored = sources.stored[name]
        decoder = f"{stored.decoder!r} " if isinstance(stored, DecodedTensor) else ""
        state.update(f"{name} {sources.shapes[rule.target]} {decoder}{rule!r}\n".encode())
    for zero in sources.zeros:
        state.update(f"{zero!r}\n".encode())
    for projection in linears(network):
        state.update(f"{type(projection).__name__} {projection.spec!r}\n".encode())
    for name, spec in specs.items():
        state.update(f"{name} {spec!r}\n".encode())
    return state.hexdigest()


@cache
def _code() -> str:
    """A digest of the package's code that weights pass through."""
    state, package = sha256(), Path(__file__).parent.parent
    for folder in _CODE:
        for source in sorted((package / folder).rglob("*.py")):
            state.update(source.name.encode() + source.read_bytes())
    return state.hexdigest()
