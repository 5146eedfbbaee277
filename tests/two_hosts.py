"""Two hosts on one machine, for tests: namespaces of network, processes, mounts and host name, joined by a link.

Each has a `/proc` and a `/dev/shm` of its own, and both have one host name, as containers of a careless cluster have.
The link is slow on demand, and can be cut.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
MTU = 9000  # frames as they would be on a wire, of which headers are little
FIRST_ADDRESS = "10.78.0.1"

# What the first process of a host does: the mounts that are its own, then the ranks, each as its own user.
_HOST = """
import json, os, subprocess, sys
folder, tasks = sys.argv[1], json.loads(sys.argv[2])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True)
subprocess.run(["hostname", "node"], check=True)
may = "=-all,+dac_read_search"  # to read Python's own files, wherever they lie; not what /proc asks for
started = []
for task in tasks:
    user = ["--reuid", str(task["uid"]), "--regid", str(task["uid"]), "--clear-groups"]
    user += [f"--{kind}{may}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    with open(f"{folder}/told{task['rank']}", "w") as out:
        command = ["setpriv", *user, sys.executable, "-W", "ignore", f"{folder}/body.py", folder]
        started.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | task["env"]))
sys.exit(max(abs(each.wait()) for each in started))
"""

_BODY = """
import os, sys, time
folder, rank = sys.argv[1], int(os.environ["SLURM_PROCID"])

def meet(name):
    "Wait until the test has seen that all ranks are here."
    open(f"{folder}/{name}-{rank}", "w").close()
    while not os.path.exists(f"{folder}/{name}"):
        time.sleep(0.02)
"""


def why_not_two_hosts():
    """What keeps this machine from it; empty where nothing does."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root makes namespaces"
    try:
        tried = ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "--mount-proc", "ip", "link", "add", "wire"]
        ran = subprocess.run([*tried, "type", "veth", "peer", "other"], capture_output=True, text=True, check=False)
        for tool in (["setpriv", "--version"], ["tc", "-V"]):
            subprocess.run(tool, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        return f"namespaces and links need unshare, iproute2 and setpriv: {e}"
    return f"namespaces are not permitted: {ran.stderr.strip()}" if ran.returncode else ""


def _run(*words):
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


class TwoHosts:
    """Hosts joined by a link, whose end is called `wire` in both."""

    def __init__(self, names):
        self.names = names

    def slow_down(self, bits_per_s):
        for host in self.names:
            how = ["rate", f"{bits_per_s}bit", "burst", str(2 * MTU), "limit", "64mb"]
            _run("tc", "-n", host, "qdisc", "replace", "dev", "wire", "root", "tbf", *how)

    def cut_link(self):
        _run("ip", "-n", self.names[1], "link", "set", "wire", "down")

    def bytes_out(self):
        """What has left each host."""
        place = "/sys/class/net/wire/statistics/tx_bytes"
        return [int(_run("ip", "netns", "exec", host, "cat", place)) for host in self.names]

    def start(self, folder, code, users, job):
        """Ranks as srun starts them, two a host; `users` are their numbers."""

        folder.chmod(0o777)
        (folder / "body.py").write_text(_BODY + code)
        ours = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_")
        shared = {k: v for k, v in os.environ.items() if not k.startswith(ours)} | {
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "wire", "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": "/tmp",
            "JIGSAW_JOB_SECRET": "the hosts have different users here, and a job has one",
            "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": f"{FIRST_ADDRESS[:-1]}[1-2]",
        }  # fmt: skip
        self.started = []
        for node, host in enumerate(self.names):
            tasks = [
                {"rank": rank, "uid": users[rank], "env": {
                    "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(node)}}
                for rank in (2 * node, 2 * node + 1)
            ]  # fmt: skip
            apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--mount-proc"]
            command = ["ip", "netns", "exec", host, *apart, sys.executable, "-c", _HOST, str(folder), json.dumps(tasks)]
            self.started.append(subprocess.Popen(command, env=shared))
        self.folder = folder

    def told(self):
        return [path.read_text() if path.exists() else "" for path in (self.folder / f"told{r}" for r in range(4))]

    def await_meeting(self, name, seconds=400):
        """Wait for all ranks to `meet`; they wait for `let_go`."""
        until = time.monotonic() + seconds
        while not all((self.folder / f"{name}-{rank}").exists() for rank in range(4)):
            ended = [each.poll() for each in self.started]
            assert time.monotonic() < until and not any(ended), (name, ended, self.told())
            time.sleep(0.05)

    def let_go(self, name):
        (self.folder / name).touch()

    def await_end(self, seconds=120):
        """What each rank said; all have ended by themselves."""
        try:
            for each in self.started:
                each.wait(seconds)
        except subprocess.TimeoutExpired as e:
            raise AssertionError(f"not all ranks ended within {seconds} s: {self.told()}") from e
        return self.told()

    def kill(self):
        for each in getattr(self, "started", []):
            each.kill()
            each.wait()


@contextmanager
def linked_hosts():
    """Two hosts, which are gone afterwards, and all that runs on them."""
    hosts = TwoHosts([f"jigsaw-{os.getpid()}-{end}" for end in "ab"])
    made = []
    try:
        for host in hosts.names:
            _run("ip", "netns", "add", host)
            made.append(host)
        ends = [["name", "wire", "netns", host] for host in hosts.names]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for i, host in enumerate(hosts.names):
            _run("ip", "-n", host, "addr", "add", f"{FIRST_ADDRESS[:-1]}{i + 1}/24", "dev", "wire")
            _run("ip", "-n", host, "link", "set", "wire", "mtu", str(MTU), "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")
        yield hosts
    finally:
        hosts.kill()
        for host in made:
            subprocess.run(["ip", "netns", "delete", host], check=False)
