"""Change one value of a checkpoint's JSON files at a time and load the folder next to a healthy model.

`python -m tests.engine.file_fuzz --seed 1 --seconds 300` prints a line for each finding and exits 1 if there is one.
A folder must be refused at load with a one-line error, or the model must answer requests.
The healthy model must generate the same tokens throughout.
The engine runs in its own process, so a crash in C or a request for too much memory is a finding too.
Each case is written to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import logging
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.front import collect, ids_of
from tests.engine.support import request
from tests.engine.thread_transport import ThreadTransport
from tests.model.checkpoints import saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import EncodeRequest, FinishReason, Request
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.engine.execution.sources import blank_source
from triptych.model.errors import ConfigError

KINDS = (
    *("llama-yarn", "llama-llama3", "mistral", "qwen3", "phi3", "gemma2", "gemma3", "gpt2", "gpt-neox"),
    *("t5-relu", "bart", "marian", "whisper", "bert", "roberta", "modernbert", "deberta-v2", "mpnet"),
    *("albert", "xlnet", "vit", "bert-sequence", "qwen2-moe-every", "nomic-bert"),
)
HEALTHY = "llama-gqa"
_NUMBERS = (0, 1, -1, 2, 1e-30, 0.5, 2**31, 2**62, 2**64 + 4, 1e39, -(2**62), float("inf"), float("nan"), True)
_OTHERS: tuple[Any, ...] = (None, "", "nonsense", "1", [], [1], {}, {"a": 1}, False)
_ABSENT = object()
_MAX_MESSAGE, _MAX_SECONDS, _MAX_CASE_SECONDS, _MEMORY = 600, 10.0, 60.0, 4 << 30


@dataclass(frozen=True)
class Case:
    """One changed value: `path` locates it in the file, `value` replaces it."""

    kind: str
    file: str
    path: tuple[str | int, ...]
    value: Any

    def __str__(self) -> str:
        value = "absent" if self.value is _ABSENT else repr(self.value)
        return f"{self.kind}: {self.file}: {'.'.join(map(str, self.path))} = {value}"

    def write(self, folder: Path) -> None:
        """Write the change into the folder's file."""
        raw = json.loads((folder / self.file).read_text())
        holder = raw
        for key in self.path[:-1]:
            holder = holder[key]
        if self.value is _ABSENT:
            del holder[self.path[-1]]
        else:
            holder[self.path[-1]] = copy.deepcopy(self.value)
        (folder / self.file).write_text(json.dumps(raw))


def cases(kind: str) -> list[Case]:
    """Return every case of a checkpoint kind."""
    folder = saved(kind).path
    found = []
    for file in sorted(folder.glob("*.json")):
        if file.name.endswith(".index.json"):
            continue
        for path, value in _places(json.loads(file.read_text()), ()):
            values = [*_NUMBERS, *_OTHERS, _ABSENT]
            if type(value) is int:
                values += [value + 1, value - 1, value * 2, 200, 100_000]
            changed = (one for one in values if not (type(one) is type(value) and one == value))
            found += [Case(kind, file.name, path, one) for one in changed]
    return found


def _places(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key), inner
        yield from _places(inner, (*path, key))


