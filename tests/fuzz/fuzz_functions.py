"""The statements that random programs are made of.

A template is text with placeholders (`Drawing._placeholder`): {x} a real value, {f} floating, {i} integer, {b} bool,
{c} complex, {a} any, {f4} floating with four dims, {g} another floating and {w} any other; {y} one that broadcasts with
the first, {z} one of its shape; {d} a dim, {e} another one, {n} a position along {d}. A function makes the text where
placeholders do not suffice.

What counts or compares equal values is given rounded ones: torch's vector code rounds a last bit otherwise by where a
value lies, also on one device, so results that should be equal may not be.
"""

from __future__ import annotations

import re

import torch

_POINTWISE = """
{a} + {w}|{x} + {y}|{x} - {y}|{x} * {y}|{y} - {x}|{x} / 2|{x} * {s}|{s} - {x}|{f} / ({y}.abs() + 1)|{x} // 2|{x} % 3
-{x}|{x}.abs()|{f}.square()|{x} ** 2|torch.pow(2.0, {x}.clamp(-3, 3))|{x}.round() == {y}.round()|{x} > {y}|{x} <= {s}
{x}.round() != {s}
torch.maximum({x}, {y})|torch.minimum({x}, {y})|torch.fmax({x}, {y})|{x}.clamp(-2, 2)|{x}.clamp(min=0)
torch.clamp({f}, {y}, {y})|torch.where({x} > 0, {x}, {y})|torch.where({x} > 0, {x}, 0.0)|torch.where({b}, 1.0, 0.0)
{f}.sign()|{f}.floor()|{f}.round()|{f}.trunc()|{f}.frac()|torch.remainder({x}, 3)|torch.fmod({x}, 3)
torch.logical_and({x} > 0, {y} > 0)|~{b}|{b} & {b}|{b} | {b}|{b} ^ {b}|{x}.logical_not()|torch.logical_xor({a}, {w})
torch.lerp({f}, {z}, 0.5)|torch.addcmul({f}, {y}, {y}, value=2)|torch.addcdiv({f}, {y}, {y}.abs() + 1)
torch.copysign({f}, {y})|torch.hypot({f}, {y})|torch.atan2({f}, {y}.abs() + 1)|torch.heaviside({f}, {y})
torch.nan_to_num({f})|torch.isfinite({f})|torch.isnan({x})|torch.isclose({f}, {y})|torch.signbit({f})|F.relu({f})
F.leaky_relu({f}, 0.5)|F.threshold({x}, 1, 2)|F.hardtanh({f})|F.relu6({f})|F.hardshrink({f})|{x}.to({dtype})
{x}.double()|{x}.float()|{x}.long()|{x}.bool()|{x}.to({x})|{x}.type_as({x})|{f}.half()|{x}.int()|{x}.clone()
{x}.detach()|{x}.contiguous()|torch.zeros_like({x})|torch.ones_like({x})|torch.full_like({x}, 2)|{x}.new_zeros({shape})
{x}.new_ones(3, 2)|{x}.new_full((2, 2), 3)|{x}.new_tensor([0.5, 2])|{f}.new_empty((2, 3)).fill_(1)
torch.complex({f}, {f})|{c}.real|{c}.imag|{c}.conj()|{c}.abs()|torch.view_as_real({c})|{a}.real
torch.polar({f}.abs(), {z})|{i} & 3|{i} | {i}|{i} << 1|torch.bitwise_xor({i}, 2)|torch.gcd({i}, {i})
torch.bitwise_not({i})|{i} >> 1|{x}.masked_fill({x} > 0, {s})|{x}.masked_fill({y} > 0, 2)|torch.frexp({f})
torch.ldexp({f}, {x}.clamp(-2, 2))|torch.nextafter({f}, {y})|torch.float_power({f}, 2)|torch.floor_divide({x}, 2)
torch.true_divide({x}, 2)|torch.rsub({x}, {y})|torch.sgn({f})|torch.positive({x})|torch.deg2rad({f})
torch.logaddexp({f}, {y})|torch.xlogy({f}, {y}.abs() + 1)
"""
_SMOOTH = """
{f}.sigmoid()|{f}.tanh()|{f}.sin()|{f}.cos()|({f} / 9).exp()|({f}.abs() + 1).log()|({f}.abs() + 1).sqrt()
({f}.abs() + 1).rsqrt()|({f}.abs() + 1).reciprocal()|{f}.atan()|{f}.erf()|({f}.abs() + 1).lgamma()|{f}.expm1().tanh()
{f}.sinc()|F.gelu({f})|F.silu({f})|F.elu({f})|F.softplus({f})|F.mish({f})|F.selu({f})|F.logsigmoid({f})|F.celu({f})
F.gelu({f}, approximate="tanh")|F.softsign({f})|F.tanhshrink({f})|F.hardswish({f})|F.hardsigmoid({f})
torch.special.expit({f})|torch.special.entr({f}.sigmoid())|torch.special.xlog1py({f}, {f}.abs())|torch.asinh({f})
"""
_REDUCTIONS = """
{a}.sum()|{x}.sum({d})|{x}.sum({dims}, keepdim={keep})|{f}.mean()|{f}.mean({d}, keepdim={keep})|{f}.mean({dims})
{x}.amax({d}, keepdim={keep})|{x}.amin({dims})|{x}.max()|{x}.max({d})|{x}.min({d}, keepdim=True)|{x}.min()|{x}.amax()
{x}.argmax()|{x}.argmax({d})|{x}.argmin({d}, keepdim={keep})|{x}.aminmax()|torch.aminmax({x}, dim={d})|{x}.prod({d})
{f}.clamp(-1, 2).prod()|{x}.any()|{x}.all({d})|{a}.any({d}, keepdim={keep})|torch.count_nonzero({x}, {d})
torch.count_nonzero({x})|torch.nansum({f}, {d})|torch.nanmean({f}, {d})|torch.equal({x}, {w})|{x}.sum().item()
torch.allclose({x}, {x})|{x}.tolist()|{x}.sum({d}, dtype=torch.float64)|torch.dist({f}, {y}, 1)
{x}.sum_to_size(1, *{x}.shape[1:])|{x}.median()|{x}.median({d})|{x}.round().mode({d})|{x}.kthvalue({upto}, {d})
torch.nanmedian({f}, {d})|{x}.max().item()|torch.einsum("i...->...", {x})|{x}.shape|{x}.numel()|{x}.ndim|{x}.size({d})
len({x})|{x}.dtype|{x}.stride({d})
"""
_SMOOTH_REDUCTIONS = """
{f}.var()|{f}.var({d})|{f}.std({d}, keepdim={keep})|torch.var_mean({f}, {dims})|{f}.std({dims}, correction=0)|{f}.norm()
{f}.norm(dim={d})|torch.linalg.vector_norm({f}, 1, {d})|torch.linalg.norm({f}, dim={d})|{f}.logsumexp({d})
torch.logsumexp({f}, {dims})|torch.quantile({f}, 0.3, dim={d})
torch.quantile({f}, torch.tensor([0.2, 0.7], dtype={f}.dtype))|{f}.softmax({d})|{f}.log_softmax({d})|F.softmin({f}, {d})
F.normalize({f}, dim={d})|F.normalize({f}, 1, {d})|torch.std_mean({f})|torch.linalg.vector_norm({f}, 3, {dims})
torch.nanquantile({f}, 0.5, {d})|torch.renorm({f}, 2, {d}, 1.5)|torch.logcumsumexp({f}, {d})
F.gumbel_softmax({f} * 1e9, hard=True, dim={d}).shape|{f}.softmax({d}, dtype=torch.float64)|torch.cov({f2})
torch.corrcoef({f2} + torch.eye(*{f2}.shape)).shape
"""
_SHAPES = """
{a}.reshape({shape})|{a}.view({shape})|{a}.flatten()|{a}.flatten(-2)|{a}.flatten(0, 1)|{a}.ravel()|{a}.reshape(-1)
{a}.transpose({d}, {e})|{a}.permute({perm})|{a}.movedim({d}, {e})|{a2}.t()|{a}.mT|{a2}.T|{a}.swapaxes({d}, {e})
{a}.unsqueeze({d})|{a}.unsqueeze(-1)|{a}.squeeze()|{a}.squeeze({d})|{a}[None]|{a}.unsqueeze(1).squeeze(1)
{a}.expand(2, *{a}.shape)|{a}[{ix}]|{a}[{ix}]|{a}[{ix}]|{a}[{ix}]|{a}.select({d}, {n})|{a}.narrow({d}, {n}, 1)
{a}.chunk({k}, {d})|{a}.split({k}, {d})|{a}.split({pieces}, {d})|{a}.unbind({d})|torch.tensor_split({a}, {k}, {d})
{a}.unflatten({d}, (-1, 1))|{a}.unflatten({d}, (1, -1))|{a}.repeat(2, *[1] * ({a}.ndim - 1))|{a}.tile(2)
{a}.repeat_interleave(2, {d})|{a}.flip({d})|{a}.flip({dims})|{a}.roll({j}, {d})|{a}.roll({k})
torch.rot90({a}, 1, ({d}, {e}))|{a}.unfold({d}, {upto}, {k})|{a}.diagonal()|{a}.diagonal({j}, {d}, {e})
torch.diag_embed({a})|torch.diag({a})|{x}.tril({j})|{x}.triu({j})|torch.trace({x2})|torch.atleast_2d({a})
torch.atleast_3d({a})|torch.broadcast_to({a}, (2, *{a}.shape))|torch.squeeze({a}, {dims})|torch.hsplit({a}, 2)
torch.narrow_copy({a}, {d}, {n}, 1)|{a}.view_as({a})|{a}.reshape_as({a})|{a}.movedim(({d}, {e}), ({e}, {d}))
torch.flatten({a}, 1)|torch.flatten({a}, 0, -2)|{a}.mT.flatten()|{a}.transpose({d}, {e}).reshape(-1)|[*{a}]
{a}.view(*{a}.shape, 1)|{a}.view(-1)|{a}.broadcast_to({a}.shape)|torch.t({a2})|{a}.expand_as({a})|{a}.swapdims(0, -1)
"""
_JOINS = """
torch.cat([{a}, {z}], {d})|torch.cat([{a}, {w}], {d})|torch.stack([{a}, {z}], {d})|torch.hstack([{x}, {z}])
torch.vstack([{x}, {z}])|torch.cat([{x}[{ix}], {x}])|torch.stack([{x}, {x}.detach()])|torch.dstack([{x}, {z}])
torch.column_stack([{x}, {z}])|torch.cat([{x}.narrow({d}, 0, 1), {x}], {d})|torch.block_diag({f2}, {g2})
torch.meshgrid({f1}, {g1}, indexing="ij")|torch.cartesian_prod({f1}, {g1})|torch.concat(({x}, {x}, {x}), dim={d})
torch.cat(torch.split({x}, 1, {d}), {d})|torch.cat([{x}, {x}.flip({d})], {d})
torch.broadcast_tensors({x}, {x}.detach())[0]
"""
_ALONG = """
{x}.cumsum({d})|{f}.clamp(-1, 1).cumprod({d})|torch.cummax({x}, {d})|torch.cummin({x}, {d})|{x}.sort({d})
{x}.argsort(dim={d}, stable=True)|{x}.sort(dim={d}, descending=True, stable=True)|{x}.topk({upto}, {d})
torch.topk({x}, {upto}, {d}, largest=False)|torch.msort({x})|{x}.diff(dim={d})
torch.diff({x}, dim={d}, prepend={x}.narrow({d}, 0, 1))|torch.trapezoid({f}, dim={d})|torch.gradient({f}, dim={d})
torch.cumulative_trapezoid({f}, dim={d})|torch.unique({x}.round())|torch.unique_consecutive({x}.round())
torch.nonzero({x})
torch.argwhere({x})|torch.unique({x}.round(), return_inverse=True)|torch.bincount({i}.abs().flatten())
torch.histc({f}, 4, -5, 5)|torch.bucketize({x}, torch.tensor([-2.0, 0, 2]))
torch.searchsorted(torch.tensor([-2.0, 0, 2]), {x}.double())|torch.isin({x}.round(), torch.tensor([1, 2]))
F.one_hot({i}.abs() % 4, 4)|torch.vander({x1}.clamp(-2, 2))|torch.nonzero({x}, as_tuple=True)
torch.histogram({f}.detach(), 4, range=(-5.0, 5.0))|{x}.nonzero().shape
"""
_INDEXING = """
{a}[{a} != 0]|{x}[..., {pos}]|{x}[{pos}]|{x}.index_select({d}, {pos})|torch.take({x}, {pos})|{x}.masked_select({x} > 0)
{x}[{x} > 0]|torch.gather({x}, {d}, ({x}.long().abs() % {N}))|torch.take_along_dim({x}, {x}.argsort({d}), {d})
{x}.index_add({d}, torch.tensor([{n}]), {x}.narrow({d}, 0, 1))|{x}.index_fill({d}, {pos}, 3)
{x}.index_copy({d}, torch.tensor([{n}]), {x}.narrow({d}, 0, 1))|{x}.scatter({d}, ({x}.long().abs() % {N}), 1)
{x}.scatter_add({d}, ({x}.long().abs() % {N}), {x})|{x}.scatter_reduce({d}, ({x}.long().abs() % {N}), {x}, "amax")
{x}.masked_scatter({x} > 0, {x}.flatten().flip(0))
{x}.index_reduce({d}, torch.tensor([{n}, {n}]), {x}.narrow({d}, 0, 1).repeat_interleave(2, {d}), "amax")
torch.select_scatter({x}, {x}.select({d}, {n}), {d}, {n})
torch.slice_scatter({x}, {x}.narrow({d}, 0, 1), {d}, {n}, {n} + 1)|torch.diagonal_scatter({x}, {x}.diagonal() * 2)
{x}.index_put((torch.tensor([0, 0]),), torch.tensor(2.0).to({x}.dtype), accumulate=True)|{x}[[0, -1]]|{x}[({pos},)]
{x}[:, [0, 0]]|{x}[{pos}, ..., 0]|{x}[{pos}[:, None], [0]]|{x}.put(torch.tensor([0]), torch.tensor([5]).to({x}.dtype))
torch.where({x} > 0)|torch.argwhere({x} > 1).sum(0)|{x}.take_along_dim({x}.long().abs().flatten() % {x}.numel())
values((5, 3), seed=3)[{i}.abs() % 5]|F.embedding({i}.abs() % 5, values((5, 3), seed=3))
{x}[torch.tensor([True] * len({x}))]
"""
_PRODUCTS = """
{f} @ {g}|{f} @ {g}.mT|{f2} @ {f2}.T|{f}.matmul({f}.mT)|{f1} @ {g1}|torch.mm({f2}, {f2}.t())|torch.bmm({f3}, {f3}.mT)
torch.outer({f1}, {g1})|torch.einsum("...i,...j->...ij", {f}, {g})|torch.einsum("...i->...", {f})
torch.einsum("i...,i...->...", {f}, {f})|torch.tensordot({f}, {f}, dims=([{d}], [{d}]))|torch.kron({f2}, {g2})
torch.inner({f}, {g})|torch.linalg.vecdot({f}, {z}, dim={d})|torch.linalg.multi_dot([{f2}, {f2}.T, {f2}])
torch.addmm({f2}[:, :1], {f2}, {f2}.T)|torch.baddbmm({f3}[:, :1, :1], {f3}, {f3}.mT)|torch.dot({f1}, {g1})
torch.mv({f2}, {f2}[0])|torch.cross({f}, {z}, dim={d})|torch.cdist({f2}, {g2}, 1)|torch.addr({f2}, {f2}[:, 0], {f2}[0])
"""
_SMOOTH_PAIRS = """
F.cosine_similarity({f}, {y}, dim={d})|F.cosine_similarity({f}, {g}, -1)|F.pairwise_distance({f}, {z})
torch.cdist({f}, {z})|F.cosine_similarity({f}, {z}, {d})|F.scaled_dot_product_attention({f}, {g}, {g})
F.scaled_dot_product_attention({f}, {z}, {z}, is_causal=True)|F.scaled_dot_product_attention({f4}, {g4}, {g4})
"""
_LOSSES = """
F.mse_loss({f}, {z})|F.l1_loss({f}, {z})|F.mse_loss({f}, {z}, reduction="none")
F.smooth_l1_loss({f}, {z}, reduction="sum")|F.huber_loss({f}, {z})|F.mse_loss({f}, {z}.detach(), reduction="sum")
F.l1_loss({f}, {f}.detach().roll(1))
"""
_SMOOTH_LOSSES = """
F.kl_div({f}.log_softmax({d}), {z}.softmax({d}), reduction="batchmean")
F.binary_cross_entropy_with_logits({f}, {z}.sigmoid())|F.binary_cross_entropy({f}.sigmoid(), {z}.sigmoid())
F.poisson_nll_loss({f}.clamp(-3, 3), {z}.abs())|F.soft_margin_loss({f}, {z}.sign())
F.gaussian_nll_loss({f}, {z}, {f}.abs() + 1)|F.cross_entropy({f2}, {f2}.detach().argmax(1))
F.cross_entropy({f4}, {f4}.detach().argmax(1), reduction="none")|F.cross_entropy({f3}, {f3}.detach().softmax(1))
F.nll_loss({f2}.log_softmax(1), {f2}.detach().argmin(1), reduction="sum")
F.cross_entropy({f2}, {f2}.detach().argmax(1), label_smoothing=0.25)|F.triplet_margin_loss({f}, {z}, {z})
F.margin_ranking_loss({f}, {z}, {f}.detach().sign())|F.hinge_embedding_loss({f}, {z}.detach().sign())
F.multi_margin_loss({f2}, {f2}.detach().argmax(1))|F.multilabel_soft_margin_loss({f2}, {f2}.detach().sigmoid())
"""
_WINDOWS = """
F.max_pool2d({f4}, {k})|F.avg_pool2d({f4}, {k})|F.max_pool2d({f4}, 3, 2, 1)|F.avg_pool2d({f4}, 3, 1, 1)
F.max_pool1d({f3}, 2)|F.avg_pool1d({f3}, {k}, 1)|F.adaptive_avg_pool2d({f4}, {k})|F.adaptive_max_pool2d({f4}, {k})
F.adaptive_avg_pool1d({f3}, {k})|F.max_pool3d({f5}, 2)|F.avg_pool3d({f5}, 2, 1)|F.avg_pool2d({f4}, 2, ceil_mode=True)
F.max_pool2d({f4}, 2, ceil_mode=True)|F.max_pool2d({f4}, 2, return_indices=True)
F.avg_pool2d({f4}, 3, 2, 1, count_include_pad=False)|F.max_pool2d({f4}, 2, dilation=2)
F.adaptive_avg_pool2d({f4}, ({k}, None))|F.avg_pool2d({f3}, 2)|F.max_pool2d({f3}, 2)|F.unfold({f4}, 2)
F.unfold({f4}, 3, padding=1, stride=2)|F.fold(F.unfold({f4}, 2, stride=2), {f4}.shape[2:], 2, stride=2)
F.max_unpool2d(*F.max_pool2d({f4}, 2, return_indices=True), 2)|F.pad({x}, (1, 2))|F.pad({x}, (1, -1))
F.pad({x}, ({k}, 0, 0, {k}))|F.pad({x}, (1, 1), value=2)|F.pad({f4}, (1, 1, 1, 1), "circular")
F.pad({f4}, (1, 0, 1, 1), "reflect")|F.pad({f4}, (1, 2, 0, 1), "replicate")|F.pad({f3}, (1, 1), "circular")
F.pad({f3}, (2, 1), "reflect")|F.pad({f3}, (1, 1), "replicate")|F.pad({x}, (0, 0, 1, 1))
F.pad({f5}, (1, 1, 0, 1, 1, 0), "circular")|F.pad({x}, (-1, 0))|F.interpolate({f4}, scale_factor=2)
F.interpolate({f4}, size=(5, 3))|F.interpolate({f3}, scale_factor=2)
F.interpolate({f4}, size=(3, 4), mode="nearest-exact")|F.pixel_shuffle({f4}, 2)|F.pixel_unshuffle({f4}, 2)
F.channel_shuffle({f4}, 2)|F.interpolate({f5}, scale_factor=2)|F.lp_pool2d({f4}, 1.0, 2)|F.local_response_norm({f4}, 2)
F.glu({f}, {d})|F.max_pool1d({f3}, 3, 2, 1)|F.max_pool2d({f4}, (1, 2), (2, 1))
F.avg_pool2d({f4}, (2, 1), divisor_override=3)
"""
_SMOOTH_WINDOWS = """
F.interpolate({f4}, scale_factor=2, mode="bilinear")
F.interpolate({f4}, size=(4, 7), mode="bilinear", align_corners=True)|F.interpolate({f3}, size=5, mode="linear")
F.interpolate({f4}, size=(3, 5), mode="bicubic")|F.interpolate({f4}, size=(2, 2), mode="area")
F.interpolate({f4}, size=(3, 3), mode="bilinear", antialias=True)|F.interpolate({f5}, scale_factor=2, mode="trilinear")
F.lp_pool2d({f4}.abs() + 1, 2.0, 2)
F.grid_sample({f4}, F.affine_grid(torch.eye(2, 3, dtype={f4}.dtype).expand({f4}.shape[0], 2, 3), (1, 1, 3, 4)))
"""
_NORMS = """
F.layer_norm({f}, ({f}.shape[-1],))|F.layer_norm({f}, {f}.shape[-2:])|F.layer_norm({f}, {f}.shape)|F.instance_norm({f3})
F.instance_norm({f4})|F.group_norm({f}, 1)|F.group_norm({f}, 2)|F.batch_norm({f}, None, None, training=True)
F.rms_norm({f}, ({f}.shape[-1],))
F.batch_norm({f4}, torch.zeros({f4}.shape[1]).double(), torch.ones({f4}.shape[1]).double())
F.group_norm({f4}, {f4}.shape[1])
"""
_FOURIER = """
torch.fft.fft({f}, dim={d})|torch.fft.rfft({f}, dim={d}, norm={norm})|torch.fft.fft2({f})|torch.fft.rfft2({f})
torch.fft.ifft({c}, dim={d})|torch.fft.irfft(torch.fft.rfft({f}, dim={d}), n={N}, dim={d})
torch.fft.fftn({f}, dim={dims})|torch.fft.fftshift({x})|torch.fft.ifftshift({x}, {d})
torch.fft.irfft2(torch.fft.rfft2({f}), s={f}.shape[-2:])|torch.fft.fft({f}, n={upto}, dim={d})
torch.fft.hfft({f}, dim={d})|torch.fft.ihfft({f}, dim={d})|torch.fft.rfftn({f}, dim={dims})
torch.fft.rfft({f}, n={upto}, dim={d}).abs()|torch.fft.fftshift(torch.fft.fft({f}, dim={d}), dim={d}).real
"""
_RANDOM = """
F.dropout({f}, 0.0)|F.dropout({f}, 1.0)|F.dropout({f}, 0.5, training=False)|torch.bernoulli(({f} > 0).double())
torch.rand_like({f}) < 2|torch.randint_like({x}, 3, 4)|torch.randn_like({f}).shape|F.dropout2d({f4}, 1.0)
torch.normal({f}, 0.0)|F.alpha_dropout({f}, 0.5, False)
torch.multinomial(F.one_hot({x1}.argmax(), len({x1})).double(), 1)|torch.rand_like({f}).ge(0).all()
F.rrelu({f}, 0.5, 0.5)
"""


