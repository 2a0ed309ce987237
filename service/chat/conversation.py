"""Turns a conversation into prompt tokens and the format of its reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from triptych.model.api.request import ImageSpan
from triptych.model.errors import TooManyTokensError
from triptych.service.chat.call_grammar import reply_grammar
from triptych.service.chat.chat_template import ChatTemplate
from triptych.service.chat.formats import ToolFormat, calls_of, reasoning_format
from triptych.service.chat.message_fit import (
    fitted_messages,
    given_ids,
    new_separator,
    parted_messages,
    shown_tools,
    texts_of,
    without_marks,
)
from triptych.service.chat.reply_parser import ReplyFormat
from triptych.service.chat.tools import Json, ToolUse
from triptych.service.core.context_bound import ContextBound, context_exceeded
from triptych.service.core.errors import ApiError, invalid, shorten
from triptych.service.core.models import ServedModel
from triptych.service.images.pictures import Pictures, pictures_of, spelled_marks, without_files
from triptych.service.lifecycle.state import Service
from triptych.service.planning.admission import check_room, loaded_info
from triptych.service.planning.checks import ReplyShape
from triptych.service.planning.response_format import OutputConstraint, check_schema, schema_constraint

_LONG = 20_000  # characters


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages, tools and template variables of a request, in the form that templates read.

    `variables` are the template variables that the request sets, each with the field that it comes from.
    """

    messages: list[Json]
    use: ToolUse = field(default_factory=ToolUse)
    variables: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    param: str = "messages"
    to_speak: bool = True  # the prompt ends at the start of the assistant's message
    continues: bool = False  # the prompt ends within the last message
    separator: str = field(default_factory=new_separator)
    parted: dict[str, str] = field(default_factory=dict)  # texts, with it in spelled marks: searched once
    pictures: list[Pictures] = field(default_factory=list)  # those of all messages, checked and decoded once


@dataclass(frozen=True, slots=True)
class Turn:
    """The prompt of a conversation and the format of its reply."""

    ids: list[int]
    format: ReplyFormat
    use: ToolUse
    served: ServedModel
    images: tuple[ImageSpan, ...] = ()

    def shape(self) -> ReplyShape:
        """Return the reply's constraint and the special tokens that it shows; neither if it is all content."""
        if self.format.is_plain:
            return ReplyShape(images=self.images)
        calls, reasoning = self.format.calls, self.format.reasoning
        marks = (*(calls.marks if calls else ()), *(reasoning.marks if reasoning else ()))
        ids = {self._special_id(mark) for mark in marks}
        ends = {self._special_id(mark) for mark in calls.ends} if calls is not None else set()
        shown, stops = tuple(sorted(_known(ids))), tuple(sorted(_known(ends)))
        return ReplyShape(self._constraint, shown, stops, images=self.images)

    def _special_id(self, text: str) -> int | None:
        tokenizer = self.served.require_tokenizer("messages")
        found = tokenizer.special_token_id(text) if text else None
        return found if found in tokenizer.special_ids else None

    def _constraint(self, given: OutputConstraint | None) -> OutputConstraint | None:
        """Return the constraint of the whole reply; `given` constrains an answer without calls."""
        if given is None and not self.use.is_held:
            return None
        parts: list[OutputConstraint] = [] if given is None else [given]
        parts += [schema_constraint(tool.schema, tool.param) for tool in self.use.callable]
        answer = "" if given is None else given.grammar
        grammar = reply_grammar(self.format, self.use, answer, self._special_id)
        return OutputConstraint(grammar, parts[0].param if len(parts) == 1 else "tools", tuple(parts))


def _known(ids: set[int | None]) -> set[int]:
    return {id for id in ids if id is not None}