class Fuzz:
    """An engine that serves a healthy model and loads the changed folders."""

    def __init__(self, engine: AsyncEngine, config: EngineConfig, scratch: Path) -> None:
        self._engine = engine
        self._config = config
        self._scratch = scratch
        self._expected: list[int] = []
        self.counts = {"refused": 0, "answered": 0}

    async def begin(self) -> None:
        self._expected = await self._healthy()

    async def _healthy(self) -> list[int]:
        return ids_of(await collect(self._engine.submit([request(HEALTHY, "healthy", 9, max_tokens=4)])), "healthy")

    async def run(self, case: Case) -> str:
        """Load the folder of a case and send it a request; return what is wrong, or an empty string."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        shutil.copytree(saved(case.kind).path, self._scratch)
        case.write(self._scratch)
        began = time.monotonic()
        async with asyncio.timeout(_MAX_CASE_SECONDS):
            wrong = await self._load_and_ask()
        if (seconds := time.monotonic() - began) > _MAX_SECONDS:
            wrong = wrong or f"it took {seconds:.0f} s"
        if self._engine.restarts:
            raise RuntimeError(f"the engine was lost: {case}")
        if await self._healthy() != self._expected:
            wrong = f"{wrong}; the healthy model gives other tokens"
        return wrong

    async def _load_and_ask(self) -> str:
        try:
            info = await self._engine.load(ModelSpec("tried", str(self._scratch), self._config), None)
        except ConfigError as error:
            self.counts["refused"] += 1
            message = str(error)
            short = len(message) <= _MAX_MESSAGE and "\n" not in message
            return "" if short else f"a refusal of {len(message)} characters: {message}"
        except Exception as error:
            return f"the load raised {type(error).__name__}: {error}"
        try:
            return await self._ask(info.form)
        finally:
            if "tried" in self._engine.models:
                await self._engine.unload("tried")

    async def _ask(self, form: str) -> str:
        from triptych.model.checkpoint.folder import read_checkpoint

        checkpoint = read_checkpoint(self._scratch)
        config = checkpoint.config
        self.counts["answered"] += 1
        [encoded] = await self._engine.encode([EncodeRequest("e", "tried", blank_source(config, 4))])
        if encoded.finish_reason is not FinishReason.STOP:
            return f"encoding ended with {encoded.finish_reason}"
        if not config.can_generate:
            return ""
        prompt, source = blank_source(config, 4).token_ids, None
        if config.encoder is not None:
            prompt, source = (config.decoder_start_token_id or 0,), blank_source(config, 4)
        sampled = SamplingParams(max_tokens=3, temperature=1.0, seed=1)
        beams = SamplingParams(max_tokens=3, num_beams=2, n=2)
        wrong = ""
        for name, params in (("greedy", SamplingParams(max_tokens=3)), ("sampled", sampled), ("beams", beams)):
            outputs = await collect(self._engine.submit([Request(name, "tried", prompt, params, source)]))
            reasons = {one.finish_reason for one in outputs if one.finish_reason is not None}
            if reasons - {FinishReason.STOP, FinishReason.LENGTH}:
                wrong += f" {name} ended with {', '.join(reasons)}: {outputs[-1].error}"
        return wrong


async def fuzz(seed: int, seconds: float, kinds: Sequence[str], most: int) -> list[str]:
    """Run cases in random order until the time is up; return the findings."""
    config = EngineConfig(kv_cache_memory=1 << 20, block_size=4, device="cpu", dtype="float32")
    spec = ModelSpec(HEALTHY, str(saved(HEALTHY).path), config)
    todo = [case for kind in kinds for case in cases(kind)]
    random.Random(seed).shuffle(todo)
    findings, until, done = [], time.monotonic() + seconds, 0
    engine = AsyncEngine([spec], ThreadTransport, {HEALTHY: None}, 60.0)
    await engine.start()
    with tempfile.TemporaryDirectory() as scratch:
        tried = Fuzz(engine, config, Path(scratch) / "tried")
        await tried.begin()
        for case in todo[:most]:
            if time.monotonic() > until:
                break
            print(f"# {case}", file=sys.stderr, flush=True)
            if wrong := await tried.run(case):
                findings.append(f"{case}: {wrong}")
                print(findings[-1], flush=True)
            done += 1
    await engine.close()
    print(f"{done} of {len(todo)} cases: {tried.counts}, {len(findings)} findings")
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--most", type=int, default=1_000_000, help="cases")
    parser.add_argument("kind", nargs="*", default=KINDS)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for kind in options.kind:
        saved(kind)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, resource.RLIM_INFINITY))
    return 1 if asyncio.run(fuzz(options.seed, options.seconds, options.kind, options.most)) else 0


if __name__ == "__main__":
    sys.exit(main())
