"""POST /tokenize and /detokenize: use a model's tokenizer without its engine."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from triptych.service.core.context_bound import ContextBound
from triptych.service.core.errors import invalid
from triptych.service.core.models import Task
from triptych.service.http.bodies import context_of_request, json_response, read_body
from triptych.service.http.json_replies import Json
from triptych.service.http.model_use import hold_model
from triptych.service.http.route_table import BODY_ERRORS, Routes, json_body, replies
from triptych.service.lifecycle.state import service_of
from triptych.service.planning.capabilities import TOKENIZE
from triptych.service.planning.tokenization import check_vocabulary
from triptych.service.schemas.bodies import DetokenizeBody, TokenizeBody
from triptych.service.schemas.replies import DetokenizeReply, TokenizeReply

routes = Routes()


@routes.post(
    "/tokenize",
    "Text to token ids",
    json_body(TokenizeBody, ability=TOKENIZE),
    replies("The ids.", TokenizeReply),
    errors=(*BODY_ERRORS, 404, 499, 503),
)
async def tokenize(request: Request) -> Response:
    """Returns the ids that a prompt with this text has."""
    service = service_of(request)
    body = await read_body(request, TokenizeBody)
    await hold_model(request, body.model, Task.TOKENIZE)
    served = service.models.resolve(body.model, Task.TOKENIZE)
    tokenizer = served.require_tokenizer("text")
    info = service.model_info(served.name)
    limits = service.limits
    bound = ContextBound(info.max_model_len, limits.prompt_characters_per_token, limits.max_text_bytes)
    bound.check(body.text, "text")
    bound.check(body.text_pair or "", "text_pair")
    context = context_of_request()
    context.model = served.name

    def work() -> Json:
        ids = tokenizer.encode(body.text, body.text_pair, add_special_tokens=body.add_special_tokens).ids
        reply: Json = {
            "model": served.name,
            "token_ids": ids,
            "count": len(ids),
            "max_model_len": info.max_model_len,
        }
        if body.return_texts:
            reply["texts"] = [tokenizer.token_text(token) for token in ids]
        return reply

    characters = len(body.text) + len(body.text_pair or "")
    reply = await service.threads.run(served.name, characters, work)
    context.tokens_in = reply["count"]
    return json_response(reply)


@routes.post(
    "/detokenize",
    "Token ids to text",
    json_body(DetokenizeBody, ability=TOKENIZE),
    replies("The text.", DetokenizeReply),
    errors=(*BODY_ERRORS, 404, 499, 503),
)
async def detokenize(request: Request) -> Response:
    """Returns the text of token ids."""
    service = service_of(request)
    body = await read_body(request, DetokenizeBody)
    await hold_model(request, body.model, Task.TOKENIZE)
    served = service.models.resolve(body.model, Task.TOKENIZE)
    tokenizer = served.require_tokenizer("token_ids")
    bound = service.model_info(served.name).max_model_len
    if len(body.token_ids) > bound:
        raise invalid(f"token_ids has {len(body.token_ids)} entries, more than max_model_len {bound}", "token_ids")
    check_vocabulary(body.token_ids, served.vocab_size, "token_ids")
    context = context_of_request()
    context.model, context.tokens_in = served.name, len(body.token_ids)
    skip = body.skip_special_tokens
    text = await service.threads.decode(tokenizer, body.token_ids, skip_special_tokens=skip)
    return json_response({"model": served.name, "text": text})
