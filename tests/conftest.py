"""One thread a process: the ranks are the parallelism, and a test must not depend on the machine's core count."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
