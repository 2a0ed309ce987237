"""OpenAI's decisions and moderations: probabilities of answers, and categories of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from triptych.model.api.request import Request as EngineRequest
from triptych.model.errors import TooManyTokensError
from triptych.service.chat.conversation import Conversation, rendered
from triptych.service.chat.message_fit import new_separator
from triptych.service.core.context_bound import ContextBound, context_exceeded
from triptych.service.core.errors import invalid, too_large
from triptych.service.core.models import ServedModel
from triptych.service.dialects import decisions, systemone
from triptych.service.dialects.common import fields_of, naming_errors, native_generate
from triptych.service.dialects.decision_bodies import DecisionBody, ModerationBody, Question
from triptych.service.dialects.decisions import EncodedQuestions, LabelTree
from triptych.service.dialects.ranking import judges_pairs
from triptych.service.dialects.systemone import SystemOneBody
from triptych.service.http.bodies import cancel_on_disconnect, context_of_request, json_response, read_body
from triptych.service.http.json_replies import Json
from triptych.service.http.model_use import choose_model
from triptych.service.http.route_table import Example, Routes, json_body, replies
from triptych.service.lifecycle.state import Service, service_of
from triptych.service.planning.admission import check_room
from triptych.service.planning.capabilities import DECIDE, MODERATE
from triptych.service.planning.tokenization import check_vocabulary
from triptych.service.routes import encode
from triptych.service.routes.label_probes import LabelProbes, probing

routes = Routes("generate")
_EXAMPLE = Example(
    DECIDE, {"input": "Hello", "questions": [{"type": "predicate", "instructions": "This is a greeting."}]}, own=True
)
_GREETS = {"greets": {"type": "noul", "instructions": "This is a greeting."}}
_NAMED_EXAMPLE = Example(DECIDE, {"state": "Hello", "questions": _GREETS})
_ANCHOR = 16  # characters before a label that are tokenised with it


@routes.post(
    "/v1/decisions",
    "Answer questions with probabilities, as OpenAI does",
    json_body(DecisionBody, decisions=_EXAMPLE),
    replies("The answers, in the order of the questions.", Any),
)
async def decide(request: Request) -> Response:
    """Works with OpenAI's client. Nothing is generated: a model that writes text computes one prefill a question over
    the shared input, and a classifier reads the input with each label.
    """
    return await _decided(request, await read_body(request, DecisionBody), lambda found: found)


@routes.post(
    "/v1/systemone",
    "Answer named questions with probabilities, as TypeSafe and Ollama do",
    json_body(SystemOneBody, systemone=_NAMED_EXAMPLE),
    replies("The answers, by the names of the questions.", Any),
)
async def system_one(request: Request) -> Response:
    """Works with the clients of TypeSafe and Ollama. The questions are answered as in /v1/decisions."""
    body = await read_body(request, SystemOneBody)
    with naming_errors(systemone.names(body)):
        return await _decided(
            request, systemone.decision(body), lambda found: systemone.reply(body, found), body.keep_alive
        )


@routes.post(
    "/v1/moderations",
    "Classify texts by what may be harmful, as OpenAI does",
    json_body(ModerationBody, moderations=Example(MODERATE, {"input": "{text}"})),
    replies("The categories of each text.", Any),
    task="encode",
)
async def moderate(request: Request) -> Response:
    """Works with OpenAI's client. Categories are the labels of a classifier: OpenAI's where names match, others under
    their own names.
    """
    body = await read_body(request, ModerationBody)
    what = "classifies texts into labels with names (`id2label` of config.json)"
    served = await choose_model(request, body.model, decisions.moderates, what, body.timeout_s)
    with naming_errors({"output": "model"}):
        found = decisions.moderate(body.model_copy(update={"model": served.name}))
        return await encode.answer(request, found, decisions.moderation_reply)


def _decides(served: ServedModel) -> bool:
    """Return whether a model answers questions."""
    head = served.config.classifier
    if not served.reads_text or served.config.only_images or (head is not None and head.spans):
        return False
    return judges_pairs(served) or served.config.can_generate


async def _decided(
    request: Request, body: DecisionBody, show: Callable[[Json], Json], keep_alive: float | str | None = None
) -> Response:
    """Answer the questions of a body; `show` translates the reply."""
    service = service_of(request)
    decisions.check(body, service.limits.max_encode_inputs)
    served = await choose_model(request, body.model, _decides, "writes text or classifies texts", body.timeout_s)
    if keep_alive is not None:
        service.models[served.name].keep_alive_s = float(keep_alive)
    body = body.model_copy(update={"model": served.name})
    if judges_pairs(served):
        questions = EncodedQuestions(body, served)
        with naming_errors(questions.names()):
            return await encode.answer(request, questions.body(), lambda *found: show(questions.reply(*found)))
    with service.handling(), naming_errors(decisions.NAMES):
        return json_response(show(await _answers(request, service, body, served)))


class _Prompts(NamedTuple):
    """The tokens of each question's prompt, and the tree of its labels."""

    ids: list[tuple[int, ...]]
    trees: list[LabelTree]


