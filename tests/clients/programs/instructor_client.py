"""Instructor over OpenAI's client, in each of its ways to get an object."""

import instructor
import openai
import pydantic
from features import KEY, URL, feature

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
ASKED = {"messages": [{"role": "user", "content": "Three days in Oslo, as JSON"}], "max_tokens": 100, "temperature": 0}


class Stay(pydantic.BaseModel):
    """A stay in a city."""

    city: str
    days: int


# The mode JSON leaves the schema to the model, and chat is too small to keep to it.
for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):

    @feature(f"structured: {mode}")
    def structured(mode=mode):
        patched = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
        found = patched.chat.completions.create(model="chat", response_model=Stay, **ASKED)
        assert isinstance(found, Stay)
        return found


@feature("stream: partial objects")
def partial():
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    found = list(patched.chat.completions.create_partial(model="chat", response_model=Stay, **ASKED))
    assert len(found) > 1 and found[-1].days is not None
    return found[-1]
