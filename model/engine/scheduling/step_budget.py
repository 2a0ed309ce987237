"""What an engine could compute in its next step, and how much of it it may."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepDemand:
    """What one engine would compute now.

    `whole_tokens` is the least that can be computed of the first input whose tokens belong together (one layer of a
    source or of a text to encode, as that share of its tokens; all of it where layers are not cut), 0 without one;
    `all_whole_tokens` is what one step could take of all such inputs. `prompt_tokens` are decoder tokens of prompts,
    which can be split.
    """

    decodes: int = 0
    streams: bool = False  # somebody reads the decoded tokens as they come
    waiting: int = 0  # sequences that have not begun
    prompt_tokens: int = 0
    whole_tokens: int = 0
    all_whole_tokens: int = 0

    @property
    def prefills(self) -> bool:
        return self.prompt_tokens > 0 or self.whole_tokens > 0


@dataclass(frozen=True, slots=True)
class StepBudget:
    """How much of its demand an engine may compute in one step; None leaves it to the engine's own limits.

    Where `whole_tokens` is not 0, at least that of the demand is taken.
    """

    decodes: bool = True
    prompt_tokens: int | None = None
    whole_tokens: int | None = None


UNLIMITED = StepBudget()


DECODES_ONLY = StepBudget(prompt_tokens=0, whole_tokens=0)
