"""The page of `triptych inspect --attention`: attention weights in one HTML file that needs no other."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from importlib import resources

import torch

from triptych.model.inspection.attention_maps import AttentionMap

_LEVELS = 255  # a weight is stored as one byte


def attention_page(model: str, text: str, maps: Sequence[AttentionMap]) -> str:
    """Return the page. It holds the weights as base64, and a script that draws them in the browser."""
    template = (resources.files("service") / "static" / "attention.html").read_text("utf-8")
    data = {
        "model": model,
        "text": text,
        "maps": [
            {
                "name": one.name,
                "layers": one.weights.shape[0],
                "heads": one.weights.shape[1],
                "queries": one.queries,
                "keys": one.keys,
                "weights": base64.b64encode(_as_bytes(one.weights)).decode(),
            }
            for one in maps
        ],
    }
    # "</script" inside the JSON would end the element, and "<!--<script" would hide its end.
    script = json.dumps(data).replace("<", "\\u003c")
    return template.replace("@@TITLE@@", escape(f"{model}: attention")).replace("@@DATA@@", script)


def _as_bytes(weights: torch.Tensor) -> bytes:
    return (weights * _LEVELS).round().to(torch.uint8).contiguous().numpy().tobytes()
