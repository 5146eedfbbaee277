"""The two runs that are compared: a net trained in one process, and the same net on tiles on every rank."""

from __future__ import annotations

import json
import linecache
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_net import ZooNet, as_built, default_dtype
from zoo_random import drawn_by_place
from zoo_table import ZOO

import jigsaw
from jigsaw.testing import world_mesh

STEPS = 3
Record = dict[str, Tensor]


# -- the oracle -------------------------------------------------------------------------------------------------------


@contextmanager
def right_norms() -> Iterator[None]:
    """torch 2.13's batch and instance norm on CPU give wrong gradients at batch 1 when theirs comes back channels-last
    (``norm(x).flatten(2).transpose(1, 2)``); with a contiguous one they are right.
    """
    kept = {name: getattr(F, name) for name in ("batch_norm", "instance_norm")}

    def mended(norm: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            y = norm(*args, **kwargs)
            if y.requires_grad:
                y.register_hook(Tensor.contiguous)
            return y

        return call

    for name, norm in kept.items():
        setattr(F, name, mended(norm))
    try:
        yield
    finally:
        for name, norm in kept.items():
            setattr(F, name, norm)


@contextmanager
def without_casts(is_wide: bool) -> Iterator[None]:
    """What a net of float64 casts to float32 stays float64 where it says so (`ZooNet.is_wide`), in both runs: what is
    left of a difference is not its own rounding.
    """
    kept = [(place, name, getattr(place, name)) for place in (Tensor, jigsaw.Tile) for name in ("to", "type", "float")]
    for place, name, method in kept if is_wide else ():
        setattr(place, name, place.double if name == "float" else _to_float64(method))
    try:
        yield
    finally:
        for place, name, method in kept:
            setattr(place, name, method)


@contextmanager
def wide_complex(net: ZooNet) -> Iterator[None]:
    """What such a net makes as ``torch.cfloat`` in a step is complex128; not for longer: `torch.load` asks for it."""
    kept = torch.cfloat
    torch.cfloat = torch.complex128 if net.is_wide else kept
    try:
        yield
    finally:
        torch.cfloat = kept


def _to_float64(method: Any) -> Any:
    def wide(dtype: Any) -> Any:
        return torch.float64 if dtype is torch.float32 else dtype

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*map(wide, args), **{name: wide(value) for name, value in kwargs.items()})

    return call


