"""The colours of pages and pictures: those of the page's palette by name, and one for each family of buffers."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from zeroplan.core.families import Family

OTHER_COLOR = "#d9dee4"

#: A family has the same colour in every picture. The first is drawn lowest.
FAMILY_COLORS: dict[Family, str] = {
    Family.PARAMETERS: "#1d4f91",
    Family.GATHERED: "#8ec1f0",
    Family.MASTERS: "#0b2f5c",
    Family.OPTIMIZER: "#8259b3",
    Family.GRADIENTS: "#1f8a53",
    Family.COMMUNICATION: "#22a6b3",
    Family.STAGING: "#b08d57",
    Family.WORKSPACES: "#7f8c9b",
    Family.ACTIVATIONS: "#f28c38",
    Family.LOSS: "#d7263d",
    Family.STEP: "#c9a7e8",
    Family.INITIALISATION: "#c8d0d9",
    Family.OTHER: OTHER_COLOR,
}


@cache
def palette() -> dict[str, tuple[str, str]]:
    """Return each colour of ``palette.css`` by its name, as it is on a light and on a dark page."""
    text = files(__package__).joinpath("assets", "palette.css").read_text(encoding="utf-8")
    return {name: (light, dark) for name, light, dark in re.findall(r"--([a-z-]+): light-dark\((#\w+), (#\w+)\)", text)}
