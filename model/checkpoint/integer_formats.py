"""The layouts of integers that GPTQ, AWQ, torchao and compressed-tensors write, by their settings. No torch.

GPTQ, AWQ: `qweight`, `qzeros` and `scales`; unsigned numbers in words of 32 bits, and a zero point for each group.
torchao: `_weight_qdata` in bytes, `_weight_scale`, `_weight_zero_point`; the file's metadata say bits and groups.
compressed-tensors: `weight_packed` in words, or `weight` in bytes, and `weight_scale`; zero points where it is not
symmetric.

Bits of fewer inputs than there are (2 or 3 bits) and other layouts (marlin, gemv_fast) are refused by name.

compressed-tensors targets projections by patterns of their names (`re:` in a config.json). A pattern comes with a
checkpoint, and one for `re` could be written to run for years. Served are single characters and sets of them, each
maybe repeated, and groups of alternatives: `.*layers\\.[0-3]\\.mlp\\.(gate|up)_proj$`. As with `re.match` a name may be
longer than a pattern without `$`. Time is linear in the name's length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from triptych.model.checkpoint.layouts import Along, IntegerLayout, Layout
from triptych.model.checkpoint.quantization_settings import WHERE, expect, group_size
from triptych.model.errors import ConfigError

_BITS = (4, 8)
_HOW = (  # it was quantised, and by whom; which kernels its makers prefer
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "desc_act", "act_group_aware", "mse"),
    *("model_name_or_path", "model_file_base_name", "meta", "sym", "lm_head", "tokenizer", "dataset", "backend"),
    *("use_exllama", "disable_exllama", "exllama_config", "use_cuda_fp16", "max_input_length", "model_seqlen"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize"),
    *("batch_size", "pad_token_id", "cache_block_outputs", "method", "quantizer", "hyb_act", "dynamic"),
    *("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "zero_point"),
    # AutoRound, in GPTQ's and AWQ's formats
    *("autoround_version", "amp", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "iters"),
    *(
        "gradient_accumulate_steps",
        "low_gpu_mem_usage",
        "lr",
        "minmax_lr",
        "nsamples",
        "seqlen",
        "train_bs",
        "provider",
    ),
    *("quant_block_list", "to_quant_block_names"),
)
_WEIGHTS = {"type": "int", "num_bits": _BITS, "symmetric": (True, False), "dynamic": False, "block_structure": None}
_PER_TOKEN = {
    **{"type": "int", "num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True},
    **{"group_size": None, "block_structure": None},
}


def gptq(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, IntegerLayout]:
    """GPTQ as AutoGPTQ, GPTQModel and optimum write it, by stored projection; raises `ConfigError`."""
    form = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    if form not in ("gptq", "gptq_v2"):
        raise ConfigError(f"{WHERE}.checkpoint_format: {form!r} is not served, only 'gptq' or 'gptq_v2'")
    expected = {"quant_method": "gptq", "bits": _BITS, "pack_dtype": ("int32", None), "is_marlin_format": False}
    expected |= {"data_type": "int"}
    known = (*_HOW, "group_size", "checkpoint_format", "format")
    expect(WHERE, {"bits": None, **settings}, expected, known=known)  # there is no usual number of bits
    _check_dynamic(settings.get("dynamic"))
    layout = IntegerLayout(
        "GPTQ",
        settings["bits"],
        group_size(WHERE, settings.get("group_size", 128)),
        "qweight",
        "scales",
        "qzeros",
        "g_idx",
        inputs_first=True,
        zeros_less=0 if form == "gptq_v2" else 1,
    )
    return _of_all(layout, names)


def awq(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, IntegerLayout]:
    """AWQ as AutoAWQ and GPTQModel write it, by stored projection; raises `ConfigError`."""
    named = next((key for key in ("checkpoint_format", "version", "format") if settings.get(key)), "version")
    form = str(settings.get(named) or "gemm").lower()
    if form not in ("gemm", "gemv"):
        raise ConfigError(f"{WHERE}.{named}: {form!r} is not served, only 'gemm' or 'gemv'")
    if settings.get("backend") == "llm-awq":  # others name kernels, this one a layout
        raise ConfigError(f"{WHERE}.backend: 'llm-awq' is not served")
    expected = {"quant_method": "awq", "bits": 4, "pack_dtype": ("int32", None), "data_type": "int"}
    expect(WHERE, settings, expected, known=(*_HOW, "group_size", "version", "format", "checkpoint_format"))
    _check_dynamic(settings.get("dynamic"))
    group = group_size(WHERE, settings.get("group_size", 128))
    if form == "gemv":
        layout = IntegerLayout(
            "AWQ", 4, group, "qweight", "scales", "qzeros", zero_words=Along.INPUTS, padded_groups=True
        )
    else:
        layout = IntegerLayout(
            "AWQ", 4, group, "qweight", "scales", "qzeros", words=Along.OUTPUTS, inputs_first=True, interleaved=True
        )
    return _of_all(layout, names)


def torchao(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, IntegerLayout]:
    """Return the layouts of torchao's tensors of plain integers, by stored projection; raises `ConfigError`."""
    known = ("quant_type", "quant_type_kwargs", "include_input_output_embeddings", "untie_embedding_weights")
    expect(WHERE, settings, {"quant_method": "torchao"}, known=known)
    layout = IntegerLayout(
        "torchao",
        8,
        0,
        "_weight_qdata",
        "_weight_scale",
        "_weight_zero_point",
        words=None,
        zero_words=None,
        described=True,
    )
    return _of_all(layout, names)