def train_whole(net: ZooNet, last_digit: float = 0.0, seed: int = 0) -> Record:
    """Three steps in this process, on whole tensors; with `last_digit` from an input that differs by so much."""
    with right_norms(), without_casts(net.is_wide), default_dtype(net.dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = net.draw_inputs()
        for x, given in zip(inputs, net.inputs, strict=True):
            if last_digit and x.is_floating_point():
                x.mul_(
                    1 + last_digit * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
                )
            x.requires_grad_(given.spec is not None and x.is_floating_point())
        model = net.model()
        with drawn_by_place(world_mesh(alone=1)):
            record, *_ = _train(net, model, inputs, net.draw_targets(), lambda i: _gradient_of(inputs[i]))
    if not any(found.any() for name, found in record.items() if name.startswith("gradient")):
        raise ValueError("every gradient is zero, so any run would be exact; build the net otherwise")
    return record


@dataclass(frozen=True)
class OwnNoise:
    """How exact one process is: its runs from inputs that differ in the last digit, and the run in float64."""

    nearby: Sequence[Record] = ()
    reference: Record | None = None

    def beyond(self, name: str, got: Tensor, want: Tensor) -> float:
        """How much farther `got` is from `want` than three times the farthest of the process's other runs.

        It is no farther than it should be where it is as near to float64 as one of the process's own runs. bfloat16
        makes such tensors: a bias's gradient that one process sums up in bfloat16, and ranks in two shorter sums.
        """
        runs = [run[name] for run in self.nearby]
        lacking = _farthest(got, want) - 3 * max((_farthest(run, want) for run in runs), default=0.0)
        if self.reference is not None and name in self.reference:
            exact = self.reference[name]
            own = max(_farthest(run, exact) for run in (want, *runs))
            lacking = min(lacking, _farthest(got, exact) - own)
        return max(lacking, 0.0)


def _farthest(x: Tensor, y: Tensor) -> float:
    wide = torch.complex128 if x.is_complex() else torch.float64
    return (x.to(wide) - y.to(wide)).abs().nan_to_num(torch.inf).max().item()


def measure_noise(net: ZooNet, last_digit: float, exists_in_float64: bool) -> OwnNoise:
    """Four more runs of one process, and one in float64 of the same weights, as they are built, casts left out.

    A net that draws other numbers in float64 is another net there, which its first loss tells.
    """
    nearby = [train_whole(net, last_digit, seed) for seed in range(5, 9)]
    if not exists_in_float64:
        return OwnNoise(nearby)
    reference = train_whole(replace(net, dtype=torch.float64, drawn=net.dtype, prepare=as_built, casts=True))
    losses = nearby[0]["loss 0"].item(), reference["loss 0"].item()
    return OwnNoise(nearby, reference if abs(losses[0] - losses[1]) <= 0.05 * abs(losses[1]) else None)


# -- on ranks ---------------------------------------------------------------------------------------------------------


@dataclass
class RankVerdict:
    """What a rank has to say of a net: how it ended, and the first cause."""

    verdict: str  # exact, refused, untyped, wrong
    cause: str = ""
    function: str = ""
    place: str = ""
    detail: str = ""
    worst: float = 0.0
    sent: dict[str, int] = field(default_factory=dict[str, int])  # in the first step, by kind
    sent_last: dict[str, int] = field(default_factory=dict[str, int])  # in the last one
    said: list[str] = field(default_factory=list[str])
    seconds: float = 0.0


def named_net(net: ZooNet | str) -> ZooNet:
    """Nets reach the ranks by key: most are made by functions that do not pickle."""
    return ZOO[net] if isinstance(net, str) else net


def import_package(net: ZooNet | str) -> None:
    """Import what a net needs, so that its own time is its own."""
    named_net(net).model()


def train_on_tiles(named: ZooNet | str, axes: dict[str, int], options: dict[str, Any], folder: str) -> RankVerdict:
    """One rank's side; the verdict is also left in `folder`, in case another rank never answers."""
    net = named_net(named)
    with without_casts(net.is_wide), default_dtype(net.dtype):
        return judged(lambda: compare_with_whole(net, axes, options, folder), folder)


def judged(run: Callable[[], RankVerdict], folder: str) -> RankVerdict:
    """The verdict of `run`, or of the error that it ends with, with what jigsaw said meanwhile."""
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = run()
        except Exception as error:
            found = verdict_of_error(error)
        found.said = sorted({str(w.message).split("\n")[0] for w in caught if "jigsaw" in w.filename + str(w.message)})
    found.seconds = time.monotonic() - started
    (Path(folder) / f"rank{torch.distributed.get_rank()}").write_text(json.dumps(found.__dict__))
    return found


def compare_with_whole(
    net: ZooNet,
    axes: dict[str, int],
    options: dict[str, Any],
    folder: str,
    finish: Callable[[nn.Module], nn.Module] = as_built,
) -> RankVerdict:
    """Train on tiles, and compare with the run on whole tensors; `finish` is what is done after `parallelize`."""
    mesh = world_mesh(**axes)
    model = finish(jigsaw.parallelize(net.model(), mesh, **options))
    wholes = net.draw_inputs()
    inputs: list[Any] = []
    for x, given in zip(wholes, net.inputs, strict=True):
        tile: Any = x if given.spec is None else jigsaw.shard(x, mesh, given.spec)
        if given.spec is not None and x.is_floating_point():
            tile.local.requires_grad_()
        inputs.append(tile)
    targets = [
        y if given.spec is None else jigsaw.shard(y, mesh, given.spec)
        for y, given in zip(net.draw_targets(), net.targets, strict=True)
    ]

    def input_gradient(i: int) -> Tensor | None:
        spec = net.inputs[i].spec
        if spec is None:  # what is passed whole (a time, a text) is not trained
            return None
        gradient = _gradient_of(inputs[i].local).contiguous()
        return jigsaw.from_local(gradient, mesh, spec, wholes[i].shape).full_tensor()

    # a loss is called outside of the model
    with jigsaw.strict_mode(options.get("strict", True)), drawn_by_place(mesh):
        record, *sent = _train(net, model, inputs, targets, input_gradient)
    found = compare_records(net, record, folder)
    found.sent, found.sent_last = sent
    return found


def compare_records(net: ZooNet, record: Record, folder: str, is_part: bool = False) -> RankVerdict:
    """The verdict on what a run gave, or on the part of it that this rank has."""
    expected: Record = torch.load(Path(folder) / "whole")
    measured = Path(folder) / "noise"
    noise = OwnNoise(*torch.load(measured)) if measured.exists() else OwnNoise()
    if is_part:
        expected = {name: expected[name] for name in record if name in expected}
    rtol = net.rtol or (1e-9 if net.dtype == torch.float64 else 1e-3)
    lines, worst = _differences(record, expected, rtol, noise)
    found = RankVerdict("wrong" if lines else "exact", detail="\n".join(lines), worst=worst)
    if lines:
        found.cause = f"{lines[0]} (and {len(lines) - 1} more tensors)"
    return found


def _train(
    net: ZooNet, model: nn.Module, inputs: Sequence[Any], targets: Sequence[Any], input_gradient: Any
) -> tuple[Record, dict[str, int], dict[str, int]]:
    """Three steps; what they give by name, and the bytes that the first and the last one send, by kind.

    Adam for few weights in float64; else SGD, for Adam's first steps have the signs of gradients that are rounding.
    """
    torch.manual_seed(1)  # of what is drawn in training
    record: Record = {}
    few = sum(p.numel() for p in model.parameters()) < 500_000 and (net.drawn or net.dtype) == torch.float64
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam(trained, lr=1e-3, foreach=False)  # some weights may be cut, others not
        if few
        else torch.optim.SGD(trained, lr=1e-3, momentum=0.9, foreach=False)
    )
    sent: list[Counter[str]] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with ExitStack() as stack:
            stack.enter_context(wide_complex(net))
            traffic = stack.enter_context(jigsaw.comm.count())
            output = model(*inputs) if net.call is None else net.call(model, *inputs)
            leaves = list(float_leaves(output))
            loss = net.loss(output, *targets) if net.loss else sum_of_squares([leaf for _, leaf in leaves])
            loss.backward()
        record[f"loss {step}"] = loss.detach().clone()
        sent.append(Counter())
        for call in traffic.calls:
            sent[-1][call.kind] += call.sent_bytes
        if step == 0:
            for name, leaf in leaves:
                record[name] = _whole(leaf).detach().clone()
            for name, p in model.named_parameters():
                if p.requires_grad:
                    record[f"gradient of {name}"] = _whole(_gradient_of(p)).clone()
            for i, given in enumerate(net.inputs):
                gradient = None if given.spec is None or given.classes else input_gradient(i)
                if gradient is not None:
                    record[f"gradient of input {i}"] = gradient.detach().clone()
        if not few:
            _clip_gradients(trained)
        optimizer.step()
    record |= {f"trained {name}": _whole(p.detach()).clone() for name, p in model.named_parameters()}
    record |= {f"buffer {name}": b.detach().clone() for name, b in model.named_buffers()}
    return record, dict(sent[0]), dict(sent[-1])


