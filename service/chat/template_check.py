"""Checks a chat template before a model is served: what it writes is read back, and prompts have what was said.

Each check renders a short conversation as the service does. `tests/conformance/areas/templates.py` runs the checks of
calls over published templates. No weights are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from triptych.model.errors import ConfigError, GrammarError
from triptych.model.text.grammar import json_grammar
from triptych.model.text.grammar_matcher import Vocabulary, compile_grammar
from triptych.model.text.token_bytes import TokenBytes, token_bytes
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.chat.call_grammar import reply_grammar, written_calls
from triptych.service.chat.chat_template import ChatTemplate
from triptych.service.chat.check_conversations import (
    ANSWER,
    ASKED,
    CALLS,
    SAID,
    SCHEMA,
    SHOWN_TEXTS,
    THOUGHT,
    TOOLS,
    UNICODE,
    Calls,
    called,
    turns,
)
from triptych.service.chat.formats import (
    OWN,
    REASONING_FORMATS,
    ReasoningFormat,
    ToolFormat,
    calls_of,
    reasoning_format,
)
from triptych.service.chat.message_fit import fitted_messages, given_ids, new_separator, parted_messages, shown_tools
from triptych.service.chat.parts import WholeReply
from triptych.service.chat.reasoning_probe import without_reasoning
from triptych.service.chat.render_pool import RenderError, RenderWorker
from triptych.service.chat.reply_parser import ReplyFormat, ReplyParser
from triptych.service.chat.template_probe import last_reply
from triptych.service.chat.tools import Json, ToolUse
from triptych.service.core.errors import scrub

Result = Literal["yes", "no", "not applicable"]
_MOST_RENDERED, _SHOWN = 1_000_000, 160  # characters
_MOST_MARKS = 20


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. The reason of a `yes` says what was found, or what limits it."""

    name: str
    result: Result
    reason: str = ""


