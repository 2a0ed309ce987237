"""Weights of torch.nn.Transformer: the encoder-decoder of 2017 (Vaswani et al.) trained with PyTorch.

config.json has `"model_type": "transformer"`, the arguments of `nn.Transformer` by their names, `vocab_size`,
`scale_embedding` and the special ids. The tensors are the module's state_dict under `transformer.`, and
`embedding.weight`, `generator.weight` and `generator.bias`; without `generator.weight` the head is tied. Positions are
the paper's sinusoids, sine and cosine interleaved; they are computed, not stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import EmbeddingConfig, HeadConfig, ModelConfig
from triptych.model.config.stack import PositionConfig, PositionKind, StackConfig
from triptych.model.families.table.helpers import activation, affine, ids, refuse_unless, repeat, split_width, tied
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule

_HEAD = "generator.weight"


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, bias=True, batch_first=raw.get("batch_first"))
    size, heads = raw.get("d_model", 512), raw.get("nhead", 8)
    dim = split_width(size, heads)
    attention = AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=True, out_bias=True)
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-5))
    norms = Norms(pre=norm) if raw.get("norm_first", False) else Norms(post=norm)

    def stack(side: str) -> StackConfig:
        layer = LayerConfig(
            mixer=attention,
            cross=attention if side == "decoder" else None,
            feed_forward=MLPConfig(raw.get("dim_feedforward", 2048), activation(raw, "activation", "relu")),
            norms=(norms,) * (3 if side == "decoder" else 2),
        )
        return StackConfig(
            layers=repeat(layer, raw.get(f"num_{side}_layers", 6)),
            hidden_size=size,
            causal=side == "decoder",
            position=PositionConfig(PositionKind.SINUSOIDAL, interleaved=True),
            final_norm=norm,  # nn.Transformer has final norms with either norm_first
        )

    return ModelConfig(
        model_type="transformer",
        embedding=EmbeddingConfig(
            raw["vocab_size"], size, scale=size**0.5 if raw.get("scale_embedding", True) else 1.0
        ),
        encoder=stack("encoder"),
        decoder=stack("decoder"),
        head=HeadConfig(tied=tied(raw, names, _HEAD), bias=names is None or "generator.bias" in names),
        max_positions=raw.get("max_position_embeddings"),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=ids(raw.get("eos_token_id")),
        pad_token_id=raw.get("pad_token_id"),
        decoder_start_token_id=raw.get("decoder_start_token_id", raw.get("bos_token_id")),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.head is not None
    yield TensorRule("embedding.weight", "tokens.weight")
    for side, stack in config.stacks.items():
        for i, layer in enumerate(stack.layers):
            here, there = f"transformer.{side}.layers.{i}", f"{side}.layers.{i}"
            yield from _packed(f"{here}.self_attn.in_proj_", f"{there}.attn.qkv.")
            yield LinearRule(f"{here}.self_attn.out_proj", f"{there}.attn.out")
            sublayers = ["attn", "mlp"]
            if layer.cross is not None:
                sublayers.insert(1, "cross")
                yield from _cross(f"{here}.multihead_attn", f"{there}.cross", stack)
            slot = "pre" if layer.norms[0].pre else "post"
            for number, sublayer in enumerate(sublayers, 1):
                yield from affine(f"{here}.norm{number}", f"{there}.{sublayer}_norms.{slot}")
            yield LinearRule(f"{here}.linear1", f"{there}.mlp.up")
            yield LinearRule(f"{here}.linear2", f"{there}.mlp.down")
        yield from affine(f"transformer.{side}.norm", f"{side}.final_norm")
    if config.head.bias:
        yield TensorRule("generator.bias", "head.bias")
    if not config.head.tied:
        yield TensorRule(_HEAD, "head.weight")


def _packed(source: str, target: str) -> Iterator[Rule]:
    for kind in ("weight", "bias"):
        yield TensorRule(f"{source}{kind}", f"{target}{kind}")


def _cross(source: str, target: str, stack: StackConfig) -> Iterator[Rule]:
    """Split the stored matrix of q, k and v: q is separate, since it reads another sequence than k and v."""
    size = stack.hidden_size
    for kind, shape in (("weight", (3 * size, size)), ("bias", (3 * size,))):
        yield TensorRule(f"{source}.in_proj_{kind}", f"{target}.q.{kind}", shape=shape, part=(0, size))
        yield TensorRule(f"{source}.in_proj_{kind}", f"{target}.kv.{kind}", shape=shape, part=(size, 3 * size))
    yield LinearRule(f"{source}.out_proj", f"{target}.out")


FAMILIES = {"transformer": Family(config, rules, tables=("embedding.weight",), heads=(_HEAD,))}
