"""Estimates the seconds that waiting work of one model takes, from the rates of its latest steps. Stdlib only.

Work is of two kinds: prefill, in tokens (of prompts, sources, texts to encode), and decode, in steps of one sequence.
The time between two steps of the model, including steps of other models, is divided among both kinds by tokens.
So the estimate needs no model of the batch: if every step is mixed, it is the measured throughput.

Averages forget with `_MEMORY` seconds of work. Before anything was measured, a prior is used: the operations and bytes
of the weights at stated rates of the device. It counts as `_PRIOR_TOKENS` and `_PRIOR_STEPS` of measured work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from triptych.model.api.stats import ModelInfo, StepStats

_MEMORY = 5.0  # seconds of work
_PRIOR_TOKENS, _PRIOR_STEPS = 256, 4
_PRIOR_OPERATIONS, _PRIOR_BYTES = {"cpu": 1e12, "gpu": 1e14}, {"cpu": 2e10, "gpu": 1e12}  # a second
_PRIOR_STEP = 1e-3  # seconds of a decode step that are not for weights
_PRIOR_OUTPUT = 128.0  # decode steps of a sequence, before any has ended
_LEAST_ENDS, _MOST_ENDS = 8, 64  # ended sequences that the average output is of: those of the prior, and at most
_OUTLIER, _LEAST_OUTLIER = 4.0, 2.0  # a step counts at most as 4 average ones, or as 2 seconds


@dataclass(slots=True)
class _Average:
    """Amounts of work and the seconds that they took, both weighted by how recent they are."""

    seconds: float
    steps: float
    amount: float

    def add(self, seconds: float, amount: float) -> None:
        kept = math.exp(-seconds / _MEMORY)
        self.seconds = self.seconds * kept + seconds
        self.steps = self.steps * kept + 1
        self.amount = self.amount * kept + amount


class WorkRates:
    """The measured rates of one model's prefill and decode."""

    def __init__(self) -> None:
        self.steps = 0  # with decodes
        self._since = 0.0  # when the work of the next step began
        self._output, self._ends = _PRIOR_OUTPUT, _LEAST_ENDS
        self._prefill = self._decode = _Average(0, 0, 0)
        self._set_prior(1, 1, "cpu", 1)
        self._is_measured = False

    def loaded(self, info: ModelInfo) -> None:
        """Replace the prior by that of the loaded model, unless an engine that was lost has measured it."""
        if not self._is_measured:
            device = "cpu" if info.device.startswith("cpu") else "gpu"
            self._set_prior(max(1, info.parameters), info.weight_bytes, device, info.max_num_seqs)

    def _set_prior(self, parameters: int, weight_bytes: int, device: str, slots: int) -> None:
        token = 2 * parameters / _PRIOR_OPERATIONS[device]
        step = _PRIOR_STEP + weight_bytes / _PRIOR_BYTES[device] + slots * token
        self._prefill = _Average(_PRIOR_TOKENS * token, 1, _PRIOR_TOKENS)
        self._decode = _Average(_PRIOR_STEPS * step, _PRIOR_STEPS, _PRIOR_STEPS * slots)

    def begin(self, now: float) -> None:
        """Start the clock: work has arrived, and there was none."""
        self._since = now

    def observe(self, step: StepStats, now: float) -> None:
        """Learn from a step that has ended."""
        if not step.num_tokens:
            return
        self._is_measured = True
        average = (self._prefill.seconds + self._decode.seconds) / (self._prefill.steps + self._decode.steps)
        seconds = min(now - self._since, max(_LEAST_OUTLIER, _OUTLIER * average))
        self._since = now
        share = step.num_decodes / step.num_tokens
        if share < 1:
            self._prefill.add(seconds * (1 - share), step.num_tokens - step.num_decodes)
        if share:
            self.steps += 1
            self._decode.add(seconds * share, min(step.num_decodes, step.num_sequences))  # drafts are no sequences

    def found(self, tokens: int) -> None:
        """Count tokens of a prompt that were found in the prefix cache."""
        self._prefill.amount += tokens

    def ended(self, steps: int) -> None:
        """Learn from an ended sequence, which took this many decode steps."""
        self._ends = min(self._ends + 1, _MOST_ENDS)
        self._output += (steps - self._output) / self._ends

    def prefill_seconds(self, tokens: int) -> float:
        """Return the seconds in which these tokens are computed."""
        return tokens * self._prefill.seconds / self._prefill.amount

    def decode_seconds(self, sequences: int, slots: int) -> float:
        """Return the seconds in which this many sequences are decoded, `slots` at a time.

        The cost of a full batch is derived from that of a smaller one: twice the sequences cost the root of 2 as much.
        """
        batch = self._decode.amount / self._decode.steps
        each = self._decode.seconds / self._decode.amount * math.sqrt(min(1.0, batch / slots))
        return sequences * self._output * each
