"""Owns the models of one engine process: loads, keeps and frees them.

A model is loaded and freed in parts between the steps of others (`background_jobs`). A loaded model joins the
others between two steps; a failed load changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from triptych.model.api.messages import Events, FailureKind, LoadFailure, ModelSpec
from triptych.model.engine.background_jobs import BackgroundJobs, FreeJob, LoadJob
from triptych.model.engine.builder import LoadedModel, load, load_lora


class EngineModels:
    """The loaded models, and the jobs that load and free others."""

    def __init__(self) -> None:
        self._loaded: dict[str, LoadedModel] = {}
        self._jobs = BackgroundJobs()

    def __iter__(self) -> Iterator[LoadedModel]:
        """Iterate over the loaded models; the caller may remove some meanwhile."""
        return iter(list(self._loaded.values()))

    def __getitem__(self, name: str) -> LoadedModel:
        return self._loaded[name]

    def get(self, name: str) -> LoadedModel | None:
        """Return a loaded model."""
        return self._loaded.get(name)

    def load_now(self, spec: ModelSpec) -> LoadedModel:
        """Load a model at once, before any is served; raises what the load raises."""
        model = load(spec) if spec.adapter_of is None else load_lora(spec, self.get(spec.adapter_of))
        self._add(model)
        return model

    def begin_load(self, spec: ModelSpec) -> None:
        """Load a model between steps, after the loads that already wait."""
        self._jobs.add(LoadJob(spec, self.get))

    def give_up(self, name: str) -> bool:
        """Stop loading a model; returns False if no load of it runs or waits."""
        return self._jobs.give_up(name)

    def free(self, model: LoadedModel) -> None:
        """Remove a model with its adapters, and free it between steps."""
        for one in self if model.adapter is None else ():
            if one.info.adapter_of == model.name:
                del self._loaded[one.name]
        del self._loaded[model.name]
        if model.adapter is not None:
            del model.encode.model.lora[model.name]
        elif (library := model.encode.model.linear.library) is not None:
            library.release_scratch()  # of this thread, as large as its largest step
        self._jobs.add(FreeJob(model))

    def timeout(self, most: float) -> float:
        """Return the seconds that the loop may wait for commands before a job needs it, `most` at most."""
        return self._jobs.timeout(most)

    def work(self, seconds: float | None) -> Iterator[tuple[LoadedModel | None, Events]]:
        """Continue loads and frees after a round whose steps took `seconds`; None: it had none.

        Yield the events of each model that was loaded, failed to load, or was freed; together with the model if it was
        loaded.
        """
        for job in self._jobs.run(seconds):
            result = job.take_result() if isinstance(job, LoadJob) else None
            if isinstance(result, LoadedModel):
                yield self._take(result)
            elif result is not None:
                yield None, Events(load_failures=[result])
            else:
                yield None, Events(unloaded=[job.name])

    def _take(self, model: LoadedModel) -> tuple[LoadedModel | None, Events]:
        """Add a loaded model, unless it is an adapter of a model that is gone."""
        base = self.get(model.info.adapter_of)
        if model.adapter is not None and (base is None or base.encode is not model.encode):
            message = f"{model.name}: its base model {model.info.adapter_of} was unloaded"
            return None, Events(load_failures=[LoadFailure(model.name, FailureKind.CONFIG, message)])
        self._add(model)
        return model, Events(loaded=[model.info])

    def _add(self, model: LoadedModel) -> None:
        self._loaded[model.name] = model
        if model.adapter is not None:
            model.encode.model.lora[model.name] = model.adapter

    def close(self) -> None:
        """Stop all loads, and free all models."""
        self._jobs.close()
        for model in self._loaded.values():
            model.close()
