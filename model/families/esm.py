"""ESM: encoders of proteins, whose tokens are amino acids (Rives et al. 2021; ESM-2: Lin et al. 2023).

Pre-norm, with a last norm. ESM-2 has rotary positions, ESM-1b learned ones, which begin at the padding id + 1.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from triptych.model.config.layer import Activation, Norms
from triptych.model.config.model import MaskDropout, ModelConfig
from triptych.model.config.stack import PositionConfig, PositionKind
from triptych.model.errors import ConfigError
from triptych.model.families import bert
from triptych.model.families.table.heads import tied_names
from triptych.model.families.table.helpers import refuse_unless
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import rotary
from triptych.model.families.table.rules import Family

_MASKED = 0.15 * 0.8  # of the tokens in training
_NORMS = {"attention.LayerNorm": "attn_norms.pre", "LayerNorm": "mlp_norms.pre"}


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, is_folding_model=False, hidden_act="gelu")
    for unused in ("vocab_list", "esmfold_config", "rope_theta"):
        raw.get(unused)
    kind = raw.get("position_embedding_type", "absolute")
    if kind not in ("absolute", "rotary"):
        raise ConfigError(f"position_embedding_type {kind!r} is not served for 'esm'; served are absolute and rotary")
    raw = raw.otherwise(pad_token_id=1, max_position_embeddings=1026)
    base = bert.config(raw.but(position_embedding_type="absolute", type_vocab_size=0), names)
    encoder = base.encoder
    assert encoder is not None and base.pad_token_id is not None
    norm, offset = encoder.embed_norm, base.pad_token_id + 1
    turning = rotary(raw.but(rope_parameters=None), encoder.layers[0].attention.head_dim) if kind == "rotary" else None
    encoder = encoder.with_layers(
        lambda layer: replace(layer, mixer=replace(layer.attention, position=turning), norms=(Norms(pre=norm),) * 2)
    )
    longest = raw["max_position_embeddings"]
    position = PositionConfig()
    if turning is None:
        longest -= offset
        position = PositionConfig(PositionKind.LEARNED, max_positions=longest, offset=offset)
    encoder = replace(
        encoder,
        position=position,
        embed_norm=norm if raw.get("emb_layer_norm_before", False) else None,
        final_norm=norm,
    )
    head = base.masked_head and replace(base.masked_head, activation=Activation.GELU)
    return replace(
        base,
        embedding=replace(base.embedding, mask_dropout=_mask_dropout(raw)),
        encoder=encoder,
        masked_head=head,
        max_positions=longest,
    )


def _mask_dropout(raw: Settings) -> MaskDropout | None:
    mask = raw.get("mask_token_id")
    if not raw.get("token_dropout", False):
        return None
    if mask is None:
        raise ConfigError("token_dropout needs mask_token_id")
    return MaskDropout(mask, _MASKED)


# A head for contacts of amino acids is left out, and what rotary positions compute; their folders may have a table of
# learned positions too, which the network has no use for.
_DROPPED = (
    *("embeddings.position_ids", "contact_head.*", "*.rotary_embeddings.inv_freq", "rotary_embeddings.inv_freq"),
    *("lm_head.*", "embeddings.position_embeddings.weight"),
)
FAMILIES = {
    "esm": Family(
        config,
        partial(
            bert.rules, norms=_NORMS, embed_norm="embeddings.layer_norm", final_norm="encoder.emb_layer_norm_after"
        ),
        "esm.",
        _DROPPED,
        tables=("embeddings.word_embeddings.weight",),
        **tied_names("esm"),
    )
}
