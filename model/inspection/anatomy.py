"""What a checkpoint is made of and what it costs, from its configuration alone: no weight is read.

Costs are per token. A matrix of p parameters costs 2p FLOPs; attention over a context of c tokens costs 4 c H D a layer
(scores and weighted sum; Kaplan et al. 2020, table 1). The token table costs nothing to look up.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.config.model import ModelConfig, StackConfig
from model.network.parameter_counts import parameters_by_part

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of one token; over n tokens attention costs O(n^2 d), the rest O(n d^2)."""

    projections: int  # q, k, v and out, of self and cross attention
    attention: int  # scores and weighted sums
    feed_forward: int
    head: int

    @property
    def all(self) -> int:
        return self.projections + self.attention + self.feed_forward + self.head


@dataclass(frozen=True, slots=True)
class Anatomy:
    """A model's parts."""

    config: ModelConfig
    parameters: dict[str, int]  # by part, tied matrices once

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    def weight_bytes(self, dtype: str) -> int:
        return self.total_parameters * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Of the decoder's self attention; a source token of an encoder-decoder takes as much again."""
        return self.config.kv_elements_per_token * DTYPE_BYTES[dtype]

    def flops(self, stack: str, context: int) -> Flops:
        """One token through a stack (and the head, behind the last) with `context` tokens to attend to."""
        config = self.config.stacks[stack]
        shared = config.num_layers // config.distinct_layers
        projections = self.parameters[f"{stack} attention"] + self.parameters.get(f"{stack} cross attention", 0)
        head = 0
        if stack == "decoder" and self.config.head is not None:
            head = 2 * self.config.embedding.vocab_size * config.hidden_size
        return Flops(
            projections=2 * projections * shared,
            attention=4 * context * config.attention.query_size * config.num_layers,
            feed_forward=2 * self.parameters[f"{stack} MLP"] * shared,
            head=head,
        )

    def flops_per_token(self, stack: str, context: int) -> int:
        return self.flops(stack, context).all

    def flops_per_prompt_token(self, stack: str, length: int) -> float:
        """The mean over a prompt of `length` tokens: under causal attention a token sees half of it."""
        if not self.config.stacks[stack].causal:
            return self.flops_per_token(stack, length)
        return sum(self.flops_per_token(stack, position + 1) for position in range(length)) / length

    def sequences_that_fit(self, memory: int, length: int, dtype: str) -> int:
        """Decoder sequences of `length` tokens whose keys and values `memory` bytes hold."""
        return memory // (self.kv_bytes_per_token(dtype) * length) if self.config.decoder else 0


def dissect(config: ModelConfig) -> Anatomy:
    """Count the parameters of every part."""
    return Anatomy(config, parameters_by_part(config))


def describe_stack(config: StackConfig) -> dict[str, str]:
    """A stack in words, for people."""
    attention, mlp = config.attention, config.mlp
    norms = [name for name, on in (("pre", config.pre_norm), ("post", config.post_norm)) if on]
    kind = f"{config.norm.kind.value} {' and '.join(norms)}-norm" + (", final norm" if config.final_norm else "")
    heads = f"{attention.num_heads} of {attention.head_dim}"
    if attention.num_kv_heads != attention.num_heads:
        heads += f", {attention.num_kv_heads} key/value heads"
    sharing = f", {config.distinct_layers} distinct" if config.distinct_layers != config.num_layers else ""
    return {
        "layers": f"{config.num_layers}{sharing}",
        "width": str(config.hidden_size),
        "attention": ("causal" if config.causal else "bidirectional")
        + (f", window {attention.window}" if attention.window else "")
        + (" + cross" if config.cross_attention else ""),
        "heads": heads,
        "positions": config.position.kind.value.replace("_", " "),
        "norms": kind,
        "MLP": f"{mlp.intermediate_size}, {'gated ' if mlp.gated else ''}{mlp.activation.value.replace('_', ' ')}",
    }
