"""The first pass over a body of /encode: all checks that need no tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from triptych.model.api.stats import ModelInfo
from triptych.service.core.context_bound import ContextBound
from triptych.service.core.errors import invalid, shorten, too_large
from triptych.service.core.models import ServedModel
from triptych.service.planning.outputs.base import CheckedInputs, EncodeBounds, EncodeInput
from triptych.service.planning.outputs.registry import OUTPUTS, output_of
from triptych.service.schemas.encode_bodies import EncodeBody
from triptych.service.schemas.types import ImageFile, TextPair
from triptych.service.settings.service_settings import Limits


def check_inputs(
    body: EncodeBody, served: ServedModel, info: ModelInfo, limits: Limits, uncounted: int
) -> CheckedInputs:
    """Check a body; raises an `ApiError` that names the first field that cannot be served."""
    count = len(body.input) if isinstance(body.input, list) and not isinstance(body.input[0], int) else 1
    if OUTPUTS[body.output].detailed or served.config.only_images:  # results for each token, or images
        bounds = EncodeBounds(limits.max_detailed_inputs, limits.max_detailed_tokens, uncounted)
    else:
        bounds = EncodeBounds(limits.max_encode_inputs, limits.max_encode_tokens, uncounted)
    _at_most("input", count - uncounted, bounds.inputs)
    _at_most("chunks", len(body.chunks or ()), limits.max_encode_inputs)
    output = output_of(body, served)
    _check_size(body, served, info)
    inputs = inputs_of(body)
    _at_most("input", sum(one.image is not None for one in inputs), limits.max_detailed_inputs)
    prompt = _prompt(inputs, body, served)
    if prompt and body.split is not None:
        raise invalid("split: a prompt stands in front of the first window alone", "split")
    if body.labels is not None:
        images, labels = len(inputs), len(body.labels)
        bounds.check_inputs(images * labels if output.shared is None else images + labels)
    return CheckedInputs(body, served, info, limits, bounds, output, tuple(inputs), prompt)


def _at_most(name: str, count: int, bound: int) -> None:
    if count > bound:
        raise too_large(f"{name} has {count} entries, more than {bound}", name, "too_many_inputs")


def inputs_of(body: EncodeBody) -> list[EncodeInput]:
    """Return the inputs in order, each with its path in the body."""
    value = body.input
    if isinstance(value, str):
        return [EncodeInput("input", text=value)]
    if isinstance(value[0], int):
        return [_input(value, "input")]
    return [_input(one, f"input[{index}]") for index, one in enumerate(value)]


def _input(one: object, param: str) -> EncodeInput:
    if isinstance(one, ImageFile):
        return EncodeInput(param, image=one.image)
    if isinstance(one, TextPair):
        return EncodeInput(param, text=one.text, pair=one.text_pair)
    if isinstance(one, str):
        return EncodeInput(param, text=one)
    return EncodeInput(param, ids=tuple(one))  # type: ignore[arg-type]


def _check_size(body: EncodeBody, served: ServedModel, info: ModelInfo) -> None:
    if body.pooling == "pooler" and not served.config.pooler:
        raise invalid(f"pooling: model {served.name} has no pooler", "pooling")
    own = body.output == "embedding" and body.pooling == "default"
    size = info.embedding_size if own else served.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise invalid(f"dimensions must be at most {size}", "dimensions")


def _prompt(inputs: Sequence[EncodeInput], body: EncodeBody, served: ServedModel) -> str:
    """Return the prompt before the texts, empty for none; raises a 400 for a prompt that does not apply."""
    sentences, name = served.checkpoint.sentences, body.prompt_name
    if "prompt_name" not in OUTPUTS[body.output].fields:  # the chat template of a reranker contains its prompt
        return sentences.prompt(None) if _is_scored(body) and served.pairs is None else ""
    _check_task(body, served)
    if served.config.only_images:
        if name is not None:
            raise invalid(f"prompt_name: model {served.name} reads images, which have no prompts", "prompt_name")
        return ""
    if name is not None and name not in sentences.prompts:
        known = ", ".join(sorted(sentences.prompts)) or "none"
        raise invalid(f"prompt_name: model {served.name} has no prompt {name!r}; it has {known}", "prompt_name")
    single = not any(one.pair is not None or one.ids or one.image for one in inputs)
    if name is not None and not single:
        raise invalid("prompt_name: only vectors of single texts have prompts", "prompt_name")
    if body.task is not None and sentences.adapter(body.task) is None:  # then `task` names a prompt
        if not single:
            raise invalid("task: only vectors of single texts have prompts", "task")
        if name not in (None, body.task):
            raise invalid(f"task and prompt_name contradict each other: {body.task!r} is a prompt too", "task")
    prompt = sentences.prompt(name, body.task)
    if prompt and body.truncate == "left" and not any(one.ids for one in inputs):
        raise invalid("truncate: a prompt stands at the left end; found 'left', expected 'right'", "truncate")
    return prompt


def _is_scored(body: EncodeBody) -> bool:
    """Whether a classifier reads the texts; a cross-encoder's prompt is then put before the first text."""
    return body.output in ("logits", "scores")