class TemplateCheck:
    """The checks of one template. Without a tokenizer, text is matched by bytes."""

    def __init__(self, chat: ChatTemplate, worker: RenderWorker, tokenizer: Tokenizer | None = None) -> None:
        self._plain, self._chat = chat, chat.chosen(with_tools=True)
        self._worker = worker
        self._tokenizer = tokenizer
        self._calls = calls_of(self._chat)
        self._reasoning = reasoning_format(chat.traits)
        # Bytes are the tokens, and the marks of channels, which are special tokens in every model that has them.
        is_harmony = self._reasoning is not None and self._reasoning.name == "harmony"
        self._special = {
            mark: 256 + at for at, mark in enumerate(REASONING_FORMATS["harmony"].marks if is_harmony else ())
        }
        every_byte = (*(bytes([byte]) for byte in range(256)), *(b"" for _ in self._special))
        self._bytes = Vocabulary(TokenBytes(every_byte, every_byte))

    def all(self) -> Iterator[Check]:
        """Run all checks, in the order of a table."""
        yield from self._formats()
        for name, messages, with_tools, may_refuse in SHOWN_TEXTS:
            if with_tools and self._calls is None:
                yield Check(name, "not applicable", "tools are refused")
            else:
                yield self._tried(name, lambda one: self._shows(one, messages, with_tools), may_refuse)  # noqa: B023
        yield self._tried("tools in the prompt", self._shows_tools, may_refuse=False)
        yield from self.calls()
        yield from self._replies()
        yield from self._tokens()

    def _tried(self, name: str, check: Callable[[str], Check], may_refuse: bool) -> Check:
        try:
            return check(name)
        except RenderError as error:
            if error.kind == "raised" and may_refuse:
                return Check(name, "not applicable", f"the template refuses it: {scrub(str(error))[:_SHOWN]}")
            return Check(name, "no", f"the template does not render it ({error.kind}: {scrub(str(error))[:_SHOWN]})")

    def _rendered(self, messages: Sequence[Json], *, with_tools: bool = False, speak: bool = False) -> str:
        chat, tools = (self._chat, TOOLS) if with_tools else (self._plain, ())
        fitted = fitted_messages(messages, tools, chat, calls_of(chat))
        shown = shown_tools(tools, chat.traits)
        variables = chat.variables(fitted, add_generation_prompt=speak, tools=shown)
        return self._worker.render(chat.source, variables, _MOST_RENDERED)

    # -- What was found

    def _formats(self) -> Iterator[Check]:
        calls, thoughts = self._calls, self._reasoning
        if calls is None:
            yield Check("tool format", "no", self._chat.traits.tools_problem)
        elif not self._chat.reads("tools"):
            yield Check("tool format", "yes", "json: the template reads no tools, so messages describe them")
        else:
            written = _short(written_calls(calls.syntax, CALLS["a call"]))
            why = "texts around a rendered call" if calls.name == OWN else "it gives the rendered call again"
            yield Check("tool format", "yes", f"{calls.name}: {why}: {written}")
        if thoughts is None:
            yield Check("reasoning format", "not applicable", "the template writes, opens and removes none")
        else:
            marks = f"{_short(thoughts.opening)} to {_short(thoughts.closing)}" if thoughts.closing else "channels"
            yield Check("reasoning format", "yes", f"{thoughts.name}: {marks}")

    # -- Prompts

    def _shows(self, name: str, messages: Sequence[Json], with_tools: bool) -> Check:
        """Check that the texts of a conversation are in its prompt, each after the one before."""
        prompt, at = self._rendered(messages, with_tools=with_tools, speak=messages[-1]["role"] != "assistant"), 0
        for message in messages:
            text = message.get("content") or ""
            places = [found for one in (text, _escaped(text)) if (found := prompt.find(one, at)) >= 0]  # or as JSON
            if not places:
                return Check(name, "no", f"{message['role']}: {_short(text)} is not in the prompt, or not in order")
            at = places[0] + len(text)
        return Check(name, "yes")

    def _shows_tools(self, name: str) -> Check:
        if self._calls is None:
            return Check(name, "not applicable", "tools are refused")
        prompt = self._rendered([ASKED], with_tools=True, speak=True)
        wanted = [tool.name for tool in TOOLS] + ["city", "urgent"]
        lost = [text for text in wanted if text not in prompt]
        return Check(name, "no", f"not in the prompt: {', '.join(lost)}") if lost else Check(name, "yes")

    # -- Calls

    def calls(self) -> Iterator[Check]:
        """Check that calls which the template writes are read back, however they are cut, and held by a grammar."""
        format = self._calls
        for kind, calls in CALLS.items():
            names = [f"{what}: {kind}" for what in ("read back", "in pieces", "grammar")]
            try:
                reply = "" if format is None else self._written(kind)
                why = _why_not(format, reply, calls)
            except RenderError as error:
                reply, why = "", f"the template refuses it: {scrub(str(error))[:_SHOWN]}"
            if format is None or why:
                yield from (Check(name, "not applicable", why) for name in names)
                continue
            tools = {tool.name: tool for tool in TOOLS}
            free = ReplyFormat(calls=format, tools=tools, ids=given_ids(self._chat.traits, format))
            found = ReplyParser(free).whole(reply)
            yield _outcome(names[0], _calls(found) == calls, f"{_calls(found)} of {_short(reply)}")
            yield _outcome(names[1], _is_one(free, reply), f"other parts in pieces: {_short(reply)}")
            yield self._held(names[2], format, calls, reply)

    def _written(self, kind: str) -> str:
        """Return the reply with calls that the template writes."""
        text = self._rendered([ASKED, called(kind)], with_tools=True)
        prompt = self._rendered([ASKED], with_tools=True, speak=True)
        try:
            plain = self._rendered([ASKED, {"role": "assistant", "content": SAID}], with_tools=True)
        except RenderError:
            plain = ""
        return without_reasoning(last_reply(text, prompt, plain.rpartition(SAID)[0])[0], self._reasoning)

    def _held(self, name: str, format: ToolFormat, calls: Calls, reply: str) -> Check:
        """Check that a grammar of a forced call takes these calls, as the template or the format writes them."""
        held = _forced(format)

        def is_taken(text: str) -> bool:
            taken = self._taken(lambda special: reply_grammar(held, ToolUse(TOOLS, "required"), "", special), text)
            return taken is not None and _calls(ReplyParser(held).whole(taken)) == calls

        written = reply[max(reply.find(format.syntax.trigger), 0) :]
        if is_taken(written) or is_taken(written.lstrip()):
            return Check(name, "yes")
        if is_taken(own := written_calls(format.syntax, calls)):
            return Check(name, "yes", f"held as {_short(own)}; the template writes {_short(written)}")
        return Check(name, "no", f"the grammar does not take {_short(written)}")

    # -- Other replies

    def _replies(self) -> Iterator[Check]:
        thoughts = self._reasoning
        names = ("read back: reasoning", "in pieces: reasoning")
        if thoughts is None:
            yield from (Check(name, "not applicable", "there is no reasoning format") for name in names)
        else:
            format, reply, note = self._thought(thoughts, SAID)
            found = ReplyParser(format).whole(reply)
            is_whole = (found.reasoning, found.content) == (THOUGHT, SAID)
            yield Check(names[0], "yes", note) if is_whole else Check(names[0], "no", f"{found} of {_short(reply)}")
            yield _outcome(names[1], _is_one(format, reply), f"other parts in pieces: {_short(reply)}")
        answer = json.dumps(ANSWER, ensure_ascii=False)
        format, reply, _ = self._thought(thoughts, answer)
        for name, use in (("response_format", ToolUse()), ("response_format with tools", ToolUse(TOOLS))):
            name = f"grammar: {name}"
            if use.tools and self._calls is None:
                yield Check(name, "not applicable", "tools are refused")
                continue
            whole = ReplyFormat(
                *(format.reasoning, format.reasoning_opened),
                calls=self._calls if use.tools else None,
                tools={tool.name: tool for tool in use.tools},
                is_held=bool(use.tools),
            )
            content = self._calls.syntax.content if use.tools and self._calls is not None else ""
            taken = self._taken(
                lambda special: reply_grammar(whole, use, json_grammar(SCHEMA), special),  # noqa: B023
                reply,
            )
            read = None if taken is None else ReplyParser(whole).whole(taken).content.removeprefix(content)
            yield _outcome(name, read == answer, f"the grammar takes {_short(taken or '')} of {_short(reply)}")

    def _thought(self, thoughts: ReasoningFormat | None, said: str) -> tuple[ReplyFormat, str, str]:
        """Return a reply with reasoning and its format, and what is said of its origin."""
        if thoughts is None:
            return ReplyFormat(), said, ""
        asked = turns("Question-3")
        try:
            prompt = self._rendered(asked, speak=True)
            answered = {"role": "assistant", "content": said}
            ending = self._rendered([*asked, answered]).rpartition(said)[2]
            text = self._rendered([*asked, answered | {"reasoning_content": THOUGHT}])
            reply, is_sure = last_reply(text, prompt)
        except RenderError:
            prompt, ending, reply, is_sure = "", "", "", False
        opened = is_sure and bool(thoughts.opening) and prompt.rstrip().endswith(thoughts.opening.strip())
        format = ReplyFormat(thoughts, reasoning_opened=opened)
        written = reply.removesuffix(ending)
        between = written.rpartition(thoughts.closing)[2].removesuffix(said) if thoughts.closing else ""
        if THOUGHT in written and written.endswith(said) and (opened or thoughts.opening.strip() in written):
            if not between.strip():
                return format, written, ""
            note = f"tried without {_short(between)}, which the template writes before the answer"
        else:
            note = "the template leaves it out of earlier replies; tried with the format's marks"
        if thoughts.name == "harmony":
            begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
            return ReplyFormat(thoughts), f"{begin}{THOUGHT}{end}{said}", note
        return ReplyFormat(thoughts), f"{thoughts.opening}{THOUGHT}{thoughts.closing}\n\n{said}", note

    def _taken(self, grammar: Callable[[Callable[[str], int | None]], str], text: str) -> str | None:
        """Return the beginning of a text that is a whole reply of the grammar; None if no beginning is."""
        try:
            matcher = compile_grammar(grammar(self._special.get), self._bytes)
        except GrammarError:
            return None
        taken, complete = "", None
        for piece in re.split(f"({'|'.join(map(re.escape, self._special)) or '$^'})", text):
            for character in [piece] if piece in self._special else piece:
                tokens = [self._special[piece]] if piece in self._special else list(character.encode())
                for token in tokens:
                    if not matcher.tokens[token]:
                        return complete
                    matcher.accept(token)
                taken += character
                complete = taken if matcher.is_complete else complete
        return complete

    # -- The tokenizer

    def _tokens(self) -> Iterator[Check]:
        tokenizer = self._tokenizer
        names = ("marks are tokens", "Unicode in tokens", "spelled marks stay text", "grammar in tokens")
        if tokenizer is None:
            yield from (Check(name, "not applicable", "no tokenizer is given") for name in names)
            return
        yield self._marks(names[0], tokenizer)
        yield self._tried(names[1], lambda name: self._keeps_unicode(name, tokenizer), may_refuse=False)
        yield self._tried(names[2], lambda name: self._keeps_marks(name, tokenizer), may_refuse=False)
        yield self._held_in_tokens(names[3], tokenizer)

    def _marks(self, name: str, tokenizer: Tokenizer) -> Check:
        calls = self._calls.marks if self._calls is not None and self._chat.reads("tools") else ()
        marks = (*calls, *(self._reasoning.marks if self._reasoning is not None else ()))
        lost = [_short(mark) for mark in marks if mark and tokenizer.special_token_id(mark) is None]
        if not any(marks):
            return Check(name, "not applicable", "the formats have no marks")
        return Check(name, "yes", f"spelt in several tokens: {', '.join(lost)}" if lost else "")

    def _keeps_unicode(self, name: str, tokenizer: Tokenizer) -> Check:
        prompt = self._rendered(turns(UNICODE), speak=True)
        text = tokenizer.decode_part(tokenizer.encode(prompt, add_special_tokens=False).ids, skip_special_tokens=False)
        return _outcome(name, UNICODE in text, f"{UNICODE} is decoded to {_short(text)}")

    def _keeps_marks(self, name: str, tokenizer: Tokenizer) -> Check:
        """Check that special tokens which a user spells are no special tokens of the prompt, and keep their text."""
        spelled, separator = " ".join(tokenizer.special_texts[:_MOST_MARKS]), new_separator()
        if not spelled:
            return Check(name, "not applicable", "the tokenizer has no special tokens")
        counts = []
        for text in (spelled, "x"):
            [said] = parted_messages(turns(text), tokenizer.spelled_marks, separator, {})
            ids = tokenizer.encode_parts(self._rendered([said], speak=True).split(separator))
            counts.append(sum(token in tokenizer.special_ids for token in ids))
            if text == spelled and text not in (shown := tokenizer.decode_part(ids, skip_special_tokens=False)):
                return Check(name, "no", f"{_short(text)} is decoded to {_short(shown)}")
        return _outcome(name, counts[0] == counts[1], f"{counts[0]} special tokens in place of {counts[1]}")

    def _held_in_tokens(self, name: str, tokenizer: Tokenizer) -> Check:
        """Check that a grammar takes the tokens of a reply with a call."""
        format = self._calls
        if format is None:
            return Check(name, "not applicable", "tools are refused")

        def special(mark: str) -> int | None:
            found = tokenizer.special_token_id(mark)
            return found if found in tokenizer.special_ids else None

        held = _forced(format)
        text = written_calls(format.syntax, CALLS["a call"])
        try:
            vocabulary = Vocabulary(token_bytes(tokenizer, tokenizer.vocab_size))
            matcher = compile_grammar(reply_grammar(held, ToolUse(TOOLS, "required"), "", special), vocabulary)
        except (ConfigError, GrammarError) as error:
            return Check(name, "no", str(error)[: 2 * _SHOWN])
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            if not matcher.tokens[token]:
                return Check(name, "no", f"{_short(tokenizer.token_text(token))} is not allowed in {_short(text)}")
            matcher.accept(token)
        return _outcome(name, matcher.is_complete, f"the grammar wants more than {_short(text)}")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _outcome(name: str, is_right: bool, problem: str) -> Check:
    return Check(name, "yes") if is_right else Check(name, "no", problem)


