"""llama.cpp's POST /infill: the middle of a text, for editors.

Times and counts are those of llama-server's reply. As there, a prompt that is too long is cut, and sampling has that
server's defaults. `samplers` and the slot have no counterpart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, RootModel, Tag

from triptych.model.api.sampling_params import LineStop
from triptych.model.text.detokenizer import LINE_STOP
from triptych.model.text.fill_marks import OtherFile
from triptych.service.core.errors import NOT_SUPPORTED, invalid
from triptych.service.core.models import ServedModel
from triptych.service.dialects.common import (
    DialectBody,
    Extended,
    Ignored,
    NotTrue,
    Refused,
    RepeatLastN,
    json_format,
    native_generate,
    native_penalties,
    sampling_fields,
)
from triptych.service.dialects.openai_replies import shown_token
from triptych.service.http.json_replies import DataEvents, Generation, Json
from triptych.service.planning.checks import ReplyShape
from triptych.service.schemas.bodies import GenerateBody
from triptych.service.schemas.parameters import LLAMA_CPP, Parameters
from triptych.service.schemas.types import TextOrTexts, TokenId

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama-server's, where the folder has none
NAMES = LLAMA_CPP.names | {
    "prompt": "input_prefix",
    "suffix": "input_suffix",
    "response_format.json_schema.schema": "json_schema",
    "response_format": "json_schema",
}
_SLOT = "the service chooses where a request runs"
_CACHED = "prefixes are cached"
_OFF = "it is only read with a field that is refused"
_COUNTS = ("n_predict", "max_tokens", "max_completion_tokens")


def _kind_of_bias(value: Any) -> str:
    return "<false>" if isinstance(value, bool) else "<number>"


_Bias = Annotated[
    Annotated[float, Tag("<number>")] | Annotated[Literal[False], Tag("<false>")], Discriminator(_kind_of_bias)
]
Biases = Annotated[
    Annotated[dict[TokenId, float], Tag("<object>")] | Annotated[list[tuple[TokenId, _Bias]], Tag("<pairs>")],
    Discriminator(lambda value: "<pairs>" if isinstance(value, list) else "<object>"),
]


class ExtraFile(DialectBody):
    """A part of another file."""

    text: str = Field(description="The part.", examples=["def add(a, b): ..."])
    filename: str = Field("tmp", description="The name of the file.", examples=["lib.py"])
    time: Annotated[Any, Ignored("the list gives the order; llama.vim's")] = None


class LoraScale(DialectBody):
    """How much of a LoRA adapter is added."""

    id: int = Field(ge=0, description="Its place in GET /lora-adapters.", examples=[0])
    scale: float = Field(description="1: the adapter; 0: none of it.", examples=[1.0])


@LLAMA_CPP.body
class InfillBody(Extended, Parameters):
    """Fill in the middle of a text, as llama.cpp does."""

    input_prefix: str = Field(description="The text before the output.", examples=["def add(a, b):\n    "])
    input_suffix: str = Field(description="The text after the output.", examples=["\n\nprint(add(1, 2))\n"])
    input_extra: list[ExtraFile] | None = Field(
        None, description="Parts of other files, which are read first; the last ones stay if there is no room for all."
    )
    prompt: str | None = Field(None, description="More of the prefix, such as the current line.", examples=["    "])
    n_predict: int | None = Field(
        None,
        ge=-1,
        description="Maximum number of tokens to generate; -1: until the model ends or the context is full. 0: only "
        "read the prompt.",
        examples=[64],
    )
    max_tokens: int | None = Field(None, ge=-1, description="The same.", examples=[None])
    max_completion_tokens: int | None = Field(None, ge=-1, description="The same.", examples=[None])
    stream: bool | None = Field(None, description="Answer as server-sent events.", examples=[False])
    stop: TextOrTexts | None = Field(None, description="Texts that end the output before them.", examples=["\n\n"])
    seed: int | None = Field(None, description="As in /generate; -1: random.", examples=[7])
    repeat_penalty: float | None = Field(None, description="`repetition_penalty` of /generate.", examples=[1.0])
    repeat_last_n: RepeatLastN = None
    logit_bias: Biases | None = Field(
        None, description="As in /generate, or as pairs; false: never.", examples=[[[42, -5.0]]]
    )
    n_probs: int | None = Field(
        None, ge=0, description="`logprobs` of /generate, in `completion_probabilities`; 0: none.", examples=[2]
    )
    grammar: str | None = Field(None, description="As in /generate.", examples=[None])
    json_schema: dict[str, Any] | None = Field(None, description="A JSON schema for the output.", examples=[None])
    n_indent: int | None = Field(
        None, ge=0, le=1024, description="End before a line with fewer spaces and tabs at its start.", examples=[4]
    )
    t_max_predict_ms: float | None = Field(
        None, description="End at the first line break that comes this long after the first token.", examples=[1000]
    )
    t_max_prompt_ms: Annotated[Any, Ignored("llama.cpp reads it no more")] = None
    response_fields: list[str] | None = Field(
        None, description="The fields of the reply to return; a/b is field b of object a.", examples=[["content"]]
    )
    return_tokens: bool | None = Field(None, description="Return the ids of the output.", examples=[False])
    samplers: Annotated[Any, Ignored("samplers run in a fixed order; each has a field")] = None
    id_slot: Annotated[Any, Ignored(_SLOT)] = None
    cache_prompt: Annotated[Any, Ignored(_CACHED)] = None
    n_cache_reuse: Annotated[Any, Ignored(_CACHED)] = None
    n_keep: Annotated[Any, Ignored("a context does not shift; a prompt that is too long is cut")] = None
    n_discard: Annotated[Any, Ignored("a context does not shift; a prompt that is too long is cut")] = None
    backend_sampling: Annotated[Any, Ignored(_SLOT)] = None
    sse_ping_interval: Annotated[Any, Ignored("`stream_keepalive_s` is the service's")] = None
    stream_options: Annotated[Any, Ignored("the last event has all counts")] = None
    min_keep: Annotated[Any, Refused(0, 1)] = None
    n: Annotated[Any, Refused(1)] = None
    n_cmpl: Annotated[Any, Refused(1)] = None
    lora: list[LoraScale] | None = Field(
        None,
        description="The LoRA adapter that computes the request, with scale 1; others have 0. Default: none.",
        examples=[[{"id": 0, "scale": 1.0}]],
    )
    mirostat: Annotated[Any, Refused(0)] = None
    mirostat_tau: Annotated[Any, Ignored(_OFF)] = None
    mirostat_eta: Annotated[Any, Ignored(_OFF)] = None
    dynatemp_range: Annotated[Any, Refused(0, 0.0)] = None
    dynatemp_exponent: Annotated[Any, Ignored(_OFF)] = None
    xtc_probability: Annotated[Any, Refused(0, 0.0)] = None
    xtc_threshold: Annotated[Any, Ignored(_OFF)] = None
    dry_multiplier: Annotated[Any, Refused(0, 0.0)] = None
    dry_base: Annotated[Any, Ignored(_OFF)] = None
    dry_allowed_length: Annotated[Any, Ignored(_OFF)] = None
    dry_penalty_last_n: Annotated[Any, Ignored(_OFF)] = None
    dry_sequence_breakers: Annotated[Any, Ignored(_OFF)] = None
    post_sampling_probs: NotTrue = None
    timings_per_token: NotTrue = None
    return_progress: NotTrue = None
    verbose: NotTrue = None

    def adapter_named(self) -> tuple[str, int] | None:
        used = [(place, one) for place, one in enumerate(self.lora or ()) if one.scale]
        for place, one in used:
            if one.scale != 1:
                field = f"lora[{place}].scale"
                raise invalid(f"{field}: {one.scale:g}; an adapter is computed with scale 1 or 0", field, NOT_SUPPORTED)
        if len(used) > 1:
            raise invalid("lora: one adapter computes a request; give the others scale 0", "lora", NOT_SUPPORTED)
        return None if not used else (f"lora[{used[0][0]}].id", used[0][1].id)


class LoraScales(RootModel[list[LoraScale]]):
    """Scales of adapters for requests that name none."""


def names(body: InfillBody) -> Mapping[str, str]:
    """Return the body's own field names, by native name."""
    return NAMES | {"max_tokens": next((name for name in _COUNTS if getattr(body, name) is not None), "n_predict")}


