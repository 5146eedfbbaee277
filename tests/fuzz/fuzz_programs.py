"""Random programs of torch functions: lines of text that mean the same for whole tensors and for tiles.

A program has inputs (whole tensors, most of them cut) and statements. `make_program` draws both from a seed, and runs
each statement on whole tensors as it goes, so that only what plain torch accepts becomes part of it.
"""

from __future__ import annotations

import random
import re
import warnings
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from fuzz_functions import FUNCTIONS, WRITES, has_written_over_itself, reads_what_it_writes

HELPERS = '''
def values(shape, dtype="float64", seed=0, whole=True):
    """The same small numbers on every rank: whole ones, with which sums are exact, or any."""
    generator = torch.Generator().manual_seed(seed)
    if whole or not getattr(torch, dtype).is_floating_point:
        return torch.randint(-4, 5, shape, generator=generator).to(getattr(torch, dtype))
    return (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(getattr(torch, dtype))


def loss_of(*outputs):
    """A sum of all outputs with whole numbers as weights."""
    parts = [(y * values(tuple(y.shape), seed=at).to(y.dtype)).sum() for at, y in enumerate(outputs)]
    return sum((part.real if part.dtype.is_complex else part).double() for part in parts)
'''
exec(HELPERS)

AXES = {2: [{"lat": 2}], 4: [{"lat": 2, "lon": 2}, {"lat": 2, "lon": 2}, {"lat": 4}]}
_MOST_ELEMENTS, _LARGEST = 1500, 1e6


@dataclass(frozen=True)
class ProgramInput:
    """A tensor that every rank can make; `spec` says how it is cut, None that it stays plain."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float64"
    seed: int = 0
    whole: bool = True
    spec: tuple | None = None
    split: dict | None = None
    halo: dict | None = None
    periodic: tuple = ()
    has_grad: bool = False

    def values_text(self) -> str:
        return f"values({self.shape}, {self.dtype!r}, seed={self.seed}, whole={self.whole})"

    def cut_text(self) -> str:
        """The arguments of `jigsaw.shard` after the mesh."""
        named = [("split", self.split), ("halo", self.halo), ("periodic", self.periodic)]
        return ", ".join([str(self.spec), *(f"{name}={value}" for name, value in named if value)])


@dataclass(frozen=True)
class Statement:
    """A line of a program. `key` is the entry of the table that it was drawn from."""

    key: str
    text: str
    names: tuple[str, ...] = ()
    writes: bool = False


@dataclass(frozen=True)
class Program:
    """What one seed gives."""

    seed: int
    axes: dict[str, int]
    inputs: tuple[ProgramInput, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...] = ()
    """What the loss is made of; without any there is no backward pass."""

    def text(self, title: str) -> str:
        """A script that prints where tiles differ from whole tensors."""
        size = 1
        for n in self.axes.values():
            size *= n
        axes = ", ".join(f"{name}={n}" for name, n in self.axes.items())
        body = []
        for x in self.inputs:
            cut = f"cut({x.values_text()}, {x.cut_text()})" if x.spec is not None else x.values_text()
            body.append(f"{x.name} = {cut}")
            if x.has_grad:
                body.append(f"{x.name}.requires_grad_()")
        body += [s.text for s in self.statements]
        names = [x.name for x in self.inputs] + [n for s in self.statements for n in s.names]
        if self.outputs:
            body.append(f"loss_of({', '.join(self.outputs)}).backward()")
        grads = [x.name for x in self.inputs if x.has_grad and self.outputs]
        shown = [*(f'"{n}": {n}' for n in names), *(f'"{n}.grad": grad_of({n})' for n in grads)]
        return _SCRIPT.format(
            title="\n".join(f"# {line}" for line in title.splitlines()),
            helpers=HELPERS.strip(),
            size=size,
            axes=axes,
            body="\n    ".join(body),
            shown=", ".join(shown),
        )


_SCRIPT = """{title}
import torch
import torch.nn.functional as F

import jigsaw
from jigsaw.testing import on_ranks, world_mesh


{helpers}


def program(cut, grad_of):
    {body}
    return {{{shown}}}


