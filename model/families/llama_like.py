"""Llama with other biases, another MLP or norms of queries and keys.

Seed-OSS (ByteDance 2025); AFM (Arcee 2025) and Nemotron (NVIDIA 2024), which have a squared ReLU and no gate; HunYuan
(Tencent 2025); Apertus (Swiss AI 2025) with xIELU. Nemotron's norms are LayerNorms whose gains are stored as their
distance from 1, and half of each head's dimensions turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

from triptych.model.config.attention import NormConfig, NormKind
from triptych.model.config.layer import Activation, ExpertsConfig, MLPConfig
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError, shown
from triptych.model.families import llama
from triptych.model.families.table.decoders import ExpertNames, either_way, with_attention, with_layers
from triptych.model.families.table.helpers import refuse_unless
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, Rule, TensorRule


def seed_oss(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(attention_bias=True, head_dim=128, max_position_embeddings=524_288, num_key_value_heads=8)
    base = llama.config(raw, names)
    return with_attention(base, out_bias=bool(raw.get("attention_out_bias", False)))


def arcee(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(hidden_act="relu2", max_position_embeddings=4096, rms_norm_eps=1e-5)
    return _ungated(llama.config(raw, names))


def nemotron(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    norm = NormConfig(NormKind.LAYER, raw.get("norm_eps", 1e-5), unit_offset=True)
    raw = raw.otherwise(hidden_act="relu2", max_position_embeddings=4096, partial_rotary_factor=0.5)
    return _ungated(llama.config(raw, names, norm=norm, partial=True))


def hunyuan(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build HunYuan, whose queries and keys are normalised after they turn."""
    raw.get("eod_token_id"), raw.get("pretraining_tp")  # of training
    raw = raw.otherwise(rms_norm_eps=1e-5).but(pretraining_tp=1)
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind, alpha = scaling.get("rope_type", scaling.get("type")), scaling.get("alpha")
    if kind == "dynamic" and alpha:  # a base that is stretched once and for all
        dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0
        raw = raw.but(rope_parameters=None, rope_scaling=None, rope_theta=theta * alpha ** (dim / (dim - 2)))
    base = llama.config(raw, names)
    assert base.decoder is not None
    _read_own_code(raw, base)
    return with_attention(base, qk_norm=base.decoder.final_norm, turns_first=True)


# What the code in published folders of HunYuan reads beyond the reference's class, by the value that is computed.
_OWN_CODE = {
    **dict.fromkeys(("use_qk_norm", "use_rotary_pos_emb", "norm_topk_prob"), True),
    **dict.fromkeys(("use_cla", "use_mla", "position_embedding_xdrope", "group_limited_greedy", "mlp_bias"), False),
    **dict.fromkeys(("moe_drop_tokens", "moe_random_routing_dropped_token", "add_classification_head"), False),
    **{"norm_type": "rms", "num_shared_expert": 1, "routed_scaling_factor": 1.0, "moe_layer_num_skipped": 0},
}
# Of images, of classifiers that are not stored, and of what is switched off above.
_OWN_CODE_UNUSED = (
    *("im_*", "image_*", "text_*_id", "vit_*", "anyres_*", "video_*", "num_media_embeds", "mask_init_id"),
    *("class_num", "pool_type", "skip_cls_token", "dense_list", "pad_id", "cla_share_factor"),
    *("capacity_factor", "sep_token_id", "xdrope_section"),
)


def _read_own_code(raw: Settings, base: ModelConfig) -> None:
    assert base.decoder is not None
    layer = base.decoder.layers[0]
    served = {**_OWN_CODE, "use_mixed_mlp_moe": raw["model_type"] == "hunyuan_v1_moe"}
    served |= {"org_vocab_size": raw["vocab_size"], "attention_head_dim": layer.attention.head_dim}
    served["moe_intermediate_size"] = layer.mlp.intermediate_size
    for key, value in served.items():
        found = raw.get(key, value)  # or a list with one for each layer
        if found is not None and any(one != value for one in (found if isinstance(found, list) else [found])):
            raw.ignore(key, found)
    for key in raw:
        if any(fnmatchcase(key, pattern) for pattern in _OWN_CODE_UNUSED):
            raw.get(key)


