"""Target figures as shares of the roof that the same run has measured. Uses only the standard library."""

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
_COPY, _ROOF, _RATE = "of the measured copy", "of the roofline", "of the measured product"
TARGETS = (
    Target("llama-8b, one stream", "of_bandwidth", 0.75, _COPY, _HAND),
    Target("llama-1b, one stream", "of_bandwidth", 0.60, _COPY, _HAND),
    Target("llama-8b, one stream, fp8", "of_bandwidth", 0.60, _COPY, "1.5x bfloat16 at least"),
    Target("qwen3-0.6b x256, greedy", "of_roofline", 0.75, _ROOF, "vLLM 8,600 tokens/s on an A800"),
    Target("qwen3-0.6b x256, temperature 0.6", "of_roofline", 0.75, _ROOF, "nano-vLLM's bench as it is"),
    Target("qwen3-0.6b x256, temperature 0.6, top-p 0.9", "of_roofline", 0.75, _ROOF, "no dearer than that"),
    Target("llama-8b x128 1k/1k", "of_roofline", 0.75, _ROOF),
    Target("llama-8b x128 1k/1k, int8 KV", "of_roofline", 0.65, _ROOF),
    Target("llama-8b x128 1k/1k, fp8", "of_roofline", 0.65, _ROOF, "TRT-LLM FP8 17,700 tokens/s on an H200"),
    Target("llama-8b, prefill 2k", "of_matrix_rate", 0.70, _RATE),
    Target("bart-large x128", "of_roofline", 0.31, _ROOF, "TRT-LLM 23,500 tokens/s on an H100: 0.22"),
    Target("t5-xl x128", "of_roofline", 0.41, _ROOF, "TRT-LLM 4,770 tokens/s on an H100: 0.21"),
    Target("bert-base, texts of 512", "of_matrix_rate", 0.33, _RATE, "vLLM 516,000 tokens/s over HTTP"),
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
