"""Runs the layers of a stack in C: describes its parameters and each step as C reads them, with one call a step.

The network's modules remain the definition: C reads their norms and packed matrices, and returns the same rows up to
rounding. What C cannot compute (XLNet's positions, an encoder's output without a cache), the modules compute over the
same packed matrices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from triptych.model.attention.base import AttentionMetadata
from triptych.model.attention.native import bias_width, fill_segments, kv_pages, shape_of
from triptych.model.cache.kv_cache import KVCache, whole_segments
from triptych.model.config.attention import (
    AlibiConfig,
    AttentionConfig,
    BucketBiasConfig,
    DisentangledConfig,
    NormConfig,
    NormKind,
    NormSpan,
    RotaryConfig,
)
from triptych.model.config.cache import pool_of_layers
from triptych.model.config.formats import QUANTIZED_LAYERS, NumberFormat, NumberKind
from triptych.model.config.layer import LayerConfig
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.native import packed_matrix
from triptych.model.native.library import ACTIVATIONS, KINDS, Library
from triptych.model.native.structures import (
    AttentionLayer,
    KVPages,
    LayerStates,
    Norm,
    RotaryTable,
    ScoreBias,
    Segments,
    StateSpan,
    SublayerNorms,
)
from triptych.model.native.structures import Layer as LayerData
from triptych.model.native.structures import Stack as StackData
from triptych.model.native.structures import Step as StepData
from triptych.model.network.bounds import reads_alike
from triptych.model.network.disentangled import DisentangledBias
from triptych.model.network.lora import AdapterRuns
from triptych.model.network.native_adapters import fill_runs
from triptych.model.network.native_coverage import unsupported_stack
from triptych.model.network.native_structures import (
    NativePositions,
    delta_structure,
    feed_forward_structure,
    fill_bounds,
    fill_delta,
    fill_feed_forward,
    layer_states,
)
from triptych.model.network.norms import HeadsNorm, OffsetLayerNorm, OffsetRMSNorm
from triptych.model.network.positions import AlibiBias, BucketBias

if TYPE_CHECKING:
    from triptych.model.network.inputs import CrossInput, StepContext
    from triptych.model.network.layer import Layer
    from triptych.model.network.norms import SublayerNorms as NormModules
    from triptych.model.network.stack import Stack
    from triptych.model.network.transformer import Transformer

_NORM_KINDS = {NormKind.LAYER: 1, NormKind.RMS: 2}
_SPANS = {NormSpan.HEAD: 0, NormSpan.OWN_GAINS: 1, NormSpan.ALL_HEADS: 2}
_NONE = -1  # of rotary tables, score biases and relative positions


def native_linears(
    config: ModelConfig,
    dtype: torch.dtype,
    library: Library | None,
    *,
    quantization: str = "none",
    batch_invariant: bool = False,
) -> LinearFactory:
    """Return the factory of projections for a network whose stacks run in C; without a library, only for their sizes.

    C computes the layers of stacks that it covers, and the head; a `quantization` of `QUANTIZED_LAYERS` keeps both in
    fewer bits. In a decoder, or with `batch_invariant`, torch multiplies no rows of several segments at once, because
    its order of additions depends on their number.
    """
    kind = NumberKind(str(dtype).removeprefix("torch."))
    own = NumberFormat(kind, kind)
    in_layers, in_head = QUANTIZED_LAYERS.get(quantization, (own, own))
    stacks = [name for name, stack in config.stacks.items() if NativeStack.unsupported(stack) is None]
    inside = [f"{stack}.{part}.*" for stack in stacks for part in ("layers", "convolution")]
    native = [
        *((name, in_layers) for name in inside),
        ("head", in_head),
        ("audio.*", own),
        ("patches.*", own),
        ("joint.*", own),
    ]
    around = ("project", "output", "layer_embeddings.project")
    native += [(f"{stack}.{part}", own) for stack in stacks for part in around if batch_invariant or stack == "decoder"]
    return LinearFactory(dtype, native=tuple(native), library=library, quantization=quantization)


def attach_native_stacks(model: Transformer) -> None:
    """Let C compute the layers of those stacks of a loaded model that it covers."""
    library = model.linear.library
    if library is not None:
        for stack in model.stacks.values():
            if NativeStack.unsupported(stack.config) is None and reads_alike(stack):
                stack.runner = NativeStack(stack, library)


class NativeStack:
    """A `StackRunner` that computes the layers of one stack and its final norm in C."""

    def __init__(self, stack: Stack, library: Library) -> None:
        self.library = library
        self.stack = stack
        self._rotaries = stack.config.rotaries
        self._num_pools = max(pool_of_layers(stack.config)) + 1
        self._kept: list[Tensor] = []
        self._cache: tuple[KVCache, ctypes.Array[KVPages], ctypes.Array[LayerStates]] | None = None
        self._score_biases: list[BucketBias | AlibiBias] = [] if stack.bias is None else [stack.bias]  # or of layers
        self._bias_arrays: list[Tensor] = []  # of each: `[H, width]`, or slopes `[H]`
        self._bias_width = 0
        dtype = stack.distinct_layers[0].mlp.up.dtype
        self._relative = NativePositions(stack, library, dtype)
        self._layers = [self._layer(layer) for layer in stack.distinct_layers]
        self._data = stack_structure(stack.config, self._layers)
        self._data.dtype = KINDS[dtype]
        self._data.tiles = library.tiles
        self._data.final = self._norm(stack.final_norm)
        self._multiply_adds = max(map(_multiply_adds, self._layers))

    @staticmethod
    def unsupported(config: StackConfig) -> str | None:
        """Return why C does not compute the stack; None if it computes each of its layers."""
        return unsupported_stack(config)

    def covers(self, cache: KVCache | None, cross: CrossInput | None) -> bool:
        """Return whether C can compute a step with this cache and encoder output."""
        if cache is None and self.stack.config.key_owners:
            return False
        return cross is None or (cross.encoder_output is None and cache is not None)

    def __call__(
        self,
        x: Tensor,  # [T, d] float32, contiguous
        context: StepContext,
        cache: KVCache | None,
        layers: range,
    ) -> None:
        """Take `x` through these layers in place, then through the final norm if the last layer is among them."""
        inputs, cross, pools = context.inputs, context.cross, self._num_pools
        step = StepData(rows=len(x), first_layer=layers.start, last_layer=layers.stop)
        segments = (Segments * (pools * (2 if self.stack.config.has_cross_attention else 1)))()
        step.num_segments, step.segments = len(segments), segments
        kept: list[Tensor] = []
        longest = max(inputs.metadata.kv_lens, default=0)
        for pool in range(pools):
            layer = cache.pages[cache.pools[pool].layers[0]] if cache is not None else None
            metadata = inputs.other_pools[pool - 1] if cache is None and inputs.other_pools and pool else None
            kept += fill_segments(segments[pool], metadata or inputs.metadata_of(layer), layer)
            if cross is not None:
                sources = cross.metadata_of(layer)
                kept += fill_segments(segments[pools + pool], sources, layer)
                longest = max(longest, *sources.kv_lens)
        if cache is not None:
            _, step.pages, step.states = self._layers_of(cache)
        if cross is not None and cross.queries:
            step.cross_queries = (ctypes.c_void_p * self.stack.config.num_layers)()
            for index, queries in cross.queries.items():
                step.cross_queries[index] = queries.data_ptr()
        if self.stack.config.recurrences:
            spans = inputs.states if cache is not None else whole_segments(inputs.metadata.q_lens)
            step.num_spans, step.spans = len(spans), (StateSpan * len(spans))(*(StateSpan(*span) for span in spans))
        if self._rotaries:
            step.rotary = self._rotary_tables(context, kept)
        if context.layer_vectors is not None:
            kept.append(context.layer_vectors.float().contiguous())
            step.vectors = kept[-1].data_ptr()
        if isinstance(inputs.adapters, AdapterRuns):
            fill_runs(step, self.stack, inputs.adapters)
        if self._score_biases:
            step.score_biases = self._make_biases(max(inputs.metadata.kv_lens))
        if self._relative:
            step.relative = self._relative.structures(max(inputs.metadata.kv_lens))
        self._run(step, x, inputs.metadata, longest)

    def _rotary_tables(self, context: StepContext, kept: list[Tensor]) -> ctypes.Array[RotaryTable]:
        """Return a step's cosines and sines; `kept` gets the tensors that must live as long as the step."""
        found = (RotaryTable * len(self._rotaries))()
        for place, rotary in enumerate(self._rotaries):
            cos, sin = (table.float().contiguous() for table in context.rotary(rotary))
            kept += (cos, sin)
            found[place] = RotaryTable(cos.data_ptr(), sin.data_ptr(), cos.shape[-1], rotary.interleaved)
            if rotary.growth:
                kept.append(context.query_growth(rotary))
                found[place].growth = kept[-1].data_ptr()
        return found

    def _run(self, step: StepData, x: Tensor, metadata: AttentionMetadata, longest: int) -> None:
        """Run a step of up to `longest` keys; torch computes the convolution parallel to the first layer."""
        convolution, last = self.stack.convolution, step.last_layer
        multiply_adds = len(x) * (self._multiply_adds + 2 * longest * self._data.hidden)
        if convolution is not None and step.first_layer == 0:
            before, step.last_layer = x.clone(), 1
            self.library.run_stack(self._data, step, x, multiply_adds)
            x.copy_(convolution(before, x, metadata))
            step.first_layer, step.last_layer = 1, last
        if step.first_layer < last:
            self.library.run_stack(self._data, step, x, multiply_adds)

    def _layer(self, layer: Layer) -> LayerData:
        data = layer_structure(layer.config, self.stack.config)
        mlp = data.mlp
        mixer_norms = self._norms(layer.attn_norms)
        if isinstance(layer.config.mixer, AttentionConfig):
            data.self.norms = mixer_norms
            self._fill_attention(data, layer)
        else:
            data.delta.contents.norms = mixer_norms
            fill_delta(data.delta.contents, layer.delta, self._norm, self._keep)
        mlp.norms = self._norms(layer.mlp_norms)
        if layer.config.one_norm:
            mlp.norms.pre = mixer_norms.pre
        fill_feed_forward(mlp, layer.mlp, self._norm, self._keep)
        if layer.embedding is not None:
            data.vectors.up, data.vectors.down = (
                packed_matrix(one) for one in (layer.embedding.gate, layer.embedding.project)
            )
            data.vectors.norms.output = self._norm(layer.embedding.norm)
        if layer.scale is not None:
            data.scale = self._keep(layer.scale)
        return data

    def _fill_attention(self, data: LayerData, layer: Layer) -> None:
        """Fill in a layer's attention except for its norms, and its cross attention if there is one."""
        attn = data.self
        if layer.config.attention.qk_norm is not None:
            attn.q_norm = self._norm(layer.attn.q_norm)
            if layer.config.attention.keys_of is None:
                attn.k_norm = self._norm(layer.attn.k_norm)
        if layer.attn.v_norm is not None:
            attn.v_norm = self._norm(layer.attn.v_norm)
        attn.input, attn.output = packed_matrix(layer.attn.qkv), packed_matrix(layer.attn.out)
        fill_bounds(attn.input, layer.attn.qkv_bounds, self._keep)
        fill_bounds(attn.output, layer.attn.out_bounds, self._keep)
        if layer.attn.sinks is not None:
            attn.shape.sinks = self._keep(layer.attn.sinks)
        if layer.bias is not None:  # of its own
            attn.score_bias = len(self._score_biases)
            self._score_biases.append(layer.bias)
        if isinstance(layer.relative, DisentangledBias):
            attn.relative = self._relative.of_layer(layer)
        if layer.cross is not None:
            data.cross.norms = self._norms(layer.cross_norms)
            data.cross.input = packed_matrix(layer.cross.q)
            data.cross.output = packed_matrix(layer.cross.out)

    def _norms(self, norms: NormModules) -> SublayerNorms:
        return SublayerNorms(self._norm(norms.pre), self._norm(norms.output), self._norm(norms.post))

    def _norm(self, module: nn.Module) -> Norm:
        if isinstance(module, nn.Identity):
            return Norm()
        assert isinstance(module, nn.LayerNorm | nn.RMSNorm | OffsetRMSNorm | OffsetLayerNorm | HeadsNorm)
        size = module.normalized_shape if isinstance(module, nn.RMSNorm | nn.LayerNorm) else ()
        gain = torch.ones(size) if module.weight is None else module.weight.detach().float()
        offset = isinstance(module, OffsetRMSNorm | OffsetLayerNorm)
        self._kept.append((1.0 + gain if offset else gain).contiguous())
        kind = _NORM_KINDS[module.kind if isinstance(module, HeadsNorm) else _kind_of(module)]
        norm = Norm(kind=kind, eps=module.eps, weight=self._kept[-1].data_ptr())
        shift = getattr(module, "bias", None)
        if shift is not None:
            self._kept.append(shift.detach().float().contiguous())
            norm.bias = self._kept[-1].data_ptr()
        return norm

    def _keep(self, tensor: Tensor) -> int:
        """Keep a tensor in float32 as long as the stack; return its address."""
        self._kept.append(tensor.detach().float().contiguous())
        return self._kept[-1].data_ptr()

    def _layers_of(self, cache: KVCache) -> tuple[KVCache, ctypes.Array[KVPages], ctypes.Array[LayerStates]]:
        """Return a cache with the pages or the states of each layer."""
        if self._cache is None or self._cache[0] is not cache:
            count = self.stack.config.num_layers
            pages, states = (KVPages * count)(), (LayerStates * count)()
            for index, layer in cache.pages.items():
                pages[index] = kv_pages(layer)
            for index, kept in cache.states.items():
                states[index] = layer_states(kept)
            self._cache = (cache, pages, states)
        return self._cache

    def _make_biases(self, longest: int) -> ctypes.Array[ScoreBias]:
        """Return what is added to scores, for keys up to `longest`.

        Tables are by distance `[H, width]`, `key - query` at `width / 2 + key - query`.
        """
        width = bias_width(longest)
        if self._bias_width < width:
            distances, self._bias_width = torch.arange(-width // 2, width // 2), width
            self._bias_arrays = [
                bias.weight[bias.bucket(distances)].float().T.contiguous()
                if isinstance(bias, BucketBias)
                else bias.slopes(distances.device)
                for bias in self._score_biases
            ]
        found = (ScoreBias * len(self._score_biases))()
        for place, (bias, array) in enumerate(zip(self._score_biases, self._bias_arrays, strict=True)):
            if isinstance(bias, BucketBias):
                found[place] = ScoreBias(array.data_ptr(), array.shape[1])
            else:
                found[place] = ScoreBias(slopes=array.data_ptr())
        return found


def layer_structure(config: LayerConfig, stack: StackConfig) -> LayerData:
    """Return a layer without weights: what it computes, which norms it has, and which of a step's arrays it reads."""
    cross, pools = config.cross, pool_of_layers(stack)
    pool = pools[stack.layers.index(config)]
    layer = LayerData(mlp=feed_forward_structure(config.feed_forward))
    layer.parallel, layer.has_cross = config.parallel, cross is not None
    if isinstance(config.mixer, AttentionConfig):
        layer.self = _attention_structure(config.mixer, stack, pool)
    else:
        layer.delta = ctypes.pointer(delta_structure(config.mixer))
    sublayers = [layer.self if not layer.delta else layer.delta.contents, layer.mlp]
    if cross is not None:
        layer.cross = AttentionLayer(
            shape=shape_of(cross), segments=max(pools) + 1 + pool, rotary=_NONE, score_bias=_NONE, relative=_NONE
        )
        sublayers.insert(1, layer.cross)
    for sublayer, norms in zip(sublayers, config.norms, strict=True):
        sublayer.scale = config.residual_scale
        sublayer.norms = SublayerNorms(*(Norm(kind=_kind(norm)) for norm in (norms.pre, norms.output, norms.post)))
    if config.one_norm:
        layer.mlp.norms.pre = sublayers[0].norms.pre
    if (vectors := config.embedding) is not None:
        layer.has_vectors, layer.vectors.scale = True, 1.0
        layer.vectors.activation = ACTIVATIONS[vectors.activation]
        layer.vectors.norms.output = Norm(kind=_kind(vectors.norm))
    return layer


def _attention_structure(attention: AttentionConfig, stack: StackConfig, pool: int) -> AttentionLayer:
    attn = AttentionLayer(shape=shape_of(attention), segments=pool, rotary=_NONE, score_bias=_NONE, relative=_NONE)
    attn.output_gate = attention.output_gate
    if isinstance(attention.position, RotaryConfig):
        attn.rotary = stack.rotaries.index(attention.position)
    if isinstance(attention.position, BucketBiasConfig | AlibiConfig):
        attn.score_bias = 0  # the table of the stack
    attn.norm_span = _SPANS[attention.qk_norm_span]
    attn.keys_as_values, attn.reads_keys = attention.keys_as_values, attention.keys_of is not None
    if isinstance(attention.position, DisentangledConfig):
        attn.relative = 0  # of whichever layer
    return attn


def _kind_of(module: nn.Module) -> NormKind:
    return NormKind.LAYER if isinstance(module, nn.LayerNorm | OffsetLayerNorm) else NormKind.RMS


def _kind(norm: NormConfig | None) -> int:
    return 0 if norm is None else _NORM_KINDS[norm.kind]


def _multiply_adds(layer: LayerData) -> int:
    """Count the multiply-adds that a row takes in the products of a layer, those of the experts it chooses included."""
    mlp, of_experts = layer.mlp, 0
    matrices = [mlp.up, mlp.down, layer.vectors.up, layer.vectors.down, layer.cross.input, layer.cross.output]
    if layer.delta:
        matrices += [layer.delta.contents.input, layer.delta.contents.output]
    else:
        matrices += [layer.self.input, layer.self.output]
    if mlp.experts:
        experts = mlp.experts.contents
        one = experts.experts[0]
        of_experts = (experts.active + experts.has_shared) * (one.up.n * one.up.k + one.down.n * one.down.k)
    return of_experts + sum(matrix.n * matrix.k for matrix in matrices)


def stack_structure(config: StackConfig, layers: Sequence[LayerData]) -> StackData:
    """A stack over the structures of its distinct layers, which must stay where they are."""
    pointers = (ctypes.POINTER(LayerData) * config.num_layers)(*(ctypes.pointer(layers[i]) for i in config.weights_of))
    return StackData(hidden=config.hidden_size, num_layers=config.num_layers, layers=pointers)
