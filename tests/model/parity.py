"""Helpers that compare our results with those of `transformers`: packed with other lengths, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tests.model.checkpoints import CPU, START, prompt, reference_input, reference_logits, saved, source_of
from triptych.model.api.request import Source
from triptych.model.attention.base import AttentionMetadata
from triptych.model.config.model import ImageConfig, ModelConfig
from triptych.model.engine.execution.sources import source_input
from triptych.model.network.inputs import CrossInput, StackInput, packed_input
from triptych.model.network.transformer import Transformer

LENGTHS = (5, 1, 23, 5, 12)  # equal and unequal neighbours, and a single token
SOURCE_LENGTHS = (7, 19, 1, 7, 30)
# Kinds that together have each form, position scheme, norm and head: for tests that do not depend on a family's table.
MECHANISMS = (
    *("llama-gqa", "llama-yarn", "mistral", "qwen3", "phi3", "gemma", "gemma2", "gemma3", "gpt2", "gpt-neox"),
    *("granite", "olmo2", "cohere", "gptj", "bloom", "mixtral", "qwen2-moe", "gpt-oss", "qwen3-next"),
    *("marian", "bart", "m2m-100", "t5-relu", "t5-gated-untied", "umt5", "whisper"),
    *("bert", "albert", "mpnet", "xlnet", "vit", "deberta-v2-unshared", "modernbert"),
    *("bert-token", "roberta-sequence", "llama-sequence", "vit-image"),
)


def decoder_prompts() -> list[tuple[int, ...]]:
    return [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


def sources(config: ModelConfig) -> list[Source]:
    return [source_of(config.audio, length, 50 + seed) for seed, length in enumerate(SOURCE_LENGTHS)]


@torch.inference_mode()
def decoder_logits(model: Transformer, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Return the packed logits `[T, V]` of a decoder."""
    return model.logits(model.decode(packed_input(prompts, CPU, causal=True)))


@torch.inference_mode()
def encoder_decoder_logits(model: Transformer, sources: Sequence[Source], begins: Sequence[Sequence[int]]) -> Tensor:
    """Return the packed logits `[T, V]` of the decoder, each sequence over its own source."""
    memory = model.encode(source_input(sources, CPU))
    lens = tuple(source.num_positions for source in sources)
    cross = AttentionMetadata(tuple(map(len, begins)), lens, causal=False)
    return model.logits(model.decode(packed_input(begins, CPU, causal=True), cross=CrossInput(cross, memory)))


def ours_and_theirs(kind: str, model: Transformer) -> tuple[Tensor, Tensor]:
    """Return our and `transformers`' outputs for the same inputs: packed logits, class scores, or hidden states."""
    if model.config.classifier is not None:
        return _class_scores(kind, model)
    if model.config.form == "decoder-only":
        prompts = decoder_prompts()
        return decoder_logits(model, prompts), torch.cat([reference_logits(kind, ids) for ids in prompts])
    if model.config.form == "encoder-only":
        return _encoded(kind, model)
    begins = [(START, *ids) for ids in decoder_prompts()]
    read = sources(model.config)
    theirs = [reference_logits(kind, ids, source) for ids, source in zip(begins, read, strict=True)]
    return encoder_decoder_logits(model, read, begins), torch.cat(theirs)


@torch.inference_mode()
def hidden_states(model: Transformer) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return each input's hidden states `[L, d]`, computed in one packed batch, and the inputs for `transformers`."""
    inputs, theirs = images(model.config.image) if model.config.image else _texts(model)
    if model.config.audio is not None:
        windows = sources(model.config)
        inputs, theirs = source_input(windows, CPU), [reference_input(window) for window in windows]
    hidden = model.encode(inputs) if model.encoder is not None else model.decode(inputs)
    return list(hidden.split(inputs.metadata.q_lens)), theirs


def _texts(model: Transformer) -> tuple[StackInput, list[dict[str, Tensor]]]:
    """Return texts, divided into as many segments as the model has token types."""
    texts = decoder_prompts()
    count = model.encoder.config.token_types if model.encoder is not None else 0
    types = [tuple(at * count // len(ids) for at in range(len(ids))) for ids in texts]
    inputs = packed_input(texts, CPU, causal=model.encoder is None, token_types=types if count else None)
    theirs = [dict(input_ids=torch.tensor([ids])) for ids in texts]
    if count:
        for given, segments in zip(theirs, types, strict=True):
            given["token_type_ids"] = torch.tensor([segments])
    return inputs, theirs


def images(image: ImageConfig) -> tuple[StackInput, list[dict[str, Tensor]]]:
    pixels = torch.randn(3, image.channels, image.size, image.size, generator=torch.Generator().manual_seed(0))
    inputs = packed_input([range(image.num_tokens)] * len(pixels), CPU, causal=False)
    return replace(inputs, pixels=pixels), [dict(pixel_values=one[None]) for one in pixels]


_THEIRS: dict[str, Tensor] = {}  # by kind: the inputs of a kind are always the same


def _encoded(kind: str, model: Transformer) -> tuple[Tensor, Tensor]:
    ours, inputs = hidden_states(model)
    if kind not in _THEIRS:
        reference = saved(kind).reference.base_model
        _THEIRS[kind] = torch.cat([reference(**given).last_hidden_state[0] for given in inputs])
    return torch.cat(ours), _THEIRS[kind]


def _class_scores(kind: str, model: Transformer) -> tuple[Tensor, Tensor]:
    ours, inputs = hidden_states(model)
    if kind not in _THEIRS:
        _THEIRS[kind] = torch.cat([saved(kind).reference(**given).logits.flatten(0, -2) for given in inputs])
    return torch.cat([model.classify(hidden) for hidden in ours]), _THEIRS[kind]


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return (ours.float() - theirs.float()).abs().max().item()


def is_varied(values: Tensor) -> bool:
    """Whether a comparison is meaningful: the columns vary from row to row."""
    return values.std(dim=0).mean().item() > 0.1
