"""Target figures for an H200 (4.3 TB/s and 790 TFLOP/s measured). Uses only the standard library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """Holds the target of a case's figure."""

    case: str
    figure: str
    bound: float
    unit: str
    anchor: str = ""  # the figure of other projects, or the reason
    at_most: bool = False

    def reached(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound

    @property
    def wanted(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:,} {self.unit}"


_HAND = "vLLM, SGLang <= 0.5 at 1B; gpt-fast 0.69 at 8B; a hand-made megakernel 0.78 (H100)"
TARGETS = (
    Target("llama-8b, one stream", "of_bandwidth", 0.70, "of the measured copy", _HAND),
    Target("llama-1b, one stream", "of_bandwidth", 0.60, "of the measured copy", _HAND),
    Target("qwen3-0.6b x256, greedy", "out_tokens_per_s", 20_000, "tokens/s", "vLLM 8,600 on an A800"),
    Target("qwen3-0.6b x256, temperature 0.6", "out_tokens_per_s", 20_000, "tokens/s", "nano-vLLM's bench as it is"),
    Target(
        "qwen3-0.6b x256, temperature 0.6, top-p 0.9", "out_tokens_per_s", 20_000, "tokens/s", "no dearer than that"
    ),
    Target("llama-8b x128 1k/1k", "out_tokens_per_s", 10_000, "tokens/s", "TRT-LLM FP8 17,700 on an H200"),
    Target("llama-8b x128 1k/1k, int8 KV", "out_tokens_per_s", 10_000, "tokens/s", "the same"),
    Target("llama-8b x128 1k/1k, fp8", "out_tokens_per_s", 17_700, "tokens/s", "TRT-LLM FP8 17,700 on an H200"),
    Target("llama-8b, one stream, fp8", "of_bandwidth", 0.60, "of the measured copy", "1.5x bfloat16 at least"),
    Target("llama-8b, prefill 2k", "of_matrix_rate", 0.60, "of the measured product"),
    Target("bart-large x128", "out_tokens_per_s", 23_500, "tokens/s", "TRT-LLM 23,500 on an H100"),
    Target("t5-xl x128", "out_tokens_per_s", 4_800, "tokens/s", "TRT-LLM 4,770 on an H100"),
    Target("bert-base, texts of 512", "tokens_per_s", 1_000_000, "tokens/s", "vLLM 516,000 over HTTP"),
    Target("llama-8b, 32 streams, prompts arriving", "p99_stretch", 2.0, "times its normal", at_most=True),
    Target("qwen3-0.6b, transformers", "times", 3.0, "times transformers' continuous batching"),
)

_STATED = (  # bytes/s and dense bfloat16 FLOP/s, from datasheets; the first matching name is used
    ("H200", 4.8e12, 989e12),
    ("H100 NVL", 3.9e12, 835e12),
    ("H100 PCIe", 2.0e12, 756e12),
    ("H100", 3.35e12, 989e12),
    ("A100-SXM4-80GB", 2.039e12, 312e12),
    ("A100", 1.555e12, 312e12),
    ("L40S", 0.864e12, 362e12),
    ("L4", 0.3e12, 121e12),
)


def datasheet_ceilings(device: str) -> tuple[float, float] | None:
    """Return bandwidth and matrix rate from a card's datasheet; None for an unknown card."""
    return next(((data, flops) for name, data, flops in _STATED if name in device), None)
