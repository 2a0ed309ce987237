"""What `triptych inspect` prints of a LoRA adapter's folder."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from triptych.model.checkpoint.adapter_tensors import AdaptedModule, read_adapter
from triptych.model.checkpoint.folder import errors_about


def described(name: str, path: Path) -> dict[str, Any]:
    """Return the adapter as JSON: its base, and the modules that it changes by the last part of their names."""
    with errors_about(str(path)):
        folder = read_adapter(path)
    kinds: dict[str, list[AdaptedModule]] = defaultdict(list)
    for module, found in folder.modules.items():
        kinds[module.rpartition(".")[2]].append(found)
    return {
        "schema": 1,
        "name": name,
        "form": "adapter",
        "adapter_of": folder.base,
        "parameters": folder.size,
        "memory_bytes": {"float32": 4 * folder.size, "bfloat16": 2 * folder.size},
        "modules": {
            kind: {
                "count": len(found),
                "ranks": sorted({one.rank for one in found}),
                "scales": sorted({round(one.scale, 6) for one in found}),
                "parameters": sum(math.prod(one.down.shape) + math.prod(one.up.shape) for one in found),
            }
            for kind, found in kinds.items()
        },
    }


def show(name: str, path: Path) -> None:
    """Print a table of the adapter."""
    found, console = described(name, path), Console()
    base = found["adapter_of"] or "a model that its folder does not name"
    console.print(f"\n[bold]{name}[/]  LoRA adapter of {base}, {found['parameters']:,} parameters")
    table = Table("module", "layers", "rank", "scale", "parameters")
    for kind, one in found["modules"].items():
        ranks, scales = (", ".join(map(str, one[key])) for key in ("ranks", "scales"))
        table.add_row(kind, str(one["count"]), ranks, scales, f"{one['parameters']:,}")
    console.print(table)
    sizes = " or ".join(f"{size / 1e6:.2f} MB in {dtype}" for dtype, size in found["memory_bytes"].items())
    console.print(f"in memory: {sizes}, and some padding", highlight=False)
    console.print(f"serve it: triptych serve base=MODEL --lora {name}={path}", markup=False, soft_wrap=True)


def print_json(name: str, path: Path) -> None:
    """Print the same as one line of JSON."""
    print(json.dumps(described(name, path)))
