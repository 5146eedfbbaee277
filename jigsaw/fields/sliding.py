"""Sliding-window inference on tiles: the whole volume is never on one rank, the result is that of the whole volume.

Windows, their order and the blending are MONAI's (``monai.inferers.sliding_window_inference``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from numbers import Real
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.comm.agreement import check_arguments_alike
from jigsaw.comm.exchange import PackedSwap, redistribute_rows
from jigsaw.errors import FieldError, PeerError
from jigsaw.geometry.cut import (
    Box,
    Cut,
    Interval,
    box_elements,
    box_overlap,
    box_shape,
    box_slices,
    cut_points,
    whole_dim,
)
from jigsaw.geometry.layout import Layout
from jigsaw.ranks.mesh import mesh_coordinate
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals.autograd import memory_id

VolumeTensor = TypeVar("VolumeTensor", Tile, Tensor)
WindowModel = Callable[[Any], Any]
RoundWindows = dict[int, Box]
"""The window that each member of the group has in a round."""

_LEAST_WEIGHT = 1e-3


def sliding_window(
    model: WindowModel,
    volume: VolumeTensor,
    roi: Sequence[int | None],
    *,
    overlap: float = 0.5,
    blend: str = "gaussian",
    sigma: float = 0.125,
    fill: float = 0.0,
    windows: str = "cut",
    align: int = 1,
) -> VolumeTensor:
    r"""Return the model's output on windows of a volume, averaged where they overlap.

    - `model`: from a window [B, C, \*roi] to [B, K, \*roi];
    - `volume`: a tile [B, C, \*space], whose space (and batch) may be cut, or a plain tensor;
    - `roi`: rows of a window along each dim of space; None for the whole dim;
    - `overlap`: the share of a window that the next one covers again, in [0, 1);
    - `blend`: ``"gaussian"`` gives a window's middle more weight, with a standard deviation of `sigma` x roi (weights
      below 0.001 are 0.001), ``"constant"`` gives all the same;
    - `fill`: the value around a volume that is smaller than a window, half on either side;
    - `windows`: ``"cut"``: each window is a tile, cut like the volume (at multiples of `align`), so the model works as
      in training. A window may be larger than a rank can hold; ``"dealt"``: each rank takes other windows, whole, near
      its own rows. The layers send nothing. It is for a model of plain tensors whose window fits one rank.

    It tracks no gradients; the model is used in the mode (``model.eval()``) that it is in.

    *Shapes*: global [B, C, \*space] -> [B, K, \*space]; per rank likewise with its owned rows.
    *Sends*: an all-reduce of 32 bytes; the rows of each window that other ranks own, and its answer back. With
    ``"dealt"``, one small `comm.all_gather_object` comes before each window of a rank. With ``"cut"``, also what the
    model sends.
    *Raises*: `FieldError` for arguments that do not fit the volume, or a model whose answer has another size;
    `RanksDifferError` for arguments that differ between ranks; `PeerError` where, with ``"dealt"``, the model fails on
    a window of another rank.

    >>> scan = jigsaw.shard(torch.ones(1, 1, 20, 12, 12), jigsaw.init_mesh(depth=1), (None, None, "depth", None, None))
    >>> model = torch.nn.Conv3d(1, 3, 3, padding=1).eval()
    >>> jigsaw.io.sliding_window(model, scan, roi=(8, 8, None)).shape
    torch.Size([1, 3, 20, 12, 12])
    """
    if not isinstance(volume, (Tensor, Tile)):
        raise FieldError(f"volume is a {type(volume).__name__}; give a tile or a tensor: torch.as_tensor(volume)")
    _check_number("fill", fill, "a number", lambda number: True)
    _check_number("overlap", overlap, "a share in [0, 1), one for all dims", lambda share: 0 <= share < 1)
    shape = tuple(volume.shape)
    is_real = volume.dtype.is_floating_point or volume.dtype.is_complex
    if not is_real and torch.tensor(fill, dtype=torch.float64).to(volume.dtype).item() != fill:
        raise FieldError(f"fill={fill} is none of the values of {volume.dtype}; give another, or volume.float()")
    plan = _WindowGrid.of(shape, roi, overlap, windows, align)
    weight = importance_map(plan.roi, blend, sigma)
    if isinstance(volume, Tile):
        asked = {"overlap": float(overlap), "blend": blend, "sigma": sigma, "fill": float(fill), "align": align}
        check_arguments_alike("sliding_window", volume.mesh, shape=shape, roi=plan.roi, windows=windows, **asked)
    with torch.no_grad():
        answer = _slide_over_tile(volume, plan, weight, model, fill, windows) if isinstance(volume, Tile) else None
        if answer is None:
            uncut = Layout.of(shape, (None,) * len(shape), ())
            answer = _DealtWindows(uncut, None, cast(Tensor, volume), plan, fill).run(model, weight)
    return cast(VolumeTensor, answer)


def _check_number(argument: str, value: Any, rule: str, is_right: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not is_right(float(value)):
        raise FieldError(f"{argument}={value!r} must be {rule}")


def _slide_over_tile(
    volume: Tile, plan: _WindowGrid, weight: Tensor, model: WindowModel, fill: float, windows: str
) -> Tile:
    bare = volume.owned()
    windows_class = _CutWindows if windows == "cut" else _DealtWindows
    local = windows_class(bare.layout, bare.mesh, bare.local, plan, fill).run(model, weight)
    return Tile(local, bare.layout.replace_dim(1, whole_dim(local.shape[1])), bare.mesh)


def importance_map(roi: Sequence[int], blend: str, sigma: float) -> Tensor:
    """Return the weight of each voxel of a window, float32: MONAI's ``compute_importance_map``."""
    if blend == "constant":
        return torch.ones(tuple(roi))
    if blend != "gaussian" or not (isinstance(sigma, Real) and sigma > 0):
        raise FieldError(f"blend={blend!r}, sigma={sigma} must be 'constant', or 'gaussian' with sigma > 0")
    weight = torch.ones(())
    for rows in roi:
        x = torch.arange(-(rows - 1) / 2.0, (rows - 1) / 2.0 + 1, dtype=torch.float32)
        weight = weight.unsqueeze(-1) * torch.exp(x**2 / (-2 * (rows * sigma) ** 2))
    return weight.clamp(min=max(float(weight.min()), _LEAST_WEIGHT))