async def take_turn(service: Service, served: ServedModel, conversation: Conversation, *, answer_is_held: bool) -> Turn:
    """Render and tokenise a conversation; raises `ApiError` that names its fields.

    `answer_is_held`: a grammar constrains the answer, and therefore the whole reply.
    """
    param, context = conversation.param, service.model_info(served.name).max_model_len
    if conversation.use.is_held or answer_is_held:
        for tool in conversation.use.callable:
            check_schema(tool.schema, tool.param, service.limits)
    chat, calls, parts = await _prompt(service, served, conversation)
    tokenizer = served.require_tokenizer(param)
    reasoning = reasoning_format(chat.traits, service.settings.reasoning_format)
    pictures = _pictures(service, served, conversation)
    prepared = await pictures.decode(pictures_of(conversation.messages), context, param)
    whole = pictures.expanded(parts, prepared, param)

    def work() -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
        ids = tokenizer.encode_parts(whole, most=context)
        return ids, pictures.spans(ids, prepared, param)

    try:
        ids, images = await service.threads.run(served.name, sum(map(len, whole)), work)
    except TooManyTokensError as error:
        raise context_exceeded(context, f"{param} has {error.count} prompt tokens", param) from None
    if not ids:
        raise _empty(param)
    use, ending = conversation.use, "".join(parts).rstrip()
    opened = closed = False
    if reasoning is not None and reasoning.opening:
        opening, closing = reasoning.opening.strip(), reasoning.closing
        said = str(conversation.messages[-1].get("content") or "") if conversation.continues else ""
        opened = ending.endswith(opening) or said.rfind(opening) > said.rfind(closing)
        closed = ending.endswith(closing)
    format = ReplyFormat(
        reasoning,
        reasoning_opened=opened,
        reasoning_closed=closed,
        calls=calls if calls is not None and (use.callable or calls.frames_content) else None,
        ids=given_ids(chat.traits, calls),
        tools={tool.name: tool for tool in use.callable},
        one_call=not use.parallel,
        is_held=use.is_held or (answer_is_held and bool(use.callable)),
    )
    return Turn(list(ids), format, use, served, images)


async def count_tokens(service: Service, served: ServedModel, conversation: Conversation) -> int:
    """Return the number of tokens of the prompt that `take_turn` makes."""
    _, _, parts = await _prompt(service, served, conversation)
    tokenizer, param = served.require_tokenizer(conversation.param), conversation.param
    pictures = _pictures(service, served, conversation)
    prepared = await pictures.decode(pictures_of(conversation.messages), None, param)  # texts may be too long as well
    parts = pictures.expanded(parts, prepared, param)
    size = sum(map(len, parts))
    count = await service.threads.run(served.name, size, lambda: len(tokenizer.encode_parts(parts)))
    if not count:
        raise _empty(param)
    return count


async def rendered(service: Service, served: ServedModel, conversation: Conversation) -> list[str]:
    """Return the text of the prompt that `take_turn` makes, cut within spelled marks and without pictures."""
    return (await _prompt(service, served, conversation))[2]


def _empty(param: str) -> ApiError:
    return invalid(f"{param}: the chat template makes an empty prompt of it", param, "empty_prompt")


async def _prompt(
    service: Service, served: ServedModel, conversation: Conversation
) -> tuple[ChatTemplate, ToolFormat | None, list[str]]:
    """Return the template of a conversation, the format of its calls, and its prompt, cut within spelled marks."""
    param, limits = conversation.param, service.limits
    chat, calls = _chosen(service, served, conversation.use)
    for name, found, most in (
        (param, conversation.messages, limits.max_chat_messages),
        ("tools", conversation.use.tools, limits.max_tools),
    ):
        if len(found) > most:
            raise invalid(f"{name} has {len(found)} entries, more than {most}", name)
    served.require_tokenizer(param)
    _pictures(service, served, conversation)
    check_room(service.client, served)
    return chat, calls, await _rendered(service, served, chat, conversation, calls)


def _pictures(service: Service, served: ServedModel, conversation: Conversation) -> Pictures:
    """Return the pictures of a conversation, which are checked the first time; raises an `ApiError`."""
    if not conversation.pictures:
        found = pictures_of(conversation.messages)
        info, most = loaded_info(service.client, served), service.limits.max_detailed_inputs
        conversation.pictures.append(Pictures(service.images, served, info, found, most))
    return conversation.pictures[0]


