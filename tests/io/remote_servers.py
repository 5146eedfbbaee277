"""Real servers on 127.0.0.1 for the tests of remote stores: nginx for HTTP, SeaweedFS for S3."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

KEYS = {"access_key_id": "tests-key", "secret_access_key": "tests-secret", "region": "us-east-1"}

_NGINX = """
daemon off; master_process off; error_log stderr crit; pid {folder}/nginx.pid;
events {{ worker_connections 512; }}
http {{
    access_log off; client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
    uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5; sendfile on; keepalive_requests 100000;
    server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


def free_ports(count):
    """Ports that nobody listens on now, nor 10000 above."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def running(command, port, log):
    """A server while it is used; it answers on `port` before the body begins, and has ended after it."""
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{command[0]} did not start: {Path(log).read_text()[-2000:]}")
            time.sleep(0.02)
        yield process
    finally:
        process.kill()  # what they hold is a folder of the tests; SeaweedFS ends itself only after 10 seconds
        process.wait()


def _answers(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextlib.contextmanager
def nginx(root, folder):
    """``host:port`` of an nginx that serves the files below `root`; the test is skipped where there is none."""
    (port,) = free_ports(1)
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")
    if not binary:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs nginx: apt-get install nginx-light")
    user = "user root;" if os.getuid() == 0 else ""  # pytest's folders are their owner's alone
    config = folder / "nginx.conf"
    config.write_text(user + _NGINX.format(folder=folder, port=port, root=root))
    with running([binary, "-c", str(config), "-p", str(folder), "-e", "stderr"], port, folder / "nginx.log"):
        yield f"127.0.0.1:{port}"


@contextlib.contextmanager
def seaweedfs(folder):
    """The options for obstore of a SeaweedFS that answers for S3; a bucket is made by the first write to it."""
    import obstore
    from obstore.store import S3Store

    identity = {"accessKey": KEYS["access_key_id"], "secretKey": KEYS["secret_access_key"]}
    actions = ["Admin", "Read", "Write", "List"]
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [{"name": "tests", "credentials": [identity], "actions": actions}]}))
    names = ["master", "volume", "filer", "s3"]
    ports = free_ports(2 * len(names))
    listen = [f"-{name}.port{kind}={ports.pop()}" for name in names for kind in (".grpc", "")]
    port = int(listen[-1].rpartition("=")[2])
    (folder / "data").mkdir()
    command = [
        str(Path(sys.executable).with_name("weed")), "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1", *listen, "-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        "-s3.iam=false", "-master.volumeSizeLimitMB=64", "-volume.max=8",
    ]  # fmt: skip
    options = {**KEYS, "endpoint": f"http://127.0.0.1:{port}"}
    with running(command, port, folder / "weed.log"):
        store = S3Store("tests", **options, client_options={"allow_http": True}, retry_config={"max_retries": 0})
        until = time.monotonic() + 60
        while True:  # it listens before its volumes are there
            try:
                obstore.put(store, "ready", b"yes")
                break
            except obstore.exceptions.BaseError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        yield options


def upload(folder, bucket, prefix, options):
    """Copy the files below a folder to a bucket."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(bucket, **options, client_options={"allow_http": True})
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            obstore.put(store, f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