def _short(text: str) -> str:
    """Return the beginning of a text, in quotes."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def _why_not(format: ToolFormat | None, reply: str, calls: Calls) -> str:
    """Return why a reply is not compared with the calls that were given to the template; empty: it is."""
    if format is None:
        return "tools are refused"
    if format.syntax.one and len(calls) > 1:
        return "a reply ends with its first call"
    said = [str(value) for _, given in calls for value in list(given.values())[:1]]
    lost = [text for text in said if not any(one in reply for one in (text, _escaped(text), json.dumps(text)[1:-1]))]
    return f"the template leaves out or changes {', '.join(map(_short, lost))}" if lost else ""


def _forced(format: ToolFormat) -> ReplyFormat:
    """Return the format of a reply that a grammar makes call a tool."""
    channels = REASONING_FORMATS["harmony"] if format.name == "harmony" else None
    return ReplyFormat(channels, calls=format, tools={tool.name: tool for tool in TOOLS}, is_held=True)


def _calls(reply: WholeReply) -> list[tuple[str, Any]]:
    return [(call.name, _as_json(call.arguments)) for call in reply.calls]


def _as_json(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def _is_one(format: ReplyFormat, text: str) -> bool:
    """Return whether a reply has the same parts at once, in single characters, and cut in two at each place."""
    wanted = _parts(ReplyParser(format).whole(text))
    splits = [list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    return all(_parts(_streamed(format, pieces)) == wanted for pieces in splits)


def _parts(reply: WholeReply) -> tuple[str, str, list[tuple[str, str]]]:
    return reply.reasoning, reply.content, [(call.name, call.arguments) for call in reply.calls]


def _streamed(format: ReplyFormat, pieces: list[str]) -> WholeReply:
    parser, reply = ReplyParser(format), WholeReply()
    for piece in pieces:
        reply.add(parser.push(piece))
    reply.add(parser.push("", end=True))
    return reply
