"""Generate, encode and transcribe with a Transformer from Python, without a server.

from triptych import LLM, SamplingParams

with LLM("path/of/a/checkpoint") as llm:
    print(llm.generate(["def add(a, b):"], SamplingParams(max_tokens=32)))

The names here are public. Modules of `model`, `service` and `loadtest` may change in any version.
"""

from importlib.metadata import version

from model.api.engine_config import EngineConfig
from model.api.request import TokenOutput
from model.api.sampling_params import SamplingParams
from model.errors import ConfigError, EngineError
from model.llm import LLM
from model.pretrained import embedded_models

__version__ = version("triptych")
__all__ = [
    "LLM",
    "ConfigError",
    "EngineConfig",
    "EngineError",
    "SamplingParams",
    "TokenOutput",
    "embedded_models",
]
