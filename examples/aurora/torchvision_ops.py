"""Import torchvision beside a torch that its compiled part does not fit; import this before what imports torchvision.

pip pairs a torch of the CPU with a torchvision that was built for CUDA's.  Its compiled operators do not load then, and
its import ends at the first that it describes, ``nms``.  timm imports torchvision, and Aurora imports timm, but neither
calls it.  So the two operators that torchvision describes are declared without a kernel: a call raises torch's error.
"""

from __future__ import annotations

import torch

try:
    import torchvision  # noqa: F401  asks if it loads
except RuntimeError:
    # a library ends with its last name
    declared_operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        declared_operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
