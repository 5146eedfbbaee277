"""A Markdown table, as the pages that benchmarks make have it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Its lines, and an empty one."""
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
