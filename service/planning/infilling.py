"""Checks of a suffix: whether the model fills in the middle, and which fields have no meaning with it."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.model.api.stats import ModelInfo
from triptych.model.text.fill_marks import OtherFile
from triptych.service.core.errors import invalid
from triptych.service.core.models import ServedModel
from triptych.service.planning.tokenization import Gap
from triptych.service.schemas.bodies import GenerateBody

_EXCLUDED = ("task", "decoder_prompt", "source_language", "target_language", "prompt_logprobs")
_OUTPUT_SHARE = 4  # of a prompt that is cut, the output gets one part in four of the context, if it has no length


def gap_of(
    body: GenerateBody, served: ServedModel, info: ModelInfo, files: Sequence[OtherFile] = (), *, cuts: bool = False
) -> Gap | None:
    """Return what is around the output of a body; None without a suffix. Raises an `ApiError` that names `suffix`.

    `cuts`: a prompt that is too long is cut, not refused.
    """
    if body.suffix is None:
        if body.prompt == "":
            raise invalid("prompt is empty: without suffix it should have at least 1 character", "prompt")
        return None
    served.require_tokenizer("suffix")
    infilling = served.infilling
    if infilling is None:
        missing = "sentinels (<extra_id_0>)" if served.is_encoder_decoder else "marks (such as <|fim_prefix|>)"
        message = f"suffix: model {served.name} cannot fill in the middle: its tokenizer has no {missing} for it"
        raise invalid(message, "suffix", "not_supported")
    if max(infilling.marks.read) >= served.source_vocab_size:
        message = f"suffix: model {served.name} cannot fill in the middle: its vocabulary ends before the marks"
        raise invalid(message, "suffix", "not_supported")
    if not isinstance(body.prompt, str) and not all(isinstance(one, str) for one in body.prompt):
        raise invalid("suffix needs prompts that are texts: token ids are taken as they are", "suffix")
    given = next((name for name in _EXCLUDED if getattr(body, name) is not None), None)
    if given is not None:
        raise invalid(f"{given} has no meaning with suffix", given)
    return Gap(infilling, body.suffix, files, _room(body, served, info) if cuts else None)


def _room(body: GenerateBody, served: ServedModel, info: ModelInfo) -> int:
    """Return how many tokens a prompt may have that is cut to fit."""
    if served.is_encoder_decoder:
        return min(info.max_model_len, info.max_num_batched_tokens)
    capacity = info.max_model_len if info.sequence_capacity is None else min(info.max_model_len, info.sequence_capacity)
    output = capacity // _OUTPUT_SHARE if body.max_tokens is None else max(1, body.max_tokens)
    return max(0, capacity - output)
