"""How large a GPU's KV pool may be: what the largest step takes is measured before the pool is made, not guessed.

    pool = utilization * total - used - peak - margin

`used` is what everybody holds once the weights are there; `peak` what the largest step adds to it: a whole batch of
prompt tokens through every stack, then logits and sampling of as many rows as there can be sequences. `margin` is for
what a measured step does not show: recorded graphs and a fragmented allocator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.api.engine_config import BatchLimits
from model.api.request import SamplingParams
from model.attention.base import AttentionMetadata
from model.errors import ConfigError
from model.network.inputs import CrossInput, StackInput, packed_input
from model.network.transformer import Transformer
from model.sampling.sampler import SamplingRow, sample

MARGIN = 256 << 20  # bytes; not measured on a GPU yet
GRAPH_MARGIN = 16 << 20  # for each recorded size; the same

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Card:
    """Bytes of one GPU."""

    free: int
    total: int

    @property
    def used(self) -> int:
        return self.total - self.free


class Allocator(Protocol):
    """What is asked of a device's memory: `CudaMemory`, or a scripted one in tests."""

    def card(self) -> Card:
        """As the driver sees it, whoever holds what."""

    def reserved(self) -> int:
        """Bytes that this process holds for tensors."""

    def restart_peak(self) -> None:
        """Give back what no tensor needs; `peak` counts from here."""

    def peak(self) -> int:
        """The most that was reserved since."""


class CudaMemory:
    """One device's memory by torch's statistics."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def card(self) -> Card:
        return Card(*torch.cuda.mem_get_info(self._device))

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def restart_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)


def peak_of(run: Callable[[], None], memory: Allocator) -> int:
    """Bytes that `run` takes at most beyond what was held before; none of them are held afterwards."""
    memory.restart_peak()
    before = memory.reserved()
    run()
    peak = memory.peak() - before
    memory.restart_peak()
    return peak


def pool_bytes(
    cards: Iterable[Card], utilization: float, peak: int, *, recorded_sizes: int = 0, gathered_layers: float = 0.0
) -> int:
    """What the fullest of the cards has for the pool; 0 where there is nothing left.

    `gathered_layers`: the share of the pool that a step copies, where the backend cannot read pages in place.
    """
    margin = MARGIN + recorded_sizes * GRAPH_MARGIN
    left = min(int(card.total * utilization) - card.used - peak - margin for card in cards)
    return max(0, int(left / (1 + gathered_layers)))


def pool_memory(
    model: Transformer,
    limits: BatchLimits,
    max_model_len: int,
    utilization: float,
    memory: Allocator,
    others: Iterable[Card] = (),
    *,
    recorded_sizes: int = 0,
) -> int:
    """Bytes for the pool of a model whose weights are on the device; `others` are the cards of its other ranks.

    The other ranks take part in the measured step, and what it takes of them is what it takes here. Raises
    `ConfigError` where that step does not fit beside the weights.
    """
    try:
        peak = peak_of(lambda: largest_step(model, limits, max_model_len), memory)
    except torch.OutOfMemoryError:
        tokens = limits.max_num_batched_tokens
        raise ConfigError(
            f"a step of max_num_batched_tokens {tokens} does not fit beside the weights: lower it"
        ) from None
    gathered = 0.0
    if model.backend.gathers_pages and model.decoder is not None:
        gathered = 2 / model.decoder.config.num_layers  # the pages of a layer, and once more in the query's dtype
    cards = [memory.card(), *others]
    pool = pool_bytes(cards, utilization, peak, recorded_sizes=recorded_sizes, gathered_layers=gathered)
    logger.info(
        "of %.1f GiB at a utilization of %g: %.2f GiB in use, %.2f GiB for the largest step, %.2f GiB for KV",
        *(cards[0].total / 2**30, utilization, cards[0].used / 2**30, peak / 2**30, pool / 2**30),
    )
    return pool


@torch.inference_mode()
def largest_step(model: Transformer, limits: BatchLimits, max_model_len: int) -> None:
    """What takes most memory of a model that generates: as many tokens as a step has, then as many rows to sample."""
    device = next(model.parameters()).device
    lengths = _segments(limits.max_num_batched_tokens, max_model_len)
    inputs = packed_input([[0] * length for length in lengths], device, causal=model.encoder is None)
    encoder_output = model.encode(inputs) if model.encoder is not None else None
    hidden = model.decode(*_decoder_inputs(lengths, encoder_output, device))
    rows = [_drawn_row() for _ in range(limits.max_num_seqs)]
    logits = model.logits(hidden[: len(rows)])
    sample(logits, rows[: len(logits)])


def _segments(tokens: int, longest: int) -> list[int]:
    """So many tokens as inputs of the longest length, the last one of what is left."""
    whole, rest = divmod(tokens, longest)
    return [longest] * whole + [rest] * (rest > 0)


def _decoder_inputs(
    lengths: list[int], encoder_output: Tensor | None, device: torch.device
) -> tuple[StackInput, None, CrossInput | None]:
    inputs = packed_input([[0] * length for length in lengths], device, causal=True)
    if encoder_output is None:
        return inputs, None, None
    lens = tuple(lengths)
    return inputs, None, CrossInput(AttentionMetadata(lens, lens, causal=False, device=device), encoder_output)


def _drawn_row() -> SamplingRow:
    """With a penalty, which copies the logits, and a cut by mass, which looks at all of them."""
    params = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5)
    return SamplingRow(params, 0, (0, 0), 1)
