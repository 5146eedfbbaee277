"""Store in which the ranks of a job meet, apart from that of the same job before torchrun restarted it.

The agent of torchrun keeps one store for all starts of its job (in torch 2.13, unless
``TORCH_DISABLE_SHARE_RDZV_TCP_STORE`` is 1). gloo and NCCL leave in it where each rank listens.  After a restart, ranks
would find the addresses of the dead there.  So each start has a unique name.  Torchrun's count of restarts is not
unique, because each agent counts only its own.

Four ranks start again.  Each writes a token, and waits for an answer to that token.  Rank 0 makes a name and answers
every token that it finds, even those of the dead, until each rank has acknowledged this name.

Ranks of srun and mpirun meet at a port that another job may have, too.  There rank 0 first proves that it knows the
job's secret, and so does each token. A rank that meets another job learns it at once.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from jigsaw.errors import RanksDifferError, ShardingError

T = TypeVar("T")
_FOLDER = "jigsaw.start"
_POLL_SECONDS = 0.02
_BACKLOG = 2048
_KEEPER_PATIENCE = timedelta(seconds=20)
"""Rank 0 identifies itself as soon as it listens."""
_LOOK_SECONDS = 2.0
"""How often a rank that waits for rank 0 looks whether something listens there."""


def is_shared_between_starts() -> bool:
    """Say whether the store that this rank would join in has the addresses of earlier starts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_this_start(limit: timedelta) -> tuple[dist.Store, int, int]:
    """Return the job's store under a name that only the ranks of this start know, this rank, and how many there are."""
    store, rank, ranks = next(rendezvous("env://", timeout=limit))
    return _name_start(store, rank, ranks, limit, b""), rank, ranks