@on_ranks({size})
def compare():
    mesh = world_mesh({axes})

    def grad_of(x):  # each rank has its part of the gradient of a plain tensor
        if isinstance(x, jigsaw.Tile) or x.grad is None:
            return x.grad
        return jigsaw.comm.all_reduce(x.grad, mesh, {axis_names})

    right = program(lambda x, *cut, **cuts: x, lambda x: x.grad)
    got = program(lambda x, *cut, **cuts: jigsaw.shard(x, mesh, *cut, **cuts), grad_of)
    for name, y in got.items():
        whole = y.full_tensor() if isinstance(y, jigsaw.Tile) else y
        is_same = torch.allclose(whole, right[name], equal_nan=True) if torch.is_tensor(whole) else whole == right[name]
        if mesh.get_rank() == 0:
            print(name, "as plain torch" if is_same else f"WRONG:\\n{{whole}}\\nplain torch:\\n{{right[name]}}")


if __name__ == "__main__":
    compare()
""".replace("{axis_names}", "mesh.mesh_dim_names")


# -- what a statement is drawn from ------------------------------------------------------------------------------------


class Drawing:
    """The choices of one statement: values that are alive, dims, numbers."""

    def __init__(self, rng: random.Random, live: dict[str, torch.Tensor], inputs: list[ProgramInput]) -> None:
        self.rng, self.live, self.inputs = rng, live, inputs
        self.first: torch.Tensor | None = None
        self.first_name = ""
        self.dim = self.other_dim = 0
        self.new_inputs: list[ProgramInput] = []
        self._drawn: dict[str, str] = {}

    def value(self, kind: str = "x", **wants: int) -> str:
        """The name of a value of that kind; the first that is asked for is what dims are drawn of."""
        names = [n for n, v in self.live.items() if _KINDS[kind](v) and wants.get("ndim", v.ndim) == v.ndim]
        if "least" in wants:
            names = [n for n in names if self.live[n].ndim >= wants["least"]]
        if not names:
            raise LookupError(kind)
        name = self.rng.choice(names[-4:] if self.rng.random() < 0.6 else names)
        if self.first is None:
            self.first, self.first_name = self.live[name], name
            if self.first.ndim:
                self.dim = self.rng.randrange(self.first.ndim)
                self.other_dim = self.rng.choice([d for d in range(self.first.ndim) if d != self.dim] or [0])
        return name

    def partner(self, same_shape: bool = False) -> str:
        """Another value that fits beside the first one: it broadcasts, or has its shape; else a new plain one."""
        shape = tuple(self.first.shape)

        def alike(v: torch.Tensor) -> bool:
            return v.dtype.is_floating_point == self.first.dtype.is_floating_point and v.dtype != torch.bool

        if same_shape:
            names = [n for n, v in self.live.items() if alike(v) and tuple(v.shape) == shape]
        else:
            names = [n for n, v in self.live.items() if alike(v) and _broadcasts(v.shape, shape)]
        others = [n for n in names if n != self.first_name]
        if others and self.rng.random() < 0.8:
            return self.rng.choice(others)
        if names and self.rng.random() < 0.2:
            return self.rng.choice(names)
        if not same_shape:
            shape = tuple(1 if self.rng.random() < 0.25 else n for n in shape)[self.rng.choice([0, 0, 0, 1]) :]
        return self.plain(shape)

    def plain(self, shape: tuple[int, ...], dtype: str | None = None, tile_share: float = 0.0) -> str:
        """A new plain input of that shape."""
        dtype = dtype or str(self.first.dtype).removeprefix("torch.")
        name = f"p{len(self.inputs) + len(self.new_inputs)}"
        grad = getattr(torch, dtype).is_floating_point and any(x.has_grad for x in self.inputs)
        is_whole = self.rng.random() < 0.6
        self.new_inputs.append(ProgramInput(name, shape, dtype, self.rng.randrange(99), is_whole, has_grad=grad))
        return name

    def size(self) -> int:
        return self.first.shape[self.dim] if self.first.ndim else 1

    def index(self) -> str:
        """A basic index of the first value: integers, slices, None, an ellipsis."""
        parts = []
        for n in self.first.shape[: self.rng.randint(1, max(1, self.first.ndim))]:
            how = self.rng.random()
            if how < 0.3 and n:
                parts.append(str(self.rng.randrange(-n, n)))
            elif how < 0.75:
                a, b = sorted((self.rng.randint(0, n), self.rng.randint(0, n)))
                b = b + 1 if a == b and b < n else b
                step = self.rng.choice(["", "", "", ":2"])
                parts.append(f"{a or ''}:{b if b < n else ''}{step}")
            else:
                parts.append(":")
        if self.rng.random() < 0.15:
            parts.insert(self.rng.randint(0, len(parts)), "None")
        if self.rng.random() < 0.2:
            parts.insert(0, "...")
            if len(parts) > 1:
                parts = parts[:2]
        return ", ".join(parts)

    def positions(self, most: int | None = None) -> str:
        """A plain tensor of positions along the dim."""
        n = self.size()
        if not n:
            raise LookupError("an empty dim")
        count = self.rng.randint(1, most or 4)
        return f"torch.tensor({[self.rng.randrange(n) for _ in range(count)]})"

    def number(self) -> str:
        return str(self.rng.choice([-3, -2, -1, 2, 3, 0.5, 4]))

    def shape(self) -> str:
        """A shape that the first value can be reshaped to."""
        n, dims = self.first.numel(), []
        while n > 1 and len(dims) < 3:
            k = self.rng.choice([k for k in range(1, n + 1) if n % k == 0])
            dims.append(k)
            n //= k
        dims.append(n)
        self.rng.shuffle(dims)
        if self.rng.random() < 0.3 and self.first.numel():
            dims[self.rng.randrange(len(dims))] = -1
        return f"({', '.join(map(str, dims))},)"

    def dims(self) -> str:
        count = self.rng.randint(1, max(1, self.first.ndim))
        found = self.rng.sample(range(max(1, self.first.ndim)), count)
        return f"({', '.join(map(str, found))},)"

    def fill(self, template: str) -> str:
        """The text of a template: each placeholder is drawn."""
        codes = re.findall(r"\{(\w+)\}", template)
        for code in codes:  # the first value comes before what is drawn to fit it
            if code.rstrip("12345") in _KINDS:
                self._drawn[code] = self._value_of(code)
                break
        return re.sub(r"\{(\w+)\}", lambda m: self._placeholder(m.group(1)), template)

    def _value_of(self, code: str) -> str:
        kind = code.rstrip("12345")
        return self.value(kind) if kind == code else self.value(kind, ndim=int(code[-1]))

    def _placeholder(self, code: str) -> str:
        """One value stands for all places of a kind; all else is drawn for each place but dims and numbers of them."""
        if code.rstrip("12345") in _KINDS:
            if code not in self._drawn:
                self._drawn[code] = self._value_of(code)
            return self._drawn[code]
        if code in ("d", "e", "n", "y", "z", "dims", "upto"):
            if code not in self._drawn:
                self._drawn[code] = self._choice(code)
            return self._drawn[code]
        return self._choice(code)

    def _choice(self, code: str) -> str:
        r = self.rng

        def negative(d: int) -> int:
            return d - self.first.ndim if r.random() < 0.3 and self.first.ndim else d

        choices = {
            "y": self.partner,
            "z": lambda: self.partner(same_shape=True),
            "d": lambda: negative(self.dim),
            "e": lambda: negative(self.other_dim),
            "n": lambda: r.randrange(self.size()) if self.size() else 0,
            "N": self.size,
            "upto": lambda: r.randint(1, max(1, self.size())),
            "s": self.number,
            "k": lambda: r.randint(1, 3),
            "j": lambda: r.randint(-2, 2),
            "ix": self.index,
            "pos": self.positions,
            "shape": self.shape,
            "dims": self.dims,
            "perm": lambda: tuple(r.sample(range(self.first.ndim), self.first.ndim)),
            "bool": lambda: r.choice([True, False]),
            "keep": lambda: r.choice([True, False]),
            "dtype": lambda: r.choice(["torch.float64", "torch.float32", "torch.int64", "torch.bool"]),
            "pieces": lambda: _pieces(r, self.size()),
            "norm": lambda: r.choice(['"backward"', '"ortho"', '"forward"']),
            "rank": lambda: self.first.ndim,
        }
        return str(choices[code]())


def _pieces(rng: random.Random, n: int) -> list[int]:
    a = rng.randint(0, n)
    return [a, n - a]


_KINDS = {
    "x": lambda v: v.dtype.is_floating_point or v.dtype in _INTEGERS,
    "f": lambda v: v.dtype.is_floating_point,
    "g": lambda v: v.dtype.is_floating_point,
    "w": lambda v: True,
    "i": lambda v: v.dtype in _INTEGERS,
    "b": lambda v: v.dtype == torch.bool,
    "c": lambda v: v.dtype.is_complex,
    "a": lambda v: True,
}
_INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.int16)


def _broadcasts(shape: torch.Size, to: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(a in (1, b) for a, b in pairs)


# -- making a program --------------------------------------------------------------------------------------------------


def ranks_of_seed(seed: int) -> int:
    return (2, 4)[seed % 2]


def make_program(seed: int) -> Program:
    """The program of a seed, the same on every rank."""
    rng = random.Random(seed)
    axes = rng.choice(AXES[ranks_of_seed(seed)])
    inputs = _draw_inputs(rng, axes)
    writes_share = rng.choice([0.0, 0.0, 0.25, 0.5])
    functions, writes = list(FUNCTIONS.items()), list(WRITES.items())
    state = plain_state(inputs)
    statements: list[Statement] = []
    wanted = rng.randint(3, 8)
    for attempt in range(40):
        if len(statements) == wanted:
            break
        inner = random.Random(f"{seed} {attempt}")
        is_write = inner.random() < writes_share
        key, template = inner.choice(writes if is_write else functions)
        live = {n: v for n, v in state.items() if isinstance(v, torch.Tensor) and n[0] in "xvp" and n[1:].isdigit()}
        drawing = Drawing(inner, live, inputs)
        try:
            text = template(drawing) if callable(template) else drawing.fill(template)
        except LookupError:
            continue
        state |= plain_state(drawing.new_inputs)
        made = _accept(key, text, is_write, state, len(statements))
        if made is None:
            for x in drawing.new_inputs:
                del state[x.name]
            continue
        inputs += drawing.new_inputs
        if isinstance(made, Statement):
            statements.append(made)
        else:
            break  # a write went wrong half-way: the state is spoilt
    return with_outputs(Program(seed, axes, tuple(inputs), tuple(statements)))


def plain_state(inputs: list[ProgramInput]) -> dict[str, object]:
    """The names that statements see, with whole tensors."""
    state: dict[str, object] = {"torch": torch, "F": F, "values": globals()["values"]}
    for x in inputs:
        state[x.name] = globals()["values"](x.shape, x.dtype, x.seed, x.whole)
        if x.has_grad:
            state[x.name].requires_grad_()
    return state


def _accept(key: str, text: str, is_write: bool, state: dict[str, object], at: int) -> Statement | bool | None:
    """The statement, run on whole tensors; None where torch refuses it, False where it spoilt the state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if not is_write:
                result = eval(text, state)
                if has_written_over_itself(result):
                    return None
            elif reads_what_it_writes(text, state):
                return None
            else:
                exec(text, state)
        except Exception:  # whatever torch says of arguments that do not fit
            return None
    if is_write:
        live = [v for v in state.values() if isinstance(v, torch.Tensor)]
        return Statement(key, text, (), True) if all(map(_is_tame, live)) else False
    if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size) and any(map(torch.is_tensor, result)):
        results = list(result)[:2]
        if len(results) < 1 or not all(isinstance(r, torch.Tensor) for r in results):
            return None
        names = tuple(f"v{2 * at + k}" for k in range(len(results)))
        text = f"{', '.join(names)}{',' if len(results) == 1 else ''}{'' if len(result) <= 2 else ', *_'} = {text}"
    else:
        results, names = [result], (f"v{2 * at}",)
        text = f"{names[0]} = {text}"
    if not all(_is_tame(r) for r in results if isinstance(r, torch.Tensor)):
        return None
    state.update(zip(names, results, strict=True))
    return Statement(key, text, names)


