"""`jigsaw.nn.chunked`: a module that runs over slabs of the tile, one after the other, and again in the backward pass.

A slab is what a rank of a finer mesh would have (`jigsaw.ranks.slab_mesh`), so the module runs on it as on any tile.
Rows beyond a slab are slices of the tile, or come from neighbors.  For the backward pass the inputs are kept;
intermediate results exist for one slab at a time.

Norms over positions need a value of all slabs: y = F(x, s), s = S(x), where s is a mean and a sum of squares.  The
slabs run up to the norm, which gives s, and then to the end, with s as if it were a weight.  The backward pass first
sums the gradient of s over the slabs.  Then x gets that of F with s fixed, and that of s. For a row x of n:
    dL/dx = dF/dx + dL/dmean / n + 2 (x - mean) dL/dsquares.
With a second norm, y = F(x, s, t) and t = T(x, s), and so on.  Each costs one more pass, forward and backward.  Keys
and values of attention over the dim that slabs cut are such an s, too.

>>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.GELU(), torch.nn.Conv2d(4, 1, 3, padding=1))
>>> net = jigsaw.nn.chunked(net, slabs=4)
>>> net(torch.randn(1, 1, 16, 16)).shape
torch.Size([1, 1, 16, 16])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import index
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm.exchange import AsyncExchange, AsyncExchangeAdjoint
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, box_shape, cut_points
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.geometry.stencil_rules import ceil_div
from jigsaw.nn.slab_statistics import SlabPaused, SlabRun, SlabStatistic
from jigsaw.nn.weights import call_with_tensors
from jigsaw.ops.meeting.plain_operands import AVERAGED_MARK, plain_operand
from jigsaw.ops.random_numbers import random_states
from jigsaw.ranks.mesh import mesh_coordinate
from jigsaw.ranks.slab_mesh import CHUNKED_NAME, SLAB_AXIS, RowsMissing, SlabMesh
from jigsaw.tile.tile import Tile, shared_mesh, tiles_in
from jigsaw.torch_internals.autograd import tensor_version
from jigsaw.torch_internals.placements import is_dtensor

M = TypeVar("M", bound=nn.Module)
_Tensors = Sequence[Tensor]
_Statistics = Sequence[SlabStatistic]

# For the axes of a cut: a slab's halo below and above, in rows of the input with the fewest; whether it is a circle.
_HaloWidths = dict[tuple[str, ...], tuple[int, int, bool]]


def chunked(module: M, slabs: int, dim: int = 2, align: int = 1) -> M:
    """Let `module` compute over `slabs` slabs of its input along `dim`, recomputed in the backward pass, with exact
    results.

    Returns `module` itself, with the same parameters, inputs and outputs, on tiles and on plain tensors.  Each rank
    cuts its own rows into slabs, at multiples of `align` (the strides within, for less overlap). Submodules can be
    chunked one by one (``unet.encoder1``); tensors between them are whole.

    Memory: the inputs are kept for the backward pass. The peak is the output, the gradients of inputs and outputs, and
    what the module needs for 1 / `slabs` of the rows and their halo.  Compute: one pass over all slabs. One more for
    each norm over positions (batch, instance, group norm in training) and each attention along `dim`. The same again
    backward.  So a step without those costs 4/3 of an unchunked one, a convolution with a norm 2 times, two of them 2.7
    times.  Smaller modules cost less and keep more.

    *Shapes*: unchanged.
    *Sends*: in every pass, the rows that the module's output rows need from neighbors, for all its layers at once;
    backward, their gradients.  A norm sends a mean and a sum of squares, and backward their gradients. An attention
    sends all keys and values to every rank that cuts tokens, as an all-reduce.
    *Raises*: `ShardingError` for fewer rows than slabs on a rank, weights that are cut (DTensors), and results without
    slabs. Also for tiles that are cut otherwise along `dim` (the same places of a multiple of the rows are allowed).
    When it runs, also for functions that need all slabs at once, and for second derivatives.

    The method is that of activation checkpointing (Chen et al., arXiv 1604.06174), over slabs of space.

    >>> block = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    >>> mesh = jigsaw.init_mesh(lat=1)
    >>> tile = jigsaw.shard(torch.randn(2, 3, 9, 16), mesh, (None, None, "lat", None))
    >>> jigsaw.nn.chunked(block, slabs=3)(tile).shape
    torch.Size([2, 8, 9, 16])
    """
    if isinstance(module.forward, ChunkedForward):
        raise ShardingError(f"{CHUNKED_NAME}: this {type(module).__name__} is chunked already; call it once")
    try:
        wanted = index(slabs)
    except TypeError:
        wanted = 0
    if wanted < 2:
        raise ShardingError(f"{CHUNKED_NAME}: slabs={slabs!r} must be a whole number, 2 or more")
    cut_points(0, wanted, align=align)  # raises for an invalid `align`
    module.forward = ChunkedForward(module, wanted, dim, align)
    return module


@dataclass(frozen=True)
class _TensorSlot:
    place: int
    is_tile: bool


class ChunkedForward:
    """The forward pass of a chunked module, in place of its own."""

    def __init__(self, module: nn.Module, slabs: int, dim: int, align: int) -> None:
        self.module, self.slabs, self.dim, self.align = module, slabs, dim, align
        self.inside: Callable[..., Any] = module.forward
        self.widths: dict[Any, list[_HaloWidths]] = {}  # for each pass, keyed by the layouts of the inputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tiles = list(tiles_in((args, kwargs)))
        if any(isinstance(t.mesh, SlabMesh) for t in tiles):  # this module lies within another chunked one
            return self.inside(*args, **kwargs)
        mesh = shared_mesh(tiles) if tiles else None
        inputs, plain = list[Tile](), list[Tensor]()

        def as_slot(x: Tensor) -> _TensorSlot:
            is_tile = isinstance(x, Tile)
            if not tiles and not inputs:  # with plain tensors alone, the first is cut as if it were a tile on one rank
                is_tile = True
                x = Tile(x, Layout.of(x.shape, (None,) * x.ndim, ()), cast(DeviceMesh, SlabMesh((), (), x.device.type)))
            if isinstance(x, Tile):
                inputs.append(x.owned())
            else:
                plain.append(x)
            return _TensorSlot(len(inputs if is_tile else plain) - 1, is_tile)

        structure = _replaced((args, kwargs), Tensor, as_slot)
        if not inputs:
            raise ShardingError(f"{CHUNKED_NAME}: {type(self.module).__name__} was given no tensor that could be cut")
        named = dict(self.module.named_parameters())
        cut = [name for name, p in named.items() if is_dtensor(p)]
        if cut:
            raise ShardingError(
                f"{CHUNKED_NAME}: parameter {cut[0]!r} of {type(self.module).__name__} is cut (a DTensor), but slabs "
                "are computed with whole weights; leave them whole, or let the module be gathered at once (units=)"
            )
        job = _SlabJob(self, structure, inputs, mesh, list(named))
        operands = [*plain, *named.values()]
        if mesh is not None:
            operands = [plain_operand(x, inputs[0]) for x in operands]
        outputs = _RunSlabs.apply(job, *(t.local for t in inputs), *operands)
        assert job.result is not None

        def finished(slot: _TensorSlot) -> Any:
            y = cast(tuple[Tensor, ...], outputs)[slot.place]
            return y if mesh is None else Tile(y, job.out_layouts[slot.place], mesh)

        return _replaced(job.result[0], _TensorSlot, finished)


def _replaced(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return a structure of tuples, lists and dicts with all values of a kind changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        values = [_replaced(v, kind, change) for v in cast(Sequence[Any], value)]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    if isinstance(value, dict):
        return type(value)((k, _replaced(v, kind, change)) for k, v in cast(dict[Any, Any], value).items())
    return value


class _RunSlabs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _SlabJob, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = job.run_forward(tensors)
        ctx.job = job
        ctx.save_for_backward(*tensors)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ShardingError(
                f"{CHUNKED_NAME}: gradients of gradients (create_graph=True) are not made by slabs; leave the module "
                "as it is for those"
            )
        return None, *ctx.job.run_backward(ctx.saved_tensors, grads, ctx.needs_input_grad[1:])


class _InsideForward(nn.Module):
    """The module's own forward pass, as a module whose weights `call_with_tensors` can replace."""

    def __init__(self, forward: ChunkedForward) -> None:
        super().__init__()
        self.inner = forward.module
        self.inside = forward.inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside(*args, **kwargs)


