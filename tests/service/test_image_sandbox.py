"""Processes that decode untrusted image files: results, refusals, and files that take too long."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Iterator

import pytest
from PIL import Image

from triptych.model.vision.decoding import ImageError
from triptych.model.vision.processing import ImageProcessing
from triptych.service.images.image_pool import ImagePool, ImageWorker

PROCESSING = ImageProcessing(32, (32, 32), None, 2, False, 1 / 255, (0.5,) * 3, (0.5,) * 3)


def png(side: int) -> bytes:
    made = io.BytesIO()
    Image.new("RGB", (side, side), (9, 8, 7)).save(made, "PNG", compress_level=9)
    return made.getvalue()


@pytest.fixture(scope="module")
def large() -> bytes:
    return png(5600)  # 31 million pixels in 100 KB


@pytest.fixture
def worker() -> Iterator[ImageWorker]:
    worker = ImageWorker(5.0, 1_000)
    yield worker
    worker.close()


def test_a_process_returns_the_same_pixels(worker: ImageWorker) -> None:
    noise = io.BytesIO()
    Image.effect_noise((50, 70), 90).convert("RGB").save(noise, "JPEG")
    for file in (png(40), noise.getvalue()):
        pixels, found = worker.prepare(file, PROCESSING, 10_000)
        assert pixels == PROCESSING.prepare(file) and found in (1_600, 3_500)
    with pytest.raises(ImageError, match="not an image file"):
        worker.prepare(b"hello", PROCESSING, 10_000)
    with pytest.raises(ImageError, match=r"1,000 pixels \(max_image_pixels\)"):
        worker.prepare(png(40), PROCESSING, 999)


def test_a_file_that_takes_too_long_is_refused_and_the_next_one_is_decoded(large: bytes) -> None:
    assert len(large) < 150_000
    worker = ImageWorker(0.03, 10**9)
    try:
        worker.prepare(png(8), PROCESSING, 10**9)
        with pytest.raises(ImageError, match=r"takes more than 0\.03 s"):
            worker.prepare(large, PROCESSING, 10**9)
        worker._seconds = 5.0
        assert worker.prepare(png(8), PROCESSING, 10**9)[1] == 64
    finally:
        worker.close()


def test_the_images_of_a_request_have_a_bound_and_the_loop_goes_on(large: bytes) -> None:
    pool = ImagePool(10.0, 64_000_000, 1 << 30)
    longest, tries = 0.0, list[float]()

    async def watch() -> None:
        nonlocal longest
        while True:
            began, computed = time.monotonic(), time.process_time()
            await asyncio.sleep(0.001)
            longest = max(longest, min(time.monotonic() - began, time.process_time() - computed))

    async def work() -> None:
        watcher = asyncio.create_task(watch())
        images = pool.request()
        for _ in range(2):
            await images.prepare(large, PROCESSING)
        with pytest.raises(ImageError, match="max_image_pixels"):
            await images.prepare(large, PROCESSING)
        await pool.request().prepare(large, PROCESSING)
        watcher.cancel()

    while len(tries) < 4 and (not tries or min(tries) > 0.05):  # a busy machine computes more slowly
        longest = 0.0
        asyncio.run(work())
        tries.append(longest)
    pool.close()
    assert min(tries) < 0.05, tries
