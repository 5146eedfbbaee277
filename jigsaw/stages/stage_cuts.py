"""Modules of each stage of a pipeline, from the names of the modules that the later stages begin with.

A *whole module* lies in one stage.  A module with a cut within it is *open*: its forward runs in every stage (the
modules that it calls do not).  So in a net whose forward is ``head(blocks[1](blocks[0](stem(x))))``, cut at
``blocks.1``, the net is open, and `stem`, `blocks.0`, `blocks.1` and `head` are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import ShardingError
from jigsaw.parallel.channel_parallel import PlannedCut
from jigsaw.parallel.parallelize import parallelize
from jigsaw.parallel.sharding import ShardingOptions, sharding_units
from jigsaw.ranks.mesh import axes_of_mesh, split_axis_mesh

# these are never called, only their elements are
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class StageCuts:
    """Modules that begin stages 1, 2, ..., and the stage of every whole module, in the order of registration."""

    begins: tuple[str, ...]
    stage_of: dict[str, int]

    @property
    def stages(self) -> int:
        return len(self.begins) + 1


def cut_stages(model: nn.Module, begins: Sequence[str], calls: Sequence[str] = ()) -> StageCuts:
    """Cut `model` before the modules `begins`, in the order of registration, or that of `calls`.  A module that is
    never called goes with the one registered before it.

    *Raises*: `ShardingError` for a name that the model does not have, has within another one, or has in another order.
    Also for a parameter of two stages.
    """
    known = dict(model.named_modules(remove_duplicate=False))
    unknown = [name for name in begins if not name or name not in known]
    if unknown:
        raise ShardingError(
            f"stages={list(begins)!r}: the model has no module {unknown[0]!r}; name modules as in named_modules()"
        )
    names = whole_names(model, begins)
    for name in begins:
        if name not in names:
            within = [other for other in begins if other.startswith(f"{name}.")]
            why = f"{within[0]!r} is within it" if within else "it is a list of modules, which nobody calls"
            raise ShardingError(
                f"stages={list(begins)!r}: {name!r} cannot begin a stage, as {why}; name an element of it"
            )
    order = [name for name in calls if name in names] or names
    places = [order.index(name) for name in begins if name in order]
    if places != sorted(set(places)) or len(places) < len(begins):
        has_them = "calls" if calls else "has"
        raise ShardingError(
            f"stages={list(begins)!r}: name each module once, in the order in which the model {has_them} them: "
            f"{[order[at] for at in sorted(set(places))]}"
        )
    called = {name: sum(at >= place for place in places) for at, name in enumerate(order)}
    stage_of, stage = dict[str, int](), 0
    for name in names:
        stage = stage_of[name] = called.get(name, stage)
    _check_shared(model, stage_of)
    return StageCuts(tuple(begins), stage_of)


def stage_of_tensor(name: str, cuts: StageCuts) -> int | None:
    """Return the stage of a parameter or buffer; None for one that every stage has."""
    parts = name.split(".")
    heads = (".".join(parts[:at]) for at in range(1, len(parts)))
    return next((cuts.stage_of[head] for head in heads if head in cuts.stage_of), None)


def whole_names(model: nn.Module, begins: Sequence[str]) -> list[str]:
    """Return the whole modules of a model whose stages begin with these modules, in the order of registration."""
    return list(_whole_names("", model, begins))


def _whole_names(name: str, module: nn.Module, begins: Sequence[str]) -> Iterator[str]:
    prefix = f"{name}." if name else ""
    if not name or isinstance(module, _CONTAINERS) or any(other.startswith(prefix) for other in begins):
        for child, its in module.named_children():
            yield from _whole_names(prefix + child, its, begins)
    else:
        yield name


def _check_shared(model: nn.Module, stage_of: dict[str, int]) -> None:
    owners: dict[nn.Parameter, str] = {}
    for name, stage in stage_of.items():
        for inner, p in model.get_submodule(name).named_parameters():
            first = owners.setdefault(p, f"{name}.{inner}")
            other = stage_of[next(name for name in stage_of if first.startswith(f"{name}."))]
            if other != stage:
                raise ShardingError(
                    f"parameter {first!r} of stage {other} is also {name}.{inner!s}, of stage {stage}; cut the model "
                    "where both are in one stage"
                )


def balanced_begins(
    model: nn.Module, stages: int, order: Callable[[Sequence[str]], Sequence[str]] = tuple
) -> tuple[str, ...]:
    """Choose modules to begin `stages` stages with, so that the stage of most parameters has as few as possible;
    `order` sorts names of modules by their calls.

    *Raises*: `ShardingError` for a model of fewer modules with parameters.
    """
    if stages == 1:
        return ()
    modules = dict(cut_places(model, stages))
    ordered = [(name, modules[name]) for name in order(tuple(modules))]
    sizes = [_weight_count(module) for _, module in ordered]
    return tuple(ordered[at][0] for at in _least_largest_cuts(sizes, stages))


def cut_places(model: nn.Module, stages: int) -> list[tuple[str, nn.Module]]:
    """Return modules that one of `stages` stages may begin with, by name.  They are elements of ``Sequential``,
    ``ModuleList`` and ``ModuleDict`` and children of the model; where these are too few, children of the largest.

    *Raises*: `ShardingError` for a model of fewer modules with parameters.
    """
    parts = _expanded("", model, 0 if isinstance(model, (nn.Sequential, *_CONTAINERS)) else 1)
    while len(parts) < stages:
        grown = [(_weight_count(module), name) for name, module in parts if _expanded(name, module)]
        if not grown:
            raise ShardingError(
                f"{type(model).__name__} has {len(parts)} modules with parameters to cut between, but the pipeline has "
                f"{stages} stages; take fewer ranks along the pipe axis, a schedule with fewer stages a rank "
                "(schedule='1f1b'), or name modules in stages="
            )
        largest = max(grown)[1]
        parts = [
            each
            for name, module in parts
            for each in (_expanded(name, module) if name == largest else [(name, module)])
        ]
    return parts


def _weight_count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _expanded(name: str, module: nn.Module, levels: int = 1) -> list[tuple[str, nn.Module]]:
    """Return the children with parameters; containers, and lists always, are replaced by theirs, `levels` deep."""
    prefix, modules = f"{name}." if name else "", list[tuple[str, nn.Module]]()
    for child, its in module.named_children():
        if isinstance(its, _CONTAINERS) or (levels and isinstance(its, nn.Sequential)):
            modules += _expanded(prefix + child, its, max(levels - 1, 0))
        elif _weight_count(its):
            modules.append((prefix + child, its))
    return modules


def _least_largest_cuts(sizes: Sequence[int], parts: int) -> list[int]:
    """Return where parts 1, 2, ... of a sequence begin, none empty, so that the largest sum of a part is smallest."""
    sums = [0, *accumulate(sizes)]
    # best[k][n]: the least largest sum of the first n in k parts, and where the last of them begins
    best = [[(sums[n], 0) for n in range(len(sums))]]
    for k in range(1, parts):
        row = [(0, 0)] * len(sums)
        for n in range(k + 1, len(sums)):
            row[n] = min((max(best[-1][m][0], sums[n] - sums[m]), m) for m in range(k, n))
        best.append(row)
    cuts, end = list[int](), len(sizes)
    for k in range(parts - 1, 0, -1):
        end = best[k][end][1]
        cuts.append(end)
    return cuts[::-1]


def mesh_of_stage(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Return the mesh of the ranks that have one stage together."""
    names = tuple(name for name, _ in axes_of_mesh(mesh) if name != axis)
    if names:
        return mesh[names]
    return split_axis_mesh(mesh, axis, ((axis, mesh.size()), ("alone", 1)))["alone"]


class StageModules(nn.Module):
    """Modules of a rank's stages, for code that looks for their parameters; the model calls them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        for at, module in enumerate(modules):
            self.add_module(str(at), module)


_UNIT_BYTES = 4 * 2**20  # least bytes of weights within a module of a stage that are gathered as a unit


def parallel_stage(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    sharding: ShardingOptions | None,
    channel: str,
    planned: Mapping[nn.Module, PlannedCut],
    gather_again: bool = False,
) -> StageModules:
    """`parallelize` the whole modules of a rank's stages together, with a unit of cut weights for each of them.

    `planned` has the layers of the whole model that a plan names (`parallelize(tensor=)`).
    """
    holder = StageModules(modules)
    options: dict[str, Any] = {"gather_again": gather_again}
    if sharding is not None:
        inner = [unit for unit in sharding_units(holder, _UNIT_BYTES) if unit not in modules]
        cut = "keep" if sharding.keeps else True
        options |= {"shard_weights": cut, "replicate": sharding.replicate, "units": [*inner, *modules]}
    tensor = {name: planned[module] for name, module in holder.named_modules() if module in planned}
    return parallelize(holder, mesh, channel=channel, tensor=tensor, **options)
