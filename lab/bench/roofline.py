"""The roofline model of a workload: its least time, from measured memory bandwidth and matrix rate.

A decode step reads once all weights but those of experts that none of its tokens takes, and the keys and values of its
sequences, and reads and writes the states of their recurrent layers; a matrix product takes two FLOPs per weight and
row. The roofline of a workload assumes an ideal engine: all requests run from the start, nothing is computed twice,
and each step takes the larger of its memory time and its arithmetic time. Source: Williams et al. 2009.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lab.bench.batches import Workload
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.attention import AttentionConfig
from triptych.model.config.cache import paged_specs, state_bytes
from triptych.model.config.formats import FORMATS, QUANTIZED_LAYERS
from triptych.model.config.layer import ExpertsConfig, LayerConfig, MLPConfig
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.linear.native import packed_linear
from triptych.model.native.library import Kind, Library, native

_READ_BYTES = 512 << 20  # larger than any cache
_SIZE = 2048  # of the square matrices
_PATIENCE_S = 1.0
_FORMATS = (("float32", Kind.F32), ("bfloat16", Kind.BF16), ("int8", Kind.INT8))  # from wide to narrow
NUMBER_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0}


def weight_bytes(name: str) -> float:
    """Return the bytes of a weight of the layers in the number format `name`, with its share of a group's scale."""
    return FORMATS[name].bits / 8 if name in FORMATS else NUMBER_BYTES[name]


def multiplied_as(name: str) -> str:
    """Return the number format whose rate bounds products in `name`: int8 for integers of any width."""
    return "int8" if name in QUANTIZED_LAYERS else name


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Holds the measured maximum bandwidth and matrix rate of this machine."""

    bytes_per_second: float
    flops_per_second: float
    kernel: str = ""  # the one with that rate

    @classmethod
    def measure(cls, number_format: str) -> Ceilings:
        """Measure with weights of `number_format` (float32, bfloat16, int8), by the fastest kernel for them."""
        data = torch.ones(_READ_BYTES // 4)
        seconds = {name: _best(product) for name, product in _kernels(number_format).items()}
        kernel = min(seconds, key=seconds.__getitem__)
        return cls(_READ_BYTES / _best(lambda: data.sum()), 2 * _SIZE**3 / seconds[kernel], kernel)


def _kernels(number_format: str) -> dict[str, Callable[[], object]]:
    """Yield matrix products by torch and by this project's library, in `number_format` and all wider formats.

    On a CPU that only emulates the narrow format, widening the weights first is faster.
    """
    library = native()
    found: dict[str, Callable[[], object]] = {}
    rows = torch.ones(_SIZE, _SIZE)
    for name, kind in _FORMATS[: 1 + [name for name, _ in _FORMATS].index(number_format)]:
        if kind is not Kind.INT8:  # torch has only private functions for integers
            a = rows.to(getattr(torch, name))
            found[f"torch {name}"] = partial(torch.matmul, a, a)
        if isinstance(library, Library):
            found[f"native {name}"] = partial(packed_linear(library, rows, None, kind), rows)
    return found


def _best(work: Callable[[], object], runs: int = 7) -> float:
    """Return the least seconds of `runs` runs, or of those that begin within `_PATIENCE_S`."""
    seconds: list[float] = []
    while len(seconds) < runs and sum(seconds) < _PATIENCE_S:
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


@dataclass(frozen=True, slots=True)
class ExpertCosts:
    """Counts the elements of one layer's experts."""

    count: int
    per_token: int
    elements: int  # of each

    def read(self, rows: int) -> float:
        """Return the expected elements of all experts that `rows` tokens take, each at random."""
        return self.count * (1 - (1 - self.per_token / self.count) ** rows) * self.elements


