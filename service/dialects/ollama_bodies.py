"""The bodies of Ollama's API. A `model` may end in `:latest`, as in all dialects (`triptych.service.http.bodies`)."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from triptych.service.dialects.common import (
    DialectBody,
    Extended,
    Ignored,
    NotFilled,
    NotTrue,
    Refused,
    RepeatLastN,
    native_field,
)
from triptych.service.dialects.openai_bodies import SCHEMA_EXAMPLE, FunctionTool, ToolBody
from triptych.service.dialects.responses_bodies import ResponsesToolChoice
from triptych.service.schemas.parameters import OLLAMA, Parameters
from triptych.service.schemas.types import PIXEL, Text, TokenId

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_PART = r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)"
_DURATION = re.compile(rf"([-+]?)(?:((?:{_PART}){{1,6}})|(\d+\.?\d*))")


def _seconds(value: float | str) -> float:
    """Return a duration in seconds: a number, or a text such as `1h30m`; negative ones last for ever."""
    if isinstance(value, str):
        found = _DURATION.fullmatch(value[:64])
        if found is None:
            raise PydanticCustomError("duration", 'Input should be seconds, or a text such as "5m" or "1h30m"')
        parts = re.findall(_PART, found[2]) if found[2] else [(found[5], "")]
        value = sum(float(number) * _UNITS[unit] for number, unit in parts) * (-1.0 if found[1] == "-" else 1.0)
    return math.inf if value < 0 else float(value)


def _by(kind: type) -> Discriminator:
    """Return how a union with a member of this type is decided, so that errors name the field and no member."""
    return Discriminator(lambda value: "<this>" if isinstance(value, kind) else "<other>")


_Seconds = Annotated[Annotated[str, Field(max_length=64), Tag("<this>")] | Annotated[float, Tag("<other>")], _by(str)]
KeepAlive = Annotated[_Seconds | None, AfterValidator(lambda value: None if value is None else _seconds(value))]
Format = Annotated[Annotated[dict[str, Any], Tag("<this>")] | Annotated[Literal["", "json"], Tag("<other>")], _by(dict)]
Think = Annotated[
    Annotated[Literal["low", "medium", "high", "max"], Tag("<this>")] | Annotated[bool, Tag("<other>")], _by(str)
]
OfTheMachine = Annotated[Any, Ignored("the service's settings decide about the hardware")]
OfTheFirstServers = Annotated[Any, Ignored("Ollama ignores it too")]


@OLLAMA.body
class Options(DialectBody, Parameters):
    """Parameters of the generation. Defaults are the checkpoint's, else Ollama's."""

    num_predict: int | None = Field(
        None,
        description="`max_tokens` of /generate; less than 0, and the default: until the model ends or the context is "
        "full. Reduced to what fits the context.",
        examples=[64],
    )
    temperature: float | None = Field(
        None, description="As in /generate. Default: the checkpoint's, else 0.8.", examples=[0.8]
    )
    top_k: int | None = Field(None, description="As in /generate. Default: the checkpoint's, else 40.", examples=[40])
    top_p: float | None = Field(
        None, description="As in /generate. Default: the checkpoint's, else 0.9.", examples=[0.9]
    )
    seed: int | None = Field(None, description="As in /generate; less than 0: random.", examples=[7])
    stop: list[Text] | Text | None = Field(
        None, description="Texts that end the output before them.", examples=[["\n\n"]]
    )
    repeat_penalty: float | None = Field(
        None,
        description="`repetition_penalty` of /generate. Default: the checkpoint's, else 1.",
        examples=[1.1],
    )
    repeat_last_n: RepeatLastN = None
    draft_num_predict: int | None = Field(
        None, description="`num_speculative_tokens` of /generate. The output does not depend on it.", examples=[8]
    )
    num_ctx: Annotated[Any, Ignored("the context length is a setting of the model")] = None
    num_keep: Annotated[Any, Ignored("a full context ends the output and drops nothing")] = None
    num_batch: OfTheMachine = None
    num_gpu: OfTheMachine = None
    main_gpu: OfTheMachine = None
    num_thread: OfTheMachine = None
    use_mmap: OfTheMachine = None
    use_mlock: OfTheMachine = None
    low_vram: OfTheMachine = None
    numa: OfTheMachine = None
    f16_kv: OfTheMachine = None
    logits_all: OfTheFirstServers = None
    vocab_only: OfTheFirstServers = None
    embedding_only: OfTheFirstServers = None
    penalize_newline: OfTheFirstServers = None
    tfs_z: Annotated[Any, Refused(1, 1.0)] = None
    mirostat: Annotated[Any, Refused(0)] = None
    mirostat_tau: Annotated[Any, Ignored("there is no mirostat sampling")] = None
    mirostat_eta: Annotated[Any, Ignored("there is no mirostat sampling")] = None


class OllamaBody(Extended):
    """The fields of all bodies that run a model."""

    keep_alive: KeepAlive = Field(
        None,
        description="How long the model stays loaded after its last request: seconds, or a text such as `5m`; 0: it is "
        "unloaded after the reply; less than 0: for ever. Models given at the start stay loaded, but with `--no-pin`.",
        examples=["5m"],
    )


class WritingBody(OllamaBody):
    """The fields of chats and prompts."""

    stream: bool | None = Field(None, description="Answer as lines of JSON; default: true.", examples=[False])
    format: Format | None = Field(
        None, description="`json`, or a JSON schema that the answer matches.", examples=["json", SCHEMA_EXAMPLE]
    )
    options: Options | None = Field(None, description="Parameters of the generation.")
    think: Think | None = Field(
        None,
        description="Whether, or how much, to reason; default: true for models that can. A 400 for models that cannot.",
        examples=[False],
    )
    logprobs: bool | None = Field(None, description="Return log-probabilities of the output's tokens.", examples=[True])
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Number of alternatives for each token.", examples=[2]
    )
    shift: NotTrue = None

    @property
    def asks(self) -> bool:
        """Whether something is to be written; else the model is only loaded or unloaded."""
        raise NotImplementedError


class CalledFunction(DialectBody):
    name: str = Field(description="The function.", examples=["weather"])
    arguments: dict[str, Any] = Field(description="Its arguments.", examples=[{"city": "Oslo"}])
    index: Annotated[Any, Ignored("the order of the calls gives it")] = None
    description: Annotated[Any, Ignored("`tools` describe the function")] = None


class OllamaCall(DialectBody):
    id: str | None = Field(None, description="Id of the call, which its result repeats.", examples=["call_1"])
    type: Annotated[Any, Refused("function")] = None
    function: CalledFunction = Field(description="The call.")


Images = Annotated[
    list[Text] | None,
    Field(description="Image files in base64, before the text, for models that read pictures.", examples=[[PIXEL]]),
]


class OllamaMessage(DialectBody):
    role: Text = Field(description="The role of the author.", examples=["user"])
    content: str | None = Field(None, description="The text.", examples=["Hello"])
    thinking: str | None = Field(None, description="Reasoning of the assistant, for the template.", examples=[None])
    tool_calls: list[OllamaCall] | None = Field(None, description="Calls of the assistant.")
    tool_name: str | None = Field(None, description="The tool that a result is of.", examples=["weather"])
    tool_call_id: str | None = Field(None, description="Id of the call that a result is of.", examples=["call_1"])
    name: str | None = Field(None, description="`tool_name`, by its name elsewhere.", examples=[None])
    images: Images = None


class OllamaFunction(FunctionTool):
    type: Annotated[Any, Ignored("a tool is always a function; the JavaScript client has it")] = None


class OllamaTool(ToolBody):
    function: OllamaFunction = Field(description="The function.")


class OllamaChatBody(WritingBody):
    """Continue a conversation, as Ollama does; the model's chat template makes the prompt."""

    messages: list[OllamaMessage] | None = Field(
        None,
        description="The conversation. None: the model is loaded, or with `keep_alive` 0 unloaded.",
        examples=[[{"role": "user", "content": "Hello"}]],
    )
    tools: list[OllamaTool] | None = Field(None, description="The functions that the model may call.")
    tool_choice: ResponsesToolChoice | None = Field(
        None,
        description="As in responses of OpenAI. Not Ollama's; Vercel's AI SDK sends it.",
        examples=["auto", {"type": "function", "name": "weather"}],
    )
    truncate: bool | None = Field(
        None, description="Leave out the oldest messages if the context is too short; default: true.", examples=[True]
    )

    @property
    def asks(self) -> bool:
        return bool(self.messages)


