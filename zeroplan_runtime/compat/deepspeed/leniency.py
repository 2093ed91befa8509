"""Settings of a ds_config that DeepSpeed ignores and the runtime would refuse: left out here, with a warning for each."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.reader import inspect_ds_config
from zeroplan_runtime.compat.deepspeed.config import removed_but_off

logger = logging.getLogger("zeroplan_runtime")


def as_deepspeed_reads(source: Mapping[str, Any], *, trains: bool) -> dict[str, Any]:
    """Returns the config without what DeepSpeed ignores.

    Args:
        source: the config's object.
        trains: there is an optimizer.
    """
    config = copy.deepcopy(removed_but_off(source)[0])
    if config.get("zero_allow_untested_optimizer") in (0, 1):  # DeepSpeed does not look at its type
        config["zero_allow_untested_optimizer"] = bool(config["zero_allow_untested_optimizer"])
    read = inspect_ds_config(config, dialect=Dialect.DEEPSPEED)
    for finding in read.findings:
        if finding.id == "key.ignored" and not finding.where.startswith("zeroplan"):
            _remove(config, finding.where)
            logger.warning("%s: %s", finding.where, finding.what)
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and read.zero.stage < 3 and read.zero.offload_param:
        for name in ("offload_param", "cpu_offload_param"):
            zero.pop(name, None)
        logger.warning("zero_optimization.offload_param: DeepSpeed ignores it below stage 3")
    if not trains and isinstance(zero, dict) and read.zero.stage >= 3 and read.zero.offload_param:
        zero["offload_optimizer"] = {"device": read.zero.offload_param.device.value}  # of no optimizer: it holds nothing
    return config


def _remove(config: dict[str, Any], path: str) -> None:
    if path in config:  # a key with dots, as TRL writes for a reference model
        del config[path]
        return
    *parents, name = path.split(".")
    section: Any = config
    for parent in parents:
        section = section.get(parent) if isinstance(section, dict) else None
    if isinstance(section, dict):
        section.pop(name, None)
