"""The colours of pages and pictures: those of the page's palette by name, and one for each buffer and family of buffers."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from zeroplan.core.buffers import Buffer
from zeroplan.core.families import Family

#: Buffers of one family share a hue, and a buffer has the same colour in every picture. The first is drawn lowest.
COLORS: dict[Buffer, str] = {
    Buffer.PARAM_SHARD: "#1d4f91",
    Buffer.PARAM_FROZEN: "#3a7bc8",
    Buffer.PARAM_PERSISTENT: "#5b9bd5",
    Buffer.PARAM_SECONDARY: "#7fb2e5",
    Buffer.PARAM_MASTER: "#0b2f5c",
    Buffer.PARAM_FULL: "#8ec1f0",
    Buffer.PARAM_REFERENCE: "#b8d9f6",
    Buffer.MODEL_BUFFER: "#b7d7f5",
    Buffer.OPTIM_EXP_AVG: "#5e3a87",
    Buffer.OPTIM_EXP_AVG_SQ: "#8259b3",
    Buffer.OPTIM_MOMENTUM: "#5e3a87",
    Buffer.OPTIM_SUM: "#8259b3",
    Buffer.OPTIM_EXP_AVG_SQ_FRESH: "#a583cc",
    Buffer.OPTIM_MAX_EXP_AVG_SQ: "#a583cc",
    Buffer.OPTIM_AVERAGE: "#8259b3",
    Buffer.OPTIM_PREVIOUS_GRAD: "#5e3a87",
    Buffer.OPTIM_STEP_SIZE: "#8259b3",
    Buffer.OPTIM_FACTORED: "#8259b3",
    Buffer.OPTIM_SCALE: "#a583cc",
    Buffer.OPTIM_ERROR_FEEDBACK: "#a583cc",
    Buffer.OPTIM_ANCHOR: "#a583cc",
    Buffer.OPTIM_SERVER_ERROR: "#b49ad4",
    Buffer.GRAD_ACCUM: "#14603a",
    Buffer.GRAD_SHARD: "#1f8a53",
    Buffer.GRAD_MASTER: "#3fae76",
    Buffer.GRAD_FULL: "#79cfa2",
    Buffer.COMM_BUCKET: "#0e7c86",
    Buffer.COMM_ALL_GATHER: "#22a6b3",
    Buffer.COMM_REDUCE_SCATTER: "#5cc3cc",
    Buffer.COMM_ALL_REDUCE: "#8dd7dd",
    Buffer.COMM_BROADCAST: "#b5e6ea",
    Buffer.COMM_ACTIVATION: "#0b5f66",
    Buffer.COMM_PIPELINE: "#063f44",
    Buffer.STAGE_H2D: "#8a6d3b",
    Buffer.STAGE_D2H: "#b08d57",
    Buffer.SWAP_BUFFER: "#cdb38b",
    Buffer.WORKSPACE: "#7f8c9b",
    Buffer.INPUT: "#a3adb9",
    Buffer.ACTIVATION_CHECKPOINT: "#c2410c",
    Buffer.ACTIVATION: "#f28c38",
    Buffer.LOGITS: "#d7263d",
    Buffer.ACTIVATION_TEMP: "#fbc15e",
    Buffer.OPTIM_TEMP: "#c9a7e8",
    Buffer.OPTIM_TRUST: "#d5baed",
    Buffer.PARAM_TEMP: "#d0c2ea",
    Buffer.OPTIM_NORM: "#e0cdf2",
    Buffer.INIT_TEMP: "#c8d0d9",
}
OTHER_COLOR = "#d9dee4"

#: The same for families. A family has the colour of its largest usual buffer.
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
