"""Planning of /generate: a body becomes `Request`s that can be served, or is refused before any work.

There are three passes: all checks that need no tokens (`checks`), tokenisation (`tokenization`), and checks of lengths
(`requests`). An encoder-decoder's prompt is its source; its decoder starts with `decoder_start_token_id` and the tokens
of `decoder_prompt`.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.model.api.request import ImageSpan, Request
from triptych.model.api.stats import ModelInfo
from triptych.model.errors import TooManyTokensError
from triptych.service.core.context_bound import ContextBound, context_exceeded
from triptych.service.core.engine_client import EngineClient
from triptych.service.core.errors import invalid
from triptych.service.core.models import Models, ServedModel, Task
from triptych.service.images.image_pool import ImagePool
from triptych.service.images.pictures import Pictures, picture
from triptych.service.planning.admission import check_request, check_room, deadline_of, loaded_info
from triptych.service.planning.checks import CheckedPrompts, ReplyShape, check_body, with_constraint
from triptych.service.planning.requests import Times, Tokens, check_length, requests_of
from triptych.service.planning.response_format import GrammarChecker, OutputConstraint
from triptych.service.planning.tokenization import PromptInput, TokenizerThreads, tokenise
from triptych.service.schemas.bodies import GenerateBody
from triptych.service.settings.service_settings import Limits


@dataclass(frozen=True, slots=True)
class GeneratePlan:
    """A `Request` for each prompt of a body, and how to present their outputs."""

    served: ServedModel
    requests: tuple[Request, ...]
    n: int
    return_token_ids: bool
    skip_special_tokens: bool
    echo: tuple[str, ...]  # the text before each prompt's output; empty: none
    constraint: OutputConstraint | None = None  # of each output
    max_output_tokens: int = 0  # of all outputs together, as the client asks for; 0: it names no number
    is_cut: bool = False  # whether a prompt was cut to fit

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return sum(request.num_sent_tokens for request in self.requests)


class GeneratePlanner:
    """Plans bodies of /generate for the loaded models."""

    def __init__(
        self,
        models: Models,
        client: EngineClient,
        limits: Limits,
        threads: TokenizerThreads,
        grammars: GrammarChecker,
        images: ImagePool,
    ) -> None:
        self._models = models
        self._client = client
        self._limits = limits
        self._threads = threads
        self._grammars = grammars
        self._images = images

    async def plan(
        self, body: GenerateBody, request_id: str, arrival: float, shape: ReplyShape | None = None
    ) -> GeneratePlan:
        """Return the plan of a body; raises `ApiError` for a body that cannot be served."""
        served = self._models.resolve(body.model, Task.GENERATE).for_task(body.task)
        served.check_reads_text("prompt")
        info = loaded_info(self._client, served)
        check_request(body.timeout_s, body.priority, self._limits)
        times = Times(arrival, deadline_of(arrival, body.timeout_s, self._limits))
        images = () if shape is None else shape.images
        written = body.prompt if body.images is not None else None
        if body.images is not None:
            body, images = await self._with_images(body, served, info)
        elif body.image_detail is not None:
            raise invalid("image_detail needs images", "image_detail")
        checked = check_body(body, served, info, self._limits, shape)
        check_room(self._client, served, len(checked.prompts) * max(body.n, checked.num_beams))
        constraint = await self._grammars.constraint(body, None if shape is None else shape.constrain)
        if constraint is not None:
            checked = with_constraint(checked, constraint)
            await self._grammars.check(constraint, served)
        tokens = await self._tokenise(checked)
        return GeneratePlan(
            served=served,
            requests=requests_of(checked, tokens, request_id, times, self._limits, images),
            n=body.n,
            return_token_ids=body.return_token_ids or served.tokenizer is None,
            skip_special_tokens=body.skip_special_tokens,
            echo=() if not body.echo else (written,) if isinstance(written, str) else await self._echo(checked),
            constraint=constraint,
            max_output_tokens=len(checked.prompts) * body.n * (body.max_tokens or 0),
            is_cut=any(prompt.is_cut for prompt in tokens.prompts),
        )

    async def _with_images(
        self, body: GenerateBody, served: ServedModel, info: ModelInfo
    ) -> tuple[GenerateBody, tuple[ImageSpan, ...]]:
        """Return a body with the tokens of its prompt, in which its images have their places."""
        if not isinstance(body.prompt, str):
            raise invalid("images: the prompt must be one text, with a mark for each image", "images")
        found = [picture(one, f"images[{at}]", body.image_detail) for at, one in enumerate(body.images or ())]
        pictures = Pictures(self._images, served, info, found, self._limits.max_detailed_inputs)
        for name in ("suffix", "decoder_prompt"):
            if getattr(body, name) is not None:
                raise invalid(f"images and {name} exclude each other", "images")
        tokenizer, context, text = served.require_tokenizer("prompt"), info.max_model_len, body.prompt
        bound = ContextBound(context, self._limits.prompt_characters_per_token, self._limits.max_text_bytes)
        bound.check(text, "prompt")
        check_room(self._client, served)
        prepared = await pictures.decode(found, context, "images")
        [whole] = pictures.expanded([text], prepared, "prompt")

        def work() -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
            ids = tokenizer.encode(whole, most=context).ids
            return ids, pictures.spans(ids, prepared, "prompt")

        try:
            ids, spans = await self._threads.run(served.name, len(whole), work)
        except TooManyTokensError as error:
            raise context_exceeded(context, f"prompt has {error.count} tokens with its images", "prompt") from None
        return body.model_copy(update={"prompt": list(ids), "images": None}), spans

    async def _tokenise(self, checked: CheckedPrompts) -> Tokens:
        """Tokenise all texts; a text that is too long for the context is refused before its ids are made."""

        def refuse(one: PromptInput, count: int) -> None:
            check_length(checked, one, count, self._limits)

        found = await tokenise(self._threads, checked.served, checked.inputs, refuse)
        prompts, others = found[: len(checked.prompts)], iter(found[len(checked.prompts) :])
        start = checked.served.config.decoder_start_token_id
        decoder: tuple[int, ...] = ()
        if checked.served.is_encoder_decoder and start is not None:
            decoder = (start, *checked.forced_tokens)
        if checked.decoder_prompt is not None:
            decoder += next(others).ids
        prediction = () if checked.prediction is None else next(others).ids
        return Tokens(prompts, decoder, prediction[: checked.info.max_model_len])

    async def _echo(self, checked: CheckedPrompts) -> tuple[str, ...]:
        """Return the text before each output: the prompt, or in an encoder-decoder the decoder's prompt."""
        if not checked.served.is_encoder_decoder:
            return tuple([await self._text(one, checked) for one in checked.prompts])
        if checked.decoder_prompt is None:
            return ()
        return (await self._text(checked.decoder_prompt, checked),) * len(checked.prompts)

    async def _text(self, source: PromptInput, checked: CheckedPrompts) -> str:
        """Return the text of a prompt; empty for token ids if there is no tokenizer."""
        if isinstance(source.value, str):
            return source.value
        if checked.served.tokenizer is None:
            return ""
        skip = checked.body.skip_special_tokens
        return await self._threads.decode(checked.served.tokenizer, source.value, skip_special_tokens=skip)
