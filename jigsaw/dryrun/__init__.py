"""One training step on a mesh that does not exist yet: its memory, messages and time, and which mesh to take."""

from jigsaw.dryrun.devices import DEVICES as DEVICES
from jigsaw.dryrun.devices import Device
from jigsaw.dryrun.dry_runs import dry_run
from jigsaw.dryrun.mesh_search import StepOption, advice_text, advise_mesh
from jigsaw.dryrun.report import DryRunReport, PhaseCost, RankCost, Remark, Traffic

__all__ = [
    "Device", "DryRunReport", "PhaseCost", "RankCost", "Remark", "StepOption", "Traffic", "advice_text",
    "advise_mesh", "dry_run",
]  # fmt: skip
