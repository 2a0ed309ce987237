"""The weights of a network as it keeps them, in the weights cache: mapped from there, or packed and put there.

A file is found by two digests. The layout is everything but the checkpoint's bytes that the file's depend on: which
stored tensor goes where, number formats, the C library with its CPU, the code in between. The content is the
checkpoint's bytes. So a file is what packing would give now, bit for bit, or it is not found.

Packing takes the memory that it takes without a cache: arrays are given back for their places in the file once they are
written there.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from model.attention.base import AttentionBackend
from model.checkpoint.content import content_digest, signs_of
from model.checkpoint.folder import Checkpoint
from model.checkpoint.packed_file import ArraySpec, Table
from model.checkpoint.tensor_files import DecodedTensor
from model.checkpoint.weights_cache import WeightsCache
from model.linear.base import Linear, linears
from model.linear.factory import LinearFactory
from model.network.build import build_model, plain_parameters
from model.network.transformer import Transformer
from model.network.weights import TOKEN_TABLES, WeightSources, adopt_parameters, fill_weights, plan_sources
from model.system.background_work import give_way, gives_way, wait_for
from model.system.mapped_file import MappedFile

_CODE = ("checkpoint", "config", "families", "linear", "network", "system")  # what weights pass through, beside C

logger = logging.getLogger(__name__)


class PackedWeights:
    """Gives the network of a checkpoint its weights by way of a cache: on a CPU, on one rank."""

    def __init__(
        self, weights_cache: WeightsCache, checkpoint: Checkpoint, backend: AttentionBackend, linear: LinearFactory
    ) -> None:
        """Look for the packed weights, without reading them. Raises `CheckpointError` as `load_model` does."""
        self.network = build_model(checkpoint.config, backend, linear)
        self._cache = weights_cache
        self._files = checkpoint.weight_files
        self._name = checkpoint.path.name
        self._sources = plan_sources(self.network, checkpoint)
        self._holders = list(_holders(self.network, self._sources.table_dtype))
        self._specs = {name: spec for holder in self._holders for name, spec in holder.specs.items()}
        self._layout = _layout(self.network, self._sources, self._specs)
        self._signs = signs_of(self._files)
        self._found = self._find(weights_cache.content(self._signs))
        self.outcome = ""  # of `load`: mapped, written, or why not

    @property
    def is_found(self) -> bool:
        """Whether the packed weights are there, so that `load` only maps them."""
        return self._found is not None

    @property
    def resident(self) -> int:
        """Bytes of the packed weights that are in memory already, maybe because others use them."""
        found = self._found
        return 0 if found is None else wait_for(lambda: found.mapped.resident)

    @property
    def others_in_use(self) -> int:
        """Bytes of other packed weights that are mapped, which Linux may count as available."""
        return self._cache.in_use(None if self._found is None else self._found.name)

    def load(self) -> Transformer:
        """Map the weights, or pack them while no other process does; raises `CheckpointError`."""
        if not self._map():
            with ExitStack() as stack:
                may_write = wait_for(lambda: stack.enter_context(self._cache.locked()))
                content = self._cache.content(self._signs)
                if content is None and self._cache.has(self._layout):  # maybe of these bytes, by another path
                    content = self._digest(1 if gives_way() else torch.get_num_threads())
                self._found = self._find(content)
                if not self._map():
                    self._pack(content, keep=may_write)
        return self.network.requires_grad_(False).eval()

    def _find(self, content: str | None) -> _Found | None:
        packed = None if content is None else self._cache.open(self._layout, content)
        if packed is None:
            return None
        with packed:
            reason = "holds other arrays than expected"
            if {name: place.spec for name, place in packed.table.places.items()} == self._specs:
                try:
                    return _Found(packed.name, packed.table, MappedFile(packed.file, packed.table.size))
                except OSError as error:
                    reason = f"cannot be mapped: {error}"
        self._cache.discard(packed.name, reason)
        return None

    def _map(self) -> bool:
        """Take the weights from the file, if it was found and can be read."""
        began, found = time.monotonic(), self._found
        if found is None:
            return False
        try:
            wait_for(found.read_ahead)
        except OSError as error:
            self._cache.discard(found.name, f"cannot be read: {error}")
            self._found = None
            return False
        for holder in self._holders:
            holder.adopt(found.arrays(holder))
            give_way()
        self.outcome = "mapped"
        seconds = time.monotonic() - began
        logger.info("%s: %.2f GB of packed weights mapped in %.2f s", self._name, found.table.size / 1e9, seconds)
        return True

    def _pack(self, content: str | None, *, keep: bool) -> None:
        """Read the checkpoint, and keep what it becomes if that can be written."""
        with ThreadPoolExecutor(1, "hash") as pool:  # beside the packing, so the files are read from the disk once
            digest = None
            if keep and content is None and not gives_way():
                digest = pool.submit(self._digest, threads=1)
            fill_weights(self.network, self._name, self._sources)
            try:
                if not keep:
                    raise OSError("it cannot be written")
                if content is None:
                    content = self._digest(threads=1) if digest is None else digest.result()
                if content is None or signs_of(self._files).digest != self._signs.digest:
                    raise OSError("the checkpoint changed while it was read")
                self._write(content)
            except OSError as error:  # what was written stays mapped, the rest is in memory
                self.outcome = f"not kept: {error}"
                logger.warning("%s: its packed weights are not kept in the weights cache: %s", self._name, error)

    def _write(self, content: str) -> None:
        """Write the arrays; each holder's are given back for the file's when they are written."""
        began = time.monotonic()
        with self._cache.new_file(self._layout, content, self._specs) as new:
            table = new.writer.table
            found = _Found("", table, MappedFile(new.file, table.size))
            waiting = {name: holder for holder in self._holders for name in holder.specs}
            left = {id(holder): len(holder.specs) for holder in self._holders}

            def written(name: str) -> None:
                holder = waiting[name]
                left[id(holder)] -= 1
                if not left[id(holder)]:
                    holder.adopt(found.arrays(holder))
                give_way()

            new.writer.write(((name, _bytes(waiting[name].arrays()[name])) for name in table.places), written)
        wait_for(found.read_ahead)
        self.outcome = "written"
        seconds = time.monotonic() - began
        logger.info("%s: %.2f GB of packed weights written in %.1f s", self._name, table.size / 1e9, seconds)

    def _digest(self, threads: int) -> str | None:
        """The content of the files; None if they change meanwhile."""
        content = content_digest(self._files, threads, give_way)
        if signs_of(self._files).digest != self._signs.digest:
            return None
        self._cache.remember(self._signs, content)
        return content


@dataclass(frozen=True, slots=True)
class _Holder:
    """What keeps some of the arrays: a projection, or the network its plain parameters."""

    specs: Mapping[str, ArraySpec]  # by the names in the file
    arrays: Callable[[], Mapping[str, Tensor]]
    adopt: Callable[[Mapping[str, Tensor]], None]


@dataclass(frozen=True, slots=True)
class _Found:
    """A file of packed weights, mapped."""

    name: str
    table: Table
    mapped: MappedFile

    def arrays(self, holder: _Holder) -> dict[str, Tensor]:
        """The arrays of a holder as tensors over the file."""
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


def _bytes(array: Tensor) -> memoryview:
    data = array.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(data.data)


def _layout(network: Transformer, sources: WeightSources, specs: Mapping[str, ArraySpec]) -> str:
    """A digest of what the bytes depend on beside those of the checkpoint."""
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
