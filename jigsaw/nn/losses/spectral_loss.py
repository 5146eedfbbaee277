"""Loss between the spectra of two fields, wherever their waves lie.

>>> x = torch.arange(8.0).sin()
>>> jigsaw.nn.spectral_loss(x, x.roll(3)) < 1e-12, torch.nn.functional.mse_loss(x, x.roll(3)) > 0.5
(tensor(True), tensor(True))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from jigsaw.nn.losses.loss import LossValues, as_wide_floats, check_same_shape, reduce_weighted

SPECTRAL_QUANTITIES = ("amplitude", "power", "log_power")


def spectral_loss(
    input: LossValues,
    target: LossValues,
    dim: int | Sequence[int] = -1,
    *,
    quantity: str = "amplitude",
    weight: LossValues | None = None,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Any:
    """Return y = (a(F x) - a(F t))² of every mode, then reduced, where F is the orthonormal Fourier transform along
    `dim`.

    `quantity`: a is ``"amplitude"`` (abs F), ``"power"`` (its square), or ``"log_power"`` (log of that plus eps). `dim`
    is longitude, or (-2, -1) for both dims of a plane. Modes of a real field come in pairs. One of each pair is
    computed and counted twice. So the sum and the mean are those over the full spectrum. `weight` (of latitudes, of
    modes) broadcasts to the modes that are computed; the mean is divided by its sum. Missing values (NaN) make NaN.

    *Shapes*: real input and target of one shape, any dim cut; with ``reduction="none"`` the last of `dim` has n // 2 +
    1 modes.
    *Sends*: of input and target where `dim` is cut, what `torch.fft.rfftn` of a tile sends; the all-reduces of the
    mean.
    *Raises*: `ShardingError` for two different shapes, `ValueError` for another quantity.

    >>> x = torch.tensor([0.0, 1.0, 0.0, -1.0])
    >>> jigsaw.nn.spectral_loss(2 * x, x, quantity="power", reduction="none")
    tensor([0., 9., 0.])
    """
    check_same_shape("spectral_loss", input, target)
    if quantity not in SPECTRAL_QUANTITIES:
        raise ValueError(f"spectral_loss(quantity={quantity!r}): use one of {', '.join(SPECTRAL_QUANTITIES)}")
    dims = [d % input.ndim for d in ([dim] if isinstance(dim, int) else dim)]
    spectra = [_mode_values(as_wide_floats(x), dims, quantity, eps) for x in (input, target)]
    losses = (spectra[0] - spectra[1]).square()
    if reduction == "none":
        return losses if weight is None else losses * weight
    size, last = input.shape[dims[-1]], dims[-1]
    twins = torch.full((size // 2 + 1,), 2.0, dtype=losses.dtype, device=losses.device)
    twins[0] = 1.0
    if size % 2 == 0:
        twins[-1] = 1.0
    twins = twins.view(-1, *(1,) * (input.ndim - 1 - last))
    return reduce_weighted(losses, twins if weight is None else twins * weight, reduction)


def _mode_values(field: Any, dims: Sequence[int], quantity: str, eps: float) -> Any:
    modes = torch.fft.rfftn(field, dim=tuple(dims), norm="ortho")
    if quantity == "amplitude":
        return modes.abs()
    power = torch.view_as_real(modes).square().sum(-1)
    return power if quantity == "power" else (power + eps).log()
