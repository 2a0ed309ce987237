"""The process that decodes image files, which its parent can kill: `python -m service.sandbox.image_main`.

A decoder is a program in C that reads bytes of a stranger, and a file of 100 KB may have 32 million pixels. So each
file gets a process of its own, which `service.sandbox.worker_main` confines and the kernel ends in time.

A request `{processing, most_pixels, all_pixels, seconds}` with a file gets `{"pixels"}`, how many it has, and those
that the model reads; or `{"error", "message"}` without bytes, the error being refused or memory.
"""

from __future__ import annotations

import importlib
from typing import Any

from PIL import Image

from model.media.images import MAX_PIXELS, ImageError, ImageProcessing, num_pixels
from service.sandbox import worker_main

_MEMORY = (1 << 30) + 16 * MAX_PIXELS  # address space: libraries, most of which is never used, and two copies or three


def answer(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return a reply and the pixels."""
    try:
        found = num_pixels(data)
        if found > request["most_pixels"]:
            message = f"the images of a request have more than {request['all_pixels']:,} pixels (max_image_pixels)"
            return {"error": "refused", "message": message}, b""
        return {"pixels": found}, ImageProcessing(**request["processing"]).prepare(data)
    except ImageError as error:
        return {"error": "refused", "message": str(error)}, b""
    except MemoryError:
        return {"error": "memory", "message": "decoding the image takes too much memory"}, b""


def main() -> None:
    """Answer requests until the other side closes."""
    Image.init()  # before files may no longer be opened
    for module in ("ExifTags", "ImageCms", "ImageOps", "ImagePalette", "ImageSequence"):
        importlib.import_module(f"PIL.{module}")
    worker_main.serve_forking(answer, lambda _: _MEMORY)


if __name__ == "__main__":
    main()