async def _answers(request: Request, service: Service, body: DecisionBody, served: ServedModel) -> Json:
    context, info = context_of_request(), service.model_info(served.name)
    check_room(service.client, served)
    before, after = await _around(service, body, served)
    characters = sum(map(len, before)) + sum(len(decisions.asked(one)) for one in body.questions)
    prompts = await service.threads.run(
        served.name, characters, lambda: _prompts(body, served, before, after, info.max_model_len)
    )
    most = service.limits.max_encode_inputs
    if (count := sum(len(one.branches) for one in prompts.trees)) > most:
        message = f"questions: their labels part at {count} places, more than max_encode_inputs ({most}); send fewer"
        raise too_large(message, "questions", "too_many_inputs")
    probes = await _probes(service, body, prompts)
    context.model, context.tokens_in = served.name, sum(one.num_sent_tokens for one in probes)
    await service.jobs.reserve(context)
    service.check_not_given_up()
    running = LabelProbes(service.client, service.jobs, context, info.max_num_seqs)
    found = iter(await cancel_on_disconnect(request, running.run(probes)))
    context.cached_tokens = running.cached_tokens
    answers = []
    for question, tree in zip(body.questions, prompts.trees, strict=True):
        shares, mass = tree.shares({path: next(found) for path in tree.branches})
        answers.append(decisions.answer(question, shares, mass=mass))
    return decisions.reply(served.name, answers, context.tokens_in, running.cached_tokens)


async def _around(service: Service, body: DecisionBody, served: ServedModel) -> tuple[list[str], list[str]]:
    """Return the text of the prompt before each question, and the text after it, cut within spelled marks."""
    if served.chat is None:
        limits, length = service.limits, service.model_info(served.name).max_model_len
        bound = ContextBound(length, limits.prompt_characters_per_token, limits.max_text_bytes)
        bound.check(decisions.plain(body), "input")
        return [decisions.plain(body) + "\n\n"], ["\nAnswer:"]
    mark = new_separator()
    messages = decisions.messages(body)
    if messages[-1]["role"] == "user":
        messages[-1]["content"] += f"\n\n{mark}"
    else:
        messages.append({"role": "user", "content": mark})
    variables = {} if served.chat.switch is None else {served.chat.switch: (False, "model")}
    parts = await rendered(service, served, Conversation(messages, variables=variables, param="input"))
    if "".join(parts).count(mark) != 1:
        raise invalid(f"input: the chat template of model {served.name} does not show the last message once", "input")
    at = next(at for at, part in enumerate(parts) if mark in part)
    head, tail = parts[at].split(mark)
    return [*parts[:at], head], [tail, *parts[at + 1 :]]


def _prompts(
    body: DecisionBody, served: ServedModel, before: Sequence[str], after: Sequence[str], context: int
) -> _Prompts:
    """Tokenise what the questions share once, and each question with its labels."""
    tokenizer = served.require_tokenizer("input")
    whole, trees, place = [], [], "input"
    try:
        shared: tuple[int, ...] = ()
        if served.chat is not None:
            shared = tokenizer.encode_parts(before, most=context)
        elif not served.is_encoder_decoder:
            shared = tokenizer.encode(before[0], most=context).ids
        for at, question in enumerate(body.questions):
            asked, place = decisions.asked(question), f"questions[{at}]"
            if served.is_encoder_decoder:
                whole.append(tokenizer.encode(before[0] + asked + after[0], most=context).ids)
            else:
                whole.append((*shared, *tokenizer.encode_parts(["", *_joined(asked, after, served)], most=context)))
            labels = _labels(question, served, asked + "".join(after))
            for ids in labels:
                check_vocabulary(ids, served.source_vocab_size, place)
            trees.append(decisions.label_tree(labels, question, place))
            longest = len(whole[-1]) + max(map(len, trees[-1].branches)) + 1
            if longest > context and not served.is_encoder_decoder:
                raise context_exceeded(context, f"input and {place} have {longest} tokens with an answer", place)
    except TooManyTokensError as error:
        raise context_exceeded(context, f"{place} has {error.count} tokens", place) from None
    return _Prompts(whole, trees)


def _joined(asked: str, after: Sequence[str], served: ServedModel) -> list[str]:
    """Return a question and what follows it, cut within the marks that the question spells, as messages are."""
    separator = new_separator()
    *parts, last = served.require_tokenizer("input").spelled_marks.parted(asked, separator).split(separator)
    return [*parts, last + after[0], *after[1:]]


def _labels(question: Question, served: ServedModel, before: str) -> list[tuple[int, ...]]:
    """Return the tokens of each label as they are after the text `before`."""
    tokenizer = served.require_tokenizer("input")
    anchor = "" if served.is_encoder_decoder else before[-_ANCHOR:]
    gap = "" if served.chat is not None or served.is_encoder_decoder else " "
    begin, labels = tokenizer.encode(anchor, add_special_tokens=False).ids, []
    for value in decisions.values_of(question):
        label = gap + decisions.as_json(value)
        ids = tokenizer.encode(anchor + label, add_special_tokens=False).ids
        is_joined = ids[: len(begin)] == begin
        labels.append(ids[len(begin) :] if is_joined else tokenizer.encode(label, add_special_tokens=False).ids)
    return labels


async def _probes(service: Service, body: DecisionBody, prompts: _Prompts) -> list[EngineRequest]:
    """Return a request for each place at which the labels of a question part."""
    context, found = context_of_request(), []
    fields = fields_of(body) | {"temperature": 0.0, "num_beams": 1, "return_token_ids": True}
    count = len(prompts.ids)
    bounds = [*range(0, count, service.limits.max_prompts), count]
    for begin, end in pairwise(bounds):
        trees: Sequence[LabelTree] = prompts.trees[begin:end]
        longest = max(len(path) for tree in trees for path in tree.branches)
        asked = native_generate(fields | {"max_tokens": longest + 1}, [list(ids) for ids in prompts.ids[begin:end]])
        plan = await service.generate_planner.plan(asked, context.request_id, context.started)
        for one, tree in zip(plan.requests, trees, strict=True):
            found += [probing(one, path, tokens) for path, tokens in tree.branches.items()]
    return found
