"""Generate, encode and transcribe with a Transformer from Python, without a server.

from triptych import LLM, SamplingParams

with LLM("path/of/a/checkpoint") as llm:
    print(llm.generate(["def add(a, b):"], SamplingParams(max_tokens=32)))

The names here are public. Modules of `triptych.model`, `triptych.service` and `triptych.loadtest` may change in any
version. In a checkout these are symbolic links to the folders `model`, `service` and `loadtest`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych.model.api.engine_config import EngineConfig
    from triptych.model.api.request import TokenOutput
    from triptych.model.api.sampling_params import SamplingParams
    from triptych.model.errors import ConfigError, EngineError
    from triptych.model.llm import LLM
    from triptych.model.pretrained import embedded_models

    __version__: str

_MODULES = {  # by the public name
    "LLM": "llm",
    "ConfigError": "errors",
    "EngineConfig": "api.engine_config",
    "EngineError": "errors",
    "SamplingParams": "api.sampling_params",
    "TokenOutput": "api.request",
    "embedded_models": "pretrained",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `triptych.service.cli` must not load torch."""
    if name == "__version__":
        from importlib.metadata import version

        return version("triptych")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"triptych.model.{_MODULES[name]}"), name)


__all__ = [
    "LLM",
    "ConfigError",
    "EngineConfig",
    "EngineError",
    "SamplingParams",
    "TokenOutput",
    "embedded_models",
]
