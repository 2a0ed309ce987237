"""Bodies that cost much for their size: they are refused or answered, and the event loop is never held for long."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SIZE = 1_990_000  # bytes, nearly `max_body_bytes`
CHAT, MESSAGES, RESPONSES, GENERATE = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/generate"
_HI = b'[{"role":"user","content":"x"}]'


class Worst(NamedTuple):
    """One request; `body` is made when it is wanted."""

    name: str
    route: str
    before: bytes
    item: bytes  # repeated up to the size, with commas between; %d is replaced by its number
    after: bytes

    def of_model(self, name: str) -> Worst:
        """Return the request for the model of this name, also where it names none."""
        model = b'{"model":"%b",' % name.encode()
        return self._replace(before=re.sub(rb'^\{("model":"\w+",)?', model, self.before))

    def body(self, *, size: int = SIZE, values: int = SIZE) -> bytes:
        """Return a body of at most `size` bytes with about `values` values; numbers are not counted."""
        room = size - len(self.before) - len(self.after)
        count = min(room // (len(self.item) + 5 * (b"%d" in self.item) + 1), values // self._item_values())
        if b"%d" not in self.item:
            return self.before + b",".join([self.item] * count) + self.after
        return self.before + b",".join(self.item.replace(b"%d", b"%d" % at) for at in range(count)) + self.after

    def _item_values(self) -> int:
        return self.item.count(b'"') // 2 + self.item.count(b"{") + self.item.count(b"[") or 1


def _chat(before: bytes, item: bytes, after: bytes, name: str) -> Worst:
    return Worst(f"chat, {name}", CHAT, b'{"model":"chat","max_tokens":1,' + before, item, after + b"}")


def _message(before: bytes, item: bytes, after: bytes, name: str) -> Worst:
    return Worst(f"messages, {name}", MESSAGES, b'{"model":"chat","max_tokens":1,' + before, item, after + b"}")


def _items(before: bytes, item: bytes, after: bytes, name: str) -> Worst:
    return Worst(
        f"responses, {name}", RESPONSES, b'{"model":"chat","max_output_tokens":1,' + before, item, after + b"}"
    )


def _generate(before: bytes, item: bytes, after: bytes, name: str) -> Worst:
    return Worst(f"generate, {name}", GENERATE, b'{"model":"gen","max_tokens":1,' + before, item, after + b"}")


def _other(route: str, before: bytes, item: bytes, after: bytes) -> Worst:
    return Worst(f"{route} {before[:40].decode()}", route, before, item, after)


_CALL = b'{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'
_USE = b'{"type":"tool_use","id":"","name":"","input":{}}'
_ASSISTANT = b'"messages":[{"role":"user","content":"x"},{"role":"assistant","content":['
_CALLS = b'"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"","tool_calls":['
_FLOAT = b"1.2345678901234567890123456789e-300"
_PROPERTY = b'"p%d":{"type":"string"}'


def worst_bodies() -> Iterator[Worst]:
    """Yield all of them: counts of every list, deep and wide schemas, JSON in texts, long texts, and wrong types."""
    yield _chat(b'"messages":[', b"{}", b"]", "messages of nothing")
    yield _chat(b'"messages":[', b'{"role":"u","content":""}', b"]", "short messages")
    yield _chat(b'"messages":[', b"0", b"]", "numbers for messages")
    yield _chat(b'"messages":[{"role":"user","content":[', b'{"type":"text","text":"a"}', b"]}]", "parts")
    yield _chat(b'"messages":[{"role":"user",', b'"x%d":0', b"}]", "unknown fields of a message")
    yield _chat(b'"messages":[{"role":"user","content":"x"}],', b'"x":0', b"", "one unknown field again and again")
    yield _chat(_CALLS, _CALL, b"]}]", "calls")
    yield _chat(b'"messages":' + _HI + b',"tools":[', b'{"function":{"name":"a"}}', b"]", "tools of one name")
    yield _chat(b'"messages":' + _HI + b',"tools":[', b'{"function":{"name":"a%d"}}', b"]", "tools")
    wide = b'"messages":' + _HI + b',"tools":[{"type":"function","function":{"name":"a","parameters":{"properties":{'
    yield _chat(wide, _PROPERTY, b"}}}}]", "properties of a tool")
    yield _chat(b'"messages":' + _HI + b',"stop_token_ids":[', b'""', b"]", "texts for ids")
    yield _chat(b'"messages":' + _HI + b',"logit_bias":{', b'"x%d":""', b"}", "biases of nothing")
    yield _chat(b'"messages":' + _HI + b',"stop":[', b'"a"', b"]", "stops")
    yield _chat(b'"messages":' + _HI + b',"chat_template_kwargs":{', b'"a%d":1', b"}", "variables")
    wide = b'"messages":' + _HI + b',"response_format":{"type":"json_schema","json_schema":{"schema":{"properties":{'
    yield _chat(wide, _PROPERTY, b"}}}}", "properties of a schema")
    call = _CALL.replace(b"{}", b'{\\"a\\":[' + b"{}," * 5000 + b"{}]}")
    yield _chat(_CALLS, call, b"]}]", "objects in arguments")
    yield _chat(_CALLS, _CALL.replace(b"{}", b"[" + (_FLOAT + b",") * 5000 + b"1]"), b"]}]", "numbers in arguments")
    unclosed = _CALL.replace(b"{}", b"[]," * 200 + b'\\"' + b'\\\\\\"' * 100_000)
    yield _chat(_CALLS + unclosed + b",", _CALL, b"]}]", "a text without an end in arguments")
    yield _chat(b'"messages":[{"role":"user","content":"' + b"a" * (SIZE - 99), b"", b'"}]', "one text")
    yield _chat(b'"messages":[{"role":"user","content":"' + b"\\u0041" * (SIZE // 6 - 99), b"", b'"}]', "escapes")
    yield _message(_ASSISTANT, _USE, b"]}]", "uses of tools")
    yield _message(_ASSISTANT, b'{"type":"text","text":"aaaaaaaaaaaaaaaaaaaaaaaa"}', b"]}]", "texts")
    yield _message(_ASSISTANT, b'{"type":"thinking","thinking":"aaaaaa","signature":""}', b"]}]", "thoughts")
    yield _message(
        b'"messages":[{"role":"user","content":[', b'{"type":"tool_result","tool_use_id":"a"}', b"]}]", "results"
    )
    yield _message(
        b'"messages":[', b'{"role":"user","content":"aaaaaaaaaaaaaaaaaaaaaaaa"}', b"]", "messages of one role"
    )
    yield _message(b'"messages":[', b"{}", b"]", "messages of nothing")
    yield _message(b'"messages":' + _HI + b',"tools":[', b'{"name":"a%d","input_schema":{}}', b"]", "tools")
    yield _message(b'"messages":' + _HI + b',"system":[', b'{"type":"text","text":"a"}', b"]", "system texts")
    yield _items(b'"input":[', b'{"role":"user","content":""}', b"]", "items")
    yield _items(b'"input":[', b'{"type":"function_call","call_id":"a","name":"f","arguments":"{}"}', b"]", "calls")
    yield _items(
        b'"input":[', b'{"type":"reasoning","content":[{"type":"reasoning_text","text":"a"}]}', b"]", "thoughts"
    )
    thought = b'{"type":"reasoning","content":[{"type":"reasoning_text","text":"' + b"a" * 1_960 + b'"}]}'
    yield _items(b'"input":[', thought, b"]", "long thoughts")
    yield _items(b'"input":[', b'{"role":"assistant","content":"' + b"a" * 2_000 + b'"}', b"]", "long answers")
    result = b'{"role":"tool","tool_call_id":"a","content":"' + b"a" * 1_980 + b'"}'
    yield _chat(b'"messages":[', result, b"]", "long results")
    yield _message(
        b'"messages":[', b'{"role":"user","content":"' + b"a" * 2_000 + b'"}', b"]", "long texts of one role"
    )
    yield _items(
        b'"input":"x","tools":[{"type":"namespace","name":"n","tools":[',
        b'{"type":"function","name":"a%d"}',
        b"]}]",
        "tools",
    )
    yield _generate(b'"prompt":"x",', b'"x%d":1', b"", "unknown fields")
    yield _generate(b'"prompt":"x",', b'"x":NaN', b"", "no numbers")
    yield _generate(b'"prompt":"x","stop_token_ids":[', b'""', b"]", "texts for ids")
    yield _generate(b'"prompt":[', b"0", b"]", "ids")
    yield _generate(b'"prompt":[', b"[0]", b"]", "lists of ids")
    yield _generate(b'"prompt":[', b'"a"', b"]", "prompts")
    yield _generate(b'"prompt":[', _FLOAT, b"]", "long numbers")
    yield _generate(b'"prompt":[', b"1" * 4200, b"]", "longer numbers")
    yield _generate(b'"prompt":"x","choice":[', b'"a%d"', b"]", "choices")
    yield _generate(b'"prompt":"x","regex":"' + b"a" * (SIZE - 99), b"", b'"', "a long expression")
    yield _generate(b'"prompt":"x","grammar":"' + b"a" * (SIZE - 99), b"", b'"', "a long grammar")
    yield _generate(b"[" * (SIZE // 2), b"", b"", "brackets")
    for grammar in (b"root ::= a " + b"#" * 64, b"\\n" * 60_000, b'root ::= \\"a\\"{' + b" " * 60_000):
        yield _generate(b'"grammar":"' + grammar + b'","prompt":[', b"0", b"]", f"{grammar[:12].decode()} as a grammar")
    schema = b'{"model":"gen","inputs":"x","parameters":{"grammar":{"type":"json","value":"'
    yield _other(GENERATE, schema + b"[" + (_FLOAT + b",") * 50_000, b"", b'1]"}}}')
    yield _other(GENERATE, schema + b"[" + b"{}," * 20_000, b"", b'1]"}}}')
    yield _other(GENERATE, b'{"model":"gen","inputs":"x","parameters":{"stop":[', b'"a"', b"]}}")
    yield _other("/v1/completions", b'{"model":"gen","prompt":[', b'"a"', b"]}")
    yield _other("/v1/embeddings", b'{"model":"enc","input":[', b'"w1"', b"]}")
    yield _other("/v1/embeddings", b'{"model":"enc","input":[', b"[0]", b"]}")
    yield _other("/encode", b'{"model":"enc","input":[', b'{"text":"a","text_pair":"b"}', b"]}")
    yield _other("/encode", b'{"model":"enc","input":"w1","embedding_type":"int8","ranges":[[', b"0", b"],[1]]}")
    yield _other("/embed", b'{"model":"enc","inputs":[', b'"w1"', b"]}")
    yield _other("/v1/rerank", b'{"model":"enc","query":"a","documents":[', b'"a"', b"]}")
    yield _other("/v1/rerank", b'{"model":"enc","query":"a","documents":[', b'{"text":"a"}', b"]}")
    yield _other("/v1/score", b'{"model":"enc","text_1":"a","text_2":[', b'"a"', b"]}")
    yield _other("/v1/classify", b'{"model":"enc","input":[', b'"a"', b"]}")
    yield _other("/v2/embed", b'{"model":"enc","texts":[', b'"a"', b"]}")
    yield _other("/predict", b'{"model":"enc","inputs":[', b'["a"]', b"]}")
    yield _other("/tokenize", b'{"model":"gen","text":"' + b"a" * (SIZE - 99), b"", b'"}')
    for name, of, before in (("chat", _chat, b""), ("messages", _message, b""), ("responses", _items, b"")):
        field = b'"input":[' if of is _items else b'"messages":['
        part = b'{"type":"input_text","text":"a"}' if of is _items else b'{"type":"text","text":"a"}'
        several = b",".join([part] * 9)
        yield of(before + field, b'{"role":"user","content":[' + several + b"]}", b"]", f"{name} of parts")
    yield _other("/detokenize", b'{"model":"gen","token_ids":[', b"0", b"]}")
    yield from _of_other_programs()


_ASK = b'"questions":[{"type":"predicate","instructions":"x"}]}'
_NAMED = b'"questions":{"a":{"type":"noul","instructions":"x"}}}'


def _of_other_programs() -> Iterator[Worst]:
    """Yield those of Ollama's and llama.cpp's APIs, of decisions and of moderations."""
    ollama, marks = b'{"model":"chat","stream":false,"options":{"num_predict":1},', b"<s>" * 9
    yield _other("/api/chat", ollama + b'"messages":[', b"{}", b"]}")
    yield _other("/api/chat", ollama + b'"messages":[', b'{"role":"user","content":"a"}', b"]}")
    yield _other("/api/chat", ollama + b'"messages":[', b'{"role":"user","content":"' + marks + b'"}', b"]}")
    yield _other("/api/chat", ollama + b'"messages":[{"role":"user","content":"' + b"a" * (SIZE - 199), b"", b'"}]}')
    call = b'{"function":{"name":"a","arguments":{}}}'
    yield _other("/api/chat", ollama + b'"messages":[{"role":"assistant","tool_calls":[', call, b"]}]}")
    result = b'{"role":"tool","tool_name":"a","content":"x"}'
    yield _other(
        "/api/chat", ollama + b'"messages":[', call[1:-1].join((b'{"role":"assistant","tool_calls":[{', b"}]}")), b"]}"
    )
    yield _other("/api/chat", ollama + b'"messages":[', result, b"]}")
    yield _other("/api/chat", ollama + b'"messages":[],"format":{"properties":{', _PROPERTY, b"}}}")
    yield _other("/api/chat", ollama + b'"keep_alive":"' + b"1h" * (SIZE // 2 - 99), b"", b'"}')
    yield _other("/api/generate", ollama + b'"prompt":"x","context":[', b"0", b"]}")
    yield _other("/api/generate", ollama + b'"prompt":"' + b"<s>" * (SIZE // 3 - 99), b"", b'"}')
    yield _other("/api/generate", ollama + b'"prompt":"x","system":"' + b"a" * (SIZE - 199), b"", b'"}')
    yield _other("/api/embed", b'{"model":"enc","input":[', b'"w1"', b"]}")
    yield _other("/api/embeddings", b'{"model":"enc","prompt":"' + b"w1 " * (SIZE // 3 - 99), b"", b'"}')
    yield _other(
        "/infill", b'{"model":"gen","input_prefix":"x","input_suffix":"y","input_extra":[', b'{"text":"a"}', b"]}"
    )
    yield _other("/infill", b'{"model":"gen","input_prefix":"x","input_suffix":"y","logit_bias":[', b"[1,false]", b"]}")
    yield _other(
        "/infill", b'{"model":"gen","input_prefix":"x","input_suffix":"' + b"a " * (SIZE // 2 - 99), b"", b'"}'
    )
    for name in (b"gen", b"chat"):
        ask = b'{"model":"' + name + b'",'
        yield _other(
            "/v1/decisions", ask + b'"input":"x","questions":[', b'{"type":"predicate","instructions":"a"}', b"]}"
        )
        yield _other("/v1/decisions", ask + b'"input":[', b'{"role":"user","content":"a"}', b"]," + _ASK)
        yield _other("/v1/decisions", ask + b'"input":"' + b"<s>" * (SIZE // 3 - 199), b"", b'",' + _ASK)
        yield _other(
            "/v1/decisions", ask + b'"input":"x","questions":[{"type":"choice","choices":[', b'{"value":"a%d"}', b"]}]}"
        )
        part = b'{"type":"input_json","data":{"a":[1]}}'
        yield _other("/v1/decisions", ask + b'"input":[{"role":"user","content":[', part, b"]}]," + _ASK)
        yield _other("/v1/systemone", ask + b'"state":[', _FLOAT, b"]," + _NAMED)
        yield _other("/v1/systemone", ask + b'"state":{', b'"a%d":[]', b"}," + _NAMED)
        yield _other(
            "/v1/systemone", ask + b'"state":"x","questions":{', b'"a%d":{"type":"noul","instructions":"x"}', b"}}"
        )
        yield _other(
            "/v1/systemone", ask + b'"state":"x","questions":{"a":{"type":"choice","criteria":{', b'"a%d":null', b"}}}}"
        )
        yield _other(
            "/v1/systemone", ask + b'"state":"x","questions":{"a":{"type":"score","criteria":[', b"[]", b"]}}}"
        )
    yield _other("/v1/moderations", b'{"model":"enc","input":[', b'"a"', b"]}")
    yield _other("/v1/moderations", b'{"model":"enc","input":[', b'{"type":"text","text":"a"}', b"]}")


def many_tokens(items: Sequence[bytes] = (b"%d", b"257")) -> Iterator[Worst]:
    """Yield bodies of about 250,000 and 500,000 token ids, and texts with about as many tokens."""
    for item in items:
        yield _generate(b'"prompt":[', item, b"]", f"{item.decode()} for ids")
        yield _generate(b'"prompt":[[', item, b"]]", f"{item.decode()} for a list of ids")
        yield _generate(b'"prompt":"x","prediction":[', item, b"]", f"{item.decode()} for predicted ids")
        yield _other("/v1/completions", b'{"model":"gen","max_tokens":1,"prompt":[', item, b"]}")
        yield _other("/detokenize", b'{"model":"gen","token_ids":[', item, b"]}")
        yield _other("/detokenize", b'{"model":"gen","tokens":[', item, b"]}")
        yield _other("/v1/rerank", b'{"model":[', item, b"]}")
        yield _other(CHAT, b'{"model":"chat","messages":[{"ids":[', item, b"]}]}")
        yield _other("/v1/embeddings", b'{"model":"enc","input":[', item, b"]}")
        yield _other("/encode", b'{"model":"enc","truncate":"right","input":[', item, b"]}")
    tool = b'"messages":' + _HI + b',"tools":[{"type":"function","function":{"name":"a","parameters":{"enum":['
    yield _chat(tool, b"257", b"]}}}]", "numbers of a tool")
    words = b"1 9 " * (SIZE // 8 + 99)  # once: a text of a million tokens
    yield _generate(b'"prompt":"', words, b'"', "many words")
    yield _other("/v1/rerank", b'{"model":"enc","query":"a","max_tokens_per_doc":5,"documents":["', words, b'"]}')
    yield _other("/v1/messages/count_tokens", b'{"messages":[{"role":"user","content":"', words, b'"}]}')
