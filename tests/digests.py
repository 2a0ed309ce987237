"""Digests of what every test checkpoint and embedded model computes, bit for bit, in every number format.

    python -m tests.digests            # compare with tests/data/digests.json; exits 1 where something differs
    python -m tests.digests --write    # what is computed now is what shall be computed

Use it for changes that must not change a bit, such as moved files.
The bits depend on the CPU's instructions and torch's version, so the file has an entry for each machine that wrote one.
Another machine compares two checkouts by writing with the first and comparing with the second.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.model.checkpoints import KINDS, prompt, saved, source_of
from tests.model.packers import CASES, folders
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import EncodeRequest, EncodeTask, Request, image_source, token_source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.engine.builder import LoadedModel, load
from triptych.model.errors import ConfigError
from triptych.model.native.library import Library, native
from triptych.model.pretrained import SMALL, embedded_models

FILE = Path(__file__).parent / "data" / "digests.json"
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "int8-g128": {"dtype": "float32", "quantization": "int8-g128"},
    "torch": {"dtype": "float32", "attention_backend": "sdpa"},
    "ranks": {"dtype": "float32", "tensor_parallel_size": 2},
}
ON_RANKS = ("llama-gqa", "bart", "bert")  # two processes each: one of each form
OF_SOME = {"ranks": ON_RANKS, "int4": (*ON_RANKS, "gpt2", "code"), "int8-g128": ON_RANKS}  # formats of these alone
PACKED = ("awq", "gptq act-order", "w4a16", "w8a16 channel asymmetric")  # integers as tools packed them
PARAMS = (
    SamplingParams(max_tokens=6, logprobs=3, prompt_logprobs=1),
    SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, seed=3, repetition_penalty=1.2, logprobs=1),
    SamplingParams(max_tokens=6, num_beams=3, n=2),
)


def machine() -> str:
    """Return what the bits depend on in addition to the project: instruction set, threads, torch."""
    library = native()
    instructions = library.description if isinstance(library, Library) else "no native kernels"
    return f"{instructions}; {torch.get_num_threads()} threads; torch {torch.__version__}"


def digests() -> Iterator[tuple[str, str]]:
    """(checkpoint/format, digest) of each; what a format does not serve is left out."""
    paths = {name: embedded_models()[name] for name in SMALL}
    for kind in [*KINDS, *paths]:
        for name, settings in FORMATS.items():
            if kind in OF_SOME.get(name, (kind,)):
                found = digest(kind, paths.get(kind) or saved(kind).path, settings)
                if found is not None:
                    yield f"{kind}/{name}", found
    for kind in PACKED:
        with TemporaryDirectory() as folder:
            stored, _ = folders(CASES[kind], Path(folder))
            for name in ("float32", "bfloat16"):
                found = digest(kind, stored, FORMATS[name])
                if found is not None:
                    yield f"packed {kind}/{name}", found


def digest(kind: str, path: Path, settings: dict[str, Any]) -> str | None:
    config = EngineConfig(kv_cache_memory=1 << 22, max_model_len=64, max_num_seqs=8, block_size=4, **settings)
    try:
        loaded = load(ModelSpec(kind, str(path), config))
    except ConfigError:  # this format is not served for this model
        return None
    state = sha256()
    try:
        for line in [*_encoded(loaded), *_generated(loaded)]:
            state.update(line)
    finally:
        loaded.close()
    return state.hexdigest()[:16]


def _encoded(loaded: LoadedModel) -> Iterator[bytes]:
    """All vectors of three inputs in one batch, and their scores where the model classifies."""
    engine, config = loaded.encode, loaded.encode.model.config
    image = config.image
    for task in (EncodeTask.TOKENS, EncodeTask.EMBEDDING, *([EncodeTask.LOGITS] if config.classifier else [])):
        for number, length in enumerate((5, 30, 17)):
            source = token_source(prompt(length, number))
            if config.audio is not None:
                source = source_of(config.audio, length, number)
            if image is not None:
                pixels = bytes(i % 251 for i in range(image.pixel_bytes))
                source = image_source(pixels, (image.channels, image.size, image.size), image.num_tokens)
            engine.add(EncodeRequest(str(number), engine.name, source, task))
        outputs = []
        while engine.has_work:
            outputs += engine.step()[0]
        for output in sorted(outputs, key=lambda output: output.request_id):
            assert output.shape, output.finish_reason
            yield output.data


def _generated(loaded: LoadedModel) -> Iterator[bytes]:
    """Tokens and log-probabilities: greedy, drawn and of beams, three prompts each, together."""
    engine, config = loaded.generate, loaded.encode.model.config
    if engine is None:
        return
    for number, params in enumerate(PARAMS):
        for place, length in enumerate((3, 29, 16)):
            name = f"{number}-{place}"
            ids, source = prompt(length, place), None
            if config.encoder is not None:
                assert config.decoder_start_token_id is not None
                ids, source = (config.decoder_start_token_id,), source_of(config.audio, length, place)
            engine.add(Request(name, engine.name, ids, params, source, arrival_time=time.monotonic()))
    outputs = []
    while engine.has_work:
        outputs += engine.step()[0]
    for output in sorted(outputs, key=lambda output: (output.request_id, output.index)):  # stable: steps in order
        shown = (output.request_id, output.index, output.token_ids, output.logprobs, output.prompt_logprobs)
        yield repr((*shown, output.finish_reason, output.score)).encode()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.digests", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="take what is computed now for what is right")
    asked = parser.parse_args()
    known: dict[str, dict[str, str]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    found = dict(digests())
    if asked.write:
        FILE.write_text(json.dumps(known | {machine(): found}, indent=1, sort_keys=True) + "\n")
        print(f"{len(found)} digests written for {machine()}")
        return 0
    expected = known.get(machine())
    if expected is None:
        print(f"no digests of this machine ({machine()}): write them with the checkout that is right")
        return 1
    different = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    print(f"{len(found)} digests, {len(different)} differ: {', '.join(different) or 'none'}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