def _check_dynamic(dynamic: Any) -> None:
    """Raise `ConfigError` unless GPTQModel's rules for single projections, if any, only leave some out."""
    if dynamic and not (isinstance(dynamic, Mapping) and all(str(key).startswith("-:") for key in dynamic)):
        raise ConfigError(f"{WHERE}.dynamic: settings for single projections are not served, only '-:' that skip them")


def compressed(where: str, group: Mapping[str, Any], form: str) -> IntegerLayout:
    """One of compressed-tensors' groups of integers; raises `ConfigError`."""
    weights, activations = group.get("weights"), group.get("input_activations")
    strategies = {"strategy": ("group", "channel")}
    expect(f"{where}.weights", weights, {**_WEIGHTS, **strategies}, known=("group_size",))
    assert isinstance(weights, Mapping)
    if activations is not None:
        expect(f"{where}.input_activations", activations, _PER_TOKEN)
    size = 0
    if weights["strategy"] == "group":
        size = group_size(f"{where}.weights", weights.get("group_size"))
    elif weights.get("group_size") not in (None, -1):
        raise ConfigError(f"{where}.weights.group_size: {weights['group_size']!r} is not served by 'channel'")
    zeros = None if weights.get("symmetric", True) else "weight_zero_point"
    bits, packed = weights.get("num_bits", 8), form == "pack-quantized"
    return IntegerLayout(
        "compressed-tensors",
        bits,
        size,
        "weight_packed" if packed else "weight",
        "weight_scale",
        zeros,
        "weight_g_idx",
        others=("weight_shape",),
        words=Along.INPUTS if packed else None,
        zero_words=Along.OUTPUTS if packed else None,
    )


def targeted(groups: Mapping[str, tuple[Layout, Any]], names: Collection[str]) -> dict[str, Layout]:
    """Return the layouts of compressed-tensors' projections, of groups by name and targets; raises `ConfigError`.

    One group has all that has its tensors. Of several the one that names a projection has it, as a whole or by a
    regular expression (`re:`), else the one that targets the class Linear.
    """
    found: dict[str, Layout] = {}
    for stem in sorted({stem for layout, _ in groups.values() for stem in stems_of(layout, names)}):
        ranked = []
        for name, (layout, targets) in groups.items():
            if len(groups) == 1:
                ranked.append((0, name, layout))
                continue
            place = f"{WHERE}.config_groups.{name}.targets"
            if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
                raise ConfigError(f"{place} must be a list of names, found {targets!r}")
            ranked += [(rank, name, layout) for target in targets if (rank := _rank(place, target, stem)) is not None]
        if not ranked:
            raise ConfigError(f"{WHERE}.config_groups: none targets {stem}, which has tensors of integers")
        best, name, found[stem] = min(ranked, key=lambda one: one[0])
        rivals = {other: layout for rank, other, layout in ranked if rank == best and layout != found[stem]}
        if rivals:
            raise ConfigError(f"{WHERE}.config_groups: {stem} is a target of {name} and {' and '.join(rivals)}")
    return found


