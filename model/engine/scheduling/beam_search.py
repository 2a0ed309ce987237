"""Beam search for one request: chooses the next beams, collects hypotheses, decides when to stop. No torch.

Candidates of all beams compete by their summed log-probability; the best that do not end go on, those that end among
the first `num_beams` become hypotheses, compared by `sum / length ** length_penalty` (Wu et al. 2016).
The rules of stopping are the reference library's, so that sequences and scores are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Candidates = Sequence[tuple[int, float]]  # (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished continuation."""

    score: float  # normalised by length
    token_ids: tuple[int, ...]
    cumulative_logprob: float = 0.0  # among the tokens that bans and rules left of each step


@dataclass(slots=True)
class BeamSearch:
    """The state of one search; beams are addressed by their place in `scores`."""

    num_beams: int
    length_penalty: float
    early_stopping: bool | str  # True: as soon as there are enough; "never": only when none can get better
    max_tokens: int
    stop_token_ids: frozenset[int]
    num_forced: int = 0  # tokens before the output that the lengths count too: the reference generates a language
    scores: list[float] = field(default_factory=lambda: [0.0])  # of the running beams, best first
    cumulative_logprobs: list[float] = field(default_factory=lambda: [0.0])  # of the same, as in a `Hypothesis`
    finished: list[Hypothesis] = field(default_factory=list)  # best first, at most num_beams
    done: bool = False

    @property
    def num_candidates(self) -> int:
        """The number of candidates: enough that at least `num_beams` of them do not end."""
        return max(2, 1 + len(self.stop_token_ids)) * self.num_beams

    def advance(
        self,
        candidates: Sequence[Candidates],
        outputs: Sequence[Sequence[int]],
        log_masses: Sequence[float] | None = None,
    ) -> list[tuple[int, int]]:
        """Return the next running beams as (continued beam, token), best first, from each beam's candidates and output.

        `log_masses`: of each beam, logsumexp of the log-probabilities of allowed tokens; None: all tokens are allowed.
        """
        if not any(logprob > float("-inf") for found in candidates for _, logprob in found):
            self.done = True  # nothing can follow any of them
            return []
        length = len(outputs[0]) + 1
        ranked = sorted(
            (
                (self.scores[beam] + logprob, beam, token, logprob)
                for beam, found in enumerate(candidates)
                for token, logprob in found
                if logprob > float("-inf")
            ),
            key=lambda one: -one[0],
        )[: self.num_candidates]
        ends = [length >= self.max_tokens or token in self.stop_token_ids for _, _, token, _ in ranked]
        masses = log_masses or [0.0] * len(candidates)
        sums = [self.cumulative_logprobs[beam] + logprob - masses[beam] for _, beam, _, logprob in ranked]
        running = [at for at, end in enumerate(ends) if not end][: self.num_beams]
        for (score, beam, token, _), total, end in list(zip(ranked, sums, ends, strict=True))[: self.num_beams]:
            if end:
                self._finish(score, length + self.num_forced, (*outputs[beam], token), total)
        self.scores = [ranked[at][0] for at in running]
        self.cumulative_logprobs = [sums[at] for at in running]
        self.done = not running or self._is_over(length)
        return [ranked[at][1:3] for at in running]

    def _finish(self, score: float, length: int, token_ids: tuple[int, ...], cumulative_logprob: float) -> None:
        self.finished.append(Hypothesis(score / length**self.length_penalty, token_ids, cumulative_logprob))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.num_beams :]

    @property
    def _is_full(self) -> bool:
        return len(self.finished) == self.num_beams

    def _is_over(self, length: int) -> bool:
        """Return whether no running beam can beat the worst hypothesis at its most favourable length."""
        if not self._is_full:
            return False
        if self.early_stopping is True:
            return True
        hopeful = self.max_tokens if self.early_stopping == "never" and self.length_penalty > 0 else length
        return self.scores[0] / (hopeful + self.num_forced) ** self.length_penalty <= self.finished[-1].score

    def best(self, outputs: Sequence[Sequence[int]]) -> list[Hypothesis]:
        """Return the hypotheses so far; without any, the running beams as they are."""
        if self.finished:
            return self.finished
        running = zip(self.scores, outputs, self.cumulative_logprobs, strict=True)
        return [Hypothesis(score, tuple(output), logprob) for score, output, logprob in running]
