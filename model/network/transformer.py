"""The one Transformer: every family is this network under another `ModelConfig`.

Everything is packed: `[T]` token ids of all sequences of a step, one after the other, and metadata that says where each
begins. The network keeps no state between calls; keys and values live in the pool that is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from triptych.model.attention.base import AttentionBackend
from triptych.model.attention.native import write_rows
from triptych.model.cache.kv_cache import KVCache
from triptych.model.config.model import (
    ClassifierConfig,
    ClassifierInput,
    EmbeddingConfig,
    MaskedHeadConfig,
    ModelConfig,
)
from triptych.model.config.sharding import Shard
from triptych.model.config.stack import StackConfig
from triptych.model.linear.base import Linear, LinearSpec, Part, Split
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.native import NativeLinear
from triptych.model.native.library import KINDS
from triptych.model.network.activation_dump import dump_to
from triptych.model.network.activations import ACTIVATIONS
from triptych.model.network.adapters import RowAdapters
from triptych.model.network.embeddings import (
    AudioEmbedding,
    PackedTable,
    PatchEmbedding,
    TokenTable,
    token_table,
    without_masked,
)
from triptych.model.network.inputs import CrossInput, StackInput
from triptych.model.network.joint_space import JointSpace
from triptych.model.network.lora import LoraAdapter
from triptych.model.network.norms import build_norm
from triptych.model.network.pictures import PicturePass, Pictures
from triptych.model.network.stack import Stack, StackPass


class Transformer(nn.Module):
    """Encoder, decoder or both over one token table.

    `config` is the whole model's. One of several ranks holds the same network, smaller: its sums over ranks (after
    attention, cross attention, MLP and token table) make hidden states whole and equal on every rank, and its logits
    are put together from each rank's part of the vocabulary (Shoeybi et al. 2019, figure 3). Then every rank must make
    the same calls in the same order.
    """

    can_pause = True  # passes may be interrupted between layers

    def __init__(self, config: ModelConfig, backend: AttentionBackend, linear: LinearFactory) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self.lora: dict[str, LoraAdapter] = {}  # adapters that requests may name, by these names
        linear = self.linear = replace(linear, stored_as=config.stored_as)
        own = linear.shard.config(config)  # what this rank holds
        size = config.embedding.embedding_size
        vocabulary = [
            Shard(rank, linear.shard.size).shard_range(config.embedding.vocab_size) for rank in range(linear.shard.size)
        ]
        self.vocabulary = vocabulary  # of each rank
        self.tokens: TokenTable | PackedTable | None = self._table(config.embedding)
        self.source_tokens = self._table(config.source_embedding)
        self.patches: PatchEmbedding | None = None
        if config.image is not None:
            width = size if config.vision is None else config.vision.hidden_size
            self.patches = PatchEmbedding(config.image, width, linear.within("patches"))
        self.audio = AudioEmbedding(config.audio, size, linear.within("audio")) if config.audio is not None else None
        self.encoder = self._stack("encoder", own.encoder)
        self.decoder = self._stack("decoder", own.decoder)
        self.vision: Stack | None = None
        if config.vision is not None:
            embedding = EmbeddingConfig(0, config.vision.hidden_size)
            self.vision = Stack(config.vision, embedding, linear.within("vision"))
        self.joint = JointSpace(config, config.joint, linear.within("joint")) if config.joint is not None else None
        self.tower: Stack | None = None
        self.pictures: Pictures | None = None
        if config.pictures is not None:
            tower, width = config.pictures.tower, size if config.decoder is None else config.decoder.hidden_size
            self.tower = Stack(tower, EmbeddingConfig(0, tower.hidden_size), linear.within("tower"))
            self.pictures = Pictures(config.pictures, width, linear.within("pictures"))
        last = config.decoder or config.encoder
        assert last is not None
        hidden_size = last.output_width
        self.head = self._head(own, hidden_size) if config.head is not None else None
        packed = self._head_with_table()
        if packed is not None:
            self.tokens = PackedTable(packed)
        self._output_width = hidden_size
        self.classifier = None if config.classifier is None else self._classifier(config.classifier)
        self.masked_head: MaskedHead | None = None
        if config.masked_head is not None:
            table, within = self.tokens, linear.within("masked_head")
            assert isinstance(table, TokenTable)
            size = own.embedding.vocab_size
            self.masked_head = MaskedHead(config.masked_head, hidden_size, size, within, lambda: table.weight)
        self.pooler = linear(LinearSpec("pooler", hidden_size, (Part(hidden_size),))) if config.pooler else None

    def _classifier(self, config: ClassifierConfig) -> Classifier:
        return Classifier(config, self._output_width, self.linear.within("classifier"))

    def new_classifier(self) -> Classifier:
        """Return another classifier of the same kind, without storage."""
        assert self.config.classifier is not None
        with torch.device("meta"):
            return self._classifier(self.config.classifier)

    def _table(self, embedding: EmbeddingConfig | None) -> TokenTable | None:
        """Return a token table, or this rank's part of it."""
        if embedding is None or not embedding.vocab_size:
            return None
        return token_table(embedding.vocab_size, embedding.embedding_size, self.linear.collective)

    def _stack(self, name: str, config: StackConfig | None) -> Stack | None:
        if config is None:
            return None
        own = self.config.source_embedding if name == "encoder" else None
        encoder, linear = self.config.encoder, self.linear.within(name)
        source_size = encoder.hidden_size if encoder is not None else None
        return Stack(config, own or self.config.embedding, linear, source_size)

    def _head(self, config: ModelConfig, hidden_size: int) -> Linear:
        """Return the projection of hidden states to logits; if it is tied, its matrix is the token table."""
        head, table = config.head, self.tokens
        assert head is not None and isinstance(table, TokenTable)
        spec = LinearSpec(
            "head",
            hidden_size,
            (Part(config.embedding.vocab_size),),
            head.bias,
            Split.OUTPUTS,
            tied_to="tokens.weight" if head.tied else None,
            softcap=head.softcap,
        )
        return self.linear(spec, lambda: table.weight)

    def _head_with_table(self) -> NativeLinear | None:
        """Return the head, if its packed matrix has the rows of the token table, which is then not kept."""
        head, others = self.config.head, self.config.masked_head
        if head is None or not (head.tied or head.repeats_table) or (others is not None and others.tied):
            return None
        return self.head if isinstance(self.head, NativeLinear) and self.head.keeps_rows else None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        parameter = next(self.parameters(), None)  # OLMo has none but packed matrices, which are on a CPU
        return self.linear.device if parameter is None else parameter.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the network computes in; of quantised matrices, that of their inputs and outputs."""
        others = ("tokens.weight", "weight_scale")
        floats = (parameter for name, parameter in self.named_parameters() if not name.endswith(others))
        wide = (parameter.dtype for parameter in floats if parameter.dtype is not torch.float8_e4m3fn)
        return next(wide, self.linear.dtype)  # OLMo has no parameters but packed matrices

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks, by their names in the configuration."""
        found = {"encoder": self.encoder, "decoder": self.decoder, "vision": self.vision, "tower": self.tower}
        return {name: stack for name, stack in found.items() if stack is not None}

    def dump_activations(self, folder: Path) -> None:
        """Write every later pass through a stack to a file in `folder`, which is created."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, stack in self.stacks.items():
            stack.dump = dump_to(folder, name)

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        assert self.tokens is not None
        vectors: Tensor = self.tokens(input_ids)  # [T, E]
        return vectors * self.config.embedding.scale if self.config.embedding.scale != 1.0 else vectors

    def _embed_source(self, input_ids: Tensor) -> Tensor:
        """Return the vectors `[T, E]` of tokens that the encoder reads, or the decoder of a model without one."""
        own, table = self.config.source_embedding, self.source_tokens
        return self.embed_tokens(input_ids) if own is None or table is None else table(input_ids) * own.scale

    def encode(self, inputs: StackInput) -> Tensor:
        """Return the encoder's hidden states `[T, d]`; each token attends to its whole segment."""
        assert self.encoder is not None
        return self.encoder(self._embedded(inputs), inputs, self.backend)

    def encode_images(self, inputs: StackInput) -> Tensor:
        """Return the hidden states `[T, d]` of images, in a model with a stack for images."""
        assert self.vision is not None
        return self.vision(self._embedded(inputs), inputs, self.backend)

    def begin_picture(self, pixels: Tensor, adapters: RowAdapters | None = None) -> PicturePass:
        """Return a pass, as `begin` does, of a picture's normalised pixels `[C, H, W]` to rows for the decoder."""
        assert self.pictures is not None
        assert self.tower is not None
        return self.pictures.begin(self.tower, pixels.to(self.dtype), self.backend, adapters)

    def begin(self, inputs: StackInput) -> StackPass:
        """Return a pass through the stack that reads the inputs, without a cache; it may pause between layers."""
        stack = self.vision if inputs.pixels is not None and self.vision is not None else self.encoder or self.decoder
        assert stack is not None
        return StackPass(stack, self._embedded(inputs), inputs, self.backend)

    def begin_decoder(self, inputs: StackInput, cross: CrossInput) -> StackPass:
        """Return a pass, as `begin` does, through the decoder over the given encoder output."""
        assert self.decoder is not None
        return StackPass(self.decoder, self.embed_tokens(inputs.input_ids), inputs, self.backend, None, cross)

    def _embedded(self, inputs: StackInput) -> Tensor:
        """Return the vectors `[T, E]` of tokens, image patches or frames of sound."""
        if inputs.frames is not None:
            assert self.audio is not None
            return self.audio(inputs.frames.to(self.dtype))
        if inputs.pixels is None:
            vectors = self._embed_source(inputs.input_ids)
            if (dropout := self.config.embedding.mask_dropout) is not None:
                vectors = without_masked(vectors, inputs, dropout)
            adapters = inputs.adapters
            return vectors if adapters is None else adapters.embedded("tokens", inputs.input_ids, vectors)
        assert self.patches is not None
        pixels = inputs.pixels
        if isinstance(pixels, Tensor):
            return self.patches(pixels.to(self.dtype))
        return self.patches([one.to(self.dtype) for one in pixels])

    def write_encoder_output(
        self, encoder_output: Tensor, cache: KVCache, slots: Tensor, adapters: RowAdapters | None = None
    ) -> None:
        """Write each layer's cross keys and values of `encoder_output` `[S, d]` to `slots` `[P, S]` of its pool."""
        assert self.decoder is not None
        library = self.linear.library
        for index, layer_cache in cache.pages.items():
            cross, at = self.decoder.layer(index).cross, slots[layer_cache.pool]
            assert cross is not None
            if library is not None and layer_cache.keys.dtype in KINDS:
                write_rows(library, layer_cache, at, cross.keys_and_values(encoder_output, adapters), cross.config)
            else:
                layer_cache.write(at, *cross.project(encoder_output, adapters))

    def decode(self, inputs: StackInput, cache: KVCache | None = None, cross: CrossInput | None = None) -> Tensor:
        """Return the decoder's hidden states `[T, d]`."""
        assert self.decoder is not None
        x = self.embed_tokens(inputs.input_ids)
        if inputs.given is not None:
            x[inputs.given.rows] = inputs.given.vectors.to(x.dtype)
        return self.decoder(x, inputs, self.backend, cache, cross)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[N, V]` of hidden states `[N, d]`."""
        logits, collective = self.partial_logits(hidden), self.linear.collective
        return logits if collective is None else collective.concatenate(logits, self.vocabulary)

    def partial_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states `[N, d]` over this rank's part of the vocabulary."""
        assert self.head is not None and self.config.head is not None
        scale = self.config.head.scale
        return self.head(hidden * scale if scale != 1.0 else hidden)

    def masked_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[N, V]` of masked tokens' hidden states `[N, d]`."""
        assert self.masked_head is not None
        logits, collective = self.masked_head(hidden.to(self.dtype)), self.linear.collective
        return logits if collective is None else collective.concatenate(logits, self.vocabulary)

    def pool(self, first: Tensor, adapter: LoraAdapter | None = None) -> Tensor:
        """Return the pooler's `tanh(W x + b)` of first tokens `[B, d]`."""
        assert self.pooler is not None
        first = first.to(self.dtype)
        pooled: Tensor = self.pooler(first)
        return torch.tanh(pooled if adapter is None else adapter.added("pooler", first, pooled))

    def classify(self, hidden: Tensor, adapter: LoraAdapter | None = None) -> Tensor:
        """Return the scores of labels for a segment `[L, d]`: `[1, labels]`, or `[L, labels]` if tokens are classified.

        A segment whose end-of-sequence token is classified ends there. An adapter may have a classifier of its own.
        """
        assert self.config.classifier is not None
        classifier = self._classifier_of(adapter)
        source = self.config.classifier.input
        hidden = hidden.to(self.dtype)  # stacks in C give float32
        if source is ClassifierInput.EVERY:
            return classifier(hidden)
        if source is ClassifierInput.ALL:
            return classifier(hidden).mean(dim=0, keepdim=True)
        if source is ClassifierInput.MEAN:
            return classifier(hidden.mean(dim=0, keepdim=True))
        if source is ClassifierInput.FIRST_TWO:
            return classifier(hidden[:2])
        if source is ClassifierInput.FIRST_AND_MEAN:
            assert self.config.image is not None
            patches = hidden[self.config.image.first_tokens :].mean(dim=0, keepdim=True)
            return classifier(torch.cat((hidden[:1], patches), dim=1))
        assert self.classified_row is not None
        return self.classify_rows(hidden[self.classified_row][None], adapter)

    def _classifier_of(self, adapter: LoraAdapter | None) -> Callable[[Tensor], Tensor]:
        found = self.classifier if adapter is None or adapter.classifier is None else adapter.classifier
        assert found is not None
        return found

    @property
    def classified_row(self) -> int | None:
        """The row of a segment that the classifier reads; None: there is no classifier, or it reads several rows."""
        source = self.config.classifier.input if self.config.classifier is not None else None
        if source in (ClassifierInput.LAST, ClassifierInput.LAST_UNPADDED, ClassifierInput.EOS):
            return -1
        return 0 if source in (ClassifierInput.FIRST, ClassifierInput.POOLER) else None

    def classify_rows(self, rows: Tensor, adapter: LoraAdapter | None = None) -> Tensor:
        """Return the scores of labels `[N, labels]` for each segment's `classified_row`, `[N, d]`."""
        assert self.config.classifier is not None
        rows, classifier = rows.to(self.dtype), self._classifier_of(adapter)
        return classifier(self.pool(rows, adapter) if self.config.classifier.input is ClassifierInput.POOLER else rows)