def _is_tame(v: torch.Tensor) -> bool:
    """Finite and small: later statements compute with it."""
    if v.numel() > _MOST_ELEMENTS or v.layout != torch.strided:
        return False
    if not v.numel() or v.dtype == torch.bool:
        return True
    size = v.detach().abs().double() if not v.dtype.is_complex else v.detach().abs()
    return bool(torch.isfinite(size).all()) and size.max().item() < _LARGEST


def with_outputs(program: Program) -> Program:
    """The program with a backward pass from all that came of tiles and requires grad, where torch can do it."""
    if not any(x.has_grad for x in program.inputs):
        return replace(program, outputs=())
    state = plain_state(list(program.inputs))
    from_tiles = {x.name for x in program.inputs if x.spec is not None}
    try:
        for s in program.statements:
            exec(s.text, state)
            names = names_in(s.text)
            if from_tiles.intersection(names):
                from_tiles.update(names[:1] if s.writes else s.names)
        outputs = tuple(n for n in state if n in from_tiles and torch.is_tensor(state[n]) and state[n].requires_grad)
        if outputs:
            globals()["loss_of"](*(state[n] for n in outputs)).backward()
    except Exception:  # changed in place after it was saved, or not differentiable
        return replace(program, outputs=())
    return replace(program, outputs=outputs)


