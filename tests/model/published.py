"""A published model: its number of parameters and its config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_TRAINING = dict(attention_dropout=0.0, initializer_range=0.02, torch_dtype="bfloat16", use_cache=True)


@dataclass(frozen=True)
class Published:
    """The published figures of a model; `not_ours`: parameters that the published figure counts and we do not."""

    parameters: int
    config: str
    not_ours: int = 0


def published_config(architecture: str, model_type: str, **settings: Any) -> str:
    return json.dumps({**_TRAINING, "architectures": [architecture], "model_type": model_type, **settings})