class Classifier(nn.Module):
    """The head that turns vectors into scores of labels."""

    def __init__(self, config: ClassifierConfig, hidden_size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.dense, self.activation = None, None
        if config.dense is not None:
            self.dense = linear(LinearSpec("dense", hidden_size, (Part(hidden_size),), config.dense_bias))
            self.activation = ACTIVATIONS[config.dense]
        self.norm = build_norm(config.norm, hidden_size)
        self.compares = len(config.tokens) == 2
        outputs = (Part(len(config.tokens) or len(config.labels)),)
        width = hidden_size * (2 if config.input is ClassifierInput.FIRST_AND_MEAN else 1)
        self.out = linear(LinearSpec("out", width, outputs, config.bias))
        self.second: Linear | None = None
        if config.input is ClassifierInput.FIRST_TWO:
            self.second = linear(LinearSpec("second", hidden_size, outputs, config.bias))

    def forward(self, x: Tensor) -> Tensor:  # [N, d] -> [N, labels]
        if self.dense is not None and self.activation is not None:
            x = self.norm(self.activation(self.dense(x)))
        if self.second is not None:
            return (self.out(x[:1]) + self.second(x[1:])) / 2
        scores: Tensor = self.out(x)
        return scores[:, :1] - scores[:, 1:] if self.compares else scores


class MaskedHead(nn.Module):
    """The head of masked tokens: hidden states to logits, or to a rank's part of them; `table` is the token table."""

    def __init__(
        self,
        config: MaskedHeadConfig,
        hidden_size: int,
        vocab_size: int,
        linear: LinearFactory,
        table: Callable[[], Tensor],
    ) -> None:
        super().__init__()
        self.dense, self.activation = None, None
        if config.activation is not None:
            self.dense = linear(LinearSpec("dense", hidden_size, (Part(config.size),), config.dense_bias))
            self.activation = ACTIVATIONS[config.activation]
        self.norm = build_norm(config.norm, config.size)
        tied_to = "tokens.weight" if config.tied else None
        out = LinearSpec("out", config.size, (Part(vocab_size),), config.bias, Split.OUTPUTS, tied_to=tied_to)
        self.out = linear(out, table)

    def forward(self, x: Tensor) -> Tensor:  # [N, d] -> [N, V]
        if self.dense is not None and self.activation is not None:
            x = self.norm(self.activation(self.dense(x)))
        logits: Tensor = self.out(x)
        return logits
