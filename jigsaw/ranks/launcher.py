"""Rank and job of this process, by the variables of its launcher: torchrun, srun or mpirun."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from jigsaw.errors import ShardingError

_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_NO_TASKS = 2**31  # Slurm numbers the steps of batch scripts and of salloc's shell from the top down
_PORTS = 15000, 10000  # the first port and their number, below the ports that systems assign

# Variables with the rank, the number of ranks, and both on this machine: Open MPI, then MPICH and Intel MPI.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

LauncherVariables = Mapping[str, str]

DEBUG_VARIABLE, EVERY_VARIABLE = "JIGSAW_DEBUG", "JIGSAW_DEBUG_EVERY"


def debug_interval(variables: LauncherVariables) -> int:
    """Return after how many forward passes ranks that debug compare parameters; 0 where ``JIGSAW_DEBUG`` is not set."""
    if variables.get(DEBUG_VARIABLE, "0") in ("", "0"):
        return 0
    return max(int(variables.get(EVERY_VARIABLE, "10")), 1)


@dataclass(frozen=True)
class _RankPlace:
    rank: int
    ranks: int
    local_rank: int
    local_ranks: int


def torchrun_variables(variables: LauncherVariables) -> dict[str, str]:
    """Return what torchrun would set, in a process that srun or mpirun started; nothing under torchrun or for a single
    process.

    Under srun the ranks meet at the first node of the step, unless ``MASTER_ADDR`` and ``MASTER_PORT`` are set. The
    port follows from the numbers of job and step.  They identify each other by ``JIGSAW_JOB_SECRET``, by default made
    of these numbers and the user's.  Processes that Slurm runs without a step are single: a batch script itself, and
    the shell of salloc.

    Raises: `ShardingError` where ranks cannot find each other.
    """
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return {}
    slurm, mpi = _of_slurm(variables), _of_mpi(variables)
    by_srun = slurm is not None and (mpi is None or (mpi.rank, mpi.ranks) == (slurm.rank, slurm.ranks))
    place = slurm if by_srun else mpi  # if mpirun started its ranks within a step of Slurm, the step has other numbers
    if place is None or place.ranks == 1:
        return {}
    if by_srun and place.rank == 0 and sys.stdin is not None and sys.stdin.isatty():
        raise ShardingError(
            f"this is a terminal in a step of {place.ranks} tasks, whose others have none; start ranks by srun without "
            f"--pty, and a terminal by srun --ntasks=1 --pty"
        )
    address, port = _meeting_point(variables, by_srun, place)
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.ranks),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "JIGSAW_JOB_SECRET": variables.get("JIGSAW_JOB_SECRET") or _job_name(variables, by_srun, address, port),
    }


def _job_name(variables: LauncherVariables, by_srun: bool, address: str, port: str) -> str:
    """Return what separates a job from others without a secret: others can guess it, but not hit it by chance."""
    if by_srun:
        parts = [
            "slurm",
            variables.get("SLURM_CLUSTER_NAME"),
            variables.get("SLURM_JOB_ID"),
            variables.get("SLURM_STEP_ID"),
        ]
    else:
        parts = ["mpi", address, port, variables.get("PMIX_NAMESPACE")]
    return " ".join([*(part or "-" for part in parts), str(os.getuid())])


def _of_slurm(variables: LauncherVariables) -> _RankPlace | None:
    if "SLURM_PROCID" not in variables or not any(name in variables for name in _STEP):
        return None
    if _parsed_number(variables, "SLURM_STEP_ID", _parsed_number(variables, "SLURM_STEPID", 0)) >= _NO_TASKS:
        return None
    ranks = _parsed_number(variables, "SLURM_STEP_NUM_TASKS", _parsed_number(variables, "SLURM_NTASKS", 1))
    local_count = _tasks_here(variables) or _parsed_number(variables, "SLURM_NTASKS_PER_NODE", ranks)
    return _RankPlace(
        _parsed_number(variables, "SLURM_PROCID"), ranks, _parsed_number(variables, "SLURM_LOCALID", 0), local_count
    )


def _tasks_here(variables: LauncherVariables) -> int | None:
    """Return how many tasks of the step this node has, from ``4(x2),3``: two nodes of four, one of three."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(count) for count, nodes in runs for _ in range(int(nodes or 1))]
    node = _parsed_number(variables, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else None


def _of_mpi(variables: LauncherVariables) -> _RankPlace | None:
    for rank, ranks, local_rank, local_ranks in _MPI:
        if rank in variables and ranks in variables:
            count = _parsed_number(variables, ranks)
            local_count = _parsed_number(variables, local_ranks, count)
            return _RankPlace(
                _parsed_number(variables, rank), count, _parsed_number(variables, local_rank, 0), local_count
            )
    return None


def _meeting_point(variables: LauncherVariables, by_srun: bool, place: _RankPlace) -> tuple[str, str]:
    address, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    if by_srun and "SLURM_HET_SIZE" not in variables:  # each part of such a job knows only its own nodes
        address = address or _first_node(variables)
        port = port or _port_of(variables)
    if not address or not port:
        raise ShardingError(
            f"{'srun' if by_srun else 'mpirun'} started this process as rank {place.rank} of {place.ranks}, and they "
            f"do not know where to meet; set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port of it "
            f"for all of them (export; mpirun -x or -genv), or start them by torchrun"
        )
    return address, port


def _first_node(variables: LauncherVariables) -> str | None:
    """Return the first host of ``tux[07-09,12],gpu1``."""
    nodes = next((variables[name] for name in _NODES if variables.get(name)), None)
    return nodes and re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).partition(",")[0]


def _port_of(variables: LauncherVariables) -> str | None:
    """Return a port that is the same on every rank, and different for a step that runs beside this one."""
    if "SLURM_JOB_ID" not in variables:
        return None
    first, count = _PORTS
    return str(
        first
        + (_parsed_number(variables, "SLURM_JOB_ID") + 101 * _parsed_number(variables, "SLURM_STEP_ID", 0)) % count
    )


def _parsed_number(variables: LauncherVariables, name: str, default: int | None = None) -> int:
    value = variables.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError:
        raise ShardingError(f"the environment has {name}={value!r}, which should be a number; unset it") from None


_SPARE_FILES = 128  # of Python, the store, and what a program opens itself


def allow_open_files(ranks: int, keeps_store: bool = False, connects_late: bool = False) -> None:
    """Raise this process' soft limit of open files to the hard one, where groups of `ranks` ranks may need more.

    A group of gloo holds a connection to each other rank: the job's own, those of the axes together, and that of saves.
    One whose ranks connect as late as they talk holds few, but on the first rank, with which all talk. The rank that
    keeps the job's store has two more of each rank.

    Raises: `ShardingError` where even the hard limit is too low for the store and the job's own group.
    """
    if os.name != "posix":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    own, infinite = 0 if connects_late and not keeps_store else ranks, resource.RLIM_INFINITY
    least = own + 2 * ranks * keeps_store + _SPARE_FILES
    wanted = least + 2 * own
    if soft == infinite or soft >= wanted:
        return
    highest = wanted if hard == infinite else hard
    if highest < least:
        raise ShardingError(
            f"a job of {ranks} ranks holds a connection to each of them"
            f"{', and two more for the store that this rank keeps' * keeps_store}, and this process may open {highest} "
            f"files at most; raise the hard limit to {wanted} or more on every node before the launch (ulimit -Hn, "
            "nofile in /etc/security/limits.conf, LimitNOFILE= of the service that starts ranks)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
