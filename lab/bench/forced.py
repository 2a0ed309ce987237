"""Outputs that a benchmark chooses: the engine computes and samples every token, and is then told which one it was.

Random weights copy nothing, so that speculation could not be measured with what they say.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lab.bench.batches import Ids
from triptych.model.api.request import Source
from triptych.model.engine.execution.model_runner import Launched, ModelRunner
from triptych.model.engine.scheduling.scheduled_step import DraftRun, SampledToken, SchedulerOutput
from triptych.model.system.devices import HostCopy


class ForcedRunner:
    """Runs steps by a `ModelRunner`, and puts the tokens of given outputs, by request, in place of those it sampled."""

    def __init__(self, runner: ModelRunner, outputs: Mapping[str, Ids], right: float = 0.0, seed: int = 0) -> None:
        """A draft model is told too what it says: what is said next, with a chance of `right`, else another token."""
        self._runner = runner
        self._outputs = outputs
        self._right = right
        self._random = random.Random(seed)

    def draft(self, runs: Sequence[DraftRun]) -> list[tuple[int, ...]]:
        """Let the draft model compute its drafts, and replace them."""
        said = self._runner.draft(runs)
        found = []
        for run, drafts in zip(runs, said, strict=True):
            output, begin = self._outputs[run.sequence.request.request_id], run.sequence.num_output_tokens
            coming = output[begin : begin + len(drafts)]
            found.append(tuple(one if self._random.random() < self._right else one + 1 for one in coming))
            run.drafting.computed(run.stop + max(0, len(coming) - 1), len(coming))
        return found

    def encode_ahead(self, source: Source, layers: int, model: str = "") -> None:
        """Compute the next `layers` layers of the encoder for a source that a later step finishes."""
        self._runner.encode_ahead(source, layers, model)

    def forget_ahead(self) -> None:
        """Forget the source that was begun so."""
        self._runner.forget_ahead()

    def probe(self) -> None:
        """Run the smallest possible forward pass; raises if even that fails."""
        self._runner.probe()

    def execute(self, output: SchedulerOutput) -> list[SampledToken | None]:
        """Launch a step and collect its tokens."""
        return self.launch(output).collect()

    def launch(self, output: SchedulerOutput, before: Any = None) -> Launched:
        """Launch a step; after the end of its given output a request keeps the sampled tokens."""
        launched = self._runner.launch(output, before)
        tokens = launched.tokens.tolist()
        for step in output.scheduled:
            row, sequence = launched.rows.get(id(step.sequence)), step.sequence
            if row is not None:
                begin, count = sequence.num_output_tokens, 1 + len(step.drafts)
                said = self._outputs[sequence.request.request_id][begin : begin + count]
                tokens[row : row + len(said)] = said
        forced = torch.tensor(tokens, device=launched.tokens.device)
        return replace(launched, tokens=forced, arriving=HostCopy(forced))
