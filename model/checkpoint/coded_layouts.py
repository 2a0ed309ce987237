"""Layouts of 4-bit codes that stand for floats (bitsandbytes' nf4 and fp4, MXFP4, NVFP4), and of LLM.int8(). No torch.

nf4 and fp4 (Dettmers et al. 2023, QLoRA): each block of a matrix, row after row, has a scale, and its numbers of 4
bits are places of a table of 16. Scales may be coded themselves, in 8 bits by a table of 256 (double quantisation).
MXFP4 (OCP Microscaling Formats 1.0): e2m1 numbers, a power of two for 32 of them; twice a number is whole, so both are
exact as integers in groups of 32. NVFP4: e2m1 numbers, a scale in fp8 for 16 of them, one in float32 for the matrix.
LLM.int8(): integers, the largest of a row being 127.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from triptych.model.checkpoint.quantization_settings import WHERE, expect
from triptych.model.config.formats import GROUPS, Storage, integers_in_groups
from triptych.model.errors import CheckpointError, ConfigError

Find = Callable[[str], NDArray[Any] | None]  # a small tensor by its name, None if there is none
_STATE = "weight.quant_state.bitsandbytes__"
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_ANY = (True, False, None)
_BITSANDBYTES = {
    "quant_method": ("bitsandbytes", None),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"), _ANY),
    "llm_int8_has_fp16_weight": (False, None),
}
_HOW_COMPUTED = (  # or found; what is stored says the rest itself
    *("llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload"),
    *("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedLayout:
    """What the layouts of this module have in common."""

    others: tuple[str, ...] = ()  # tensors that say nothing new
    zero_bias: bool = False

    @property
    def tool(self) -> str:
        """The name of the tool that wrote the layout, for messages."""
        raise NotImplementedError

    @property
    def needed(self) -> tuple[str, ...]:
        """The tensors that a projection has."""
        raise NotImplementedError

    @property
    def marks(self) -> tuple[str, ...]:
        """The tensors by which a projection is known to be stored so."""
        return tuple(name for name in self.needed if name != "weight")

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that become others when they are read."""
        return (*self.needed, *self.others)

    def storage(self) -> Storage:
        """Return the storage that is read."""
        raise NotImplementedError

    def dequantised(self) -> Storage:
        """Return the storage of the floats that are meant."""
        return replace(self.storage(), numbers=None, scale=None, block=(1, 0), nearest=(8, 128))

    def found(self, stem: str, names: Collection[str], find: Find) -> CodedLayout:
        """Return the layout of one projection as it is stored; raises `CheckpointError`."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLayout(CodedLayout):
    """bitsandbytes in 4 bits; what is not there yet says the projection's own state."""

    kind: str = ""  # nf4 or fp4
    shape: tuple[int, int] = (0, 0)  # outputs and inputs
    block: int = 0  # numbers that share a scale
    nested_block: int = 0  # scales that share a scale; 0: they are floats
    nested_offset: float = 0.0

    @property
    def tool(self) -> str:
        return f"bitsandbytes {self.kind or '4 bits'}"

    @property
    def needed(self) -> tuple[str, ...]:
        state = (_STATE + self.kind,) if self.kind else ()
        nested = ("weight.nested_absmax", "weight.nested_quant_map") if self.nested_block else ()
        return ("weight", "weight.absmax", "weight.quant_map", *nested, *state)

    def storage(self) -> Storage:
        fits = self.block in GROUPS and self.shape[1] % self.block == 0
        return Storage(f"{self.tool} in blocks of {self.block}", nearest=(8, self.block if fits else 128))

    def found(self, stem: str, names: Collection[str], find: Find) -> TableLayout:
        kind = next((kind for kind in ("nf4", "fp4") if f"{stem}.{_STATE}{kind}" in names), None)
        state = None if kind is None else find(f"{stem}.{_STATE}{kind}")
        try:
            if kind is None or state is None:
                raise ValueError("there is none of nf4 or fp4")
            return self._described(kind, json.loads(state.tobytes()))
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise CheckpointError(f"{stem}: its quant_state cannot be read: {error}") from None

    def _described(self, kind: str, state: Mapping[str, Any]) -> TableLayout:
        outputs, inputs = state["shape"]
        block, nested = state["blocksize"], state.get("nested_blocksize", 0)
        whole = all(type(size) is int for size in (outputs, inputs, block))
        if state["quant_type"] != kind or not whole or block not in _BLOCKS:
            raise ValueError(f"{dict(state)}")
        if type(nested) is not int or nested < 0 or ("nested_offset" in state) != (nested > 0):
            raise ValueError(f"{dict(state)}")
        offset = float(state.get("nested_offset", 0.0))
        return replace(self, kind=kind, shape=(outputs, inputs), block=block, nested_block=nested, nested_offset=offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8RowsLayout(CodedLayout):
    """LLM.int8(): `SCB` is the largest absolute value of each row.

    Rows are read as groups with equal scales: such models have activations with outliers, which are to cost their
    group alone.
    """

    @property
    def tool(self) -> str:
        return "LLM.int8()"

    @property
    def needed(self) -> tuple[str, ...]:
        return ("weight", "SCB")

    def storage(self) -> Storage:
        return integers_in_groups(8, 128, offsets=False)

    def found(self, stem: str, names: Collection[str], find: Find) -> Int8RowsLayout:
        form = find(f"{stem}.weight_format")
        if form is not None and form.any():
            raise CheckpointError(f"{stem}.weight_format: only rows are read (0), found {form.tolist()}")
        return replace(self, others=("weight_format",) if form is not None else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class E2M1Layout(CodedLayout):
    """MXFP4 and NVFP4 as compressed-tensors packs them: two numbers in a byte, the first in the low bits."""

    group: int  # 32: MXFP4; 16: NVFP4

    @property
    def is_exact(self) -> bool:
        """Whether C has what it stands for: powers of two as scales of groups of 32."""
        return self.group == 32

    @property
    def tool(self) -> str:
        return "MXFP4" if self.is_exact else "NVFP4"

    @property
    def needed(self) -> tuple[str, ...]:
        return ("weight_packed", "weight_scale", *(() if self.is_exact else ("weight_global_scale",)))

    def storage(self) -> Storage:
        if self.is_exact:
            return integers_in_groups(8, self.group, offsets=False)
        return Storage("NVFP4 in groups of 16", nearest=(8, 32))

    def found(self, stem: str, names: Collection[str], find: Find) -> E2M1Layout:
        known = ("input_global_scale", "weight_shape")
        return replace(self, others=tuple(name for name in known if f"{stem}.{name}" in names))


def bitsandbytes(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, CodedLayout]:
    """Return the layout of each projection that bitsandbytes stored through transformers; raise `ConfigError`."""
    expect(WHERE, settings, _BITSANDBYTES, known=_HOW_COMPUTED)
    in_4_bits = settings.get("load_in_4bit") or settings.get("_load_in_4bit")
    layout, mark = (TableLayout(), ".weight.absmax") if in_4_bits else (Int8RowsLayout(), ".SCB")
    return {name.removesuffix(mark): layout for name in sorted(names) if name.endswith(mark)}


def mxfp4(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, CodedLayout]:
    """gpt-oss' experts, by stored projection: bytes and scales of all are read as each expert's; `ConfigError`."""
    expect(WHERE, settings, {"quant_method": "mxfp4"}, known=("modules_to_not_convert", "dequantize"))
    mark, layout = ".weight_packed", E2M1Layout(group=32)
    return {name.removesuffix(mark): layout for name in sorted(names) if name.endswith(mark)}


def e2m1(where: str, group: Mapping[str, Any], form: str) -> E2M1Layout:
    """One of compressed-tensors' groups in MXFP4 or NVFP4; raises `ConfigError`. Activations are not in 4 bits here."""
    size, strategy = (32, "group") if form.startswith("mxfp4") else (16, "tensor_group")
    floats = {"num_bits": 4, "type": "float", "symmetric": True, "block_structure": None}
    expect(
        f"{where}.weights", group.get("weights"), {**floats, "strategy": strategy, "group_size": size, "dynamic": False}
    )
    activations = group.get("input_activations")
    if activations is not None:
        if not isinstance(activations, Mapping) or activations.get("type") != "float":
            raise ConfigError(f"{where}.input_activations: {activations!r} is not served, only floats")
        expect(
            f"{where}.input_activations",
            activations,
            {**floats, "num_bits": (4, 8), "dynamic": (True, False, "local")},
            known=("strategy", "group_size"),
        )
    return E2M1Layout(group=size)
