"""Makes the tables of `docs/parallelism.md` from the result files of `strategies.py` and `pipeline_waits.py`.

What stands between the markers of the page is replaced; the rest of it is left.
"""

from __future__ import annotations


def write_tables() -> None:
    """Make them anew."""