def names_in(text: str) -> list[str]:
    """The values that a statement speaks of."""
    return re.findall(r"\b[xvp]\d+\b", text)


def _draw_inputs(rng: random.Random, axes: dict[str, int]) -> list[ProgramInput]:
    ndim = rng.choice([1, 2, 2, 3, 3, 4, 4, 4, 5])
    shape = tuple(rng.choice([1, 2, 3, 4, 5, 6, 7, 8] if ndim < 4 else [1, 2, 3, 4, 5, 6]) for _ in range(ndim))
    needs_grad = rng.random() < 0.6
    inputs: list[ProgramInput] = []
    for at in range(rng.choice([1, 2, 2, 3])):
        how = rng.random()
        if at and how < 0.3:
            shape_here = tuple(1 if rng.random() < 0.3 else n for n in shape)[rng.choice([0, 0, 1]) :]
        elif at and how < 0.4:
            shape_here = tuple(rng.sample(shape, len(shape)))
        else:
            shape_here = shape
        dtype = rng.choices(
            ["float64", "float32", "int64", "bool", "complex128", "int32", "uint8", "bfloat16", "float16"],
            [70, 8, 10, 5, 3, 1, 1, 1, 1],
        )[0]
        is_plain = at and rng.random() < 0.25
        cut = {} if is_plain else _draw_cut(rng, shape_here, axes)
        grad = needs_grad and getattr(torch, dtype).is_floating_point and rng.random() < 0.85
        whole = rng.random() < 0.6
        inputs.append(ProgramInput(f"x{at}", shape_here, dtype, rng.randrange(99), whole, has_grad=grad, **cut))
    return inputs


