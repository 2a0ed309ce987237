"""Gemma 2: windows in every second layer, softcaps of scores and logits, sandwich norms (Riviere et al. 2024)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from triptych.model.config.model import ModelConfig
from triptych.model.families import gemma, llama
from triptych.model.families.table.decoders import either_way
from triptych.model.families.table.helpers import layers_by_type, query_scale, refuse_unless
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family

_PERIOD = 2  # every second layer has full attention


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    # `transformers` sees both directions with flash attention alone.
    refuse_unless(raw, use_bidirectional_attention=False)
    base = gemma.config(raw.otherwise(num_key_value_heads=4), names, sandwich=True)
    assert base.decoder is not None
    layer = base.decoder.layers[0]
    full = replace(
        layer.attention,
        scale=query_scale(raw),
        softcap=raw.get("attn_logit_softcapping", 50.0),
    )
    layers = {
        "sliding_attention": replace(layer, mixer=replace(full, window=raw.get("sliding_window", 4096))),
        "full_attention": replace(layer, mixer=full),
    }
    decoder = replace(base.decoder, layers=layers_by_type(raw, layers, base.decoder.num_layers, _PERIOD))
    head = base.head and replace(base.head, softcap=raw.get("final_logit_softcapping", 30.0))
    return replace(base, decoder=decoder, head=head)


FAMILIES = {
    "gemma2": either_way(Family(config, partial(llama.rules, norms=gemma.SANDWICH_NORMS), "model.", llama.DROPPED)),
}