def _clip_gradients(trained: Sequence[Tensor]) -> None:
    """As `clip_grad_norm_`, which takes no cut weights beside others."""
    norm = torch.stack([_whole(_gradient_of(p)).norm() for p in trained]).norm()
    for p in trained:
        if p.grad is not None:
            p.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0).item())


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _gradient_of(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def sum_of_squares(leaves: Sequence[Any]) -> Any:
    """The mean squared error of every tensor to a random target of its shape, added; drawn in float32 for any dtype."""
    total: Any = 0
    for i, leaf in enumerate(leaves):
        generator = torch.Generator().manual_seed(300 + i)
        dtype = torch.complex64 if leaf.is_complex() else torch.float32
        target = torch.randn(tuple(leaf.shape), generator=generator, dtype=dtype)
        error = leaf - target
        total = total + ((error * error.conj()).real if leaf.is_complex() else error * error).mean()
    return total


def float_leaves(output: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    if isinstance(output, (Tensor, jigsaw.Tile)):
        if (output.is_floating_point() or output.is_complex()) and output.requires_grad:
            yield name, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from float_leaves(value, f"{name}[{key!r}]")
    elif isinstance(output, (list, tuple)):
        for i, value in enumerate(output):
            yield from float_leaves(value, f"{name}[{i}]")


def _differences(found: Record, expected: Record, rtol: float, noise: OwnNoise) -> tuple[list[str], float]:
    """What differs by more than the `noise` of one process, a line each, and the worst difference, relative to the
    greatest number of its tensor.

    Gradients that are nothing but rounding (a bias before a norm) are compared with the greatest of all gradients,
    and what was trained with the whole of itself: Adam takes the sign of such a gradient.
    """
    lines: list[str] = []
    worst = 0.0
    of_gradients = max((b.abs().max().item() for n, b in expected.items() if "gradient" in n and b.numel()), default=0)
    lines += [f"{name}: is missing" for name in expected if name not in found]
    for name, got in found.items():
        want = expected.get(name)
        if want is None:
            lines.append(f"{name}: the run on whole tensors has none")
        elif got.shape != want.shape or got.dtype != want.dtype:
            lines.append(f"{name}: {got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}")
        elif got.numel():
            error, scale = _farthest(got, want), _farthest(want, torch.zeros_like(want))
            floor = of_gradients * 1e-3 if "gradient" in name else 1.0 if "trained" in name else 1e-3
            relative = noise.beyond(name, got, want) / max(scale, floor, 1e-30)
            worst = max(worst, relative)
            # an optimizer's step magnifies rounding: g / (|g| + 1e-8)
            if not relative <= (rtol if name.startswith(("output", "gradient", "loss 0")) else max(rtol, 1e-6)):
                lines.append(f"{name}: off by {error:.3g} of {scale:.3g}")
    return lines, worst


# -- the first cause --------------------------------------------------------------------------------------------------


def verdict_of_error(error: Exception) -> RankVerdict:
    """Refused, when jigsaw raises a typed error; else untyped. With the function of torch, and the net's own line."""
    function, place, last = "", "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        last = f"{file}:{line}"
        if not function and frame.f_code.co_name in ("__torch_function__", "_call_handler"):
            known = frame.f_locals.get("func", frame.f_locals.get("function"))
            function = getattr(known, "__name__", str(known)) if known is not None else ""
        if not any(part in file for part in ("/torch/", "/jigsaw/", "zoo_training", "zoo_net")) and not function:
            place = f"{file.split('site-packages/')[-1]}:{line}: {linecache.getline(file, line).strip()}"
    by_jigsaw = "/jigsaw/" in last and type(error).__name__ in (
        "ShardingError",
        "WaitError",
        "TypeError",
        "ValueError",
        "IndexError",
        "RuntimeError",
    )
    typed = isinstance(error, jigsaw.ShardingError) or (by_jigsaw and _raised_by_hand(error))
    message = str(error).strip().split("\n")[0] or type(error).__name__
    return RankVerdict(
        "refused" if typed else "untyped",
        cause=message if typed else f"{type(error).__name__}: {message}",
        function=function,
        place=place,
        detail="".join(traceback.format_exception(error)[-12:]),
    )


def _raised_by_hand(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and (frames[-1].line or "").lstrip().startswith("raise")
