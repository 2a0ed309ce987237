"""Pydantic AI, over OpenAI's chat and responses and over Anthropic's messages."""

import pydantic
from anthropic import AsyncAnthropic
from features import ANSWER, ASKED, CHAT, HELLO, KEY, RESULT, URL, expect, feature
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
MODELS = {
    "": OpenAIChatModel(CHAT, provider=PROVIDER),
    ": responses": OpenAIResponsesModel(CHAT, provider=PROVIDER),
    ": anthropic": AnthropicModel(
        CHAT, provider=AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key=KEY))
    ),
}


class Stay(pydantic.BaseModel):
    """A stay in a city."""

    city: str
    days: int


for name, model in MODELS.items():
    agent = Agent(model, model_settings={"max_tokens": 100})

    @feature(f"chat{name}")
    async def chat(agent=agent):
        return expect((await agent.run("Hello")).output, HELLO)

    @feature(f"stream{name}")
    async def stream(agent=agent):
        async with agent.run_stream("Hello") as reply:
            return expect("".join([piece async for piece in reply.stream_text(delta=True)]), HELLO)

    @feature(f"tools{name}")
    async def tools(model=model):
        able = Agent(model, model_settings={"max_tokens": 100})

        @able.tool_plain
        def get_weather(city: str) -> str:
            """Tells the weather."""
            return RESULT

        return expect((await able.run(ASKED)).output, ANSWER)


@feature("structured: by a tool")
async def by_tool():
    agent = Agent(OpenAIChatModel("chat", provider=PROVIDER), output_type=Stay, model_settings={"max_tokens": 100})
    found = (await agent.run("Three days in Oslo, as JSON")).output
    assert isinstance(found, Stay)
    return found


@feature("structured: by the schema")
async def by_schema():
    model = OpenAIChatModel("chat", provider=PROVIDER)
    agent = Agent(model, output_type=NativeOutput(Stay), model_settings={"max_tokens": 100})
    found = (await agent.run("Three days in Oslo, as JSON")).output
    assert isinstance(found, Stay)
    return found