def template_variables(
    chat: ChatTemplate | None, effort: str | None, param: str, thinks: bool | None, others: Mapping[str, Any] | None
) -> dict[str, tuple[Any, str]]:
    """Return the template variables that a body sets: `effort` in the field `param`, the switch `thinks`, and others.

    The effort `none` is accepted for every template: one without reasoning satisfies it.
    """
    variables: dict[str, tuple[Any, str]] = {}
    if effort == "none" and chat is not None and not chat.takes("reasoning_effort"):
        if chat.switch is not None:
            variables[chat.switch] = (False, param)
    elif effort is not None and chat is not None:
        variables["reasoning_effort"] = (effort, param)
    if thinks is not None:
        switch = None if chat is None else chat.switch
        variables[switch or "enable_thinking"] = (thinks, "enable_thinking")
    for name, value in (others or {}).items():
        variables[name] = (value, f"chat_template_kwargs.{name[:64]}")
    return variables


def _chosen(service: Service, served: ServedModel, use: ToolUse) -> tuple[ChatTemplate, ToolFormat | None]:
    """Return the template and the format of calls for a conversation; raises `ApiError` if tools cannot be called."""
    if served.chat is None:
        problem = served.chat_problem or f"model {served.name} has no chat template"
        message = f"{problem}; /v1/completions and /generate take plain prompts"
        raise invalid(message, "model", "no_chat_template")
    chat = served.chat.chosen(with_tools=bool(use.callable))
    calls = calls_of(chat, service.settings.tool_format)
    if calls is None and use.callable:
        message = (
            f"tools: model {served.name} does not support tools: {chat.traits.tools_problem}. Send no tools or "
            "tool_choice none; the service's setting --tool-format names a format for all its models"
        )
        raise invalid(message, "tools", "not_supported")
    return chat, calls


async def _rendered(
    service: Service, served: ServedModel, chat: ChatTemplate, conversation: Conversation, calls: ToolFormat | None
) -> list[str]:
    for name, (_, param) in conversation.variables.items():
        if not chat.takes(name):
            raise invalid(
                f"{param}: the chat template of model {served.name} has no variable {shorten(name)}",
                param,
                "not_supported",
            )
    tools = conversation.use.tools if conversation.use.choice != "none" else ()

    marks, separator = served.require_tokenizer(conversation.param).spelled_marks, conversation.separator

    processing = _pictures(service, served, conversation).processing
    images = None if processing is None else spelled_marks(processing)

    def fitted() -> list[Json]:
        fitting = fitted_messages(without_files(conversation.messages), tools, chat, calls)
        found = parted_messages(fitting, marks, separator, conversation.parted)
        return found if images is None else without_marks(found, images, separator)

    limits, context = service.limits, service.model_info(served.name).max_model_len
    bound = ContextBound(context, limits.prompt_characters_per_token, limits.max_text_bytes)
    # Long texts, and descriptions of tools that are written into the messages, are handled in another thread.
    texts = [text for one in conversation.messages for text in texts_of(one)]
    for text in texts:  # a search in a longer one would keep the event loop waiting
        bound.check_rendered(text, "messages")
    size = sum(map(len, texts))
    is_long = size > _LONG or (tools and not chat.reads("tools"))
    messages = await service.threads.run_in_thread(fitted) if is_long else fitted()
    more = {name: value for name, (value, _) in conversation.variables.items()}
    shown = shown_tools(tools, chat.traits)
    if images is not None:
        shown, more = without_marks(shown, images, separator), without_marks(more, images, separator)
    if conversation.continues:
        text = await chat.continued(service.renderers, messages, bound, tools=shown, more=more)
    else:
        speaks = conversation.to_speak
        text = await chat.render(
            service.renderers, messages, bound, add_generation_prompt=speaks, tools=shown, more=more
        )
    return text.split(separator)
