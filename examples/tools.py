"""A tool call and its result by OpenAI's client: `python examples/tools.py http://127.0.0.1:8000`."""

import json
import sys
from typing import Any

from openai import OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
weather: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Gives the weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
messages: list[Any] = [{"role": "user", "content": "Is it warm in Oslo?"}]

reply = client.chat.completions.create(model="assistant", messages=messages, tools=[weather], temperature=0)
message = reply.choices[0].message
assert message.tool_calls, message.content
for call in message.to_dict()["tool_calls"]:  # type: ignore[attr-defined]
    print("called:", call["function"]["name"], call["function"]["arguments"])
    result = json.dumps({"temperature": 12, "sky": "cloudy"})
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]

reply = client.chat.completions.create(model="assistant", messages=messages, tools=[weather], temperature=0)
print("answered:", reply.choices[0].message.content)
