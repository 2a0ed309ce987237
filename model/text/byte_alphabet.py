"""The characters that stand for bytes in byte-level vocabularies."""

from __future__ import annotations


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level vocabularies (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
