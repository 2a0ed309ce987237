"""Files and texts through a folder's own processor and tokenizer, against those of `transformers`."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.engine.test_pictures import png
from tests.model.checkpoints import copied, saved
from tests.model.picture_models import picture
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.llm import LLM


def with_idefics_processor(folder: Path) -> Any:
    """Write a tokenizer and a processor of Idefics 3 into a folder; return the processor."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor, PreTrainedTokenizerFast

    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    special += [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    letters = [*map(chr, range(ord("a"), ord("z") + 1)), "Ċ", "Ġ"]
    plain = Tokenizer(models.BPE({token: place for place, token in enumerate(special + letters)}, []))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    end = dict(eos_token="<end_of_utterance>", pad_token="<end_of_utterance>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, additional_special_tokens=special, **end)
    sizes = dict(size={"longest_edge": 72}, max_image_size={"longest_edge": 24})
    images = Idefics3ImageProcessorPil(**sizes, image_mean=[0.5] * 3, image_std=[0.25] * 3)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=9)
    processor.save_pretrained(folder)
    (folder / "preprocessor_config.json").unlink()
    return processor


def test_files_become_what_a_processor_and_its_model_make_of_them(tmp_path: Path) -> None:
    """Check tiles and a whole of each picture, through the folder's own tokenizer."""
    folder = copied("idefics3", tmp_path)
    processor = with_idefics_processor(folder)
    files = [png(picture(90, 50, 5)), png(picture(20, 64, 6))]
    text = "look at<image>and<image>what is it"
    opened = [Image.open(BytesIO(one)).convert("RGB") for one in files]
    given = processor(text=text, images=[opened], return_tensors="pt")
    given.pop("token_type_ids", None)
    with torch.inference_mode():
        logits = saved("idefics3").reference(**given).logits[0, -1]
    with LLM(folder, EngineConfig(dtype="float32", kv_cache_memory=1 << 22, block_size=4)) as llm:
        params = SamplingParams(max_tokens=1, logprobs=5, ignore_eos=True)
        ((_, output),) = llm.stream([text], params, images=[files])
    assert output.logprobs is not None
    expected = logits.log_softmax(-1).topk(5)
    tokens, values = zip(*output.logprobs[0].top, strict=True)
    assert tokens == tuple(expected.indices.tolist())
    assert max(abs(a - b) for a, b in zip(values, expected.values.tolist(), strict=True)) < 1e-4
