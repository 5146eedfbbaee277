"""Private names of torch.testing, where `assert_close` compares.  Public: its function alone, which reads the memory
of a tile and does not dispatch.

`jigsaw.ops.into_torch.closeness` derives from ``COMPARISONS.TensorLikePair``, so it has this class's methods, too.
"""

from __future__ import annotations

from typing import Any

from jigsaw.torch_internals.private_names import private_name

COMPARISONS: Any = private_name("torch.testing._comparison:")
mismatch_message: Any = private_name("torch.testing._comparison:_make_mismatch_msg")

for _method in (
    "_process_inputs _inputs_not_supported _compare_attributes _compare_values _equalize_attributes "
    "_compare_regular_values_close _fail"
).split():
    private_name(f"torch.testing._comparison:TensorLikePair.{_method}")
