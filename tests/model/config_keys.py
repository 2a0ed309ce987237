"""Lists the keys of each configuration class of `transformers` that is served: `python -m tests.model.config_keys`.

It writes `model/families/known_keys.json`, which serving reads in place of the library. A test compares the two.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from triptych.model.families import FAMILIES
from triptych.model.families.table.known_keys import PATH
from triptych.model.families.wholes import WHOLES

# Types that occur only inside other files: the sides of T5Gemma, CLIP and SigLIP, towers, MPT's attention.
INNER = (
    *("t5_gemma_module", "clip_text_model", "clip_vision_model", "siglip_text_model", "siglip_vision_model"),
    *("siglip2_text_model", "siglip2_vision_model"),
    *("pixtral", "idefics3_vision", "smolvlm_vision", "qwen2_5_vl_vision", "qwen3_vl_vision", "qwen3_vl_moe_vision"),
    *("qwen3_5_vision", "qwen3_5_moe_vision", "gemma4_vision"),
)
# Functions of a class that receive keys of a file that are not fields of the class.
_MAKERS = {"__post_init__", "convert_rope_params_to_dict"}
_ROPE = {"rope_scaling", "rope_theta", "partial_rotary_factor"}  # only classes with rotary positions accept these
# Keys of any configuration that code shared by all models reads, with the values assumed where they are absent.
_SHARED_CODE = {"is_causal": True}


def known_keys() -> dict[str, dict[str, Any]]:
    """Return, for each served type, its class's keys with their defaults, and the other keys that have an effect."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.mpt.configuration_mpt import MptAttentionConfig

    base = _of_class(PreTrainedConfig)
    base["keys"] |= _SHARED_CODE
    base["nullable"] = sorted({*base["nullable"], *_SHARED_CODE})  # read as they are
    classes = {name: CONFIG_MAPPING[name] for name in (*FAMILIES, *WHOLES, *INNER) if name in CONFIG_MAPPING}
    classes |= {"mpt.attn_config": MptAttentionConfig}
    found = {name: _without(_of_class(one) | _by_code(one, base), base) for name, one in sorted(classes.items())}
    return {"": base, **found}


def _of_class(one: type) -> dict[str, Any]:
    """Return the fields of a class, the fields that may be null, and the aliases of fields."""
    own = fields(one)  # type: ignore[arg-type]
    keys = {field.name: _default(field) for field in own}
    spelled_before = _arguments(one) - keys.keys() - (set() if "rope_parameters" in keys else _ROPE)
    return {
        "keys": keys | dict.fromkeys(sorted(spelled_before)),
        "nullable": sorted(field.name for field in own if "None" in str(field.type) or field.type is Any),
        "renamed": dict(getattr(one, "attribute_map", {})),
    }


def _by_code(one: type, base: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a class, including those that its model reads but the class does not declare."""
    found = _of_class(one)
    known = found["keys"].keys() | base["keys"].keys() | found["renamed"].keys()
    read = {name for name in _read_by_model(one) if name not in known and not hasattr(one, name)}
    return {**found, "keys": found["keys"] | dict.fromkeys(sorted(read))}


def _without(found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a class that its base class does not have, without empty entries."""
    keys = {key: value for key, value in found["keys"].items() if base["keys"].get(key, found) != value}
    nullable = [key for key in found["nullable"] if key in keys]
    parts = {"keys": keys, "nullable": nullable, "renamed": found["renamed"]}
    return {name: part for name, part in parts.items() if part}


def _default(field: Field[Any]) -> Any:
    value = field.default
    if value is MISSING:
        value = field.default_factory() if field.default_factory is not MISSING else None
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return None


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _arguments(one: type) -> set[str]:
    """Return the keys that a class's own code takes out of its arguments: older spellings."""
    return {name for owner in one.__mro__ if owner.__module__.startswith("transformers") for name in _taken(owner)}


def _taken(owner: type) -> Iterator[str]:
    makers = (getattr(owner, name) for name in _MAKERS & vars(owner).keys())
    for node in (node for maker in makers for node in ast.walk(_tree(maker))):
        taken: ast.AST | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            taken = node.args[0] if _name(node.func.value) == "kwargs" else None
        elif isinstance(node, ast.Subscript) and _name(node.value) == "kwargs":
            taken = node.slice
        if isinstance(taken, ast.Constant) and isinstance(taken.value, str):
            yield taken.value


def _tree(function: Any) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _read_by_model(one: type) -> Iterator[str]:
    """Yield the attributes of the configuration that the modules made from this class read."""
    for file in sorted(Path(inspect.getfile(one)).parent.glob("modeling_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            made_from = _annotation(node) if isinstance(node, ast.ClassDef) else ""
            if not made_from or one.__name__ in made_from or "PreTrained" in made_from:
                yield from _read(node)


def _annotation(owner: ast.ClassDef) -> str:
    """Return the annotation of a module's argument `config` as source text."""
    for node in ast.walk(owner):
        if isinstance(node, ast.arg) and node.arg == "config" and node.annotation is not None:
            return ast.unparse(node.annotation)
        if isinstance(node, ast.AnnAssign) and _name(node.target) == "config":
            return ast.unparse(node.annotation)
    return ""


def _read(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _name(node.value) == "config" and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Call) and _name(node.func) == "getattr" and _name(node.args[0]) == "config":
            yield from [node.args[1].value] if isinstance(node.args[1], ast.Constant) else []


def written(found: dict[str, dict[str, Any]]) -> str:
    """Return the file's text: one line for each class."""
    lines = (f"{json.dumps(name)}: {json.dumps(keys, sort_keys=True)}" for name, keys in found.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    PATH.write_text(written(known_keys()), encoding="utf-8")
