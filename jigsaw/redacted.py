"""Text of messages, names and reports without the secrets of URLs and options: passwords, tokens and query values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_HIDDEN = "***"
_SHORTEST = 4
"""Shorter values of options are words such as "1" or "eu", which would be removed from the middle of others."""
_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*)://(?P<rest>(?:\[[\da-fA-F:.]*\]|(?!::)[^\s'\"<>`])*)")
"""URLs up to ``::``, by which fsspec chains them, except for that of an IPv6 address."""
_SECRET = re.compile(
    r"""(?P<key>['"]?\b[\w-]*(?:secret|passw|passphrase|token|credential|signature|authorization|
        api_?key|access_?key|account_?key|private_?key|sas_?key)[\w-]*['"]?\s*[=:]\s*)
        (?P<value>b?"[^"]*"|b?'[^']*'|(?:(?:Bearer|Basic)\s+)?[^\s,;&'"(){}\[\]]+)""",
    re.IGNORECASE | re.VERBOSE,
)
_CONTAINERS = ("abfs", "abfss")  # container@account is a place, not a user


def redacted_text(shown: object, options: Mapping[str, Any] | None = None) -> str:
    """Return a text that may be shown: users and query values of its URLs, and values of secret names, become ``***``.

    With `options`, their values are removed too, because other libraries repeat them in their messages.
    """
    text = str(shown)
    for value in sorted(_option_values(options), key=len, reverse=True):
        text = text.replace(value, _HIDDEN)
    return _SECRET.sub(_hide_value, _URL.sub(_hide_in_url, text))


def cause_without_secrets(error: BaseException, options: Mapping[str, Any] | None = None) -> BaseException | None:
    """Return the cause that a traceback may show: `error`, or None where it, or its own cause, has a secret."""
    here: BaseException | None = error
    while here is not None:
        if redacted_text(here, options) != str(here):
            return None
        here = here.__cause__ or here.__context__
    return error


def _hide_in_url(url: re.Match[str]) -> str:
    scheme, rest = url["scheme"], url["rest"]
    where, mark, query = rest.partition("?")
    authority, slash, path = where.partition("/")
    user, _, host = authority.rpartition("@")
    port = host.rpartition(":")[2]
    if ":" in host and port and not port.isdecimal() and not host.startswith("["):  # a password with a slash in it
        return (
            f"{scheme}://{_HIDDEN}@{rest.rpartition('@')[2].partition('?')[0]}"
            if "@" in rest
            else f"{scheme}://{_HIDDEN}"
        )
    if user and (scheme not in _CONTAINERS or ":" in user):
        authority = f"{_HIDDEN}@{host}"
    return f"{scheme}://{authority}{slash}{path}{mark}" + "&".join(map(_hide_in_query, query.split("&")))


def _hide_in_query(part: str) -> str:
    key, equals, value = part.partition("=")
    return f"{key}={_HIDDEN}" if equals and value else _HIDDEN if part and not equals else part


def _hide_value(found: re.Match[str]) -> str:
    value = found["value"]
    quote = value[-1] if value[-1] in "'\"" else ""
    return f"{found['key']}{quote}{_HIDDEN}{quote}" if _HIDDEN not in value else found[0]


def _option_values(given: Any) -> Iterable[str]:
    """Iterate over the texts that options hold, at any depth."""
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, list | tuple | set):
        for each in given:
            yield from _option_values(each)
    elif isinstance(given, str | bytes):
        text = given.decode("utf-8", "replace") if isinstance(given, bytes) else given
        if len(text) >= _SHORTEST:
            yield text
