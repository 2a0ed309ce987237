"""Pictures of Gemma 4 over HTTP: the texts of its own processor and model, and what else its folders have."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import torch
from PIL import Image

from tests.model.checkpoints import randomise
from tests.model.picture_models import PICTURE_MODELS, randomise_buffers
from tests.service.encode_models import Client, client_of
from tests.service.test_bad_requests import check_error
from tests.service.test_pictures import FILES, app_of, claude_part, openai_part, words

_SPECIAL = ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>"]
_SPECIAL += ["<|audio>", "<|audio|>", "<audio|>", "<|video|>"]
_NAMED = dict(image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>")
_NAMED |= dict(audio_token="<|audio|>", boa_token="<|audio>", eoa_token="<audio|>")
# As published templates write a message.
_TEMPLATE = """{{- bos_token -}}{%- for message in messages -%}{{- '<|turn>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content | trim -}}{%- else -%}
{%- for item in message.content -%}{%- if item.type == 'text' -%}{{- item.text | trim -}}
{%- elif item.type == 'image' -%}{{- '\\n\\n<|image|>\\n\\n' -}}
{%- elif item.type == 'audio' -%}{{- '<|audio|>' -}}
{%- elif item.type == 'video' -%}{{- '\\n\\n<|video|>\\n\\n' -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<turn|>\\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}"""
KINDS = {"gemma4-pictures": "clipped", "gemma4-dense-pictures": "dense"}
TOKENS = 8
Answer = tuple[int, str, list[float]]  # tokens of the prompt, the text, and the first token's best logarithms
SAID: list[Any] = [{"type": "image"}, words("What"), {"type": "image"}, words("is it?")]


def tokenizer_of() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({char: at for at, char in enumerate([*_SPECIAL, *alphabet])}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(_SPECIAL)
    marks = dict(pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, extra_special_tokens=_NAMED, chat_template=_TEMPLATE, padding_side="left", **marks
    )


def processor_of(tokenizer: Any) -> Any:
    from transformers import Gemma4AudioFeatureExtractor, Gemma4ImageProcessorPil, Gemma4Processor

    class WithoutFilms(Gemma4Processor):  # whose own processor needs torchvision: another one is in its place
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    images = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    return WithoutFilms(
        Gemma4AudioFeatureExtractor(), images, tokenizer, Gemma4ImageProcessorPil(), chat_template=_TEMPLATE
    )


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Gemma4AudioConfig, Gemma4Config, Gemma4ForConditionalGeneration

    made, tokenizer = tmp_path_factory.mktemp(KINDS[request.param]), tokenizer_of()
    settings = PICTURE_MODELS[request.param]().config.to_dict()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in _SPECIAL}
    settings["text_config"] |= dict(vocab_size=272, vocab_size_per_layer_input=272, max_position_embeddings=1024)
    settings["text_config"] |= dict(pad_token_id=0, eos_token_id=1, bos_token_id=2)
    settings["vision_config"]["position_embedding_size"] = 160
    settings |= dict(image_token_id=ids["<|image|>"], boi_token_id=ids["<|image>"], eoi_token_id=ids["<image|>"])
    settings |= dict(audio_token_id=ids["<|audio|>"], video_token_id=ids["<|video|>"], eos_token_id=None)
    if request.param == "gemma4-pictures":  # as E2B, whose folder reads sounds too
        small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=16)
        settings["audio_config"] = Gemma4AudioConfig(**small, subsampling_conv_channels=[8, 4]).to_dict()
    torch.manual_seed(3)
    model = Gemma4ForConditionalGeneration(Gemma4Config(**settings))
    randomise(model)
    randomise_buffers(model)
    model.save_pretrained(made)
    processor_of(tokenizer).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    with client_of(app_of(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def answer(folder: Path) -> Answer:
    """Return what `transformers` makes of a prompt of two pictures."""
    from transformers import AutoModelForImageTextToText

    processor = processor_of(tokenizer_of())
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": SAID}], tokenize=False, add_generation_prompt=True
    )
    images = [Image.open(BytesIO(one)).convert("RGB") for one in FILES]
    inputs = processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
    model = AutoModelForImageTextToText.from_pretrained(folder).float().eval()
    with torch.inference_mode():
        out = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
        scores = model(**inputs).logits[0, -1].log_softmax(-1)
    length = inputs["input_ids"].shape[1]
    text = processor.tokenizer.decode(out[0, length:], skip_special_tokens=True)
    return length, text, scores.topk(5).values.tolist()


ASKED: dict[str, Any] = {"model": "seeing", "max_tokens": TOKENS, "temperature": 0}


def test_openai(client: Client, answer: Answer) -> None:
    content: Any = [openai_part(FILES[0]), words("What"), openai_part(FILES[1]), words("is it?")]
    made = openai.AsyncOpenAI(base_url="http://test/v1", api_key="any", http_client=client.asgi())

    async def ask() -> Any:
        asked: Any = {**ASKED, "messages": [{"role": "user", "content": content}]}
        return await made.chat.completions.create(**asked, logprobs=True, top_logprobs=5)

    for cached in (False, True):
        reply = client.run(ask())
        assert (reply.usage.prompt_tokens, reply.choices[0].message.content) == answer[:2]
        found = [one.logprob for one in reply.choices[0].logprobs.content[0].top_logprobs]
        assert found == pytest.approx(answer[2], abs=1e-4)
        assert (reply.usage.prompt_tokens_details.cached_tokens > 0) == cached


def test_anthropic(client: Client, answer: Answer) -> None:
    content: Any = [claude_part(FILES[0]), words("What"), claude_part(FILES[1]), words("is it?")]
    own = httpx2.AsyncClient(transport=httpx2.ASGITransport(client.app))
    made = anthropic.AsyncAnthropic(base_url="http://test", api_key="any", http_client=own)

    async def ask() -> Any:
        messages: Any = [{"role": "user", "content": content}]
        asked: Any = {"model": "seeing", "max_tokens": TOKENS, "extra_body": {"temperature": 0}}
        return await made.messages.create(**asked, messages=messages)

    reply = client.run(ask())
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == answer[0]
    assert reply.content[0].text == answer[1]


@pytest.mark.parametrize("kind", ["input_audio", "video_url"])
def test_sounds_and_films_are_refused_by_name(kind: str, client: Client) -> None:
    part = {"type": kind, kind: {"data": "AAAA", "format": "wav"} if kind == "input_audio" else {"url": "data:,"}}
    reply = client.post("/v1/chat/completions", **ASKED, messages=[{"role": "user", "content": [part]}])
    error = check_error(reply, 400, reply.json()["error"]["param"])
    assert kind in f"{error['param']} {error['message']}"