@dataclass(frozen=True, slots=True)
class Costs:
    """Counts the elements of a model that its matrix products read, and those that a token keeps in the KV cache."""

    encoder: int  # weights multiplied with each source token (or text token)
    decoder: int  # weights multiplied with each decoder token, without the head
    head: int
    cross: int  # weights multiplied once with each source token, for cross attention
    kv: Mapping[int | None, int]  # elements of a token, also of a source's, by the window of the layers that keep them
    experts: tuple[ExpertCosts, ...] = ()  # of the decoder's layers; those of one token are in `decoder` too
    state_bytes: int = 0  # of a sequence's recurrent layers
    positions: int = 1  # of an input: of a picture its patches

    @classmethod
    def of(cls, config: ModelConfig) -> Costs:
        if config.joint is not None and config.image is not None:  # only its pictures are measured
            return cls(_weights(config.vision), 0, 0, 0, {}, positions=config.image.num_tokens)
        decoder = config.decoder
        cross = 0
        if decoder is not None:
            kv_sizes = (layer.cross.kv_size for layer in decoder.layers if layer.cross is not None)
            cross = 2 * decoder.hidden_size * sum(kv_sizes)
        head = config.embedding.vocab_size * decoder.hidden_size if decoder is not None and config.head else 0
        return cls(
            encoder=_weights(config.encoder),
            decoder=_weights(decoder),
            head=head,
            cross=cross,
            kv=_kept(decoder),
            experts=_experts(decoder),
            state_bytes=state_bytes(decoder),
        )

    def weights_read(self, rows: int) -> float:
        """Return the weights that a step of `rows` decoding tokens reads: experts that no token takes are not read."""
        beyond = sum(one.read(rows) - one.per_token * one.elements for one in self.experts)
        return self.decoder + self.head + beyond

    def kv_elements(self, context: int) -> int:
        """Return the elements of keys and values that a token reads at the end of `context` tokens."""
        return sum(elements * min(context, window or context) for window, elements in self.kv.items())


def _kept(decoder: StackConfig | None) -> dict[int | None, int]:
    """Return the elements that a token keeps in the KV cache, by the window of the layers."""
    found: Counter[int | None] = Counter()
    for spec in paged_specs(decoder, "float32").values() if decoder is not None else ():
        found[spec.window] += spec.elements
    return dict(found)


def _experts(stack: StackConfig | None) -> tuple[ExpertCosts, ...]:
    """Return what the experts of each layer that has some are."""
    mixtures = () if stack is None else [layer.feed_forward for layer in stack.layers]
    return tuple(
        ExpertCosts(one.count, one.per_token, stack.hidden_size * _mlp_columns(one.mlp))
        for one in mixtures
        if stack is not None and isinstance(one, ExpertsConfig)
    )


def _weights(stack: StackConfig | None) -> int:
    """Return the elements of a stack's matrices, without cross attention's keys and values."""
    return 0 if stack is None else stack.hidden_size * sum(map(_columns, stack.layers))


def _columns(layer: LayerConfig) -> int:
    """Return the elements of a layer's matrices per dimension of its input; of experts only those of a token."""
    cross, mixer = layer.cross, layer.mixer
    if isinstance(mixer, AttentionConfig):
        columns = sum(mixer.projected_sizes) + mixer.query_size
    else:
        columns = mixer.channels + 2 * mixer.value_size + 2 * mixer.num_value_heads
    return columns + _mlp_columns(layer.feed_forward) + (2 * cross.query_size if cross is not None else 0)


def _mlp_columns(config: MLPConfig | ExpertsConfig | None) -> int:
    if config is None:
        return 0
    if isinstance(config, ExpertsConfig):
        return config.count + config.per_token * _mlp_columns(config.mlp) + _mlp_columns(config.shared)
    return config.intermediate_size * (3 if config.gated else 2)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Computes the least seconds of a model's work, with `weight_bytes` and `kv_bytes` per element."""

    costs: Costs
    ceilings: Ceilings
    weight_bytes: float
    kv_bytes: float

    @classmethod
    def of(cls, path: Path, ceilings: Ceilings, weight_bytes: float, kv_bytes: float) -> Roofline:
        return cls(Costs.of(read_checkpoint(path).config), ceilings, weight_bytes, kv_bytes)

    def step(self, rows: int, contexts: Sequence[int]) -> float:
        """Return the least seconds of a step of `rows` decoding tokens over cached sequences of these lengths."""
        weights = self.costs.decoder + self.costs.head
        read = (
            self.costs.weights_read(rows) * self.weight_bytes
            + sum(map(self.costs.kv_elements, contexts)) * self.kv_bytes
            + len(contexts) * 2 * self.costs.state_bytes
        )
        return max(read / self.ceilings.bytes_per_second, 2 * rows * weights / self.ceilings.flops_per_second)

    def workload(self, workload: Workload) -> float:
        flops = 2.0 * workload.input_tokens * self.costs.positions * (self.costs.encoder or self.costs.decoder)
        if self.costs.encoder and self.costs.decoder:
            flops += 2.0 * workload.input_tokens * self.costs.cross
        seconds = flops / self.ceilings.flops_per_second
        longest = max((ask.output_tokens for ask in workload.asks), default=0)
        for at in range(longest):
            alive = [len(ask.ids) + at for ask in workload.asks if ask.output_tokens > at]
            # Beams share their common blocks, which are read at least once.
            seconds += self.step(len(alive) * workload.beams, alive)
        return seconds