def joined_job_store(secret: str, limit: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store of ranks that know a secret, kept by rank 0 at ``MASTER_ADDR`` and ``MASTER_PORT``.

    It listens at the address of that host alone, where it has one and no other host's ranks need another.

    Raises: `ShardingError` where the port is another job's, on every rank within seconds.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    key = secret.encode()
    if rank == 0:
        listener = _listen_at(host, port, is_far=int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < ranks)
        store = dist.TCPStore(
            host, port, ranks, True, limit, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
        )
        salt = uuid.uuid4().hex
        store.set(f"{_FOLDER}/keeper", f"{salt} {_proof(key, 'keeper', salt)}")
    else:
        where, patience = f"{host}, port {port}", min(limit, _KEEPER_PATIENCE)
        store = store_that_answers(host, port, ranks, limit, patience)
        if store is None:
            raise _store_of_others(where)
        _check_keeper(store, key, where, patience)
    return _name_start(store, rank, ranks, limit, key), rank, ranks


def store_that_answers(
    host: str, port: int, ranks: int | None, limit: timedelta, patience: timedelta
) -> dist.TCPStore | None:
    """Join the store that rank 0 keeps; None where something listens until the limit and does not answer as a store.

    Raises: `torch.distributed.DistNetworkError` where nobody listens within the limit.
    """
    joined = store_answer(lambda: dist.TCPStore(host, port, ranks, False, limit, wait_for_workers=False))
    # torch itself gives up some seconds after the limit, if nobody listens
    until, listens_since = time.monotonic() + (limit + patience).total_seconds(), math.inf
    while True:
        try:
            return joined.result(timeout=min(_LOOK_SECONDS, patience.total_seconds()))
        except TimeoutError:
            now = time.monotonic()
        except dist.DistNetworkError as e:
            if _somebody_listens(host, port):
                raise
            # torch gives up at about the same time as this loop, and both say the same
            raise _nobody_listens(host, port, limit) from e
        listens_since = min(listens_since, now) if _somebody_listens(host, port) else math.inf
        if now - listens_since > patience.total_seconds() or (now > until and listens_since < math.inf):
            return None
        if now > until:
            raise _nobody_listens(host, port, limit)


def store_answer(ask: Callable[[], T]) -> Future[T]:
    """Ask a store in a thread, and return the future answer: torch has no time-out for a store that is silent."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as e:
            answer.set_exception(e)

    try:
        threading.Thread(target=run, name="jigsaw store", daemon=True).start()
    except RuntimeError:  # memory has run out, also for a thread, and the others are to hear of it
        run()
    return answer


def _nobody_listens(host: str, port: int, limit: timedelta) -> dist.DistNetworkError:
    return dist.DistNetworkError(f"nobody listens at {host}, port {port}, after {limit.total_seconds():g} s")


def _somebody_listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=_LOOK_SECONDS):
            return True
    except OSError:
        return False


def _listen_at(host: str, port: int, is_far: bool) -> socket.socket:
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # if a host's own name leads only to itself, others must reach it at another address
        if not (is_far and ipaddress.ip_address(address[4][0]).is_loopback):
            return socket.create_server((str(address[4][0]), port), family=address[0], backlog=_BACKLOG)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise _taken_port(host, port) from e
        # not an address of this host, as behind a virtual one: others reach it some other way
    try:
        return socket.create_server(("", port), backlog=_BACKLOG)
    except OSError as e:
        if e.errno != errno.EADDRINUSE:
            raise
        raise _taken_port(host, port) from e


def _taken_port(host: str, port: int) -> ShardingError:
    return ShardingError(
        f"rank 0 cannot listen at {host}, port {port}: another process does, perhaps another job; set MASTER_PORT to a "
        "free port of that host for all ranks"
    )


_OTHER_PORT = "set MASTER_PORT to another port for all ranks of this job"


def _store_of_others(where: str) -> ShardingError:
    return ShardingError(
        f"what listens at {where} is the store of another job, or of a program without jigsaw: nobody there proves "
        f"that it belongs to this job; {_OTHER_PORT}"
    )


def _check_keeper(store: dist.Store, key: bytes, where: str, patience: timedelta) -> None:
    try:
        store.wait([f"{_FOLDER}/keeper"], patience)
    except (RuntimeError, ValueError) as e:
        raise _store_of_others(where) from e
    salt, _, proof = store.get(f"{_FOLDER}/keeper").decode("utf-8", "replace").partition(" ")
    if not hmac.compare_digest(proof.encode(), _proof(key, "keeper", salt).encode()):
        raise ShardingError(
            f"what listens at {where} is the store of another job, which has another secret (JIGSAW_JOB_SECRET, or the "
            f"numbers of job, step and user); {_OTHER_PORT}"
        )


def _proof(key: bytes, *words: str) -> str:
    """Return a digest of the words and the key, which proves that the sender knows the key."""
    return hmac.new(key, " ".join(words).encode(), "sha256").hexdigest()


def _name_start(store: dist.Store, rank: int, ranks: int, limit: timedelta, key: bytes) -> dist.Store:
    until = time.monotonic() + limit.total_seconds()
    name = uuid.uuid4().hex
    if rank == 0:
        _answer_ranks(store, name, ranks, until, key)
    else:
        token = uuid.uuid4().hex
        store.set(f"{_FOLDER}/token/{rank}", f"{token} {_proof(key, 'rank', str(rank), token)}")
        store.wait([f"{_FOLDER}/answer/{token}"], limit)
        name, _, proof = store.get(f"{_FOLDER}/answer/{token}").decode().partition(" ")
        if not hmac.compare_digest(proof.encode(), _proof(key, "answer", token, name).encode()):
            raise ShardingError(f"the name that rank {rank} was answered is not from this job; is its store another's?")
        store.set(f"{_FOLDER}/{name}/{rank}", "")
    return dist.PrefixStore(f"{_FOLDER}/{name}", store)


def _answer_ranks(store: dist.Store, name: str, ranks: int, until: float, key: bytes) -> None:
    missing = set(range(1, ranks))
    while missing:
        for rank in sorted(missing):
            if store.check([f"{_FOLDER}/{name}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"{_FOLDER}/token/{rank}"]):
                token, _, proof = store.get(f"{_FOLDER}/token/{rank}").decode("utf-8", "replace").partition(" ")
                if hmac.compare_digest(proof.encode(), _proof(key, "rank", str(rank), token).encode()):
                    store.set(f"{_FOLDER}/answer/{token}", f"{name} {_proof(key, 'answer', token, name)}")
        if missing and time.monotonic() > until:
            raise ShardingError(
                f"ranks {sorted(missing)[:8]} of {ranks} did not start in time; init_mesh(timeout=) says how long the "
                "first rank waits for the others: look into their output for why, or give them longer"
            )
        time.sleep(_POLL_SECONDS if missing else 0)


def agree_on_start(store: dist.Store, rank: int, ranks: int, words: str, limit: timedelta) -> None:
    """Compare how the ranks of a job start, before any connects to another; else all wait for one that differs.

    Raises: `RanksDifferError` on every rank, with the words of two that differ. `ShardingError` where ranks do not
    come.
    """
    if ranks == 1:
        return
    own = f"rank {rank}: {words}"
    first = store.compare_set(f"{_FOLDER}/words", "", own).decode()
    if first.partition(": ")[2] != words:  # a rank that differs is not counted, so no other answer can be set
        store.set(f"{_FOLDER}/alike", f"{first}; {own}")
    elif store.add(f"{_FOLDER}/count", 1) == ranks:
        store.set(f"{_FOLDER}/alike", "")
    try:
        store.wait([f"{_FOLDER}/alike"], limit)
    except dist.DistStoreError as e:
        raise ShardingError(
            f"{store.add(f'{_FOLDER}/count', 0)} of {ranks} ranks came to start the job within "
            f"{limit.total_seconds():g} s; look into the output of the others, or give them longer: init_mesh(timeout=)"
        ) from e
    if different := store.get(f"{_FOLDER}/alike").decode():
        raise RanksDifferError(
            f"ranks of one job start in different ways: {different}; give init_mesh the same arguments on every rank, "
            "and a rank without its GPU one, or none to all (device='cpu')"
        )