@dataclass(frozen=True)
class _WindowGrid:
    """Places of windows: `starts` along each dim, in rows of the volume (below 0 where it is padded)."""

    roi: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    align: int

    @classmethod
    def of(
        cls, shape: Sequence[int], roi: Sequence[int | None], overlap: float, windows: str, align: int
    ) -> _WindowGrid:
        space = shape[2:]
        if not isinstance(roi, Sequence):
            raise FieldError(
                f"roi={roi!r} must have a size for each dim of space, like roi=({roi!r}, {roi!r}, {roi!r})"
            )
        if len(roi) < 4 and len(roi) in (len(shape), len(shape) - 1):
            lacking = "batch dim; give volume.unsqueeze(0)"
            if len(roi) == len(shape):
                lacking = "batch and no channel dim; give volume[None, None]"
            raise FieldError(
                f"volume of shape {list(shape)} has no {lacking}: it must be [B, C, *space], roi={tuple(roi)}"
            )
        if not space or len(roi) != len(space):
            raise FieldError(f"roi={tuple(roi)} must have a size for each dim of space of a volume [B, C, *{space}]")
        if windows not in ("cut", "dealt"):
            raise FieldError(f"windows={windows!r} must be 'cut' or 'dealt'")
        if any(
            not (rows is None or (isinstance(rows, Real) and math.isfinite(rows) and rows % 1 == 0)) for rows in roi
        ):
            raise FieldError(f"roi={tuple(roi)} must be whole numbers of rows, or None for all rows of a dim")
        sizes = tuple(n if rows is None else int(rows) for n, rows in zip(space, roi, strict=True))
        if min(sizes) < 1 or min(space) < 1:
            raise FieldError(f"roi={tuple(roi)} and the volume's {tuple(space)} rows must be at least 1")
        return cls(sizes, tuple(_window_starts(n, rows, overlap) for n, rows in zip(space, sizes, strict=True)), align)

    def __iter__(self) -> Iterator[Box]:
        """Iterate over the box of each window, the last dim fastest."""
        for corner in product(*self.starts):
            yield tuple((a, a + rows) for a, rows in zip(corner, self.roi, strict=True))