def hunyuan_moe(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build HunYuan with experts, which are as wide as the one of all tokens."""
    base, count = hunyuan(raw, names), raw["num_hidden_layers"]
    assert base.decoder is not None
    mlp, chosen, experts = base.decoder.layers[0].mlp, raw.get("moe_topk", 1), raw.get("num_experts", 1)
    each = chosen if isinstance(chosen, list) else [chosen] * count
    if len(each) != count or not all(type(one) is int for one in each) or type(experts) is not int or experts < 2:
        raise ConfigError(
            f"moe_topk of a hunyuan_v1_moe must be a whole number or one for each of {count} layers, and num_experts a "
            f"whole number from 2 on, found {shown(chosen)} and {shown(experts)}"
        )
    kinds = {one: ExpertsConfig(experts, one, mlp, renormalised=True, shared=mlp) for one in set(each)}
    layers = (replace(layer, feed_forward=kinds[one]) for layer, one in zip(base.decoder.layers, each, strict=True))
    return replace(base, decoder=replace(base.decoder, layers=tuple(layers)))


def apertus(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, hidden_act="xielu")
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raw = raw.but(rope_parameters=_APERTUS_ROPE)
    raw = raw.otherwise(max_position_embeddings=65_536, rms_norm_eps=1e-5)
    base = llama.config(raw.but(hidden_act="silu"), names)
    assert base.decoder is not None
    mlp = MLPConfig(raw["intermediate_size"], Activation.IDENTITY, bias=False, xielu=True)
    return with_attention(with_layers(base, feed_forward=mlp), qk_norm=base.decoder.final_norm)


def apertus_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield Llama's rules, and those of the numbers of xIELU; two of them are stored without dimensions.

    Its `beta` is called a bias by then, as those of old norms are.
    """
    assert config.decoder is not None
    norms = {"attention_layernorm": "attn_norms.pre", "feedforward_layernorm": "mlp_norms.pre"}
    yield from llama.rules(config, norms=norms)
    shapes: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "bias": (), "eps": ()}
    for i in range(config.decoder.num_layers):
        for place, (name, shape) in enumerate(shapes.items()):
            target = f"decoder.layers.{i}.mlp.xielu"
            yield TensorRule(f"layers.{i}.mlp.act_fn.{name}", target, (place, place + 1), shape=shape)


_APERTUS_ROPE = dict(rope_type="llama3", rope_theta=12e6, factor=8.0, original_max_position_embeddings=8192)
_APERTUS_ROPE |= dict(low_freq_factor=1.0, high_freq_factor=4.0)


def _ungated(base: ModelConfig) -> ModelConfig:
    """Return the model with one projection up in every layer."""
    assert base.decoder is not None
    return with_layers(base, feed_forward=replace(base.decoder.layers[0].mlp, gated=False))


_HUNYUAN_NORMS = {".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm."}
_HUNYUAN_EXPERTS = ExpertNames("mlp.gate.wg", shared="mlp.shared_mlp")
FAMILIES = {
    "seed_oss": either_way(Family(seed_oss, llama.rules, "model.", llama.DROPPED)),
    "arcee": either_way(Family(arcee, llama.rules, "model.", llama.DROPPED)),
    "nemotron": either_way(Family(nemotron, llama.rules, "model.", llama.DROPPED)),
    "hunyuan_v1_dense": either_way(
        Family(
            hunyuan,
            llama.rules,
            "model.",
            llama.DROPPED,
            spelled=_HUNYUAN_NORMS,
        )
    ),
    "hunyuan_v1_moe": either_way(
        Family(
            hunyuan_moe,
            partial(llama.rules, experts=_HUNYUAN_EXPERTS),
            "model.",
            llama.DROPPED,
            fused=_HUNYUAN_EXPERTS.fused(),
            spelled=_HUNYUAN_NORMS,
        )
    ),
    "apertus": either_way(Family(apertus, apertus_rules, "model.", llama.DROPPED)),
}