def _draw_cut(rng: random.Random, shape: tuple[int, ...], axes: dict[str, int]) -> dict:
    from jigsaw.errors import ShardingError
    from jigsaw.geometry.layout import Layout

    spec: list[tuple[str, ...]] = [() for _ in shape]
    for axis in axes:
        if shape and rng.random() < 0.9:
            place = rng.randrange(len(shape))
            spec[place] = (*spec[place], axis)
    split, halo = {}, {}
    for d, names in enumerate(spec):
        pieces = 1
        for name in names:
            pieces *= axes[name]
        if names and rng.random() < 0.6:
            low = 0 if rng.random() < 0.3 or shape[d] < pieces else 1
            inner = _inner_points(rng, shape[d], pieces, low)
            split[d] = (0, *inner, shape[d])
    cut = {"spec": tuple(names[0] if len(names) == 1 else names or None for names in spec), "split": split or None}
    if rng.random() < 0.3 and shape:
        d = rng.choice([d for d, names in enumerate(spec) if names] or [rng.randrange(len(shape))])
        halo = {d: (rng.randint(0, 2), rng.randint(0, 2))}
        periodic = (d,) if rng.random() < 0.3 else ()
        try:
            Layout.of(shape, cut["spec"], axes, split=split or "balanced", halo=halo, periodic=periodic)
        except ShardingError:
            return cut
        cut |= {"halo": halo, "periodic": periodic}
    return cut


def _inner_points(rng: random.Random, n: int, pieces: int, least: int) -> list[int]:
    if least:
        return sorted(rng.sample(range(1, n), pieces - 1))
    return sorted(rng.randint(0, n) for _ in range(pieces - 1))
