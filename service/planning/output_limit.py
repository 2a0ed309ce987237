"""How long an output may become where the client does not say: what the checkpoint, the API and the context allow."""

from __future__ import annotations

from dataclasses import dataclass

from model.api.sampling_defaults import length_of
from model.api.stats import ModelInfo
from service.core.context_bound import context_exceeded
from service.core.errors import ApiError
from service.core.models import ServedModel
from service.planning.body_limits import most_tokens_with_logprobs
from service.schemas.bodies import GenerateBody
from service.settings.service_settings import Limits


@dataclass(frozen=True, slots=True)
class OutputLimit:
    """Says how many tokens the outputs of one body have at most."""

    requested: int | None  # by the client
    otherwise: int | None  # if the checkpoint does not say either; None: until the model ends or the context is full
    most: int | None  # of an output whose length the client left open

    @classmethod
    def of(cls, body: GenerateBody, prompts: int, limits: Limits, *, fills_context: bool) -> OutputLimit:
        """Return the limit of a body; `fills_context` is what its API does without `max_tokens`."""
        otherwise = None if fills_context else limits.default_max_tokens
        return cls(body.max_tokens, otherwise, most_tokens_with_logprobs(body, prompts, limits))

    def tokens(self, served: ServedModel, info: ModelInfo, start: int, param: str) -> int:
        """Return the number of tokens after `start` tokens; raises `ApiError` where the context has no room for them.

        Only dialects can request 0, for no output; the engine then still generates one token.
        """
        room = info.max_model_len - start
        field = "decoder_prompt" if served.is_encoder_decoder else param
        if self.requested is not None:
            if self.requested > room:
                raise _too_long(start, self.requested, info.max_model_len, field if room < 1 else "max_tokens")
            return self.requested
        if room < 1:
            raise _too_long(start, 1, info.max_model_len, field)
        bounds = (default_max_tokens(served, start, self.otherwise), output_room(served, info, start), self.most)
        return max(1, min(bound for bound in bounds if bound is not None))


def default_max_tokens(served: ServedModel, start: int, otherwise: int | None) -> int | None:
    """Return the checkpoint's `max_new_tokens`, or the rest of its `max_length` after `start` tokens, else `otherwise`.

    Where that is None, for the whole context, a decoder's `max_length` does not count: other servers ignore it too,
    and many folders have one below their context.
    """
    whole = otherwise is not None or served.is_encoder_decoder
    found = length_of(served.checkpoint.sampling_defaults, start, whole=whole)
    return otherwise if found is None else found


def output_room(served: ServedModel, info: ModelInfo, start: int) -> int:
    """Return how many tokens may follow `start` tokens, in the context and in an empty KV cache."""
    room = info.max_model_len - start
    return min(room, _pool_room(served, info, start) or room)


def _pool_room(served: ServedModel, info: ModelInfo, start: int) -> int:
    """Return by how many tokens a decoder-only sequence can grow in an empty KV cache; 0: none or unknown."""
    capacity = None if served.is_encoder_decoder else info.sequence_capacity
    return max(0, capacity - start) if capacity is not None else 0


def _too_long(start: int, max_tokens: int, max_model_len: int, param: str) -> ApiError:
    total = start + max_tokens
    return context_exceeded(max_model_len, f"{start} prompt tokens + {max_tokens} max_tokens = {total}", param)
