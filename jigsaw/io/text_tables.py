"""Texts of numbers of bytes and of tables of cells, for people."""

from __future__ import annotations

from collections.abc import Sequence

_BYTE_UNITS = ((3, "kB"), (6, "MB"), (9, "GB"))


def bytes_text(count: int | None) -> str:
    """Return a number of bytes in the unit that shows it best; None is unknown."""
    if count is None:
        return "unknown"
    if count < 1000:
        return f"{count} B"
    value, unit = next(((count / 10**p, u) for p, u in _BYTE_UNITS if count < 999.5 * 10**p), (count / 1e12, "TB"))
    return f"{value:.3g} {unit}"


def align_columns(lines: Sequence[Sequence[str]], left: bool = False) -> list[str]:
    """Align cells in columns, flush right or left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    put = str.ljust if left else str.rjust
    return ["  ".join(put(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