def infill(body: InfillBody, served: ServedModel) -> GenerateBody:
    """Translate a body; raises `ApiError` with native field names."""
    known = served.checkpoint.sampling_defaults
    fields = sampling_fields(body, LLAMA_CPP, served)
    given = {name: value for name, value in _DEFAULTS.items() if getattr(body, name) is None and name not in known}
    if body.top_p == 0:  # which is greedy
        given = {}
    bias = body.logit_bias if isinstance(body.logit_bias, dict) else dict(body.logit_bias or ())
    most = _most(body)
    fields |= given | {
        "model": served.name,
        "suffix": body.input_suffix,
        "max_tokens": None if most is None else max(1, most),
        "stop": body.stop,
        "seed": None if body.seed == -1 else fields["seed"],
        "repetition_penalty": body.repeat_penalty,
        "logit_bias": {token: -100.0 if value is False else value for token, value in bias.items()},
        "logprobs": body.n_probs or None,
        "grammar": body.grammar or None,
        "return_token_ids": bool(body.return_tokens),
    }
    fields |= native_penalties(body.repeat_last_n, fields)
    if body.json_schema is not None:
        fields["response_format"] = json_format(body.json_schema, "json_schema")
    found = native_generate(fields, body.input_prefix + (body.prompt or ""))
    return found.model_copy(update={"max_tokens": 0}) if most == 0 else found


