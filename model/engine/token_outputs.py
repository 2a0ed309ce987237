"""The outputs of a sequence's new token, and of a finished beam search. No torch."""

from __future__ import annotations

from triptych.model.api.request import FinishReason, TokenOutput
from triptych.model.engine.scheduling.scheduled_step import SampledToken
from triptych.model.engine.scheduling.sequence import Beams, SequenceState


def token_output(sequence: SequenceState, token: SampledToken) -> TokenOutput:
    """Return the output of a token that was just appended; the first one has the figures of the prompt."""
    output = TokenOutput(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_ids=[token.token_id],
        logprobs=None if token.logprob is None else [token.logprob],
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_token_id,
        error=sequence.error,
    )
    if token.masked_logprob is not None:
        output.cumulative_logprob = sequence.cumulative_logprob
    if sequence.num_output_tokens == 1:
        output.scheduled_time = sequence.scheduled_time
        output.probe_logprobs = sequence.probe_logprobs
        output.alignment = token.alignment
        output.cached_tokens = min(sequence.num_cached_tokens, sequence.num_prompt_tokens)
        if sequence.params.prompt_logprobs is not None:
            output.prompt_logprobs = sequence.prompt_logprobs
    return output


def search_outputs(beams: Beams, reason: FinishReason | None, error: str | None = None) -> list[TokenOutput]:
    """Return the n best hypotheses of a search that ends; `reason` is None if it is done.

    If few tokens are allowed, a finished search may have fewer than n: outputs marked as missing come first.
    """
    first = beams.members[0]
    best = beams.search.best([sequence.output_token_ids for sequence in beams.members])
    outputs, missing = [], []
    for index in range(first.params.n):
        output = TokenOutput(first.request.request_id, index, finish_reason=reason or FinishReason.LENGTH, error=error)
        output.scheduled_time = first.scheduled_time
        output.cached_tokens = min(first.num_cached_tokens, first.num_prompt_tokens)
        output.probe_logprobs = first.probe_logprobs
        if index >= len(best) and reason is None:
            output.finish_reason, output.is_missing = FinishReason.STOP, True
            missing.append(output)
            continue
        outputs.append(output)
        if index >= len(best):
            continue
        output.token_ids, output.score = list(best[index].token_ids), best[index].score
        output.cumulative_logprob = best[index].cumulative_logprob if first.params.cumulative_logprob else None
        ended = bool(output.token_ids) and output.token_ids[-1] in first.stop_token_ids
        # An end token that max_tokens forced on a grammar's output is no stop.
        forced = beams.forced and first.matcher is not None and len(output.token_ids) == first.params.max_tokens
        if ended and not forced and reason is None:
            output.finish_reason, output.stop_reason = FinishReason.STOP, output.token_ids[-1]
    return missing + outputs