def _rank(place: str, target: str, stem: str) -> int | None:
    """Return how closely a target names a projection, 0 for its name; None: not at all."""
    if target.startswith("re:"):
        try:
            return 1 if matches(target[3:], stem) else None
        except ValueError as error:
            raise ConfigError(
                f"{place}: {target!r} is not served, only characters, '.*' and groups of alternatives: {error}"
            ) from None
    if target == stem:
        return 0
    return 2 if target == "Linear" else None


def _of_all(layout: IntegerLayout, names: Collection[str]) -> dict[str, IntegerLayout]:
    return dict.fromkeys(stems_of(layout, names), layout)


def stems_of(layout: Layout, names: Collection[str]) -> list[str]:
    """Return the projections that have the tensors of a layout, in order."""
    marks = tuple(f".{mark}" for mark in layout.marks)
    return sorted({name[: -len(mark)] for mark in marks for name in names if name.endswith(mark)})


_CHARACTER = re.compile(r"(\\[.\-_/dw]|\[[^\[\]\\]+\]|[\w.\-/])([*+]?)")
_GROUP = re.compile(r"\((?:\?:)?([^()]*)\)")
_BETWEEN = re.compile(r"\|(?![^()]*\))")  # alternatives that are in no group
_MOST_WAYS = 256  # to choose one alternative of each group


@dataclass(frozen=True, slots=True)
class _Step:
    """One character of a name, or with `repeats` any number of them."""

    fits: re.Pattern[str]
    repeats: bool


@dataclass(frozen=True, slots=True)
class _Way:
    """A pattern without alternatives."""

    steps: tuple[_Step, ...]
    whole: bool  # nothing may follow

    def matches(self, name: str) -> bool:
        end, places = len(self.steps), self._with_skipped([0])  # how many steps may have been taken
        for character in name:
            if end in places and not self.whole:
                return True
            taken = [place for place in places if place < end and self.steps[place].fits.fullmatch(character)]
            places = self._with_skipped(place if self.steps[place].repeats else place + 1 for place in taken)
        return end in places

    def _with_skipped(self, places: Iterable[int]) -> set[int]:
        """Return these places, and those after steps that may be left out."""
        found: set[int] = set()
        for place in places:
            while place not in found:
                found.add(place)
                if place < len(self.steps) and self.steps[place].repeats:
                    place += 1
        return found


def matches(pattern: str, name: str) -> bool:
    """Whether a name begins with what the pattern describes; raises `ValueError` for one that is not served."""
    return any(way.matches(name) for way in _ways(pattern))


@lru_cache(maxsize=64)
def _ways(pattern: str) -> tuple[_Way, ...]:
    found: list[_Way] = []
    for alternative in _BETWEEN.split(pattern):
        whole = alternative.endswith("$")
        parts = _GROUP.split(alternative.removeprefix("^").removesuffix("$"))  # every second one is a group
        choices = [part.split("|") if at % 2 else [part] for at, part in enumerate(parts)]
        if len(found) + math.prod(map(len, choices)) > _MOST_WAYS:
            raise ValueError(f"more than {_MOST_WAYS} alternatives")
        found += [_Way(_steps("".join(chosen)), whole) for chosen in product(*choices)]
    return tuple(found)


def _steps(text: str) -> tuple[_Step, ...]:
    steps: list[_Step] = []
    at = 0
    while at < len(text):
        found = _CHARACTER.match(text, at)
        if found is None:
            raise ValueError(f"{text[at:]!r} is not served")
        try:
            one = re.compile(found[1])
        except re.error as error:
            raise ValueError(f"{found[1]!r}: {error}") from None
        steps += [_Step(one, repeats=False)] if found[2] != "*" else []
        steps += [_Step(one, repeats=True)] if found[2] else []
        at = found.end()
    return tuple(steps)
