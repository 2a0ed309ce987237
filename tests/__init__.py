"""The tests.

OpenMP's threads sleep while they wait: one that spins takes its core from the thread that it waits for, wherever
something else runs as well (the training tests took seven times as long on a busy machine). It must be said before
torch is loaded; processes that tests start inherit it.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