def _window_starts(size: int, rows: int, overlap: float) -> tuple[int, ...]:
    if rows >= size:
        return (-((rows - size) // 2),)
    step = max(int(rows * (1 - overlap)), 1)
    count = math.ceil((size - rows) / step) + 1
    return tuple(min(i * step, size - rows) for i in range(count))


# -- boxes -----------------------------------------------------------------------------------------------------------


def _view_of_box(x: Tensor, box: Box, within: Box) -> Tensor:
    return x[(..., *box_slices(box, within))]


class _WeightedSums:
    def __init__(self, box: Box, weight: Tensor, like: Tensor) -> None:
        wide = torch.promote_types(like.dtype, torch.float32)
        self.mine, self.weight = box, weight.to(like.device, wide)
        self.sum = like.new_zeros((*like.shape[:2], *box_shape(box)), dtype=wide)
        self.total = like.new_zeros(box_shape(box), dtype=wide)

    def add(self, answer: Tensor, shared: Box, window: Box) -> None:
        weight = _view_of_box(self.weight, shared, window)
        _view_of_box(self.sum, shared, self.mine).add_(answer * weight)
        _view_of_box(self.total, shared, self.mine).add_(weight)

    def mean(self) -> Tensor:
        return self.sum.div_(self.total)


def _check_answer(answer: Any, window: tuple[int, ...]) -> None:
    if not isinstance(answer, Tile | Tensor):
        raise FieldError(f"the model gave a {type(answer).__name__} for a window; it must give one tensor [B, K, *roi]")
    shape = tuple(answer.shape)
    if len(shape) != len(window) or shape[0] != window[0] or shape[2:] != window[2:]:
        raise FieldError(f"the model gave {shape} for a window {window}; it must keep the batch and the rows of space")


# -- windows cut over the mesh ---------------------------------------------------------------------------------------


class _CutWindows:
    def __init__(self, layout: Layout, mesh: DeviceMesh, local: Tensor, plan: _WindowGrid, fill: float) -> None:
        self.layout, self.mesh, self.local, self.plan, self.fill = layout, mesh, local, plan, fill
        coordinate = mesh_coordinate(mesh)
        self.mine = layout.owned(coordinate)[2:]
        self.pieces = [layout.piece(cut, coordinate) for cut in layout.cuts[2:]]
        spread = [
            Cut(rows, cut_points(rows, cut.pieces, align=plan.align), cut.axes) if cut.is_cut else whole_dim(rows)
            for rows, cut in zip(plan.roi, layout.cuts[2:], strict=True)
        ]
        self.spread = Layout((*layout.cuts[:2], *spread), layout.axes)

    def run(self, model: WindowModel, weight: Tensor) -> Tensor:
        sums: _WeightedSums | None = None
        for window in self.plan:
            stored = Layout((*self.layout.cuts[:2], *self._stored(window)), self.layout.axes)
            local = redistribute_rows(self._padded(window), stored, self.spread, self.mesh)
            if memory_id(local.untyped_storage()) == memory_id(self.local.untyped_storage()):
                local = local.clone()  # where no row moves it is a view, and a model may work in place
            answer = model(Tile(local, self.spread, self.mesh))
            _check_answer(answer, self.spread.shape)
            if not isinstance(answer, Tile):
                raise FieldError("the model gave a plain tensor for a tile; use windows='dealt' for a model of those")
            back = Layout((stored.cuts[0], whole_dim(answer.shape[1]), *stored.cuts[2:]), self.layout.axes)
            own_answer = redistribute_rows(answer.local, answer.layout, back, self.mesh)
            sums = sums or _WeightedSums(self.mine, weight, own_answer)
            shared = box_overlap(self.mine, window)
            rows = tuple(self._rows(cut, window[d], d) for d, cut in enumerate(self.layout.cuts[2:]))
            sums.add(_view_of_box(own_answer, shared, rows), shared, window)
        assert sums is not None
        return sums.mean()

    def _stored(self, window: Box) -> list[Cut]:
        """Return the window's cuts: rows stay on the rank that has them, rows beyond the volume go to the outermost."""
        return [
            Cut(high - low, tuple(p - low for p in _points_in_window(cut, (low, high))), cut.axes)
            for (low, high), cut in zip(window, self.layout.cuts[2:], strict=True)
        ]

    def _rows(self, cut: Cut, span: Interval, d: int) -> Interval:
        """Return the rows of a window that this rank has before they are spread, including those beyond the volume."""
        points = _points_in_window(cut, span)
        return points[self.pieces[d]], points[self.pieces[d] + 1]

    def _padded(self, window: Box) -> Tensor:
        shared = box_overlap(self.mine, window)
        inside = _view_of_box(self.local, shared, self.mine)
        pads: list[int] = []
        for d, cut in reversed([*enumerate(self.layout.cuts[2:])]):
            rows = self._rows(cut, window[d], d)
            missing = rows[1] - rows[0] - (shared[d][1] - shared[d][0])
            below = min(max(-rows[0], 0), missing)
            pads += [below, missing - below]
        return F.pad(inside, pads, value=self.fill) if any(pads) else inside


def _points_in_window(cut: Cut, span: Interval) -> tuple[int, ...]:
    """Return the cut points of the volume that lie in a window, its ends the outermost."""
    low, high = span
    inner = [min(max(p, low), high) for p in cut.points[1:-1]]
    return (low, *inner, high)


# -- windows dealt to the ranks --------------------------------------------------------------------------------------


class _DealtWindows:
    def __init__(self, layout: Layout, mesh: DeviceMesh | None, local: Tensor, plan: _WindowGrid, fill: float) -> None:
        if layout.is_cut(1):
            raise FieldError("windows='dealt' needs whole channels, and they are cut; use windows='cut'")
        self.layout, self.mesh, self.local, self.plan, self.fill = layout, mesh, local, plan, fill
        coordinate = () if mesh is None else mesh_coordinate(mesh)
        self.me = layout.index(coordinate)
        self.boxes = {layout.index(c): layout.owned(c)[2:] for c in _coords_sharing_space(layout, coordinate)}
        self.mine = self.boxes[self.me]

    def run(self, model: WindowModel, weight: Tensor) -> Tensor:
        sums: _WeightedSums | None = None
        for windows in self._rounds():
            answer, like = self._answers(model, self._gather(windows), self.me in windows)
            sums = sums or _WeightedSums(self.mine, weight, like)
            self._give_back(windows, answer, like, sums)
        assert sums is not None
        return sums.mean()

    def _answer(self, model: WindowModel, window: Tensor) -> Tensor:
        answer = model(window)
        _check_answer(answer, tuple(window.shape))
        return answer

    def _answers(self, model: WindowModel, window: Tensor, has_window: bool) -> tuple[Tensor | None, Tensor]:
        """Return this rank's output of a round, and its kind: all learn channels and dtype, or why a model failed."""
        answer: Tensor | None = None
        message: Any = None
        try:
            answer = self._answer(model, window) if has_window else None
            message = None if answer is None else (answer.shape[1], answer.dtype)
        except Exception as e:
            if self.mesh is None:
                raise
            message = f"{type(e).__name__}: {e}"
            comm.all_gather_object(self.mesh, message)
            raise
        heard = [message] if self.mesh is None else comm.all_gather_object(self.mesh, message)
        refused = next((each for each in heard if isinstance(each, str)), None)
        if refused is not None:
            raise PeerError(f"another rank's model failed on its window: {refused}")
        channels, dtype = next(each for each in heard if each is not None)
        return answer, self.local.new_empty((self.local.shape[0], channels), dtype=dtype)

    def _rounds(self) -> list[RoundWindows]:
        """Deal the windows evenly: each to the rank that owns most of it, while that has room."""
        windows = [*self.plan]
        room = -(-len(windows) // len(self.boxes))
        dealt: dict[int, list[Box]] = {member: [] for member in self.boxes}
        for window in windows:
            free = [m for m in dealt if len(dealt[m]) < room]
            to = max(free, key=lambda m: (box_elements(box_overlap(self.boxes[m], window)), -m))
            dealt[to].append(window)
        longest = max(len(each) for each in dealt.values())
        return [{m: each[i] for m, each in dealt.items() if i < len(each)} for i in range(longest)]

    def _swap(self, sends: dict[int, Tensor], taken: dict[int, Box], like: Tensor) -> dict[int, Tensor]:
        """Return the values of the boxes `taken` from other members (a plain volume has none) for `sends`."""
        if self.mesh is None:
            return {}
        shapes = [(m, [(*like.shape[:2], *box_shape(box))]) for m, box in taken.items()]
        swap = PackedSwap(self.mesh, [(m, [x]) for m, x in sends.items()], shapes, like)
        return dict(zip(taken, swap.wait(), strict=True))

    def _gather(self, windows: RoundWindows) -> Tensor:
        sends = {
            m: _view_of_box(self.local, box_overlap(self.mine, box), self.mine)
            for m, box in windows.items()
            if m != self.me
        }
        window = windows.get(self.me)
        if window is None:
            self._swap(sends, {}, self.local)
            return self.local.new_empty(0)
        parts = {m: box_overlap(box, window) for m, box in self.boxes.items()}
        parts_by_member = self._swap(sends, {m: part for m, part in parts.items() if m != self.me}, self.local)
        window_values = self.local.new_full((*self.local.shape[:2], *box_shape(window)), self.fill)
        parts_by_member[self.me] = _view_of_box(self.local, parts[self.me], self.mine)
        for m, values in parts_by_member.items():
            _view_of_box(window_values, parts[m], window).copy_(values)
        return window_values

    def _give_back(self, windows: RoundWindows, answer: Tensor | None, like: Tensor, sums: _WeightedSums) -> None:
        window = windows.get(self.me)
        sends: dict[int, Tensor] = {}
        shared = {m: box_overlap(self.mine, box) for m, box in windows.items()}
        own: dict[int, Tensor] = {}
        if window is not None and answer is not None:
            own = {self.me: _view_of_box(answer, shared[self.me], window)}
            sends = {
                m: _view_of_box(answer, box_overlap(box, window), window)
                for m, box in self.boxes.items()
                if m != self.me
            }
        values = own | self._swap(sends, {m: box for m, box in shared.items() if m != self.me}, like)
        for m, box in windows.items():
            sums.add(values[m], shared[m], box)


def _coords_sharing_space(layout: Layout, coordinate: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Iterate over the coordinates that cut the same samples' space with this one: they differ only along its axes."""
    cutting = {axis for cut in layout.cuts[2:] for axis in cut.axes}
    for coord in layout.coords():
        if all(a == b or name in cutting for (name, _), a, b in zip(layout.axes, coord, coordinate, strict=True)):
            yield coord
