"""The rules that timestamps follow in a transcription of Whisper (Radford et al. 2022, section 2.3). No torch.

They are those of OpenAI's `ApplyTimestampRules`, and of `WhisperTimeStampLogitsProcessor` in `transformers`: an output
begins with a timestamp, timestamps come in pairs but for the last one before the end, and never decrease. What depends
on probabilities is the sampler's: a timestamp follows where all of them together are likelier than any text token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from sys import maxsize


@dataclass(frozen=True, slots=True)
class TimestampRules:
    """The token ids that the rules are about. Timestamps are the ids from `timestamp_begin_id` up; text is below."""

    timestamp_begin_id: int  # <|0.00|>
    no_timestamps_id: int  # <|notimestamps|>, which never comes
    eos_id: int  # text is below it; between it and the timestamps are other special tokens
    max_initial_timestamp_index: int | None = None  # of the last timestamp that may come first; None: any may

    def left(self, output: Sequence[int]) -> TokensLeft:
        """Return which tokens may follow the tokens after the prompt."""
        begin = self.timestamp_begin_id
        if not output:
            most = self.max_initial_timestamp_index
            return TokensLeft(begin, begin, maxsize if most is None else begin + most + 1)
        first = next((token for token in reversed(output) if token >= begin), None)
        if output[-1] < begin:
            return TokensLeft(0, begin if first is None else first + 1, maxsize)
        if len(output) < 2 or output[-2] >= begin:  # a pair is complete
            return TokensLeft(0, maxsize, maxsize)
        return TokensLeft(self.eos_id, output[-1], maxsize)


@dataclass(frozen=True, slots=True)
class TokensLeft:
    """The tokens that may come: those below the timestamps from `first_text`, and [`first_time`, `end_time`)."""

    first_text: int
    first_time: int
    end_time: int