def _most(body: InfillBody) -> int | None:
    """Return the maximum number of tokens; None for any number."""
    asked = next((value for name in _COUNTS if (value := getattr(body, name)) is not None), -1)
    return None if asked == -1 else int(asked)


def shape(body: InfillBody) -> ReplyShape:
    """Return what a native body does not have."""
    indent, seconds = body.n_indent or 0, max(0.0, body.t_max_predict_ms or 0.0) / 1000
    files = tuple(OtherFile(one.filename, one.text) for one in body.input_extra or ())
    stop = LineStop(indent, seconds) if indent or seconds else None
    return ReplyShape(files=files, cuts=True, line_stop=stop)


class Infilled(DataEvents):
    """Renders an output as llama-server does; the last event has everything but the text."""

    done = b""

    def __init__(self, generation: Generation, body: InfillBody) -> None:
        self._generation = generation
        self._body = body
        self._silent = _most(body) == 0  # a token was generated that was not asked for
        self._has_new_line = False

    def events(self, event: Json) -> Iterable[Json]:
        [choice] = event["choices"]
        self._has_new_line |= "\n" in choice["text"]
        if not self._silent and (choice["text"] or choice.get("logprobs")):
            yield self._head(choice, stop=False) | self._probabilities(choice)
        if choice["finish_reason"] is not None:
            yield self._chosen(self._last(event, choice | {"text": "", "token_ids": []}))

    def reply(self, reply: Json) -> object:
        [choice] = reply["choices"]
        self._has_new_line = not self._silent and "\n" in choice["text"]
        whole = self._last(reply, choice)
        return self._chosen(whole if self._silent else whole | self._probabilities(choice))

    def _head(self, choice: Json, *, stop: bool) -> Json:
        plan = self._generation.plan
        return {
            "index": 0,
            "content": "" if self._silent else choice["text"],
            "tokens": choice["token_ids"] if self._body.return_tokens and not self._silent else [],
            "id_slot": 0,
            "stop": stop,
            "tokens_predicted": 0 if self._silent else self._generation.completion_tokens,
            "tokens_evaluated": plan.prompt_tokens,
        }

    def _last(self, native: Json, choice: Json) -> Json:
        head, reason = self._head(choice, stop=True), choice.get("stop_reason")
        by_word = isinstance(reason, str) and reason != LINE_STOP
        by_end = choice["finish_reason"] == "stop" and not isinstance(reason, str)
        return head | {
            "model": native["model"],
            "generation_settings": self._settings(),
            "has_new_line": self._has_new_line,
            "truncated": self._generation.plan.is_cut,
            "stop_type": "word" if by_word else "eos" if by_end else "limit",
            "stopping_word": reason if by_word else "",
            "tokens_cached": head["tokens_evaluated"] + head["tokens_predicted"],
            "timings": self._timings(native, head["tokens_predicted"]),
        }

    def _settings(self) -> Json:
        params, names = self._generation.plan.requests[0].params, LLAMA_CPP.names
        found = {names.get(name, name): getattr(params, name) for name in (*LLAMA_CPP.same, *names)}
        return found | {"n_predict": -1 if _most(self._body) is None else _most(self._body)}

    def _timings(self, native: Json, predicted: int) -> Json:
        found, cached = native["timings"], native["usage"]["cached_tokens"]
        read = self._generation.plan.prompt_tokens - cached
        return {
            "cache_n": cached,
            **_rates("prompt", read, found["prefill_ms"]),
            **_rates("predicted", predicted, found["decode_ms"]),
        }

    def _probabilities(self, choice: Json) -> Json:
        entries = choice.get("logprobs")
        if not entries:
            return {}
        shown = [{**_token(one), "top_logprobs": [_token(other) for other in one["top"]]} for one in entries]
        return {"completion_probabilities": shown}

    def _chosen(self, whole: Json) -> Json:
        """Return the fields of the reply that were asked for."""
        asked = self._body.response_fields
        if not asked:
            return whole | {"prompt": self._prompt()}
        if any(path.split("/")[0] == "prompt" for path in asked):
            whole |= {"prompt": self._prompt()}
        return {path: value for path in asked for value in _at(whole, path.split("/"))}

    def _prompt(self) -> str:
        plan = self._generation.plan
        [request] = plan.requests
        ids = request.prompt_token_ids if request.source is None else request.source.token_ids
        assert plan.served.tokenizer is not None
        return plan.served.tokenizer.decode(ids, skip_special_tokens=False)


def _rates(name: str, count: int, milliseconds: float) -> Json:
    return {
        f"{name}_n": count,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / count if count else 0.0,
        f"{name}_per_second": 1000 * count / milliseconds if milliseconds else 0.0,
    }


def _token(entry: Json) -> Json:
    shown = shown_token(entry)
    return {"id": entry["id"], **shown, "bytes": shown["bytes"] or list(entry["text"].encode())}


def _at(value: Any, path: Sequence[str]) -> list[Any]:
    """Return what is at a path, as a list; empty if there is nothing."""
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return []
        value = value[name]
    return [value]
