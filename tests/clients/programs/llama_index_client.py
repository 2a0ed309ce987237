"""LlamaIndex's OpenAILike and OpenAILikeEmbedding."""

import pydantic
from features import ASKED, CHAT, HELLO, KEY, TEXTS, URL, expect, expect_alike, feature
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

GIVEN = {"api_base": f"{URL}/v1", "api_key": KEY, "temperature": 0, "is_chat_model": True}
model = OpenAILike(model=CHAT, is_function_calling_model=True, **GIVEN)


class Stay(pydantic.BaseModel):
    """A stay in a city."""

    city: str
    days: int


@feature("chat")
def chat():
    return expect(model.chat([ChatMessage("Hello")]).message.content, HELLO)


@feature("stream")
def stream():
    return expect("".join(one.delta or "" for one in model.stream_chat([ChatMessage("Hello")])), HELLO)


@feature("tools")
def tools():
    def get_weather(city: str) -> str:
        """Tells the weather."""
        return city

    tool = FunctionTool.from_defaults(get_weather)
    called = model.predict_and_call([tool], user_msg=ASKED)
    return expect(str(called), "Oslo")


@feature("structured")
def structured():
    small = OpenAILike(model="chat", max_tokens=100, should_use_structured_outputs=True, **GIVEN)
    found = small.as_structured_llm(Stay).chat([ChatMessage("Three days in Oslo, as JSON")]).raw
    assert isinstance(found, Stay)
    return found


@feature("completion")
def completion():
    found = OpenAILike(model="normalize", **{**GIVEN, "is_chat_model": False}).complete(
        "they paid twelve dollars fifty"
    )
    return expect(found.text, "they paid $12.50")


@feature("embeddings")
def embeddings():
    found = OpenAILikeEmbedding(model_name="embed", api_base=f"{URL}/v1", api_key=KEY)
    return expect_alike(found.get_text_embedding_batch(TEXTS))
