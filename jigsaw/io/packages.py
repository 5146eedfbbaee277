"""Reasons why a package cannot be imported: it is not installed, or the installed one fails."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec


def why_not_imported(error: ImportError, absent: str) -> str:
    """Return `absent` where a package is not installed; else its version, and the error of its import."""
    names = [each.name.partition(".")[0] for each in _error_chain(error) if each.name]
    if any(find_spec(name) is None for name in names):
        return absent
    found = f"{_installed_version(names[0])} is installed, but " if names else ""
    return f"{found}its import fails: {error}; install versions that fit together ({absent})"


def _error_chain(error: BaseException | None) -> Iterator[ImportError]:
    while error is not None:
        if isinstance(error, ImportError):
            yield error
        error = error.__cause__ or error.__context__


def _installed_version(name: str) -> str:
    project = packages_distributions().get(name, [name])[0]
    try:
        return f"{project} {version(project)}"
    except PackageNotFoundError:
        return name
