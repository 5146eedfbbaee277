"""How well a program is posed: how far its values move where every rounded result has an error, how far plain torch
itself is from float64, and whether it computes its gradient from values that were changed since.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from fuzz_functions import SMOOTH
from fuzz_programs import Program, Statement, loss_of, plain_state
from torch.autograd.graph import saved_tensors_hooks

_ROUNDING = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 1e-7, torch.complex64: 1e-7}
COARSE = 1e-2  # bfloat16 and float16


def draw_from_start() -> None:
    """Seed the CPU alone: torch.manual_seed formats a stack for each accelerator, which takes half of the time."""
    torch.default_generator.manual_seed(0)


def rounding_of(v: Any) -> float:
    return _ROUNDING.get(v.dtype, COARSE / 100) if v.is_floating_point() or v.is_complex() else 0.0


def value_spread(program: Program, statements: Sequence[Statement], name: str) -> Any:
    """How far a value (``x0``) or gradient (``x0.grad``) moves, where every rounded result has an error, or where all
    is computed in float64.
    """
    if name.endswith(".grad") and reads_changed_values(program, statements):
        return float("inf")
    # errors and their opposites, so that both sides of a step are seen
    results = [_noisy_value(program, statements, name, seed, sign) for seed in range(5) for sign in (1, -1)[: seed + 1]]
    first = results[0]
    if any(r is None or r.shape != first.shape for r in results):
        return float("inf")
    wide = _wide_value(program, statements, name)
    if wide is not None and wide.shape == first.shape:
        results.append(wide)
    spread = torch.zeros(first.shape, dtype=torch.float64)
    for r in results[1:]:
        off = (r.to(torch.complex128) - first.to(torch.complex128)).abs()
        spread = torch.maximum(spread, off.nan_to_num(float("inf")))
    return spread


def reads_changed_values(program: Program, statements: Sequence[Statement]) -> bool:
    """Whether plain torch makes a gradient of values that were written over since, which is not a derivative.

    The check of torch for changed values does not see those that `kron` has saved.  So all that is saved is copied, and
    the gradients are compared with those without copies.
    """
    plain, copied = (_gradients(program, statements, is_copied=c) for c in (False, True))
    pairs = zip(plain, copied, strict=True)
    return not all(torch.allclose(a, b, rtol=1e-6, atol=1e-6, equal_nan=True) for a, b in pairs)


def _gradients(program: Program, statements: Sequence[Statement], *, is_copied: bool) -> list[torch.Tensor]:
    state: dict[str, Any] = plain_state(list(program.inputs))
    hooks = saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x) if is_copied else nullcontext()
    with hooks:
        for statement in statements:
            draw_from_start()
            exec(statement.text, state)
        _loss_of_outputs(program, state).backward()
    leaves = [state[x.name] for x in program.inputs if x.has_grad]
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def _loss_of_outputs(program: Program, state: dict[str, Any]) -> Any:
    values = [state.get(name) for name in program.outputs]
    return loss_of(*(v for v in values if isinstance(v, torch.Tensor) and v.requires_grad))


def _noisy_value(program: Program, statements: Sequence[Statement], name: str, seed: int, sign: int) -> Any:
    state: dict[str, Any] = plain_state(list(program.inputs))
    generator = torch.Generator().manual_seed(seed)
    for statement in statements:
        draw_from_start()
        exec(statement.text, state)
        if seed:
            names = statement.names or [n for n in state if n[1:].isdigit()]
            for v in [state[n] for n in names]:
                if isinstance(v, torch.Tensor) and (statement.key in SMOOTH or not _is_whole(v)):
                    _add_noise(v, generator, sign)
    return _value_or_gradient(program, state, name)


def _wide_value(program: Program, statements: Sequence[Statement], name: str) -> Any:
    """The value of inputs that are the same numbers in float64; None where that is another program."""
    state: dict[str, Any] = plain_state(list(program.inputs))
    make = state["values"]
    state["values"] = lambda *args, **kwargs: _widened(make(*args, **kwargs))
    state |= {x.name: _widened(state[x.name]) for x in program.inputs}
    try:
        for statement in statements:
            draw_from_start()
            exec(statement.text, state)
    except Exception:
        return None
    return _value_or_gradient(program, state, name)


def _widened(v: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if v.is_floating_point() else torch.complex128 if v.is_complex() else v.dtype
    return v.detach().to(wide).requires_grad_(v.requires_grad)


def _value_or_gradient(program: Program, state: dict[str, Any], name: str) -> Any:
    if name.endswith(".grad"):
        try:
            _loss_of_outputs(program, state).backward()
        except Exception:
            return None
        leaf = state[name.removesuffix(".grad")]
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    value = state[name]
    return value.detach() if isinstance(value, torch.Tensor) else None


def _is_whole(v: Any) -> bool:
    if not (v.is_floating_point() or v.is_complex()):
        return True
    v = torch.view_as_real(v.detach().resolve_conj()) if v.is_complex() else v.detach()
    exact = {torch.float64: 2**50, torch.float32: 2**22, torch.float16: 2**10, torch.bfloat16: 2**7}.get(v.dtype, 0)
    return bool((v == v.round()).all()) and (not v.numel() or v.abs().max().item() < exact)


def _add_noise(v: Any, generator: torch.Generator, sign: int) -> None:
    if not (v.is_floating_point() or v.is_complex()):
        return
    # the rows of an expanded dim lie in one place
    rows = v.data[tuple(slice(1) if stride == 0 else slice(None) for stride in v.stride())]
    size = sign * 10 * _ROUNDING.get(v.dtype, COARSE / 10)
    scale = v.detach().abs().max().item() if v.numel() else 0.0
    noise = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    rows.add_((size * scale * noise).to(v.dtype))
