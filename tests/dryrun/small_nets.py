"""Small nets of the kinds that people train: a U-Net, a transformer, a mixer; and what a real rank counts of a step."""

import torch
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.testing import world_mesh


class SmallUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.pool = nn.Conv2d(8, 16, 2, stride=2)
        self.deep = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x):
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(self.deep(self.pool(skip)))], 1))


class _Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(x)


class SmallTransformer(nn.Module):
    def __init__(self, dim=16, heads=2, layers=2, patch=4):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.blocks = nn.ModuleList([_Block(dim, heads) for _ in range(layers)])

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x


class SmallMixer(nn.Module):
    """Mixes along a cut dim, then along the channels."""

    def __init__(self, rows=32, dim=12):
        super().__init__()
        self.embed, self.norm = nn.Linear(3, dim), nn.LayerNorm(dim)
        self.rows = nn.Sequential(nn.Linear(rows, 2 * rows), nn.GELU(), nn.Linear(2 * rows, rows))
        self.channels = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, 3))

    def forward(self, x):
        x = self.embed(x.movedim(1, -1))
        x = x + self.rows(self.norm(x).transpose(1, -1)).transpose(1, -1)
        return self.channels(x)


# net, global shape, rows to keep together in the cut dims
class SmallSpectral(nn.Module):
    """Keeps the low rows of what it makes, among zeros that torch made whole, as Fourier neural operators do."""

    def __init__(self):
        super().__init__()
        self.lift, self.out = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)

    def forward(self, x):
        y = self.lift(x)
        low = torch.zeros(y.shape, dtype=y.dtype, device=y.device)
        low[:, :, :12, :20] = 2 * y[:, :, :12, :20]
        low += y
        return self.out(low) + x


NETS = {
    "unet": (SmallUNet, (1, 3, 32, 40), 2),
    "transformer": (SmallTransformer, (1, 3, 32, 40), 4),
    "mixer": (SmallMixer, (1, 3, 32, 10), 1),
    "spectral": (SmallSpectral, (1, 3, 32, 40), 1),
}
SPEC = (None, None, "lat", "lon")


def counted_step(name, axes, **options):
    """On a real rank: the calls of a forward and of a backward pass, as (kind, bytes sent, messages)."""
    make, shape, align = NETS[name]
    mesh = world_mesh(**axes)
    model = jigsaw.parallelize(make(), mesh, **options)
    spec = tuple(a if a in axes else None for a in SPEC)
    tile = jigsaw.shard(torch.randn(shape), mesh, spec, align={2: align, 3: align})
    found = {}
    with comm.count() as forward:
        loss = model(tile).square().mean()
    with comm.count() as backward:
        loss.backward()
    for phase, counted in (("forward", forward), ("backward", backward)):
        found[phase] = by_kind(counted.calls)
    return found


def by_kind(calls):
    kinds = {}
    for call in calls:
        size, messages = kinds.get(call.kind, (0, 0))
        kinds[call.kind] = size + call.sent_bytes, messages + call.messages
    return kinds


def dry_step(name, axes, **options):
    """The report of the same step."""
    make, shape, align = NETS[name]
    spec = tuple(a if a in axes else None for a in SPEC)
    return jigsaw.dry_run(make(), shape, mesh=axes, spec=spec, align={2: align, 3: align}, **options)
