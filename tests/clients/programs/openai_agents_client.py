"""OpenAI's Agents SDK, over chat completions and over responses."""

import agents
import pydantic
from features import ANSWER, ASKED, CHAT, HELLO, KEY, RESULT, URL, expect, feature
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)
KINDS = {"": agents.OpenAIChatCompletionsModel, ": responses": agents.OpenAIResponsesModel}
COLD = agents.ModelSettings(temperature=0, max_tokens=100)


class Stay(pydantic.BaseModel):
    """A stay in a city."""

    city: str
    days: int


@agents.function_tool
def get_weather(city: str) -> str:
    """Tells the weather."""
    return RESULT


for name, kind in KINDS.items():

    def agent(model=CHAT, kind=kind, **given):
        client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)  # each feature has an event loop of its own
        return agents.Agent("helper", model=kind(model, openai_client=client), model_settings=COLD, **given)

    @feature(f"chat{name}")
    async def chat(agent=agent):
        return expect((await agents.Runner.run(agent(), "Hello")).final_output, HELLO)

    @feature(f"stream{name}")
    async def stream(agent=agent):
        reply = agents.Runner.run_streamed(agent(), "Hello")
        deltas = [
            one.data.delta
            async for one in reply.stream_events()
            if one.type == "raw_response_event" and one.data.type == "response.output_text.delta"
        ]
        return expect("".join(deltas), HELLO)

    @feature(f"tools{name}")
    async def tools(agent=agent):
        return expect((await agents.Runner.run(agent(tools=[get_weather]), ASKED)).final_output, ANSWER)

    @feature(f"structured{name}")
    async def structured(agent=agent):
        able = agent("chat", output_type=Stay)
        found = (await agents.Runner.run(able, "Three days in Oslo, as JSON")).final_output
        assert isinstance(found, Stay)
        return found
