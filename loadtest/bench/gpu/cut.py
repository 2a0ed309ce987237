"""Attention launches cut as one wants. Imported only where Triton is."""

from __future__ import annotations

from model.attention.triton import Tiles, TritonBackend


class Cut(TritonBackend):
    """Launches with other keys, warps and stages than the backend would choose, and with so many parts."""

    def __init__(self, tiles: Tiles | None = None, parts: int | None = None) -> None:
        self._cut, self._parts = tiles, parts

    def tiles(self, *arguments: object, **named: object) -> Tiles:
        return self._cut or super().tiles(*arguments, **named)  # type: ignore[arg-type]

    def parts(self, *arguments: object, **named: object) -> int:
        return self._parts or super().parts(*arguments, **named)  # type: ignore[arg-type]
