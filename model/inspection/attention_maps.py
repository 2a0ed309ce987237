"""Computes the attention weights of every layer and head over one text, for display.

The reference backend computes them in float32 without a KV cache: slow and exact. For an encoder-decoder, a greedy
output is generated first, whose tokens are the decoder's queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from triptych.model.attention.base import AttentionMetadata, ScoreBias, SegmentGroup
from triptych.model.attention.reference import ReferenceBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.attention import AttentionConfig
from triptych.model.errors import ConfigError
from triptych.model.network.inputs import CrossInput, packed_input
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_model
from triptych.model.text.tokenizer import Tokenizer

MAX_TOKENS = 128  # the page holds a square of them for every head
_MAX_OUTPUT_TOKENS = 48  # of an encoder-decoder
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class AttentionMap:
    """The weights of one kind of attention, from queries to keys."""

    name: str  # encoder, decoder, cross
    weights: Tensor  # [layers, H, Q, S]
    queries: list[str]  # Q tokens as text
    keys: list[str]  # S


class RecordingBackend(ReferenceBackend):
    """The reference backend, recording the weights of every call."""

    name = "recording"

    def __init__(self) -> None:
        self.recorded: list[Tensor] = []

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        group: SegmentGroup,
        causal: bool,
        config: AttentionConfig,
        bias: ScoreBias | None,
        sinks: Tensor | None,
    ) -> Tensor:
        weights = super().weights(q, k, group, causal, config, bias, sinks)
        self.recorded.append(weights)
        return weights

    def take_recorded(self) -> list[Tensor]:
        """Return the weights recorded since the last time, in the order of calls."""
        recorded, self.recorded = self.recorded, []
        return recorded


@torch.inference_mode()
def attention_maps(path: Path, text: str) -> list[AttentionMap]:
    """Compute the attention maps of the checkpoint at `path` over `text`; raises `ConfigError`."""
    checkpoint = read_checkpoint(path)
    tokenizer = Tokenizer.from_folder(checkpoint.network_path)
    if tokenizer is None or checkpoint.config.only_images:
        raise ConfigError(f"{path.name} reads no text: the folder has no tokenizer")
    encoded = tokenizer.encode(text)
    limit = min(MAX_TOKENS, checkpoint.config.max_positions or MAX_TOKENS)
    if not 0 < len(encoded.ids) <= limit:
        raise ConfigError(f"the text has {len(encoded.ids)} tokens; attention is shown for 1 to {limit}")
    backend = RecordingBackend()
    model = load_model(checkpoint, backend)
    names = [tokenizer.token_text(token) for token in encoded.ids]
    if model.encoder is None:
        model.decode(packed_input([encoded.ids], _CPU, causal=True))
        return [AttentionMap("decoder", torch.stack(backend.take_recorded()), names, names)]
    types, padding = [encoded.type_ids], model.config.source_padding
    read = packed_input([encoded.ids], _CPU, causal=False, token_types=types, padding=padding)
    encoder_output = model.encode(read)
    maps = [AttentionMap("encoder", torch.stack(backend.take_recorded()), names, names)]
    if model.decoder is not None:
        maps += _decoder_maps(model, backend, encoder_output, names, tokenizer)
    return maps


def _decoder_maps(
    model: Transformer, backend: RecordingBackend, encoder_output: Tensor, sources: list[str], tokenizer: Tokenizer
) -> list[AttentionMap]:
    ids = _greedy_decoder_ids(model, backend, encoder_output)
    recorded = backend.take_recorded()  # of the last pass: self and cross attention of each layer alternate
    names = [tokenizer.token_text(token) for token in ids]
    return [
        AttentionMap("decoder", torch.stack(recorded[0::2]), names, names),
        AttentionMap("cross", torch.stack(recorded[1::2]), names, sources),
    ]


def _greedy_decoder_ids(model: Transformer, backend: RecordingBackend, encoder_output: Tensor) -> list[int]:
    """Generate greedily and return the decoder's input; the backend then holds the weights of the last pass only."""
    start = model.config.decoder_start_token_id
    assert start is not None
    ids = [start]
    while True:
        backend.take_recorded()
        cross = CrossInput(AttentionMetadata((len(ids),), (len(encoder_output),), causal=False), encoder_output)
        hidden = model.decode(packed_input([ids], _CPU, causal=True), cross=cross)
        logits = model.logits(hidden[-1:])[0]
        logits[list(model.config.generation.suppressed)] = float("-inf")
        token = int(logits.argmax())
        if token in model.config.eos_token_ids or len(ids) >= _MAX_OUTPUT_TOKENS:
            return ids
        ids.append(token)
