"""What holds for all tests.

Without a GPU, Triton's kernels run in its interpreter: it must be told before anything imports Triton.
"""

import functools
import os
import ssl

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Each HTTP client reads all of the system's certificates, which takes 30 ms, and hundreds of them ask this machine
# without TLS: what was read once is every client's.
ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]
