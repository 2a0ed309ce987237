"""generation_config.json: each key of the installed `GenerationConfig`, alone and in pairs, as `generate` does it."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from tests.conformance.packages import Packages
from tests.conformance.report import Report
from tests.generation_oracle import base, ended, folder_of, ours, theirs
from tests.model.checkpoints import saved
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.generation_config import SETTINGS
from triptych.model.checkpoint.json_files import Use
from triptych.model.errors import ConfigError

PROMPT = [76, 13, 65, 36, 7, 3, 21, 87, 78, 63, 50, 43, 5, 37, 65, 28, 96, 55, 71, 72, 90, 15, 27, 75]
KINDS = ("gpt2", "bart")  # in pairs too
ALONE = ("llama-gqa", "t5-relu", "marian")
AFTER_START = (5, 63)  # a decoder prompt after its start token
WORDS = [[5], [5, 63], [63, 63], [7, 8, 9]]
# Values that change something of greedy or beam search; `SAMPLED` are compared as they are resolved.
VALUES: dict[str, list[Any]] = {
    "max_length": [9, 27, 40],
    "max_new_tokens": [1, 5],
    "min_length": [8, 30],
    "min_new_tokens": [1, 7],
    "early_stopping": [True, "never"],
    "num_beams": [2, 4],
    "length_penalty": [-1.0, 0.0, 2.5],
    "repetition_penalty": [0.6, 1.9],
    "encoder_repetition_penalty": [0.2, 3.0],
    "no_repeat_ngram_size": [1, 2],
    "encoder_no_repeat_ngram_size": [1, 2],
    "bad_words_ids": [WORDS],
    "sequence_bias": [[[[5], -4.0], [[63, 63], 6.5], [[5, 5, 7], 20.0]]],
    "suppress_tokens": [[5, 63, 2, -1, 500], []],
    "begin_suppress_tokens": [[5, 63, 60]],
    "forced_bos_token_id": [50],
    "forced_eos_token_id": [2, [7]],
    "exponential_decay_length_penalty": [[1, 1.5], [4, 0.5]],
    "renormalize_logits": [True],
    "eos_token_id": [5, [2, 63], [5, 500]],
    "pad_token_id": [5],
    "bos_token_id": [5],
    "decoder_start_token_id": [7],
    "remove_invalid_values": [True],
    "use_cache": [False],
    "num_return_sequences": [1],
    "output_attentions": [False],
    "cache_implementation": ["dynamic"],
}
PAIRED = [name for name in VALUES if SETTINGS[name].use is Use.SERVED and name not in ("pad_token_id", "bos_token_id")]
SAMPLED: dict[str, list[Any]] = {
    "temperature": [0.3, 2.0],
    "top_k": [0, 3, None],
    "top_p": [0.5, 1.0],
    "min_p": [0.2],
    "typical_p": [0.4, 1.0],
    "epsilon_cutoff": [0.01],
    "eta_cutoff": [0.02],
}
NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}


def run(report: Report, packages: Packages) -> None:
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="triptych-conformance-"))
    warnings.simplefilter("ignore")
    for name in ("transformers", "model"):  # which warn of what is tried
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        for kind, generation in cases():
            case = f"{kind} {json.dumps(generation)}"
            greedy(report, case, kind, generation, folder)
        for kind, generation in sampled_cases():
            resolved(report, f"{kind} {json.dumps(generation)}", kind, generation, folder)
        for name, setting in SETTINGS.items():
            if setting.use is Use.WARNED:
                named(report, name, folder)
    finally:
        shutil.rmtree(folder)


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each value alone, also with beams; in pairs the first values of two keys, in turn without and with beams."""
    for kind in (*KINDS, *ALONE):
        for name, values in VALUES.items():
            for value in values:
                yield kind, {name: value}
                yield (
                    kind,
                    {name: value, "num_beams": 3} if name != "num_beams" else {name: value, "renormalize_logits": True},
                )
    for kind in KINDS:
        for place, (one, other) in enumerate(combinations(PAIRED, 2)):
            pair = {one: VALUES[one][-1], other: VALUES[other][0]}
            yield kind, pair
            if place % 2 and "num_beams" not in pair:
                yield kind, pair | {"num_beams": 3}


def sampled_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in KINDS:
        for sample in (True, False, None):
            yield kind, {"do_sample": sample}
            for name, values in SAMPLED.items():
                yield from ((kind, {"do_sample": sample, name: value}) for value in values)
        for (one, ones), (other, others) in combinations(SAMPLED.items(), 2):
            yield from ((kind, {"do_sample": True, one: a, other: b}) for a in ones for b in others)


def greedy(report: Report, case: str, kind: str, changes: dict[str, Any], folder: Path) -> None:
    """Compare tokens and scores, and those after a decoder's prompt."""
    generation = base(kind) | changes
    encodes = saved(kind).reference.config.is_encoder_decoder
    begins: list[tuple[int, ...]] = [()]
    if encodes and len(changes) == 1:
        begins.append((generation["decoder_start_token_id"], *AFTER_START))
    for begin in begins:
        try:
            expected, scores = theirs(saved(kind).reference, generation, PROMPT, begin)
        except (ValueError, IndexError, RuntimeError) as error:
            report.refuses(case, f"the reference raises {type(error).__name__}: {error}"[:160])
            return
        path = folder_of(kind, folder, generation)
        try:
            found = ours(path, PROMPT, begin)
        except ConfigError as error:
            report.fails(case, f"refused: {error}")
            return
        finally:
            shutil.rmtree(path)
        eos = generation["eos_token_id"]
        wanted = ended(expected, set(eos if isinstance(eos, list) else [eos]))
        same = found.hypotheses == wanted
        if same and scores and scores[0] > -1e8:
            same = abs((found.scores[0] or 0.0) - scores[0]) < 1e-3
        report.check(
            f"{case} after {begin}" if begin else case,
            same,
            f"{found.hypotheses} {found.scores}, not {wanted} {scores}",
        )


def resolved(report: Report, case: str, kind: str, changes: dict[str, Any], folder: Path) -> None:
    """Compare the parameters of sampling with those that `generate` resolves."""
    from transformers import GenerationConfig

    generation = {name: value for name, value in (base(kind) | changes).items() if value is not None}
    reference = saved(kind).reference
    before, reference.generation_config = reference.generation_config, GenerationConfig.from_dict(generation)
    try:
        expected, _ = reference._prepare_generation_config(None)
    finally:
        reference.generation_config = before
    path = folder_of(kind, folder, generation)
    found = read_checkpoint(path).sampling_defaults
    shutil.rmtree(path)
    if not expected.do_sample:
        report.check(case, not NEUTRAL.keys() & found.keys(), f"sampled: {found}")
        return
    wanted = {name: getattr(expected, name) for name in NEUTRAL}
    wanted = {name: NEUTRAL[name] if value is None else value for name, value in wanted.items()}
    report.check(
        case, wanted == {name: found.get(name, off) for name, off in NEUTRAL.items()}, f"{found}, not {wanted}"
    )


def named(report: Report, name: str, folder: Path) -> None:
    """Check that a key that is not served is named."""
    path = folder_of("gpt2", folder, {name: 2.5, "do_sample": True})
    told = " ".join(read_checkpoint(path).warnings)
    shutil.rmtree(path)
    if f"not served: {name}" in told:
        report.refuses(name, "named in a warning")
    else:
        report.fails(name, f"not named: {told}")
