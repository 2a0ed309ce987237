"""A Triton attention backend with given tile sizes. Imported only if Triton is installed."""

from __future__ import annotations

from triptych.model.attention.triton import Tiles, TritonBackend


class TiledBackend(TritonBackend):
    """Launches with given tiles (keys, warps, stages) and number of parts, in place of the backend's choice."""

    def __init__(self, tiles: Tiles | None = None, parts: int | None = None) -> None:
        self._cut, self._parts = tiles, parts

    def tiles(self, *arguments: object, **named: object) -> Tiles:
        return self._cut or super().tiles(*arguments, **named)  # type: ignore[arg-type]

    def parts(self, *arguments: object, **named: object) -> int:
        return self._parts or super().parts(*arguments, **named)  # type: ignore[arg-type]
