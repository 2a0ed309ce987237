"""What a GPU does for the first time takes seconds: kernels are compiled, handles made. So it does it at start."""

from __future__ import annotations

import logging
import time

from model.engine.encode_engine import EncodeEngine
from model.engine.engine import Engine
from model.engine.pacing import Pacing
from model.request import EncodeRequest, EncodeTask, Request, SamplingParams

LENGTHS = (3, 40, 200)  # tokens: the kernels are cut in other ways for few, some and many rows

logger = logging.getLogger(__name__)


def warm_up(encode: EncodeEngine, generate: Engine | None) -> None:
    """Requests of some lengths, alone and together, greedy and drawn; nothing of them is left."""
    began = time.monotonic()
    if encode.model.config.image is None:
        for length in LENGTHS:
            tokens = (0,) * min(length, encode.max_num_batched_tokens, encode.model.config.max_positions or length)
            encode.add(EncodeRequest("warm-up", encode.name, tokens, EncodeTask.TOKENS))
            encode.step()
    if generate is not None:
        for together in (LENGTHS[:1], LENGTHS[1:], LENGTHS):
            for number, length in enumerate(together):
                generate.add(_request(generate, encode, length, number))
            while generate.has_work:
                generate.step()
        generate.block_manager.forget()
        generate.pacing = Pacing() if generate.pacing is not None else None
    encode.pacing = Pacing()  # seconds that compilers took would count as what tokens cost
    logger.info("%s is warm after %.1f s", encode.name, time.monotonic() - began)


def _request(generate: Engine, encode: EncodeEngine, length: int, number: int) -> Request:
    most = min(generate.max_model_len - 2, encode.max_num_batched_tokens)
    prompt = (0,) * max(1, min(length, most))
    start = encode.model.config.decoder_start_token_id
    begins = (start,) if encode.model.config.encoder is not None and start is not None else ()
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=float(number % 2), top_p=0.9)
    return Request(f"warm-up-{number}", generate.name, prompt, params, begins, cache_salt=f"warm-up-{length}")
