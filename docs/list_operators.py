"""docs/operators.md, made from the closed table: ``python docs/list_operators.py > docs/operators.md``."""

from __future__ import annotations

import re
import types
from collections import defaultdict

import torch
from torch.overrides import get_overridable_functions

import jigsaw
from jigsaw.ops import unknown_functions
from jigsaw.tile.table import table

HEAD = f"""# Which torch functions tiles answer

Made from the closed table, with torch {torch.__version__.split("+")[0]}, by
`python docs/list_operators.py > docs/operators.md`; a test fails when it is stale. Names without a dot are in `torch`;
`.name` is a method or attribute of `torch.Tensor` (left out where the function of that name is answered alike). A
function along a dim that it needs whole raises
`ShardingError` with the `redistribute` to write; `jigsaw.parallelize(model, mesh, strict=False)` and
`jigsaw.strict_mode(False)` run what is refused on the whole tensor, on every rank. On tiles that nothing cuts every
function is answered.
"""

# For each file that fills the table: which cuts its functions take, what they send.
ROOMS = {
    "pointwise": (
        "any; tiles meet at the cuts of one of them",
        "nothing; where cut points differ, the rows between them",
    ),
    "ops.reductions": ("any", "one all-reduce of the result, of the axes that cut a reduced dim"),
    "ops.shapes": ("any that the new shape can keep; cut points move to multiples", "nothing, or the rows that move"),
    "ops.joining": ("any along the other dims", "nothing, or the rows that move"),
    "ops.along": (
        "any",
        "nothing along a whole dim; softmax two all-reduces of a row; orders and quantiles bring a cut dim whole and "
        "send it back; segments the rows of one that crosses a cut",
    ),
    "ops.covariances": ("any", "what a mean and a product send; powers nothing"),
    "ops.creation": ("any", "nothing; random numbers a seed of 8 bytes"),
    "ops.cumulative": ("any", "one all-gather of one row; cummax and cummin two"),
    "ops.diagonals": ("any", "nothing where one of the two dims is cut; where both are, one of them is brought whole"),
    "ops.differences": ("any", "rows from the next rank"),
    "ops.extremes": ("any", "one all-gather of each rank's own extreme and its place"),
    "ops.indexing": ("any", "writing plain values nothing; picking by whole indices one all-reduce of what is picked"),
    "ops.listing": ("any", "the tile to every rank: the size depends on the values"),
    "ops.lookup": ("any", "nothing for whole tables"),
    "ops.masked": (
        "any; functions of `torch.masked`",
        "what the function without a mask sends, and of means the counts",
    ),
    "ops.pairs": ("any", "the operand that meets every row of the other; norms an all-reduce"),
    "ops.random_numbers": ("any", "a seed of 8 bytes"),
    "ops.scattering": ("any", "the rows that indices along a cut dim ask for, or write"),
    "ops.turns": ("any", "the rows that change their rank"),
    "ops.whole_dims": ("any", "a cut dim is brought whole and sent back"),
    "nn.activation": ("any", "nothing; glu along a cut dim the rows of its halves"),
    "nn.stencils.adaptive": ("any", "the rows that windows need"),
    "nn.spheres.sphere": (
        "any; operators of torch-harmonics, by their names in torch.ops",
        "the rows of latitude that a filter or a neighborhood reaches; where longitude is cut, the tile to finer rows "
        "and the result back",
    ),
    "nn.stencils.patches": ("any", "the rows that windows need"),
    "nn.products.recurrent": ("any", "nothing along whole sequences; cut ones are brought whole and sent back"),
    "nn.stencils.sampling": ("any", "the input along space to every rank"),
    "ops.picking": ("integer tiles as indices into plain tables: any", "nothing"),
    "ops.complex_parts": ("any", "nothing"),
    "ops.fourier": ("any", "one exchange to transform a cut dim, one back where it returns"),
    "ops.into_torch.tensor_methods": ("any", "nothing, unless its words say so (`.tolist()`, `.numpy()`)"),
    "nn.products.product": ("any", "the operand, or the result, that is cheapest to move"),
    "nn.attention.scaled_dot_product": ("any", "keys and values along a cut sequence"),
    "nn.attention.multi_head_attention": ("any", "keys and values along a cut sequence; what its projections send"),
    "nn.products.linear": (
        "any; a DTensor weight by outputs or by inputs",
        "nothing; all-reduces for channels that are cut",
    ),
    "nn.stencils.conv": ("any", "the rows that a window of another rank's border needs"),
    "nn.stencils.pool": ("any; positions (`return_indices`) need whole spatial dims", "the rows that windows need"),
    "nn.stencils.pad": ("any", "nothing; circular and reflected rows of other ranks"),
    "nn.stencils.interpolate": ("any", "the rows beside a border"),
    "nn.norms.norm": ("any", "two all-reduces of statistics where they are over cut dims"),
    "nn.losses.loss": (
        "any, alike for input and target",
        "one all-reduce of the sum; of cut classes three numbers a position",
    ),
    "nn.losses.margin_losses": ("any", "one all-reduce of the sum; what the functions send that a loss is made of"),
    "nn.dropout": ("any", "a seed of 8 bytes"),
    "nn.products.embedding": (
        "any indices; a DTensor weight by rows",
        "nothing for whole tables; for one that is cut by rows an all-reduce of what is picked",
    ),
    "nn.stencils.pixel": ("any; cut points move to multiples", "nothing, or the rows that move"),
}
REFUSED = "refused"