class OllamaGenerateBody(WritingBody):
    """Answer a prompt, as Ollama does; by the model's chat template, if it has one."""

    prompt: str | None = Field(
        None,
        description="The prompt. None: the model is loaded, or with `keep_alive` 0 unloaded.",
        examples=["def add(a, b):"],
    )
    system: str | None = Field(None, description="A system message before the prompt.", examples=["Be brief."])
    raw: bool | None = Field(None, description="Use the prompt without the chat template.", examples=[True])
    context: list[TokenId] | None = Field(
        None, description="`context` of an earlier reply, which the prompt continues.", examples=[[1, 42]]
    )
    suffix: str | None = Field(
        None,
        description="A text that follows the output, for models that fill in the middle. Without the chat template; "
        "texts that are too long are cut at their far ends.",
        examples=["\n\nprint(add(1, 2))\n"],
    )
    template: Annotated[Any, Refused("", instead="raw")] = None
    images: Images = None
    truncate: NotTrue = None
    width: NotFilled = None
    height: NotFilled = None
    steps: NotFilled = None

    @property
    def asks(self) -> bool:
        return bool(self.prompt)


class OllamaEmbedBody(OllamaBody):
    """Turn texts into vectors of length 1, as Ollama does."""

    input: Annotated[Annotated[list[Text], Tag("<this>")] | Annotated[str, Tag("<other>")], _by(list)] | None = Field(
        None, description="A text, or several.", examples=["a cat", ["a cat", "a dog"]]
    )
    truncate: bool | None = Field(
        None, description="Truncate a text that is too long at its end; default: true.", examples=[True]
    )
    dimensions: int | None = native_field("", 128)
    options: Annotated[Any, Ignored("vectors depend on no option")] = None


class OllamaEmbeddingsBody(OllamaBody):
    """Turn a text into a vector, as older clients of Ollama do."""

    prompt: str | None = Field(None, description="The text.", examples=["a cat"])
    options: Annotated[Any, Ignored("vectors depend on no option")] = None


class ShowBody(DialectBody):
    """Describe a model, as Ollama does."""

    model: str | None = Field(None, description="The model.", examples=["chat"])
    name: str | None = Field(None, description="The same; older clients'.", examples=["chat"])
    verbose: NotTrue = None
    system: Annotated[Any, Refused("")] = None
    template: Annotated[Any, Refused("")] = None
    options: NotFilled = None