def _convolution(name: str, dims: int, transposed: bool):
    """A convolution with weights that are plain inputs of the program, so that their gradients are compared."""

    def draw(drawing):
        r = drawing.rng
        x = drawing.value("f", ndim=dims + 2)
        channels, dtype = drawing.first.shape[1], str(drawing.first.dtype).removeprefix("torch.")
        groups = r.choice([g for g in (1, 1, 1, 2, channels) if channels % g == 0])
        out = groups * r.randint(1, 2)
        kernel = tuple(r.choice([1, 2, 3, 3]) for _ in range(dims))
        shape = (channels, out // groups, *kernel) if transposed else (out, channels // groups, *kernel)
        weight = drawing.plain(shape, dtype)
        bias = drawing.plain((out,), dtype) if r.random() < 0.5 else None
        stride, dilation = r.choice([1, 1, 2]), r.choice([1, 1, 1, 2])
        padding = r.choice([0, 1, 1, 2])
        parts = [x, weight, f"bias={bias}", f"stride={stride}", f"padding={padding}", f"dilation={dilation}"]
        if transposed and stride > 1 and r.random() < 0.4:
            parts.append("output_padding=1")
        elif not transposed and r.random() < 0.2:
            parts[3:5] = ["stride=1", 'padding="same"']
        return f"{name}({', '.join([*parts, f'groups={groups}'])})"

    return draw


def _linear(drawing):
    x = drawing.value("f", least=1)
    dtype, out = str(drawing.first.dtype).removeprefix("torch."), drawing.rng.randint(1, 4)
    weight = drawing.plain((out, drawing.first.shape[-1]), dtype)
    return f"F.linear({x}, {weight}, {drawing.plain((out,), dtype) if drawing.rng.random() < 0.5 else None})"


def _affine_norm(name: str):
    """Layer, group and batch norms with weight and bias."""

    def draw(drawing):
        x = drawing.value("f", least=2)
        dtype, shape = str(drawing.first.dtype).removeprefix("torch."), drawing.first.shape
        size = shape[-1] if name in ("layer_norm", "rms_norm") else shape[1]
        weight = drawing.plain((size,), dtype)
        if name == "rms_norm":
            return f"F.rms_norm({x}, ({size},), {weight})"
        bias = drawing.plain((size,), dtype)
        if name == "layer_norm":
            return f"F.layer_norm({x}, ({size},), {weight}, {bias})"
        if name == "group_norm":
            groups = drawing.rng.choice([g for g in (1, 2, 3, size) if size % g == 0])
            return f"F.group_norm({x}, {groups}, {weight}, {bias})"
        return f"F.batch_norm({x}, None, None, {weight}, {bias}, training=True)"

    return draw


def _prelu(drawing):
    x = drawing.value("f", least=2)
    dtype = str(drawing.first.dtype).removeprefix("torch.")
    return f"F.prelu({x}, {drawing.plain((drawing.first.shape[1],), dtype)})"


_DRAWN = {
    "F.conv1d": _convolution("F.conv1d", 1, False),
    "F.conv2d": _convolution("F.conv2d", 2, False),
    "F.conv3d": _convolution("F.conv3d", 3, False),
    "F.conv_transpose1d": _convolution("F.conv_transpose1d", 1, True),
    "F.conv_transpose2d": _convolution("F.conv_transpose2d", 2, True),
    "F.conv2d again": _convolution("F.conv2d", 2, False),
    "F.conv2d once more": _convolution("F.conv2d", 2, False),
    "F.linear": _linear,
    "F.layer_norm with weight": _affine_norm("layer_norm"),
    "F.rms_norm with weight": _affine_norm("rms_norm"),
    "F.group_norm with weight": _affine_norm("group_norm"),
    "F.batch_norm with weight": _affine_norm("batch_norm"),
    "F.prelu": _prelu,
}

_WRITES = """
{x}.add_({s})|{x}.mul_(2)|{x}.add_({y})|{x}.sub_({y}, alpha=2)|{x}.zero_()|{x}.fill_({s})|{x}.copy_({y})|{x}.copy_({w})
{x}.neg_()|{f}.div_(2)|{x}[{ix}] = {s}|{x}[{ix}] = {s}|{x}[{ix}] += 1|{x}[{ix}].add_(5)|{x}[{ix}].mul_(2)
{x}[{ix}].zero_()|{x}[{ix}] = {x}[{ix}]|{x}[{ix}][{ix}] = 3|{x}[...] = {y}|{x}[:] = {z}|{x}[{x} > 0] = 1|{x}[{pos}] = 2
{x}[{x} > 0] *= 2|{x}[..., 0] = {x}[..., -1]|{x}.masked_fill_({x} > 0, {s})|{x}.clamp_(-2, 2)|{f}.relu_()
F.relu({f}, inplace=True)|F.hardtanh({f}, inplace=True)|{x}.abs_()|{x}.view(-1)[0] = 7|{x}.flatten()[:3] = 7
{x}.reshape(-1)[-1] = 1|{x}.view(-1).mul_(2)|{x}.transpose({d}, {e}).add_(1)|{x}.mT.mul_(2)|{x}.select({d}, {n}).add_(1)
{x}.narrow({d}, {n}, 1).fill_(3)|{x}.diagonal().add_(1)|{x}.unsqueeze(0).mul_(2)|{x}.squeeze().add_(1)
{x}.index_add_({d}, torch.tensor([{n}]), {x}.narrow({d}, 0, 1).clone())|{x}.index_fill_({d}, {pos}, 3)
{x}.scatter_({d}, ({x}.long().abs() % {N}), 1)|{x}.index_copy_({d}, torch.tensor([{n}]), {x}.narrow({d}, 0, 1).clone())
{x}.scatter_add_({d}, ({x}.long().abs() % {N}), {z})|{x}.put_(torch.tensor([0]), torch.tensor([5]).to({x}.dtype))
{x}.masked_scatter_({x} > 0, {x}.flatten().flip(0))|{x}.index_put_((torch.tensor([0]),), torch.tensor(2).to({x}.dtype))
{x}.tril_()|{x}.triu_({j})|{x}.cumsum_({d})|{x}.floor_()|{f}.lerp_({z}, 0.5)|{f}.addcmul_({y}, {y})|{f}.sign_()
{x}.pow_(2)|{x}.remainder_(3)|{b}.logical_not_()|{b}.fill_(True)|{i}.bitwise_and_(3)|{b}[{ix}] = True|{c}.mul_(2)
{c}.real.add_(1)|{c}[{ix}] = 1|{x}.chunk(2, {d})[0].add_(1)|{x}.unbind({d})[0].mul_(2)|{x}.split(1, {d})[-1].zero_()
{x}.flip({d}).add_(1)|{x}.expand_as({x}).add_(1)|{x}.unfold({d}, {upto}, {upto}).mul_(2)|{x}.flatten(0, 1).add_(1)
{x}.unflatten({d}, (-1, 1)).mul_(2)|{x}.permute({perm}).add_(1)|{x}.roll(1, {d}).add_(1)|{x}.detach().add_(1)
{x}.detach()[{ix}] = 2|{x}.contiguous().add_(1)|{x}.to({x}.dtype).add_(1)|{x}.double().add_(1)|{x}.view_as({x}).mul_(2)
{x}.transpose_({d}, {e})|{x}.unsqueeze_(0)|{x}.squeeze_()|{x2}.t_()|{x}.swapaxes_({d}, {e})
{x}.swapaxes({d}, {e})[0] = 1|{x}.fill_diagonal_(2)|{x} += 1|{x} *= {y}|{x} -= {y}|{x}.add_({x})|{x}.mul_({x}.flip({d}))
{x}.copy_({x}.roll(1, {d}).clone())|{x}.sub_({x}.mean({d}, keepdim=True).to({x}.dtype))|{x}[{ix}].copy_({x}[{ix}])
torch.add({x}, 1, out={x})|{f}.uniform_(2, 2)|{f}.normal_(1, 0)|{x}.bernoulli_(1.0)|{x}.random_(1, 2)
{f}.exponential_().zero_()|{x}.requires_grad_(False)|{x}[{pos}] += 1|{x}[[0, -1]] = 2|{x}[:, 0] += {x}[:, -1]
{x}[0] -= {x}[0].max()|torch.relu_({f})|{x}[{ix}].view(-1)[:1] = 4
"""


def _lines(text: str) -> dict[str, str]:
    """The templates of a text: between bars, of which one with spaces around it is torch's own."""
    return {key: key for line in text.split("\n") if line for key in re.split(r"(?<! )\|(?! )", line)}


SMOOTH = _lines(_SMOOTH + _SMOOTH_REDUCTIONS + _SMOOTH_PAIRS + _SMOOTH_LOSSES + _SMOOTH_WINDOWS + _NORMS + _FOURIER)
"""Statements whose results are rounded, also where they come out whole."""

FUNCTIONS = {
    **_lines(
        _POINTWISE + _REDUCTIONS + _SHAPES + _JOINS + _ALONG + _INDEXING + _PRODUCTS + _LOSSES + _WINDOWS + _RANDOM
    ),
    **SMOOTH,
    **_DRAWN,
}
WRITES = _lines(_WRITES)


def reads_what_it_writes(text: str, state: dict[str, object]) -> bool:
    """Whether an assignment reads elements that it has written: torch refuses only overlaps that it sees, and those
    that it does not see it copies in an order of its own.
    """
    left, is_assigned, right = text.partition("] = ")
    if not is_assigned:
        return False
    target, source = eval(f"{left}]", state), eval(right, state)
    if not torch.is_tensor(source) or source.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():
        return False
    read, written = (_places_in_memory(v) for v in (source, target))
    return bool(torch.isin(read, written).any()) and not torch.equal(read.expand(written.shape), written)


def has_written_over_itself(result: object) -> bool:
    """Say whether torch has made a tensor whose elements share places: a `_scatter` of overlapping windows keeps their
    strides, so that what it writes to one appears in others.
    """
    if not torch.is_tensor(result) or result._base is not None or result.layout != torch.strided:
        return False
    places = _places_in_memory(result).flatten()
    return len(places.unique()) < len(places)


def _places_in_memory(v: torch.Tensor) -> torch.Tensor:
    count = v.untyped_storage().nbytes() // v.element_size()
    return torch.arange(count).as_strided(v.shape, v.stride(), v.storage_offset())
