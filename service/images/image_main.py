"""The process that decodes image files, which its parent can kill: `python -m triptych.service.images.image_main`.

A decoder is a C program that reads untrusted bytes, and a file of 100 KB may have 32 million pixels. So each file gets
its own process, which `triptych.service.sandbox.worker_main` confines and the kernel kills at the time limit.

A request `{processing, most_pixels, all_pixels, seconds}` with a file gets `{"pixels"}`, the number of its pixels, and
the pixels that the model reads. With a `detail` the file is a picture of a prompt, and the reply has `picture` too: the
fields of `PreparedPicture` but its pixels. Otherwise it gets `{"error", "message"}`: `refused` or `memory`.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import asdict
from typing import Any

from PIL import Image

from triptych.model.vision.decoding import MAX_PIXELS, ImageError, num_pixels
from triptych.model.vision.pictures import PictureProcessing
from triptych.model.vision.processing import ImageProcessing
from triptych.service.sandbox import worker_main

_NICENESS = 5  # steps of streams come first: with 16 clients that send images of a megapixel, p99 of their gaps halves
_MEMORY = (1 << 30) + 16 * MAX_PIXELS  # address space: the libraries, and two or three copies of the pixels


def answer(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the reply and the pixels that the model reads."""
    try:
        found = num_pixels(data)
        if found > request["most_pixels"]:
            message = f"the images of a request have more than {request['all_pixels']:,} pixels (max_image_pixels)"
            return {"error": "refused", "message": message}, b""
        if "detail" not in request:
            return {"pixels": found}, ImageProcessing(**request["processing"]).prepare(data)
        picture = PictureProcessing(**request["processing"]).prepare_picture(data, request["detail"])
        fields = {name: value for name, value in asdict(picture).items() if name != "features"}
        return {"pixels": found, "picture": fields}, picture.features
    except ImageError as error:
        return {"error": "refused", "message": str(error)}, b""
    except MemoryError:
        return {"error": "memory", "message": "decoding the image takes too much memory"}, b""


def _memory(request: dict[str, Any]) -> int:
    """Return the bytes that a process for one file may have, after it has been given its priority."""
    if request:  # not the trial that only confines itself
        os.nice(_NICENESS)
    return _MEMORY


def main() -> None:
    """Answer requests until the other side closes."""
    Image.init()  # now, because no file can be opened later
    for module in ("ExifTags", "ImageCms", "ImageOps", "ImagePalette", "ImageSequence"):
        importlib.import_module(f"PIL.{module}")
    worker_main.serve_forking(answer, _memory)


if __name__ == "__main__":
    main()