class _SlabJob:
    def __init__(
        self, chunk: ChunkedForward, structure: Any, inputs: Sequence[Tile], mesh: DeviceMesh | None, names: list[str]
    ) -> None:
        self.slabs, self.structure, self.mesh, self.names = chunk.slabs, structure, mesh, names
        self.dim, self.align = chunk.dim, chunk.align
        self.name = type(chunk.module).__name__
        self.runner = _InsideForward(chunk)
        self.source_mesh = inputs[0].mesh
        self.layouts = [t.layout for t in inputs]
        self.coordinate: MeshCoordinate = () if mesh is None else mesh_coordinate(mesh)
        self.device = inputs[0].local.device
        self.points = self._slab_points()
        self.widths = chunk.widths.setdefault((*self.layouts, chunk.module.training), [{}])
        # random numbers and buffers must be alike for all slabs and in the backward pass
        self.random = random_states(inputs[0])
        self.buffers = {f"inner.{name}": b.clone() for name, b in chunk.module.named_buffers()}
        self.autocast = (torch.is_autocast_enabled(self.device.type), torch.get_autocast_dtype(self.device.type))
        self.statistics: list[SlabStatistic] = []
        self.out_layouts: list[Layout] = []
        self.result: tuple[Any] | None = None

    # -- geometry -----------------------------------------------------------------------------------------------------

    def _slab_points(self) -> tuple[int, ...]:
        first = self.layouts[0]
        if not -first.ndim <= self.dim < first.ndim:
            raise ShardingError(f"{CHUNKED_NAME}: dim={self.dim} of shape {first.shape}; say one that it has")
        dim = self.dim % first.ndim
        coarse = min((each for each in self.layouts if each.ndim > dim), key=lambda each: each.shape[dim])
        cut = coarse.dim(dim)[0]
        for layout in self.layouts:
            if layout.ndim <= dim or len(layout.dim(dim)) > 1 or not layout.dim(dim)[0].is_finer_than(cut):
                raise ShardingError(
                    f"{CHUNKED_NAME}: {self.name} was given tiles {coarse} and {layout}, which have no one dim {dim} "
                    "that is cut at the same places, or at those of twice (three times, ...) the rows, to part into "
                    "slabs; pass what is not cut as plain tensors, or say dim="
                )
        self.dim = dim
        points = [0]
        for piece in range(cut.pieces):
            start, stop = cut.owned(piece)
            inner = cut_points(stop - start, self.slabs, align=self.align)
            if any(a == b for a, b in pairwise(inner)):
                raise ShardingError(
                    f"{CHUNKED_NAME}: slabs={self.slabs} of dim {dim}, of which a rank has {stop - start} rows in "
                    f"blocks of align={self.align}: each slab needs a block; use fewer slabs, or another dim"
                )
            points += [start + p for p in inner[1:]]
        return tuple(points)

    def _slab_layout(self, layout: Layout, widths: _HaloWidths) -> Layout:
        dims = [list(group) for group in layout.dims()]
        cut = dims[self.dim][0]
        finer = cut.size // self.points[-1]
        dims[self.dim] = [Cut(cut.size, tuple(finer * p for p in self.points), (*cut.axes, SLAB_AXIS))]
        wide = [[_with_width(c, widths, self._row_count(c.axes, c.size)) for c in group] for group in dims]
        return Layout.from_dims(wide, (*layout.axes, (SLAB_AXIS, self.slabs)))

    def _fine_layouts(self, statistics: int) -> list[Layout]:
        return [self._slab_layout(layout, self.widths[statistics]) for layout in self.layouts]

    def _parted(self, tensors: _Tensors) -> tuple[_Tensors, _Tensors]:
        return tensors[: len(self.layouts)], tensors[len(self.layouts) :]

    def _row_count(self, axes: tuple[str, ...], default: int) -> int:
        if SLAB_AXIS in axes:
            return self.points[-1]
        return min((c.size for each in self.layouts for c in each.cuts if c.axes == axes), default=default)

    def _source_target(self, layout: Layout, fine: Layout, slab: int) -> Layout:
        for d, group in enumerate(fine.dims()):
            held = [c.held[slab :: self.slabs] if SLAB_AXIS in c.axes else c.held for c in group]
            layout = layout.replace_dim(d, *(c.holding(h) for c, h in zip(layout.dim(d), held, strict=True)))
        return layout

    def _out_layout(self, fine: Layout) -> Layout:
        if SLAB_AXIS not in fine.cut_axes:
            raise ShardingError(
                f"{CHUNKED_NAME}: {self.name} gives a result of shape {fine.shape} that has no slabs; chunk the "
                "modules before it"
            )

        def merged(c: Cut) -> Cut:
            if SLAB_AXIS not in c.axes:
                return c.bare()
            return Cut(c.size, c.points[:: self.slabs], tuple(a for a in c.axes if a != SLAB_AXIS))

        return Layout.from_dims([[merged(c) for c in group] for group in fine.dims()], self.layouts[0].axes)

    def _slab_box(self, tile: Tile, layout: Layout) -> tuple[list[int], tuple[slice, ...]]:
        whole, own = layout.owned(self.coordinate), tile.layout.owned(tile.coordinate)
        return list(box_shape(whole)), tuple(
            slice(a - low, b - low) for (a, b), (low, _) in zip(own, whole, strict=True)
        )

    def _widen(self, missing: RowsMissing, widths: _HaloWidths) -> None:
        """Widen the halo of slabs by the missing rows, counted in rows of the input.

        Raises: `ShardingError` where that adds nothing, because a slab has all rows that there are.
        """
        before = dict(widths)
        for axes, (below, above, size, wraps) in missing.lacking.items():
            low, high, wrapped = widths.get(axes, (0, 0, False))
            rows = self._row_count(axes, 0)
            wide = low + ceil_div(below * rows, size), high + ceil_div(above * rows, size)
            widths[axes] = min(wide[0], rows), min(wide[1], rows), wrapped or wraps
        if widths == before:
            raise ShardingError(
                f"{CHUNKED_NAME}: a function of {self.name} reads rows of the whole dim that {[*missing.lacking]} cut, "
                "or around a circle that a layer before it does not close; chunk the submodules before and after it, "
                "or cut another dim into slabs with dim="
            )

    # -- one slab -----------------------------------------------------------------------------------------------------

    def _take_slab(self, locals_: _Tensors, fine: Sequence[Layout], slab: int) -> list[Tensor]:
        slabs: list[Tensor] = []
        for x, layout, wide in zip(locals_, self.layouts, fine, strict=True):
            target = self._source_target(layout, wide, slab)
            slabs += AsyncExchange(x, layout, [target], self.source_mesh).wait()
        return slabs

    def _run_slab(
        self,
        slab: int,
        fine: Sequence[Layout],
        inputs: _Tensors,
        operands: _Tensors,
        known: _Statistics,
        buffers: dict[str, Tensor],
    ) -> list[Tile]:
        place = SlabMesh(fine[0].axes, (*self.coordinate, slab), self.device.type, self.mesh, SlabRun(known))
        plain = operands[: len(operands) - len(self.names)]
        tiles = [Tile(x, layout, cast(DeviceMesh, place)) for x, layout in zip(inputs, fine, strict=True)]

        def given(slot: _TensorSlot) -> Tensor:
            return tiles[slot.place] if slot.is_tile else plain[slot.place]

        args, kwargs = _replaced(self.structure, _TensorSlot, given)
        weights = {f"inner.{n}": p for n, p in zip(self.names, operands[len(plain) :], strict=True)}
        self._set_random(self.random)
        out = call_with_tensors(self.runner, {**weights, **buffers}, args, kwargs)
        outputs = list[Tile]()

        def kept(y: Tensor) -> _TensorSlot:
            if not isinstance(y, Tile):
                raise ShardingError(
                    f"{CHUNKED_NAME}: {self.name} gives a plain tensor of shape {tuple(y.shape)}, which has no slabs; "
                    "chunk the modules before it"
                )
            outputs.append(y.owned())
            return _TensorSlot(len(outputs) - 1, True)

        self.result = (_replaced(out, Tensor, kept),)
        return outputs

    def _set_random(self, states: _Tensors) -> None:
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], self.device)

    def _own_buffers(self) -> dict[str, Tensor]:
        """Return the buffers as they were before the first slab, because each slab changes its own."""
        return {name: b.clone() for name, b in self.buffers.items()}

    def _as_leaves(self, tensors: _Tensors, needs: Sequence[bool]) -> list[Tensor]:
        replicas = self.layouts[0].replicas
        leaves = [x.detach().requires_grad_(needed) for x, needed in zip(tensors, needs, strict=True)]
        for leaf in leaves:
            setattr(leaf, AVERAGED_MARK, replicas)  # it was scaled outside, so the factor is 1 within
        return leaves

    # -- all slabs ----------------------------------------------------------------------------------------------------

    def run_forward(self, tensors: _Tensors) -> tuple[Tensor, ...]:
        inputs, operands = self._parted(tensors)
        operands = self._as_leaves(operands, [False] * len(operands))
        while True:
            if len(self.widths) <= len(self.statistics):
                self.widths.append(dict(self.widths[-1]))
            try:
                outputs = self._run_pass(inputs, operands)
            except RowsMissing as missing:  # all ranks find the same, before they allocate anything
                self._widen(missing, self.widths[len(self.statistics)])
                continue
            if outputs is not None:
                return tuple(outputs)

    def _run_pass(self, locals_: _Tensors, operands: _Tensors) -> list[Tensor] | None:
        fine = self._fine_layouts(len(self.statistics))
        whole, parts, changed = list[Tensor](), list[Any](), dict[str, Tensor]()
        last: SlabPaused | None = None
        for slab in range(self.slabs):
            buffers = self._own_buffers()
            try:
                taken = self._take_slab(locals_, fine, slab)
                outputs = self._run_slab(slab, fine, taken, operands, self.statistics, buffers)
            except SlabPaused as paused:
                last = paused
                parts.append(paused.part.counted())
                continue
            if slab == 0:
                self.out_layouts = [self._out_layout(y.layout) for y in outputs]
                whole = [
                    y.local.new_empty(self._slab_box(y, o)[0]) for y, o in zip(outputs, self.out_layouts, strict=True)
                ]
                changed = buffers
            for into, y, layout in zip(whole, outputs, self.out_layouts, strict=True):
                part = into[self._slab_box(y, layout)[1]]
                part.copy_(y.local.reshape(part.shape))
        if last is not None:
            self.statistics.append(last.part.merge(parts, self.mesh))
            return None
        # running statistics, which every slab changes by the same amount
        for name, buffer in self.runner.named_buffers():
            if tensor_version(changed[name]):
                buffer.copy_(changed[name])
        return [y.reshape(o.local_shape(self.coordinate)) for y, o in zip(whole, self.out_layouts, strict=True)]

    def run_backward(self, tensors: _Tensors, grads: _Tensors, needs: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of `tensors`; those of statistics come first, from the last to the first."""
        before = random_states(Tile(tensors[0], self.layouts[0], self.source_mesh))
        enabled, dtype = self.autocast
        with torch.enable_grad(), torch.autocast(self.device.type, dtype, enabled, cache_enabled=False):
            known = [SlabStatistic(s.values, s.axes) for s in self.statistics]
            for at in reversed(range(len(known))):
                parts = self._gradient_of_statistic(at, known, tensors, grads)
                known[at] = replace(known[at], gradients=known[at].summed_over_ranks(parts, self.mesh))
            gradients = self._gradients_of_tensors(known, tensors, grads, needs)
        self._set_random(before)
        return gradients

    def _slab_gradients(self, ys: Sequence[Tile], grads: _Tensors, wanted: _Tensors) -> list[Tensor | None]:
        pairs: list[tuple[Tensor, Tensor]] = []
        for y, g, layout in zip(ys, grads, self.out_layouts, strict=True):
            shape, box = self._slab_box(y, layout)
            if y.local.requires_grad:
                pairs.append((y.local, g.reshape(shape)[box].reshape(y.local.shape)))
        if not pairs or not wanted:
            return [None] * len(wanted)
        roots, seeds = zip(*pairs, strict=True)
        return list(torch.autograd.grad(roots, wanted, seeds, allow_unused=True))

    def _gradient_of_statistic(self, at: int, known: _Statistics, tensors: _Tensors, grads: _Tensors) -> list[Tensor]:
        """Return this rank's part; nothing before the statistic is differentiated."""
        inputs, operands = self._parted(tensors)
        totals = [torch.zeros_like(v) for v in known[at].values]
        weights = self._as_leaves(operands, [False] * len(operands))
        fine = self._fine_layouts(len(known))
        for slab in range(self.slabs):
            leaves = [v.detach().requires_grad_() for v in known[at].values]
            statistics = [*known[:at], SlabStatistic(tuple(leaves), known[at].axes), *known[at + 1 :]]
            taken = self._take_slab(inputs, fine, slab)
            ys = self._run_slab(slab, fine, taken, weights, statistics, self._own_buffers())
            for total, g in zip(totals, self._slab_gradients(ys, grads, leaves), strict=True):
                if g is not None:
                    total.add_(g)
        return totals

    def _gradients_of_tensors(
        self, known: _Statistics, tensors: _Tensors, grads: _Tensors, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        inputs, operands = self._parted(tensors)
        fine, weights = self._fine_layouts(len(known)), self._as_leaves(operands, needs[len(inputs) :])
        totals = [torch.zeros_like(x) if needed else None for x, needed in zip(tensors, needs, strict=True)]
        for slab in range(self.slabs):
            taken = self._take_slab(inputs, fine, slab)
            for x, needed in zip(taken, needs, strict=False):
                x.requires_grad_(needed)
            ys = self._run_slab(slab, fine, taken, weights, known, self._own_buffers())
            wanted = [x for x in (*taken, *weights) if x.requires_grad]
            of_slab = iter(self._slab_gradients(ys, grads, wanted))
            del ys
            for place, total in enumerate(totals):
                if total is None:
                    continue
                g = next(of_slab)
                if place >= len(inputs):
                    if g is not None:
                        total.add_(g)
                    continue
                # halos came from neighbors, so all ranks send gradients back, even a rank that has only zeros
                target = self._source_target(self.layouts[place], fine[place], slab)
                back = torch.zeros_like(taken[place]) if g is None else g
                AsyncExchangeAdjoint([back], self.layouts[place], [target], self.source_mesh).wait(total)
        return totals


def _with_width(cut: Cut, widths: _HaloWidths, rows: int) -> Cut:
    below, above, wraps = widths.get(cut.axes, (0, 0, False))
    below, above = (ceil_div(width * cut.size, rows) if width else 0 for width in (below, above))
    return cut.with_halo(below, above, wraps) if below or above else cut.bare()
