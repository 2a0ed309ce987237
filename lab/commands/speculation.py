"""The command `speculation`, which measures what drafts gain where they are right, and cost where they are not.

The engine computes the same requests with drafts and without, in turns, in this process. Outputs are given
(`lab.bench.forced`): every token is computed and sampled as always, but is then the next one of an output that is
the same in both arms. Two kinds of outputs:

    copies   an edit of the prompt: it is copied, but every 40 tokens or so a few are replaced, left out or put in
    fresh    tokens drawn by Zipf's law, as are those of the prompt: short runs occur again, and tell nothing

With `--draft-model` all outputs are fresh. The draft model computes its drafts, and each is then the right one with a
chance of `--right`, for each of several chances.

A figure is the median over turns of the ratio of seconds per token after the first one; CPU seconds of the process are
compared too, as other work on the machine disturbs them less.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.bench.models import CONFIGS, built
from lab.bench.speculation import DraftingEngine, Run, edit, fresh
from triptych.loadtest.errors import UsageError
from triptych.loadtest.runs import flags
from triptych.model.api.engine_config import DTYPES, MAX_SPECULATIVE_TOKENS, QUANTIZATIONS, EngineConfig
from triptych.model.errors import ConfigError

KINDS = {"copies": edit, "fresh": fresh}


@dataclass(frozen=True, slots=True)
class Result:
    """Holds the medians of a kind of outputs over turns."""

    kind: str
    plain_ms: float  # a token
    drafted_ms: float
    speedup: float  # of seconds
    cpu_speedup: float
    tokens_per_step: float
    accepted: float  # of all drafts


def add_command(commands: Any) -> None:
    parser = commands.add_parser("speculation", help="what drafts gain and cost")
    parser.add_argument(
        "--model", default="D2", metavar="NAME|PATH", help="benchmark model, built if missing, or folder"
    )
    parser.add_argument("--draft-model", metavar="NAME|PATH", help="draft model (D2S for D2); default: n-grams alone")
    parser.add_argument(
        "--right", type=float, nargs="+", default=[0.0, 0.5, 0.8], metavar="P", help="of its drafts, that are right"
    )
    parser.add_argument("--cache", type=Path, default=Path("build/bench"), help="where benchmark models are kept")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="number format")
    parser.add_argument("--quantization", default="none", choices=QUANTIZATIONS, help="of weight matrices")
    parser.add_argument("--drafts", type=flags.positive, default=8, metavar="N", help="num_speculative_tokens")
    parser.add_argument("--prompt-tokens", type=flags.positive, default=512, metavar="N", help="of each prompt")
    parser.add_argument("--output-tokens", type=flags.positive, default=256, metavar="N", help="of each output")
    parser.add_argument("--streams", type=flags.positive, default=1, metavar="N", help="requests at a time")
    parser.add_argument("--pairs", type=flags.positive, default=5, metavar="N", help="turns")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print a table and a JSON line."""
    if arguments.drafts > MAX_SPECULATIVE_TOKENS:
        raise UsageError(f"--drafts: found {arguments.drafts}, expected at most {MAX_SPECULATIVE_TOKENS}")
    if not all(0 <= chance <= 1 for chance in arguments.right):
        raise UsageError("--right: expected chances of 0 to 1")
    path = _folder(arguments.model, arguments.cache)
    draft_model = _folder(arguments.draft_model, arguments.cache) if arguments.draft_model else None
    config = EngineConfig(dtype=arguments.dtype, quantization=arguments.quantization, prefix_caching=False)
    if draft_model is None:
        engine = _engine(path, config, arguments)
        results = [_measure(engine, kind, arguments) for kind in KINDS]
    else:  # an engine for each, which has learnt nothing of the others' drafts
        config = replace(config, num_speculative_tokens=arguments.drafts, draft_model=str(draft_model))
        results = [_measure(_engine(path, config, arguments), "fresh", arguments, right) for right in arguments.right]
    Console(width=120).print(_table(results))
    settings = {key: str(value) for key, value in vars(arguments).items() if key != "command"}
    print(json.dumps({"schema": 1, "settings": settings, "rows": [asdict(result) for result in results]}))
    return 0


def _folder(name: str, cache: Path) -> Path:
    """Return the folder of a model, which is built if it is a benchmark's and missing."""
    return built(name, cache) if name in CONFIGS else Path(name)


def _engine(path: Path, config: EngineConfig, arguments: argparse.Namespace) -> DraftingEngine:
    try:
        engine = DraftingEngine(path, config)
    except (ConfigError, ValueError) as error:
        raise UsageError(f"--model: {error}") from None
    if not engine.fits(arguments.prompt_tokens, arguments.output_tokens):
        raise UsageError("--prompt-tokens and --output-tokens are more than the model's context together")
    return engine


def _measure(engine: DraftingEngine, kind: str, arguments: argparse.Namespace, right: float | None = None) -> Result:
    """Compute both arms in turns, after a warm-up that does not count."""
    plain, drafted = list[Run](), list[Run]()
    sizes = (engine.vocab_size, arguments.prompt_tokens, arguments.output_tokens)
    for turn in range(arguments.pairs + 1):
        asks = [KINDS[kind](random.Random(f"{kind} {turn} {number}"), *sizes) for number in range(arguments.streams)]
        arms = [(plain, 0), (drafted, arguments.drafts)]
        for found, drafts in arms if turn % 2 else reversed(arms):
            run = engine.run(asks, drafts, right or 0.0)
            found += [run] if turn else []
    tokens = arguments.streams * (arguments.output_tokens - 1)
    pairs = list(zip(plain, drafted, strict=True))
    return Result(
        kind if right is None else f"{right:.0%} right",
        statistics.median(one.seconds for one in plain) * 1e3 / tokens,
        statistics.median(one.seconds for one in drafted) * 1e3 / tokens,
        statistics.median(one.seconds / other.seconds for one, other in pairs),
        statistics.median(one.cpu_seconds / other.cpu_seconds for one, other in pairs),
        tokens / statistics.median(one.steps for one in drafted),
        sum(one.accepted for one in drafted) / max(1, sum(one.drafted for one in drafted)),
    )


def _table(results: list[Result]) -> Table:
    table = Table("outputs", "ms a token", "with drafts", "speedup", "of CPU time", "tokens a step", "accepted")
    for one in results:
        table.add_row(
            one.kind,
            f"{one.plain_ms:.2f}",
            f"{one.drafted_ms:.2f}",
            f"{one.speedup:.2f}",
            f"{one.cpu_speedup:.2f}",
            f"{one.tokens_per_step:.2f}",
            f"{one.accepted:.0%}",
        )
    return table
