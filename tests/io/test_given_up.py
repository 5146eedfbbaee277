"""Reads of far stores that nobody waits for any more: what failed is not tried again for them."""

import subprocess
import sys
import time

import pytest
import zarr
from fault_proxy import Proxy
from remote_servers import nginx
from toy_store import request, write

from jigsaw.io.formats.zarr_group import open_zarr
from jigsaw.io.reading.engine import ReadEngine
from jigsaw.io.reading.read_plan import plan_read

PATIENT = {"retry_config": {"max_retries": 3, "backoff": {"init_backoff": 1.0, "max_backoff": 1.0}}}


@pytest.fixture
def proxy(tmp_path, tmp_path_factory):
    for form in (("v2", "blosc"), ("sharded", "default")):
        zarr.consolidate_metadata(write(tmp_path, form)[0])
    with nginx(tmp_path, tmp_path_factory.mktemp("nginx")) as address, Proxy(address) as made:
        yield made


def at(proxy, name):
    return f"http://{proxy.address}/{name}.zarr"


@pytest.mark.parametrize("name", ["v2-blosc", "sharded-default"])
def test_nothing_is_tried_again_for_a_reader_that_was_closed(proxy, name):
    """Whether it fetches chunks or plans, which reads the indices of shards."""
    engine = ReadEngine(open_zarr(at(proxy, name), PATIENT))
    proxy.always = "503"
    proxy.clear()
    engine.ahead.expect("next", lambda: plan_read(request({}), engine.store.arrays))
    while not proxy.count:
        time.sleep(0.01)
    time.sleep(0.2)
    asked = proxy.count
    engine.close()
    assert proxy.count == asked


@pytest.mark.slow
def test_nothing_is_tried_again_for_a_process_that_ends(proxy):
    code = (
        "import datetime, sys\n"
        "from jigsaw.io.reading.engine import ReadEngine\n"
        "from jigsaw.io.formats.zarr_group import open_zarr\n"
        "minute = datetime.timedelta(minutes=1)\n"
        "retry = {'retry_timeout': 60 * minute, 'backoff': {'init_backoff': minute, 'max_backoff': minute}}\n"
        f"engine = ReadEngine(open_zarr({at(proxy, 'v2-blosc')!r}, {{'retry_config': retry}}))\n"
        "print('open', flush=True)\n"
        "sys.stdin.readline()\n"
        "engine.ahead.expect('next', lambda: engine.store.arrays['air'].loader.load((0, 0, 0, 0), None))\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "open\n"
        proxy.always = "503"
        proxy.clear()
        process.stdin.write("\n")
        process.stdin.flush()
        while not proxy.count:
            time.sleep(0.01)
        process.communicate("\n", timeout=60)
    assert (process.returncode, proxy.count) == (0, 1)
