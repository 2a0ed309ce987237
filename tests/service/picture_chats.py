"""A tiny random model that reads pictures in prompts, its service, and the parts of messages."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette

from tests.engine.thread_transport import ThreadTransport
from tests.model.checkpoints import saved
from tests.model.picture_models import QWEN, random_model, write_processor
from tests.model.test_images import file, picture
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.client.async_engine import AsyncEngine
from triptych.service.app import create_app
from triptych.service.core.models import Models
from triptych.service.runtimes.model_reader import read_model
from triptych.service.settings.service_settings import ServiceSettings

KIND = "qwen3-5-pictures"
MARK = "<|image_pad|>"
_SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", MARK, "<|video_pad|>"]
TEMPLATE = """{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
FILES = [file(picture(50, 40)), file(picture(30, 64), "JPEG")]
TOKENS = 8
ASKED: dict[str, Any] = {"model": "seeing", "max_tokens": TOKENS, "temperature": 0}


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{coded(data)}"


def openai_part(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data), **more}}


def claude_part(data: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": coded(data)}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def make_folder(made: Path) -> Path:
    """Write the model into a folder and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(_SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(made)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in _SPECIAL}
    config = {
        **QWEN,
        "text_config": {
            **QWEN["text_config"],
            "vocab_size": 272,
            "eos_token_id": None,
            "max_position_embeddings": 1024,
        },
        **dict(image_token_id=ids[MARK], video_token_id=ids["<|video_pad|>"]),
        **dict(vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"]),
    }
    torch.manual_seed(3)
    model = random_model("Qwen3_5ForConditionalGeneration", config)()
    model.save_pretrained(made)
    write_processor(KIND, made)
    return made


def app_of(folder: Path) -> Starlette:
    """Return the application over a model that reads pictures, its language model alone, and another model."""
    config = EngineConfig(kv_cache_memory=8 << 20, device="cpu", dtype="float32")
    paths = {"seeing": folder, "blind": saved("gpt2").path}
    specs = [ModelSpec(name, str(path), config) for name, path in paths.items()]
    specs.append(ModelSpec("reading", str(folder), replace(config, pictures=False)))
    served = [read_model(one) for one in specs]
    tokenizers = {one.name: one.tokenizer for one in served}
    return create_app(AsyncEngine(specs, ThreadTransport, tokenizers), Models(served), ServiceSettings())
