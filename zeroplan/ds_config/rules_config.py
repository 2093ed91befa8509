"""Rules of ``DeepSpeedConfig``, which refuses before an engine exists."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zeroplan.ds_config.findings import At
from zeroplan.ds_config.rules import BOTH, Rule, View

_refused = partial(Rule, at=At.CONFIG)
_ZC, _RC = "runtime/zero/config.py", "runtime/config.py"
_ZERO, _OFF = "zero_optimization", "zero_optimization.offload_optimizer"


def _dynamic_fp16(v: View) -> bool:
    return bool(v.says("fp16.enabled")) and v.says("fp16.loss_scale", 0) == 0


#: What cannot take summed gradients, by name, and what tells that a config has it.
_CANNOT_SUM: tuple[tuple[str, Callable[[View], bool]], ...] = (
    ("ZeRO stage 3", lambda v: v.zero.stage == 3),
    ("ZenFlow", lambda v: v.zero.zenflow is not None),
    ("DeepCompile", lambda v: bool(v.says("compile.deepcompile"))),
)


def _sums_with(uses: Callable[[View], bool], v: View) -> bool:
    return str(v.says("gradient_allreduce_op", "mean")).lower() == "sum" and uses(v)


#: Refused while the config is parsed.
CONFIG_REFUSALS: tuple[Rule, ...] = (
    _refused(
        "precision.both",
        "fp16",
        lambda v: bool(v.says("fp16.enabled")) and bool(v.says("bf16.enabled")),
        "fp16 and bf16 are both enabled",
        "disable one of the two",
        source=_RC,
        dialects=BOTH,
    ),
    _refused(
        "offload.ratio",
        f"{_OFF}.ratio",
        lambda v: v.zero.offload_optimizer.ratio < 1.0 and v.zero.stage != 3,
        "partial offload (ratio {v.zero.offload_optimizer.ratio:g}) needs stage 3, not {v.zero.stage}",
        "use stage 3, or leave ratio out",
        source=_ZC,
    ),
    _refused(
        "norm.stage",
        f"{_ZERO}.compute_grad_norm",
        lambda v: not v.zero.buckets.compute_grad_norm and v.zero.stage not in (1, 2),
        "compute_grad_norm false needs stage 1 or 2, not {v.zero.stage}",
        "leave it out",
        source=_ZC,
    ),
    _refused(
        "reduce.op",
        "gradient_allreduce_op",
        lambda v: str(v.says("gradient_allreduce_op", "mean")).lower() not in ("mean", "sum"),
        "the operation must be mean or sum",
        "write mean or sum",
        source=_RC,
    ),
    *(
        _refused(
            "reduce.sum",
            "gradient_allreduce_op",
            partial(_sums_with, uses),
            f"sum is not supported with {name}",
            "use mean",
            source=_RC,
        )
        for name, uses in _CANNOT_SUM
    ),
    _refused(
        "masters.stage",
        _ZERO,
        lambda v: (
            v.zero.stage == 0
            and (
                v.zero.step.fp16_master_weights_and_grads
                or v.zero.step.bf16_master_weights_and_grads
                or v.zero.step.bf16_optimizer_states
            )
        ),
        "16-bit master weights or optimizer states need stage 1, 2 or 3",
        "raise the stage, or leave them out",
        source=_RC,
    ),
    _refused(
        "masters.states",
        "bf16.bf16_optimizer_states",
        lambda v: v.zero.stage > 0 and v.zero.step.bf16_optimizer_states and not v.zero.step.bf16_master_weights_and_grads,
        "bf16_optimizer_states needs bf16_master_weights_and_grads",
        "set both",
        source=_RC,
    ),
    _refused(
        "fp16.window",
        "fp16.loss_scale_window",
        lambda v: _dynamic_fp16(v) and v.says("fp16.loss_scale_window", 1000) <= 0,
        "must be above 0 with a dynamic loss scale",
        "use 1000",
        source="runtime/precision_config.py",
        dialects=BOTH,
    ),
    _refused(
        "fp16.min_scale",
        "fp16.min_loss_scale",
        lambda v: _dynamic_fp16(v) and v.says("fp16.min_loss_scale", 1) <= 0,
        "must be above 0 with a dynamic loss scale",
        "use 1",
        source="runtime/precision_config.py",
        dialects=BOTH,
    ),
    _refused(
        "zenflow.strategy",
        f"{_ZERO}.zenflow.select_strategy",
        lambda v: v.zero.zenflow is not None and v.zero.zenflow.select_strategy not in ("auto", "step", "epoch"),
        "{v.zero.zenflow.select_strategy!r} is no strategy",
        "use auto, step or epoch",
        source="runtime/zenflow/zenflow_config.py",
    ),
    _refused(
        "zenflow.word",
        f"{_ZERO}.zenflow",
        lambda v: (
            v.zero.zenflow is not None
            and any(
                isinstance(n, str) and n != "auto" for n in (v.zero.zenflow.select_interval, v.zero.zenflow.update_interval)
            )
        ),
        'select_interval and update_interval are integers or "auto"',
        "write an integer",
        source="runtime/zenflow/zenflow_config.py",
    ),
    _refused(
        "zenflow.update",
        f"{_ZERO}.zenflow.update_interval",
        lambda v: (
            v.zero.zenflow is not None
            and isinstance(v.zero.zenflow.update_interval, int)
            and v.zero.zenflow.update_interval < 1
        ),
        "must be at least 1",
        "use 1 or more",
        source="runtime/zenflow/zenflow_config.py",
    ),
)
