"""What stored tensors are called without the names of wrappers: torch.compile, FSDP, modules of trainers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from model.families.table.rules import Family

# Modules that only wrap others, wherever they stand in a name: torch.compile, FSDP, activation checkpointing.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True)
class Wrapping:
    """What stands in names that the family's table has not: modules that wrap others, and a `prefix` of all."""

    prefix: str = ""
    modules: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.prefix or self.modules)

    def unwrapped(self, name: str) -> str:
        """Return a stored name without them."""
        if self.modules:
            name = ".".join(part for part in name.split(".") if part not in self.modules)
        return name.removeprefix(self.prefix)

    def __str__(self) -> str:
        return ", ".join([*self.modules, *([self.prefix] if self.prefix else [])])


PLAIN = Wrapping()


def wrapping_of(family: Family | None, names: Collection[str]) -> Wrapping:
    """Return what is to be left out of the names so that the family finds its token table.

    A prefix is left out where exactly one tensor has the table's name after it. With two models in one file neither
    is meant.
    """
    parts = {part for name in names if "._" in f".{name}" for part in name.split(".")}
    modules = Wrapping(modules=tuple(wrapper for wrapper in _WRAPPERS if wrapper in parts))
    if family is None:
        return modules
    plain = {modules.unwrapped(name) for name in names}
    tables = set(family.tables)
    if tables & {family.canonical(name) for name in plain}:
        return modules
    tails = tuple(f".{table}" for table in tables)
    found = {prefix for name in plain if name.endswith(tails) and (prefix := _prefix(family, name)) is not None}
    return Wrapping(found.pop(), modules.modules) if len(found) == 1 else modules


def _prefix(family: Family, name: str) -> str | None:
    """Return the shortest prefix of a name without which it is the token table's."""
    return next((prefix for prefix in _prefixes(name) if family.canonical(name[len(prefix) :]) in family.tables), None)


def _prefixes(name: str) -> Iterator[str]:
    for at, letter in enumerate(name, 1):
        if letter == ".":
            yield name[:at]
