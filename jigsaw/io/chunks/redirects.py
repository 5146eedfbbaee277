"""Redirects of HTTP servers, which may lead to public addresses; to others only where the user names them.

A server on the internet may answer with a redirect to an address that only the reader can reach: a service of its own
machine or network. The HTTP client does not have a rule for redirects, but has one for proxies. It is told that all
hosts but the store's own are behind a proxy. That proxy is ours and passes nothing on, but it learns which host was
meant. The host is then asked directly where it is public.

Names below the store's own host are not looked up: the client's rule for proxies includes them. Who decides where these
lead also decides where the host itself leads, and needs no redirect for it.
"""

from __future__ import annotations

import ipaddress
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from jigsaw.errors import FetchError, UnsupportedStoreError

_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
_REQUEST_BYTES = 1 << 16
_PATIENCE_SECONDS = 1.0


class GuardedHttp:
    """HTTP server that is asked directly, as are the hosts that its redirects may lead to.

    `redirects` names hosts that these may be whatever their address is; True lets all be followed.
    """

    def __init__(self, root: str, options: Mapping[str, Any], redirects: bool | Sequence[str] = ()) -> None:
        if not isinstance(redirects, bool | list | tuple) or (
            not isinstance(redirects, bool) and not all(isinstance(host, str) for host in redirects)
        ):
            raise UnsupportedStoreError(
                f"options={{'redirects': {redirects!r}}} must be a list of hosts that the server may lead to, or True"
            )
        self._root, self._options, self._follows_all = root, dict(options), redirects is True
        self._followed = {urlsplit(root).hostname or "", *([] if isinstance(redirects, bool) else redirects)}
        self._port: int | None = None

    def __getstate__(self) -> tuple[str, dict[str, Any], bool | list[str]]:
        return self._root, self._options, self._follows_all or sorted(self._followed)

    def __setstate__(self, state: tuple[str, dict[str, Any], bool | list[str]]) -> None:
        self.__init__(*state)

    def open_store(self) -> Any:
        """Open obstore's store of the server. Behind the user's own proxy, that proxy decides where requests go."""
        from obstore.store import HTTPStore

        client = dict(self._options.get("client_options", {}))
        proxied = any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXY_VARIABLES)
        if not (self._follows_all or proxied or "proxy_url" in client):
            if self._port is None:
                proxy = _refusing_proxy(os.getpid())
                self._port = proxy.listen()
                weakref.finalize(self, proxy.close, self._port)
            client["proxy_url"] = f"http://127.0.0.1:{self._port}"
            client["proxy_excludes"] = ",".join(sorted(self._followed))
        options: dict[str, Any] = {**self._options, "client_options": client}
        return HTTPStore(self._root, **options)

    def follow_new(self, called: str) -> bool:
        """Say whether requests were led to hosts that may be asked from now on, by a store that is opened again.

        Raises: `FetchError` for a private host; `called` is the object that was asked for.
        """
        if self._port is None:
            return False
        new = _refusing_proxy(os.getpid()).hosts_asked_for(self._port) - self._followed
        for host in sorted(new):
            address = private_address(host)
            if address is not None:
                raise FetchError(
                    f"{called} leads by a redirect to {host}, {address}, which is not a public internet address; "
                    f"if you trust the server, open the store with options={{'redirects': [{host!r}]}}"
                )
        self._followed |= new
        return bool(new)


def private_address(host: str) -> str | None:
    """Return the first address of a host that is not public; None where all are, or it lacks addresses."""
    addresses: list[str] = []
    with suppress(OSError, UnicodeError):
        addresses = [str(answer[4][0]) for answer in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    for text in addresses:
        address = ipaddress.ip_address(text.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None) or address
        if not mapped.is_global or mapped.is_multicast:
            return text
    return None


class _RefusingProxy:
    """Proxy of this machine with a port for each server: it answers 503, and knows which hosts were asked for."""

    def __init__(self) -> None:
        self._listeners: dict[int, socket.socket] = {}
        self._hosts: dict[int, set[str]] = {}
        self._lock, self._selector = threading.Lock(), selectors.DefaultSelector()

    def listen(self) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        port: int = listener.getsockname()[1]
        with self._lock:
            is_first = not self._hosts  # `_hosts` keeps the ports of closed servers, too
            self._listeners[port], self._hosts[port] = listener, set()
        self._selector.register(listener, selectors.EVENT_READ, port)
        if is_first:
            threading.Thread(target=self._serve, name="jigsaw-redirects", daemon=True).start()
        return port

    def close(self, port: int) -> None:
        with self._lock:
            listener = self._listeners.pop(port)
        with suppress(KeyError, ValueError):
            self._selector.unregister(listener)
        listener.close()

    def hosts_asked_for(self, port: int) -> set[str]:
        with self._lock:
            return set(self._hosts.get(port, ()))

    def _serve(self) -> None:
        while True:
            for ready, _ in self._selector.select():
                with suppress(OSError, ValueError):
                    self._answer(ready.fileobj, ready.data)

    def _answer(self, listener: Any, port: int) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_PATIENCE_SECONDS)
            head, until = b"", time.monotonic() + _PATIENCE_SECONDS
            while b"\r\n\r\n" not in head and len(head) < _REQUEST_BYTES and time.monotonic() < until:
                more = connection.recv(_REQUEST_BYTES)
                if not more:
                    return
                head += more
            method, target, _ = head.split(b"\r\n")[0].decode("latin-1").split(" ")
            host = urlsplit(f"//{target}" if method == "CONNECT" else target).hostname
            if host:
                with self._lock:
                    self._hosts[port].add(host)
            connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


@lru_cache(maxsize=16)
def _refusing_proxy(process: int) -> _RefusingProxy:
    """Return the proxy of this process; a forked process makes its own, because it lacks the thread that answers."""
    return _RefusingProxy()
