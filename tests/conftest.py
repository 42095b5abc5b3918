"""Settings of every test. Nothing here imports torch: tests that need none start at once."""

import os
from pathlib import Path

from hypothesis import settings

# Before torch is imported: the machines that run these tests have few cores, and share them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

# Before Triton is imported: without a GPU its interpreter runs our kernels on CPU tensors.
if not (Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadline: the first call of torch or NumPy on a busy machine is slow, not wrong.
settings.register_profile("sampled", deadline=None, max_examples=40)
settings.register_profile("whole", deadline=None, max_examples=100)
settings.load_profile("sampled")  # `make test-full` names the other