def _namespace(owner: object) -> str:
    if owner is torch or owner is torch.functional:
        return ""
    if isinstance(owner, types.ModuleType):
        return owner.__name__.removeprefix("torch.") + "."
    return "."


def room_of(function: object) -> str:
    """The file that answers a function on cut dims, or "refused"."""
    entry = table.entries.get(function)
    found = table.find_rest(function) if entry is None else entry.handler
    plain = getattr(found, "func", found)
    if plain is unknown_functions.write_new_values:  # written into its first argument
        return REFUSED if found.args[0] in unknown_functions.CHANGES_SHAPE else room_of(found.args[1])
    if plain is unknown_functions.run_unknown_function:
        return REFUSED
    room = plain.__module__.removeprefix("jigsaw.")
    return "pointwise" if room == "ops.pointwise" else room


def answered_names() -> dict[str, list[str]]:
    """The names of all functions of torch that can meet a tile, by the file that answers them."""
    found: dict[str, set[str]] = defaultdict(set)
    places: dict[str, str] = {}
    for owner, functions in sorted(get_overridable_functions().items(), key=lambda each: _namespace(each[0]) == "."):
        for function in functions:
            name = getattr(function, "__name__", "")
            if name in ("__get__", "__set__"):
                name = getattr(function.__self__, "__name__", "")
            if not name or (name.startswith("_") and not name.startswith("__")):
                continue
            if name == "__cuda_array_interface__":  # in builds for CUDA alone, and the page is that of any build
                continue
            room = room_of(function)
            full = _namespace(owner) + name
            if full.startswith(".") and places.get(name) == room:
                continue
            places[full] = room
            found[room].add(full)
    for function in table.entries:
        if isinstance(function, str):
            found[room_of(function)].add(f"ops.{function.replace('::', '.')}")
    return {room: sorted(names) for room, names in found.items()}


def operators_page() -> str:
    """The page."""
    names = answered_names()
    lines = [HEAD]
    for room in sorted(set(names) - {REFUSED}):
        assert room in ROOMS, f"say in ROOMS which cuts the functions of {room} take, and what they send"
        cuts, sends = ROOMS[room]
        code = "ops/pointwise.py" if room == "pointwise" else room.replace(".", "/") + ".py"
        lines += [f"## {code}", "", f"Cuts: {cuts}. Sends: {sends}.", "", _wrapped(names[room]), ""]
    lines += ["## Refused on cut dims", "", "No answer yet for any cut; whole with `strict=False`.", ""]
    lines += [_wrapped(names[REFUSED]), ""]
    return "\n".join(lines)


def _wrapped(names: list[str]) -> str:
    text = ", ".join(f"`{name}`" for name in names)
    return re.sub(r"(.{100,138}?,) ", r"\1\n", text)


if __name__ == "__main__":
    assert jigsaw.__version__
    print(operators_page(), end="")