def _check_task(body: EncodeBody, served: ServedModel) -> None:
    known = served.checkpoint.sentences.tasks
    if body.task is not None and body.task not in known:
        listed = ", ".join(known) or "none"
        raise invalid(f"task: model {served.name} has no task {shorten(body.task)}; it has {listed}", "task")
    if served.checkpoint.sentences.adapter(body.task) is not None and body.pooling == "pooler":
        raise invalid(
            f"pooling: the pooler of model {served.name} has no adapters; leave out pooling or task", "pooling"
        )


def texts_of(checked: CheckedInputs) -> list[tuple[int | None, EncodeInput]]:
    """Return the texts that the engine reads, each with the index of its input, or None; raises an `ApiError`."""
    output = checked.output
    texts: list[tuple[int | None, EncodeInput]] = [
        (owner, one if output.verbatim else _prepared(one, checked))
        for owner, sent in enumerate(checked.inputs)
        for one in ((sent,) if output.readings is None else output.readings(checked, sent))
        if one.image is None or checked.served.config.joint is None
    ]
    if output.shared is not None:
        texts += [(None, one) for one in output.shared(checked)]
    if len(texts) > len(checked.inputs):
        checked.bounds.check_inputs(len(texts))
    per_token, may_cut = checked.limits.prompt_characters_per_token, checked.body.truncate is not False
    bound, characters = ContextBound(checked.info.max_model_len, per_token, checked.limits.max_text_bytes), 0
    is_bound = not (may_cut or output.windows or checked.body.split is not None)
    for _, one in texts:
        _check_text(checked, one)
        if is_bound:
            bound.check(one.text + (one.pair or ""), one.param)
        else:
            bound.check_bytes(one.text + (one.pair or ""), one.param)
        characters += one.characters
    most = per_token * checked.bounds.tokens
    if characters > most and not (may_cut and characters <= 2 * _sent(checked)):
        raise too_large(f"input has {characters} characters in all, more than {most}", "input", "too_many_tokens")
    return texts


def _sent(checked: CheckedInputs) -> int:
    """Return the characters of all inputs; a text that is in many of them, such as a query, counts once."""
    texts = (text for one in checked.inputs for text in (one.text, one.pair) if text)
    return sum({id(text): len(text) for text in texts}.values())


def _check_text(checked: CheckedInputs, one: EncodeInput) -> None:
    """Raise an `ApiError` for an input that the model or the output cannot read."""
    served, output = checked.served, checked.output
    if one.image is not None:
        raise invalid(f"{one.param}: model {served.name} reads text, not images", one.param)
    if one.ids is not None:
        if output.offsets:
            raise invalid(f"{one.param}: output '{output.name}' needs text, not token ids", one.param)
        return
    served.require_tokenizer(one.param)
    if one.pair is None and served.pairs is not None and output.labelled:
        raise invalid(f"{one.param}: model {served.name} scores pairs: send text and text_pair", one.param)
    single = served.config.encoder is None or served.config.joint is not None
    if one.pair is not None and single and served.pairs is None:
        raise invalid(f"{one.param}.text_pair: model {served.name} reads one text", f"{one.param}.text_pair")


def _prepared(one: EncodeInput, checked: CheckedInputs) -> EncodeInput:
    prepare, prompt = checked.served.checkpoint.sentences.prepare, checked.prompt
    if one.ids is not None or one.image is not None:
        return one
    if one.pair is not None:
        prompt = prompt if _is_scored(checked.body) else ""
        return msgspec.structs.replace(one, text=prepare(one.text, prompt), pair=prepare(one.pair))
    text = prepare(one.text, prompt)
    return one if text == one.text else msgspec.structs.replace(one, text=text)
