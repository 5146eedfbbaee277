"""Plain tensors that cut tiles are written into become tiles: exact, without a message, or refused before a change."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw import comm
from jigsaw.errors import RanksDifferError, ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

MESHES = [{"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2}]
F64 = torch.float64
MASK = (torch.arange(7 * 5) % 3 == 0).reshape(7, 5)
PLACES = (torch.arange(2)[:, None], torch.tensor([4, 4, 1]))
LABELS = (torch.arange(2 * 7 * 5) * 7 % 4).reshape(2, 1, 7, 5)


def _zeros(*shape, dtype=F64):
    return torch.zeros(shape, dtype=dtype)


def _set(out, *writes):
    for index, value in writes:
        out[index] = value
    return out


def _augmented(out, x):
    out += x
    out *= x
    out -= 2.0
    return out


def _views_augmented(x):
    out = torch.ones(2, 3, 11, 9, dtype=F64)
    out[:, :, 1:8, 2:7] += x
    out[:, 1, 1:8, 2:7] *= x[:, 0]
    out[1:, :, 4:, :5] -= x[:1]
    return out


def _rows_augmented(x):
    out = torch.zeros(4, 7, 5, dtype=F64) + x.mean()
    for k in range(3):
        out[k + 1] += x[0, k] * x[1, k]
    out[1:3, 2:5] += 2 * x[0, :2, 2:5]
    return out


def _filled_views(x):
    every = _zeros(2, 3, 15, 5)
    every[:, :, 1::2].copy_(x)
    last = _zeros(6, 5, 7, 5)
    last[4:, 1:4][:, ::2].add_(x[:, :2], alpha=2)
    wide = _zeros(2, 3, 7, 5)
    view = wide[:, :, 2:]
    view[..., 1:] = x[:, :, 2:, 1:]  # both are tiles then, and one memory
    wide += 1
    lone = _zeros(1, 2, 1, 3, 7, 5)
    lone[0, :, :, 1:, None] += x[:, None, 1:, None]
    hot = _zeros(3, 4, 7, 5)
    hot[1:].scatter_add_(1, (x > 0).long(), x)
    return every * every.mean(), last.sum((0, 1)), wide * view.sum(), lone, hot, wide + x


def _rows(x):
    out = _zeros(*x.shape)
    for k in range(x.shape[1]):
        out[:, k] = x[:, -1 - k]
    return out


def _spectral(x, weight):
    spectrum = torch.fft.rfft2(x)
    out = torch.zeros(*x.shape[:2], *spectrum.shape[2:], dtype=spectrum.dtype)
    out[:, :, :2, :2] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :2, :2], weight[..., :2, :2])
    out[:, :, -2:, :2] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -2:, :2], weight[..., -2:, :2])
    return torch.fft.irfft2(out, s=x.shape[-2:])


def _shifted(x, weight):
    spectrum = torch.fft.fftshift(torch.fft.rfftn(x, dim=(-2, -1)), dim=-2)
    out = torch.zeros(x.shape[0], 3, *spectrum.shape[2:], dtype=spectrum.dtype)
    out[:, :, 1:5, :2] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, 1:5, :2], weight[..., :4, :2])
    return torch.fft.irfftn(torch.fft.fftshift(out, dim=-2), s=x.shape[-2:], dim=(-2, -1))


def _padded_spectrum(x, weight):
    spectrum = torch.fft.rfft2(x)
    low = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :2, :2], weight[..., :2, :2])
    return torch.fft.irfft2(F.pad(low, (0, 1, 0, 5)), s=x.shape[-2:]) + x


def _sum_in_place(x, weight):
    total = x.sum((2, 3), keepdim=True)
    total *= 0.5
    return total * x


def _of_a_parameter(x, weight):
    out = torch.ones(2, 3, 7, 5, dtype=F64) * weight.real.sum((0, 2, 3))[None, :, None, None]
    out[:, :, 2:] = x[:, :, 2:]
    return out * x


def _of_a_statistic(x, weight):
    out = torch.zeros(2, 3, 7, 5, dtype=F64) + x.mean().square() * weight.real.sum()
    out[..., 1:3] = x[..., 1:3].tanh()
    return out * x


# x [2, 3, 7, 5] is cut along its last two dims, on some meshes along the last but one alone; the weight is a parameter
CASES = {
    "all": lambda x, w: _set(_zeros(*x.shape), (slice(None), x)) * x,
    "ellipsis": lambda x, w: _set(_zeros(2, 3, 7, 5), (..., x.sin())) + x,
    "copy_": lambda x, w: _zeros(2, 3, 7, 5).copy_(x) * x,
    "copy_ broadcast": lambda x, w: _zeros(4, 2, 3, 7, 5).copy_(x) * x,
    "low rows": lambda x, w: _set(_zeros(2, 3, 11, 5), (slice(None), x.new_zeros(())), (np.s_[:, :, :7], x)),
    "rows between": lambda x, w: _set(_zeros(2, 3, 19, 9), (np.s_[:, :, 6:13, 2:7], x * x)) * 2,
    "every second row": lambda x, w: _set(_zeros(2, 3, 15, 5), (np.s_[:, :, 1::2], x)).square(),
    "last rows": lambda x, w: _set(_zeros(2, 3, 7, 5), (np.s_[:, :, -2:, -1:], x[:, :, :2, 1:2])) + x,
    "int and None": lambda x, w: _set(_zeros(4, 7, 5), (2, x[0, 1]), (-1, x[1, 1] * 2), (np.s_[0, None], x[:1, 2])),
    "channels": lambda x, w: _set(_zeros(2, 5, 7, 5), (np.s_[:, 1:4], x), (np.s_[:, 0], x[:, 0]), (np.s_[:, 4], 3.0)),
    "rows by hand": lambda x, w: _rows(x) * x,
    "other cuts": lambda x, w: _set(_zeros(2, 3, 7, 5), (np.s_[:, :, :4], x[:, :, 3:]), (np.s_[:, :, 4:], x[:, :, :3])),
    "index of channels": lambda x, w: _set(_zeros(2, 5, 7, 5), (np.s_[:, [4, 0, 2]], x * x)),
    "index apart": lambda x, w: _set(_zeros(2, 7, 5, 3), (np.s_[[1, 0], :, :, [2, 0]], x[:, 1])),
    "index_put_": lambda x, w: _zeros(2, 5, 7, 5).index_put_(PLACES, x, accumulate=True),
    "mask of a tile": lambda x, w: _set(torch.ones(2, 3, 7, 5, dtype=F64), (x > 0.3, 0.5)) * x,
    "mask behind": lambda x, w: _set(torch.ones(4, 2, 3, 7, 5, dtype=F64), (np.s_[:, x > 0.3], 0.5)) * x,
    "masked_fill_": lambda x, w: torch.ones(2, 3, 7, 5, dtype=F64).masked_fill_(x[:, :1] > 0.3, 0.5) * x,
    "add_": lambda x, w: _zeros(2, 3, 7, 5).add_(x, alpha=2).mul_(x).clamp_(-1, 1) + x,
    "+=": lambda x, w: _augmented(torch.ones(2, 3, 7, 5, dtype=F64), x),
    "+= of rows": lambda x, w: _augmented(torch.ones(4, 2, 3, 7, 5, dtype=F64), x[:, :1]),
    "+= of a view": lambda x, w: _views_augmented(x) * 2,
    "+= of a row": lambda x, w: _rows_augmented(x).square(),
    "views": lambda x, w: torch.cat([y.flatten() for y in _filled_views(x)]),
    "addcmul_": lambda x, w: _zeros(2, 3, 7, 5).addcmul_(x[:, :1], x.cos(), value=0.5).lerp_(x, 0.25),
    "scatter_": lambda x, w: _zeros(2, 4, 7, 5).scatter_(1, (x[:, :1] > 0).long() + 1, 1.0) * x[:, :1],
    "scatter_ src": lambda x, w: _zeros(2, 4, 7, 5).scatter_(1, (x > 0).long()[:, :1], x[:, :1] * x[:, 1:2]),
    "scatter_ plain": lambda x, w: _zeros(2, 4, 7, 5).scatter_(1, LABELS, x[:, :1]),
    "scatter_add_": lambda x, w: _zeros(2, 4, 7, 5).scatter_add_(1, (x > 0).long(), x) * x[:, :1],
    "scatter_reduce_": lambda x, w: _zeros(2, 4, 7, 5).scatter_reduce_(1, (x > 0).long(), x, "sum"),
    "index_add_": lambda x, w: _zeros(2, 4, 7, 5).index_add_(1, torch.tensor([3, 0, 3]), x, alpha=0.5),
    "index_copy_": lambda x, w: _zeros(2, 4, 7, 5).index_copy_(1, torch.tensor([3, 0, 2]), x * 2),
    "flattened": lambda x, w: _set(_zeros(2, 3, 35), (slice(None), x.flatten(2))).unflatten(2, (7, 5)) * x,
    "complex": lambda x, w: torch.view_as_real(
        _set(_zeros(2, 3, 7, 5, dtype=torch.complex128), (..., torch.complex(x, x * x)))
    ),
    "real into complex": lambda x, w: _set(_zeros(2, 3, 7, 5, dtype=torch.complex128), (..., x)).real * x,
    "spectrum": _spectral,
    "shifted spectrum": _shifted,
    "padded spectrum": _padded_spectrum,
    "sum in place": _sum_in_place,
    "einsum": lambda x, w: torch.einsum("bcij,cdk->bdij", _set(_zeros(2, 3, 7, 5), (..., x)), w.real[..., 0]),
    "of a parameter": _of_a_parameter,
    "of a statistic": _of_a_statistic,
    "checkpointed": lambda x, w: checkpoint(
        lambda y: _set(_zeros(2, 3, 7, 5), (..., y * y)) * y, x, use_reentrant=False
    ),
}


class _AllCases(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names, self.weight = names, nn.Parameter(torch.randn(3, 3, 4, 2, dtype=torch.complex128))

    def forward(self, x):
        return tuple(CASES[name](x, self.weight) for name in self.names)


@pytest.mark.parametrize(
    "mesh",
    [m if len(m) > 1 else pytest.param(m, marks=pytest.mark.slow) for m in MESHES],
    ids=lambda m: "x".join(map(str, m.values())),
)
def test_filled_tensors_are_those_of_torch(mesh):
    torch.manual_seed(0)
    spec = (None, None, *(("lat", "lon") if "lon" in mesh else ("lat", None)))
    model = _AllCases(list(CASES))
    assert_same_on_every_mesh(model, torch.randn(2, 3, 7, 5), [mesh], spec=spec, build=jigsaw.parallelize)


@pytest.mark.parametrize("halo", [{2: 1}, {2: 2, 3: 1}])
def test_a_filled_tensor_has_no_halo(halo):
    torch.manual_seed(0)
    model = _AllCases(["all", "low rows", "+=", "scatter_add_", "flattened"])
    cut = {"spec": (None, None, "lat", "lon"), "halo": halo, "periodic": [3] if 3 in halo else []}
    assert_same_on_every_mesh(model, torch.randn(2, 3, 7, 5), MESHES[2:], build=jigsaw.parallelize, **cut)


# -- where it is cut, and what is sent --------------------------------------------------------------------------------


@on_ranks(4)
def test_a_filled_tensor_is_cut_as_what_was_written():
    mesh = world_mesh(lat=4)
    modes = shard(torch.randn(33, 6), mesh, ("lat", None))
    assert modes.layout.cuts[0].points == (0, 9, 17, 25, 33)
    with comm.count() as counted:
        out = _set(torch.zeros(33, 6), (slice(12), modes[:12]), (slice(21, None), modes[21:]))
        assert out.layout == modes.layout
        out = _set(torch.zeros(33, 6), (slice(21, None), modes[21:]), (slice(12), modes[:12]))
        assert out.layout == modes.layout
        padded = _set(torch.zeros(40, 6), (slice(3, 36), modes))
        assert padded.layout.cuts[0].points == (0, 12, 20, 28, 40)
        every = _set(torch.zeros(66, 6), (slice(1, None, 2), modes))
        assert every.layout.cuts[0].points == (0, 19, 35, 51, 66)
        wide = torch.ones(5, 33, 6).mul_(modes[:, :1])
        assert wide.layout.spec == (None, "lat", None)
        hot = torch.zeros(33, 8).index_copy_(1, torch.arange(6), modes)
        assert hot.layout.spec == ("lat", None)
        for tile in (out, padded, every, wide, hot):
            assert tile.local.shape == tile.layout.local_shape(tile.coordinate)
            assert tile.local.untyped_storage().nbytes() == tile.local.numel() * 4, "the whole tensor is kept"
    assert counted.calls == []
    with comm.count() as counted:
        out, wider = torch.zeros(2, 40, 6), torch.zeros(33, 8)
        out[1, 3:36] += modes
        wider[:, 1:7] *= modes
        view = out[0]
        view[3:36] = modes
    assert counted.calls == []
    assert out.layout.cuts[1].points == (0, 12, 20, 28, 40) and wider.layout.spec == ("lat", None)
    assert isinstance(view, Tile) and torch.equal(view.full_tensor(), out[1].full_tensor())
    assert view.local.untyped_storage().data_ptr() == out.local.untyped_storage().data_ptr()
    # rows that lie elsewhere than the first value said: 12 of 33 rows change their rank, by one exchange
    with comm.count() as counted:
        out = _set(torch.zeros(33, 6), (slice(12), modes[:12]), (slice(12, 24), modes[:12]))
    assert out.layout == modes.layout and [c.kind for c in counted.calls] == ["exchange"]


SENDS = {"last rows", "other cuts", "of a statistic", "sum in place", "+= of a view", "+= of a row", "views"}
SENDS |= {name for name in CASES if "spectrum" in name}
CHECKS_INDICES = {name for name in CASES if name.startswith("scatter_")} - {"scatter_ plain"}


@on_ranks(2)
def test_what_fits_is_filled_without_a_message():
    x, weight = torch.randn(2, 3, 7, 5, dtype=F64), torch.randn(3, 3, 4, 2, dtype=torch.complex128)
    tile = shard(x, world_mesh(lat=2), (None, None, "lat", None))
    for name in CASES.keys() - SENDS:
        with comm.count() as counted:
            CASES[name](tile, weight)
        sent = [(c.kind, c.sent_bytes) for c in counted.calls]
        # whether an index is out of range is asked of all ranks, for an error on each
        assert sent == [("all_reduce", 16)] * (name in CHECKS_INDICES), name


# -- the object -------------------------------------------------------------------------------------------------------


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


@on_ranks(2)
def test_only_old_values_that_are_read_must_be_alike():
    x = torch.arange(18.0).view(2, 9)
    tile = shard(x, world_mesh(lat=2), (None, "lat"))
    wanted = torch.cat([x, torch.zeros(2, 3)], 1)

    def old(columns):  # as torch.empty may give them
        return torch.full((2, columns), 7.0 + torch.distributed.get_rank())

    written = old(12)
    written[:, :9] = tile
    written[:, 9:] = 0
    copied = old(9).copy_(tile)
    masked = old(9).masked_fill_(tile >= 0, 3.0)
    put = old(9).scatter_(0, torch.zeros(2, 9, dtype=torch.int64), tile)
    assert all(isinstance(y, Tile) for y in (written, copied, masked, put))
    torch.testing.assert_close(written.full_tensor(), wanted)
    torch.testing.assert_close(copied.full_tensor(), x)
    torch.testing.assert_close(masked.full_tensor(), torch.full((2, 9), 3.0))
    torch.testing.assert_close(put[:1].full_tensor(), x[1:])
    added = old(9)
    added += tile
    with pytest.raises(RanksDifferError, match="must be alike on every rank"):
        added.sum()


@on_ranks(2)
def test_a_filled_tensor_is_a_tile_for_everybody():
    mesh = world_mesh(lat=2)
    x = torch.randn(7, 5, dtype=F64, requires_grad=True)
    tile = shard(x, mesh, ("lat", None))
    out = torch.zeros(7, 5, dtype=F64)
    other_name, held = out, weakref.ref(out)
    out += tile
    assert out is other_name is held() and isinstance(out, Tile) and type(out) is Tile
    assert (out.shape, out.dtype, out.device, out.mesh) == ((7, 5), F64, tile.device, mesh)
    assert out.grad_fn is not None and not out.is_leaf
    assert torch.equal(copy.deepcopy(out.detach()).local, tile.local)
    assert "Tile(shape (7, 5)" in repr(out)
    with pytest.raises(ShardingError, match="memory of the whole tensor"):
        out.data_ptr()
    with (
        torch._C.DisableTorchFunctionSubclass(),  # as C++ code sees it: no zeros of before
        pytest.raises(ShardingError, match="below torch's own functions"),
    ):
        torch.sin(out)
    _Twice.apply(out).sum().backward()
    assert torch.equal(x.grad, torch.full((7, 5), 2.0, dtype=F64))
    # autograd's own rule about what is changed after it was saved
    out = torch.zeros(7, 5, dtype=F64)
    out += tile
    product = out * out
    out += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        made = torch.ones(7, 5, dtype=F64)
        made[:, 1:3] = tile[:, 1:3]
    expected = torch.ones(7, 5, dtype=F64)
    expected[:, 1:3] = x.detach()[:, 1:3]
    assert torch.equal(made.full_tensor(), expected)


class _Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(3, 7, 5))

    def forward(self, x):
        self.cache[1] = x
        return self.cache.sum(0)


@on_ranks(2)
def test_a_buffer_that_is_filled_works_and_is_not_saved_in_parts():
    x, model = torch.randn(7, 5), _Cached()
    tile = shard(x, world_mesh(lat=2), ("lat", None))
    for _ in range(2):
        assert torch.equal(model(tile).full_tensor(), x)
    assert isinstance(model.cache, Tile)
    with pytest.raises(jigsaw.CheckpointError, match=r"'model.cache' is a Tile .*persistent=False"):
        jigsaw.save("never made", model=model)


# -- what cannot become a tile ----------------------------------------------------------------------------------------


def _with_view():
    out = _zeros(7, 5)
    return out, out[1:]


def _with_detached():
    out = _zeros(7, 5)
    return out, out.detach()


def _with_array():
    out = _zeros(7, 5)
    return out, out.numpy()


def _saved():
    out = _zeros(7, 5)
    return out, torch.ones(7, 5, dtype=F64, requires_grad=True) * out


def _from_array():
    array = np.zeros((7, 5))
    return torch.from_numpy(array), array


def _of_a_flat_view():
    return _zeros(5, 7).view(7, 5), None


def _of_a_turned_view():
    return _zeros(5, 7).T, None


def _of_two_views():
    out = _zeros(7, 10)
    return out[:, ::2], out[:2]


def _of_a_view_of_a_leaf():
    return _zeros(9, 5).requires_grad_()[2:], None


def _of_a_saved_view():
    out = _zeros(9, 5)[2:]
    return out, torch.ones(7, 5, dtype=F64, requires_grad=True) * out


def _not_with_grad_mode():
    return torch.ones(7, 5, dtype=F64, requires_grad=True) * 2, None


def _hooked():
    out = _zeros(7, 5).requires_grad_() * 2
    out.register_hook(lambda g: g)
    return out, None


def _retaining():
    out = _zeros(7, 5).requires_grad_() * 2
    out.retain_grad()
    return out, None


STAYS_PLAIN = {
    "a hook, or retain_grad": (_hooked, _retaining),
    "another view, another tensor of its memory, or autograd holds it": (
        *(_with_view, _with_detached, _saved),
        *(_of_two_views, _of_a_saved_view),
    ),
    "its memory is shared with an array": (_with_array, _from_array),
    r"what is changed is a view \(7, 5\) that ints and slices of it do not give": (_of_a_flat_view, _of_a_turned_view),
    "it is a leaf that requires grad": (lambda: (_zeros(7, 5).requires_grad_(), None), _of_a_view_of_a_leaf),
    "it is a parameter": (lambda: (nn.Parameter(_zeros(7, 5)), None),),
}


@pytest.mark.slow
@on_ranks(2)
def test_what_cannot_become_a_tile_is_left_as_it_was():
    tile = shard(torch.ones(7, 5, dtype=F64), world_mesh(lat=2), ("lat", None))
    rows = torch.arange(7)
    writes = (
        lambda g: g.__setitem__(..., tile),
        lambda g: g.copy_(tile),
        lambda g: g.__iadd__(tile),
        lambda g: g.mul_(tile),
        lambda g: g.masked_fill_(tile > 0, 2.0),
        lambda g: g.scatter_add_(1, torch.zeros(7, 5, dtype=torch.int64), tile),
    )
    with comm.count() as counted:
        for why, makes in STAYS_PLAIN.items():
            for make in makes:
                # garbage is collected before what another name holds is refused, which takes its time
                for write in writes[:2] if "another tensor" in why else writes:
                    out, other = make()
                    with pytest.raises(ShardingError, match=rf"would become a Tile, but {why}.*(clone|out.index)"):
                        write(out)
                    assert not isinstance(out, Tile) and not out.detach().any(), other
        out, _ = _not_with_grad_mode()
        with torch.no_grad(), pytest.raises(ShardingError, match="its gradient would be lost without grad mode"):
            out += tile
        # what every rank would need all of, and shapes that do not fit
        for write in (
            lambda g: g.index_copy_(0, rows, tile),
            lambda g: g.index_put_((rows,), tile),
            lambda g: g.scatter_(0, rows[:, None].expand(7, 5), tile),
            lambda g: g.masked_scatter_(torch.ones(7, 5, dtype=torch.bool), tile),
            lambda g: g.put_(torch.arange(35).reshape(7, 5), tile),
            lambda g: g.addmm_(tile, torch.ones(5, 5, dtype=F64)),
            lambda g: g[:, :3].add_(tile),
            lambda g: torch._foreach_add_([g], [tile]),
        ):
            out = _zeros(7, 5)
            with pytest.raises(ShardingError, match=r"full_tensor|must be a Tile|do not broadcast"):
                write(out)
            assert type(out) is torch.Tensor and not out.any()
    assert counted.calls == []


@on_ranks(2)
def test_garbage_that_one_rank_still_has_is_no_other_name():
    tile = shard(torch.ones(7, 5, dtype=F64), world_mesh(lat=2), ("lat", None))
    out = _zeros(7, 5)
    gc.collect()
    gc.disable()
    try:
        if tile.coordinate == (1,):
            circle = [out[1:]]
            circle.append(circle)
            del circle
        out += tile
    finally:
        gc.enable()
    assert torch.equal(out.full_tensor(), torch.ones(7, 5, dtype=F64))


@on_ranks(2)
def test_what_stays_plain_is_filled_whole_without_strict():
    tile = shard(torch.arange(35.0).reshape(7, 5), world_mesh(lat=2), ("lat", None))
    out = torch.zeros(7, 5)
    view = out[1:]
    with jigsaw.strict_mode(False), pytest.warns(UserWarning, match="__setitem__ runs on the whole tensor"):
        out[...] = tile
    assert type(out) is torch.Tensor and torch.equal(view, torch.arange(35.0).reshape(7, 5)[1:])
    free = torch.zeros(7, 5)
    with jigsaw.strict_mode(False), comm.count() as counted:
        free[...] = tile
    assert isinstance(free, Tile) and counted.calls == []


@on_ranks(4)
def test_tokens_of_two_cut_dims_fill_a_tensor_that_was_never_flattened():
    """As Lumina2 puts the words of a text before the tokens of an image."""
    mesh, words = world_mesh(lat=2, lon=2), torch.randn(1, 5, 4, dtype=torch.float64)

    def joined(x):
        tokens = x.flatten(2).transpose(1, 2)
        both = tokens.new_zeros(1, 5 + tokens.shape[1], 4)
        both[0, :5] = words[0]
        both[0, 5:] = tokens[0]
        return both.softmax(1) * both

    x = torch.randn(1, 4, 7, 6, dtype=torch.float64, requires_grad=True)
    want = joined(x)
    want.square().sum().backward()
    tile = jigsaw.shard(x.detach(), mesh, (None, None, "lat", "lon"))
    tile.local.requires_grad_()
    got = joined(tile)
    got.square().sum().backward()
    torch.testing.assert_close(got.full_tensor() if isinstance(got, jigsaw.Tile) else got, want)
    gradient = jigsaw.from_local(tile.local.grad, mesh, (None, None, "lat", "lon"), x.shape)
    torch.testing.assert_close(gradient.full_tensor(), x.grad)
