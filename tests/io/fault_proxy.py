"""A proxy between a reader and a server that counts, delays and spoils answers, as networks and servers do.

    python tests/io/fault_proxy.py --upstream 127.0.0.1:80 --latency 0.02 --rate 200e6

Each answer waits `latency` seconds; all answers together pass at most `rate` bytes a second.
"""

import argparse
import asyncio
import json
import threading
from collections import Counter

BLOCK = 1 << 17
END = b"\r\n\r\n"


class Proxy:
    """It listens in a thread of its own while it is used as a context.

    `faults` are taken one a request, in order, for paths that contain `spoils`: ``"503"`` and other statuses,
    ``"reset"``, ``"truncate"`` (half of the body, then the end of the connection), ``"short"`` (half of the body, with
    headers that say so), ``"ignore"`` (200 and the whole object for a range), ``"shift"`` (another range),
    ``"stall"`` (no answer), ``""`` (well); then all are spoilt by `always`.  While `hold` is set, no answer comes
    before that many requests are under way.
    """

    def __init__(self, upstream, latency=0.0, rate=None):
        host, _, port = upstream.partition(":")
        self._upstream = host, int(port)
        self.latency, self.rate = latency, rate
        self.faults, self.spoils, self.always = [], "", None
        self.hold = 0
        self.clear()
        self._idle, self._due = [], 0.0

    def clear(self):
        """Count from zero."""
        self.requests, self.body_bytes, self.methods, self.most_at_once = [], 0, Counter(), 0
        self._under_way = 0

    @property
    def count(self):
        return len(self.requests)

    # -- life --------------------------------------------------------------------------------------------------------

    def __enter__(self):
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name="fault-proxy")
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *error):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    async def _serve(self, started):
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._client, "127.0.0.1", 0, limit=1 << 20)
        self.address = "{}:{}".format(*server.sockets[0].getsockname())
        self._tasks = set()
        started.set()
        await self._over.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, writer in self._idle:
            writer.close()

    # -- one connection ----------------------------------------------------------------------------------------------

    async def _client(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader, writer):
        """Answer one request; whether the connection can be used again."""
        head = await reader.readuntil(END)
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        body = await reader.readexactly(int(header(head, "content-length") or 0))
        self.requests.append((method, path, header(head, "range")))
        self.methods[method] += 1
        self._under_way += 1
        self.most_at_once = max(self.most_at_once, self._under_way)
        try:
            while self._under_way < self.hold:
                await asyncio.sleep(0.001)
            self.hold = 0
            if self.latency:
                await asyncio.sleep(self.latency)
            return await self._answer(method, head, body, self._fault(path), writer)
        finally:
            self._under_way -= 1

    def _fault(self, path):
        if self.spoils not in path:
            return ""
        return self.faults.pop(0) if self.faults else self.always or ""

    async def _answer(self, method, head, body, fault, writer):
        if fault == "reset":
            writer.transport.abort()
            return False
        if fault == "stall":
            await asyncio.sleep(3600)
        if fault.isdigit():
            text = b"<Error><Code>SlowDown</Code><Key>tests-secret</Key></Error>"
            writer.write(b"HTTP/1.1 %b Spoilt\r\nContent-Length: %d\r\n\r\n%b" % (fault.encode(), len(text), text))
            await writer.drain()
            return True
        if fault == "ignore":
            head = without(head, "range")
        if fault == "shift":
            first, _, last = header(head, "range").removeprefix("bytes=").partition("-")
            head = without(head, "range")[:-2] + f"Range: bytes={int(first) + 1}-{int(last) + 1}\r\n\r\n".encode()
        return await self._pass_on(method, head, body, fault, writer)

    async def _pass_on(self, method, head, body, fault, writer):
        server, to_server = (
            self._idle.pop() if self._idle else await asyncio.open_connection(*self._upstream, limit=BLOCK)
        )
        to_server.write(head + body)
        answer = await server.readuntil(END)
        size = 0 if method == "HEAD" else int(header(answer, "content-length") or 0)
        chunked = method != "HEAD" and (header(answer, "transfer-encoding") or "").lower() == "chunked"
        if chunked:
            size, answer, text = 0, without(answer, "transfer-encoding"), await dechunked(server)
            answer = answer[:-2] + b"Content-Length: %d\r\n\r\n%b" % (len(text), text)
            self.body_bytes += len(text)
        sent = size // 2 if fault in ("truncate", "short") else size
        if fault == "short":
            answer = without(answer, "content-length")[:-2] + b"Content-Length: %d\r\n\r\n" % sent
        writer.write(answer)
        await self._copy(server, writer, size, sent)
        if fault == "truncate":
            await writer.drain()
            return False
        self._idle.append((server, to_server))
        return True

    async def _copy(self, server, writer, size, sent):
        """The body, of which the first `sent` bytes reach the client."""
        while size:
            block = await server.read(min(size, BLOCK))
            if not block:
                raise ConnectionError
            size -= len(block)
            passed = block[: max(sent, 0)]
            sent -= len(block)
            self.body_bytes += len(passed)
            await self._in_turn(len(passed))
            writer.write(passed)
            await writer.drain()

    async def _in_turn(self, count):
        if self.rate:
            now = self._loop.time()
            self._due = max(self._due, now - 0.01) + count / self.rate
            if self._due > now:
                await asyncio.sleep(self._due - now)


def header(head, name):
    """The value of a header, or None."""
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.decode().lower() == name:
            return value.strip().decode()
    return None


def without(head, name):
    """The head without one of its headers."""
    lines = [line for line in head.split(b"\r\n") if line.partition(b":")[0].decode().lower() != name]
    return b"\r\n".join(lines)


async def dechunked(reader):
    """A body that comes in chunks, as one."""
    parts = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readuntil(b"\r\n")
    return b"".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--rate", type=float)
    asked = parser.parse_args()
    with Proxy(asked.upstream, asked.latency, asked.rate) as proxy:
        print(json.dumps({"address": proxy.address}), flush=True)
        input()  # until its parent closes the pipe, or says so


if __name__ == "__main__":
    main()
