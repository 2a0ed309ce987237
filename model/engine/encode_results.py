"""Unfinished batches of inputs to encode: those that pause between layers, and those whose results are in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from triptych.model.api.request import EncodeOutput, EncodeRequest, FinishReason
from triptych.model.engine.output_heads import EncodeResult
from triptych.model.network.stack import StackPass
from triptych.model.system.devices import HostCopies


class ArrivingResults:
    """The results of a batch, on their way to the host in one copy."""

    def __init__(self, results: Sequence[EncodeResult]) -> None:
        parts = [part for one in results for part in (one.values, one.indices) if part is not None]
        # Token ids are exact in float32. A conversion that changes nothing would take microseconds of each vector.
        self._copies = HostCopies([part if part.dtype is torch.float32 else part.float() for part in parts])
        self._with_indices = [one.indices is not None for one in results]

    def outputs(self, batch: Sequence[EncodeRequest], began: float) -> list[EncodeOutput]:
        """Wait for the results, and return them as bytes."""
        host, outputs = iter(self._copies.get()), []
        for request, with_indices in zip(batch, self._with_indices, strict=True):
            data = next(host)
            indices = next(host).int().numpy().tobytes() if with_indices else b""
            output = EncodeOutput(request.request_id, data.numpy().tobytes(), tuple(data.shape), began, indices=indices)
            outputs.append(output)
        return outputs


@dataclass(slots=True)
class LaunchedBatch:
    """A batch in flight: the device may still be computing it."""

    parts: Sequence[tuple[Sequence[EncodeRequest], ArrivingResults | None]]  # None: these inputs failed
    began: float
    num_tokens: int

    @property
    def requests(self) -> list[EncodeRequest]:
        return [request for part, _ in self.parts for request in part]

    def outputs(self) -> list[EncodeOutput]:
        """Wait for the batch, and return the output of each input."""
        outputs: list[EncodeOutput] = []
        for part, results in self.parts:
            if results is None:
                outputs += [EncodeOutput(one.request_id, finish_reason=FinishReason.ERROR) for one in part]
            else:
                outputs += results.outputs(part, self.began)
        return outputs


@dataclass(slots=True)
class PausedBatch:
    """Inputs of one path that pause between two layers."""

    requests: list[EncodeRequest]
    began: float
    stack_pass: StackPass | None = None  # None: not begun
    decodes: bool = False  # the encoder is done, the layers are the decoder's
    dropped: set[int] = field(default_factory=set)  # `id`s of requests that are answered already

    @property
    def num_tokens(self) -> int:
        return sum(request.source.num_positions for request in self.requests)

    @property
    def unanswered(self) -> list[EncodeRequest]:
        return [request for request in self.requests if id(request) not in self.dropped]
