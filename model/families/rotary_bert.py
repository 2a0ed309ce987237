"""BERT with rotary positions: Nomic BERT, GTE (`new` on the Hub) and jina-embeddings-v3.

Nomic BERT (Nussbaum et al. 2024) and GTE (Zhang et al. 2024) have gated MLPs, the former no biases, the latter a rotary
base that may be stretched. jina-embeddings-v3 (Sturua et al. 2024) is XLM-RoBERTa in the rest, its first folder with
low-rank adapters. The code that comes with their folders is not run: tensors have the names that it gives them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind, RopeScaling, RotaryConfig
from triptych.model.config.layer import Activation, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import AdapterConfig, ClassifierInput, EmbeddingConfig, ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.errors import ConfigError
from triptych.model.families.table.heads import classifier, masked_head, tied_names
from triptych.model.families.table.helpers import activation, refuse_unless, repeat, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import number, rotary
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule
from triptych.model.families.table.stored_names import StoredNames


def _config(
    raw: Settings,
    names: Collection[str] | None,
    *,
    bias: bool,
    mlp: MLPConfig,
    position: RotaryConfig,
    head: Activation,
    pooler: bool = False,
) -> ModelConfig:
    """Build what the families have in common; `head` is of masked tokens, `pooler` whether a base model has one."""
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    dim, norm = split_width(size, heads), NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-12))
    attention = AttentionConfig(heads, heads, dim, dim**-0.5, bias, bias, position)
    encoder = StackConfig(
        layers=repeat(LayerConfig(attention, mlp, (Norms(post=norm),) * 2), raw["num_hidden_layers"]),
        hidden_size=size,
        causal=False,
        embed_norm=norm,
        token_types=raw["type_vocab_size"],
    )
    labels, embedding = classifier(raw, names), EmbeddingConfig(raw["vocab_size"], size)
    if names is not None:
        pooler = "pooler.dense.weight" in names
    elif labels is not None:
        pooler = labels.input is ClassifierInput.POOLER
    return ModelConfig(
        model_type=raw["model_type"],
        embedding=embedding,
        encoder=encoder,
        masked_head=masked_head(raw, names, embedding, head, norm),
        classifier=labels,
        pooler=pooler,
        max_positions=raw["max_position_embeddings"],
        pad_token_id=raw.get("pad_token_id", 0),
    )


def nomic(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build Nomic BERT from `transformers`' settings, or from those of the folder's own code, which are GPT-2's."""
    if "n_embd" in raw:
        raw = _nomic_settings(raw)
    raw = raw.otherwise(type_vocab_size=2, max_position_embeddings=2048)
    dim = split_width(raw["hidden_size"], raw["num_attention_heads"])
    refuse_unless(raw, head_dim=dim)
    act = activation(raw, "hidden_act", "silu")
    mlp = MLPConfig(raw["intermediate_size"], act, gated=True, bias=False)
    return _config(raw, names, bias=False, mlp=mlp, position=rotary(raw, dim, theta=1000.0), head=act)


_GATES = {"swiglu": "silu", "geglu": "gelu"}
_NOMIC_WITHOUT_EFFECT = (  # of training, of how that code computes, and of heads that it has not
    *("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "use_flash_attn", "use_xentropy"),
    *("pad_vocab_size_multiple", "max_trained_positions", "scale_attn_weights", "last_layer_subset"),
)


def _nomic_settings(raw: Settings) -> Settings:
    """Return the folder's settings by `transformers`' names.

    With `rotary_scaling_factor` that code stretches the rotary base for a text that is longer than those of training,
    by the text's own length. Such texts are refused: up to that length the base is the plain one.
    """
    refuse_unless(
        raw,
        **dict.fromkeys(("prenorm", "parallel_block", "parallel_block_tied_norm", "causal", "use_rms_norm"), False),
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "rotary_emb_interleaved"), False),
        rotary_emb_scale_base=None,
        rotary_emb_fraction=1.0,
    )
    for unused in _NOMIC_WITHOUT_EFFECT:
        raw.get(unused)
    gate = raw["activation_function"]
    if gate not in _GATES:
        raise ConfigError(f"activation_function {gate!r} is not served; served are {', '.join(_GATES)}")
    longest = raw["n_positions"]
    if raw.get("rotary_scaling_factor"):
        longest = min(longest, raw.get("max_trained_positions", 2048))
    return raw.but(
        hidden_size=raw["n_embd"],
        num_attention_heads=raw["n_head"],
        num_hidden_layers=raw["n_layer"],
        intermediate_size=raw.get("n_inner") or 4 * raw["n_embd"],
        hidden_act=_GATES[gate],
        layer_norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        max_position_embeddings=longest,
        rope_theta=number(raw, "rotary_emb_base", 1000),
    )


