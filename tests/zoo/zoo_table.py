"""Every net of the zoo by its key, ``package/name``."""

from __future__ import annotations

import importlib.metadata

from nets_by_hand import HAND_NETS
from nets_diffusion import DIFFUSION_NETS
from nets_graphs import GRAPH_NETS
from nets_hub import HUB_NETS
from nets_medical import MEDICAL_NETS
from nets_users import USER_NETS
from nets_video import VIDEO_NETS
from nets_vision import VISION_NETS
from nets_weather import WEATHER_NETS
from zoo_net import ZooNet, define_missing_operators

define_missing_operators()
_NETS = (
    *MEDICAL_NETS, *VISION_NETS, *HUB_NETS, *DIFFUSION_NETS, *VIDEO_NETS, *WEATHER_NETS, *GRAPH_NETS, *HAND_NETS,
    *USER_NETS,
)  # fmt: skip
ZOO: dict[str, ZooNet] = {net.key: net for net in _NETS}

# What is refused today, and the function that is: a net leaves this list when it runs.
KNOWN_REFUSALS: dict[str, str] = {}


def installed_version(net: ZooNet) -> str | None:
    """The version of the net's package, or None where it is not there."""
    if net.package == "by hand":
        return "-"
    try:
        return importlib.metadata.version(net.package)
    except importlib.metadata.PackageNotFoundError:
        return None
