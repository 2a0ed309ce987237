"""The hub's registry of models, mirrored in each worker."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from model.api.messages import ModelSpec
from model.api.stats import ModelInfo
from model.checkpoint.folder import Checkpoint, read_checkpoint
from model.client.relayed_engine import RelayedEngine
from service.core.errors import ApiError, error_fields, log_unexpected
from service.core.model_registry import Registry, ServedModel
from service.core.request_context import RequestContext
from service.runtimes.fronts.messages import Available, Change, Loaded, Refused, Removed
from service.runtimes.model_reader import read_model

logger = logging.getLogger("triptych.models")


class MirroredRegistry(Registry):
    """The registry of the hub, which tells every change of it."""

    def __init__(
        self,
        models: Iterable[ServedModel],
        elsewhere: Mapping[str, str],
        row_of: Callable[[str], int],
        *,
        pickle: bool,
    ) -> None:
        """`row_of`: the row of a model in the shared counts. `pickle`: whether available models may be read from it."""
        super().__init__(models, elsewhere)
        self._row_of = row_of
        self._pickle = pickle
        self._is_replacing = False
        self._adoptions = {model.name: number for number, model in enumerate(self)}
        self._names = list(self._adoptions)  # by adoption
        self.observe: Callable[[Change], None] = lambda _: None
        self.info_of: Callable[[str], ModelInfo | None] = lambda _: None

    def adoption(self, name: str) -> int | None:
        """Return the number of a loaded model, which a later one of its name will not have."""
        return self._adoptions.get(name)

    def name_of(self, adoption: int) -> str:
        return self._names[adoption]

    def changes(self) -> Iterator[Change]:
        """Yield what makes an empty registry like this one."""
        for model in self:
            yield self._loaded(model)
        for name, offered in self._available.items():
            yield self._offered(name, offered.checkpoint)
        for name, error in self._refused.items():
            yield Refused(name, None, error_fields(error))

    def add(self, model: ServedModel) -> None:
        with self._replacing():
            super().add(model)
        self._adoptions[model.name] = len(self._names)
        self._names.append(model.name)
        self.observe(self._loaded(model))

    def offer(self, name: str, checkpoint: Checkpoint) -> None:
        with self._replacing():
            super().offer(name, checkpoint)
        self.observe(self._offered(name, checkpoint))

    def refuse(self, name: str, error: ApiError) -> None:
        with self._replacing():
            super().refuse(name, error)
        self.observe(Refused(name, self._adoptions.pop(name, None), error_fields(error)))

    def remove(self, name: str) -> None:
        super().remove(name)
        if not self._is_replacing:
            self.observe(Removed(name, self._adoptions.pop(name, None)))

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        """Tell nothing of removals inside the block: what stands in the model's place is told."""
        self._is_replacing = True
        try:
            yield
        finally:
            self._is_replacing = False

    def _offered(self, name: str, checkpoint: Checkpoint) -> Available:
        return Available(name, self._adoptions.pop(name, None), str(checkpoint.path), self._pickle)

    def _loaded(self, model: ServedModel) -> Loaded:
        spec = ModelSpec(model.name, str(model.checkpoint.path), model.engine)
        return Loaded(self._adoptions[model.name], spec, self._row_of(model.name), self.info_of(model.name))


class Use:
    """The requests of this worker that hold one loaded model."""

    def __init__(self, adoption: int, told: Callable[[int, int], None]) -> None:
        """`told` is given the adoption and by how many its requests have changed, for the hub."""
        self.adoption = adoption
        self._told = told

    def hold(self, context: RequestContext, *, counted: bool = False) -> None:
        """Keep the model until the request's reply has been sent; `counted`: the hub knows of it already."""
        if not counted:
            self._told(self.adoption, 1)
        context.on_end.append(self._release)

    def _release(self) -> None:
        self._told(self.adoption, -1)


class RegistryFollower:
    """Makes a worker's registry and engine client like the hub's, as the changes come."""

    def __init__(
        self,
        registry: Registry,
        engine: RelayedEngine,
        rows: dict[str, int],
        told: Callable[[int, int], None],
        settled: Callable[[int], None],
    ) -> None:
        """`rows`: of the models in the shared counts, filled here. `settled` is told each adoption that has ended."""
        self._registry = registry
        self._engine = engine
        self._rows = rows
        self._told = told
        self._settled = settled
        self._changes: deque[Change] = deque()
        self._arrived = asyncio.Event()
        self._infos: dict[str, ModelInfo] = {}
        self._unreadable: set[int] = set()
        self.uses: dict[str, Use] = {}
        self._all_sent = False
        self.applied = asyncio.Event()  # set while no change waits, from when the models of the start have been read

    def receive(self, change: Change) -> None:
        """Take a change; what ends the time of a loaded model has that effect at once."""
        if not isinstance(change, Loaded) and change.adoption is not None:
            self._end(change.name)
            self._settled(change.adoption)
        self._changes.append(change)
        self.applied.clear()
        self._arrived.set()

    def all_sent(self) -> None:
        """Note that the models of the start have all been told."""
        self._all_sent = True
        self._arrived.set()

    def loaded(self, info: ModelInfo) -> None:
        """The engine has loaded a model, which may be one that is still being read here."""
        self._infos[info.name] = info

    def is_unreadable(self, adoption: int) -> bool:
        """Whether this process could not read the folder of a model that the engine has loaded."""
        return adoption in self._unreadable

    async def run(self) -> None:
        """Apply changes in their order, forever."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._changes:
                change = self._changes[0]
                try:
                    await self._apply(change)
                except Exception as error:  # the engine could read it, so the folder has changed since
                    log_unexpected(error)
                    if isinstance(change, Loaded):
                        self._unreadable.add(change.adoption)
                self._changes.popleft()
            if self._all_sent:
                self.applied.set()

    async def _apply(self, change: Change) -> None:
        name = _name(change)
        if not isinstance(change, Loaded):
            self._end(name)
        if any(_name(later) == name for later in list(self._changes)[1:]):
            return  # which leaves nothing of it
        if isinstance(change, Loaded):
            await self._adopt(change)
        elif isinstance(change, Removed):
            self._registry.remove(name)
        elif isinstance(change, Refused):
            self._registry.refuse(name, ApiError(**change.error))
        elif change.adoption is None or name not in self._registry.available:
            checkpoint = await asyncio.to_thread(read_checkpoint, Path(change.path), pickle=change.pickle)
            self._registry.offer(name, checkpoint)

    async def _adopt(self, change: Loaded) -> None:
        name = change.spec.name
        served = await asyncio.to_thread(read_model, change.spec)
        self._rows[name] = change.row
        self._engine.adopt(change.spec, served.tokenizer, self._infos.get(name, change.info))
        self._registry.add(served)
        self.uses[name] = Use(change.adoption, self._told)

    def _end(self, name: str) -> None:
        """Let no more requests hold a model that was loaded, which the hub decides about from now on. Idempotent."""
        self.uses.pop(name, None)
        served = self._registry.get(name)
        if served is not None:
            self._registry.offer(name, served.checkpoint)


def _name(change: Change) -> str:
    return change.spec.name if isinstance(change, Loaded) else change.name