def gte(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build GTE from `transformers`' settings, or from those of `new`, the code of Alibaba's folders."""
    refuse_unless(
        raw,
        position_embedding_type="rope",
        layer_norm_type="layer_norm",
        pack_qkv=True,
        logn_attention_scale=False,
    )
    for unused in ("unpad_inputs", "use_memory_efficient_attention", "logn_attention_clip1"):
        raw.get(unused)
    theta = 160_000.0 if raw["model_type"] == "gte" else 10_000.0
    raw = raw.otherwise(type_vocab_size=1, max_position_embeddings=8192)
    dim = split_width(raw["hidden_size"], raw["num_attention_heads"])
    mlp = MLPConfig(raw["intermediate_size"], activation(raw, "hidden_act", "gelu"), True, bias=False, down_bias=True)
    return _config(raw, names, bias=True, mlp=mlp, position=_stretched(raw, dim, theta), head=Activation.GELU)


def _stretched(raw: Settings, dim: int, theta: float) -> RotaryConfig:
    """Return the rotary settings, also of the type that only `new` has."""
    scaling = raw.get("rope_scaling") or {}
    if scaling.get("type") != "ntk":
        return rotary(raw, dim, theta=theta)
    unknown = sorted(scaling.keys() - {"type", "factor"})
    if unknown:
        raise ConfigError(f"rope settings {', '.join(unknown)} are not known for rope type 'ntk'")
    return RotaryConfig(
        dim,
        float(raw.get("rope_theta", theta)),
        RopeScaling.NTK,
        factor=float(scaling["factor"]),
        original_max_positions=raw["max_position_embeddings"],
    )


_JINA_WITHOUT_EFFECT = (  # of training, of how that code computes, and what prompts and requests choose
    *("lora_dropout_p", "lora_main_params_trainable", "load_trained_adapters", "use_flash_attn", "use_reg_tokens"),
    *("emb_pooler", "matryoshka_dimensions", "truncate_dim", "task_instructions", "rotary_emb_base"),
)


def _adapters(raw: Settings, names: Collection[str] | None) -> AdapterConfig | None:
    """Return the adapters of the first folder; raises `ConfigError` for some without names."""
    tasks, rank = tuple(raw.get("lora_adaptations") or ()), raw.get("lora_rank", 4)
    alpha = raw.get("lora_alpha", 1)
    if not tasks and names is not None and any(".lora_" in name for name in names):
        raise ConfigError("lora_adaptations must name the adapters")
    return AdapterConfig(tasks, rank, alpha / rank) if tasks else None


def jina(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build jina-embeddings-v3 from `transformers`' settings, or from those of its own code, XLM-RoBERTa's."""
    refuse_unless(raw, position_embedding_type="rotary")
    for unused in _JINA_WITHOUT_EFFECT:
        raw.get(unused)
    if "rotary_emb_base" in raw:
        raw = raw.but(rope_theta=raw["rotary_emb_base"])
    raw = raw.otherwise(type_vocab_size=1, max_position_embeddings=8194, layer_norm_eps=1e-5, pad_token_id=1)
    dim = split_width(raw["hidden_size"], raw["num_attention_heads"])
    mlp = MLPConfig(raw["intermediate_size"], activation(raw, "hidden_act", "gelu"))
    position = rotary(raw, dim, theta=20_000.0)
    base = _config(raw, names, bias=True, mlp=mlp, position=position, head=Activation.GELU, pooler=True)
    assert base.max_positions is not None
    longest = base.max_positions - raw["pad_token_id"] - 1  # counted as RoBERTa's
    return replace(base, max_positions=longest, adapters=_adapters(raw, names))


_NOMIC = StoredNames(
    embed_norm="emb_ln",
    layer="encoder.layers.{}",
    attention=("attn.Wqkv", "attn.out_proj"),
    norms=("norm1", "norm2"),
    mlp=("mlp.fc12", "mlp.fc11", "mlp.fc2"),
)
_JINA = replace(_NOMIC, attention=("mixer.Wqkv", "mixer.out_proj"), mlp=("mlp.fc1", "mlp.fc2"))
_GTE = StoredNames(
    layer="encoder.layer.{}",
    attention=("attention.qkv_proj", "attention.o_proj"),
    norms=("attn_ln", "mlp_ln"),
)


def _gte_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of GTE, whose matrix has the gate after what it gates."""
    encoder = config.encoder_stack
    yield from _GTE.rules(config)
    for i, layer in enumerate(encoder.layers):
        here, there, inner = f"encoder.layer.{i}.mlp", f"encoder.layers.{i}.mlp", layer.mlp.intermediate_size
        first, second, shape = (0, inner), (inner, 2 * inner), (2 * inner, encoder.hidden_size)
        for rows, part in ((first, second), (second, first)):
            yield TensorRule(f"{here}.up_gate_proj.weight", f"{there}.up.weight", rows, shape=shape, part=part)
        yield LinearRule(f"{here}.down_proj", f"{there}.down")


_DROPPED = ("cls.*", "lm_head.*")
_GTE_FAMILY = Family(
    gte, _gte_rules, "gte.", _DROPPED, tables=("embeddings.word_embeddings.weight",), **tied_names("gte")
)
FAMILIES = {
    "nomic_bert": replace(
        _GTE_FAMILY,
        config=nomic,
        rules=_NOMIC.rules,
        prefix="nomic_bert.",
        **tied_names("nomic_bert"),
    ),
    "gte": _GTE_FAMILY,
    "new": replace(_GTE_FAMILY, prefix="new."),
    "jina_embeddings_v3": replace(
        _GTE_FAMILY,
        config=jina,
        rules=_JINA.rules,
        prefix="roberta.",
        dropped=(*_DROPPED, "*.parametrizations.weight.0.lora_?"),
        **tied_names("jina_embeddings_v3"),
    ),
}
