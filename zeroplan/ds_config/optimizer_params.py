"""``optimizer.params`` as the program's optimizer takes them: names and numbers by which it would not start or not step."""

from __future__ import annotations

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.hyperparameters import check_hyperparameters, not_a_number
from zeroplan.core.optimizers import RUNTIME_OPTIMIZERS, optimizer_of_type
from zeroplan.ds_config.findings import At, Severity
from zeroplan.ds_config.reading import Reading
from zeroplan.ds_config.training import TrainingSettings

_PARAMS = "optimizer.params"
_ENGINE = "runtime/engine.py"


def check_optimizer_params(reading: Reading, training: TrainingSettings, *, on_host: bool) -> None:
    """Add an error for each parameter of the file's optimizer that the dialect's program would refuse, or fail on in a step.

    `on_host`: the optimizer is offloaded.
    """
    if training.optimizer is None:
        return
    if reading.for_runtime:
        _of_runtime(reading, training)
    else:
        _of_deepspeed(reading, training, on_host=on_host)


def _of_runtime(reading: Reading, training: TrainingSettings) -> None:
    row = RUNTIME_OPTIMIZERS.get((training.optimizer or "").lower())
    if row is None or row.runtime is None:
        return
    given = {key: value for key, value in training.optimizer_params.items() if key not in ("adam_w_mode", "max_grad_norm")}
    try:
        check_hyperparameters((training.optimizer or "").lower(), given, row.runtime.defaults)
    except BadInput as fault:
        reading.add(
            "optimizer.params", Severity.ERROR, fault.where, fault.what, fault.remedy, "optim/zero_optimizer.py", At.ENGINE
        )


def _of_deepspeed(reading: Reading, training: TrainingSettings, *, on_host: bool) -> None:
    kind, row = training.optimizer_type, optimizer_of_type(training.optimizer or "")
    if kind is None or row is None:
        return
    for key, value in training.optimizer_params.items():
        where = f"{_PARAMS}.{key}"
        if kind.takes and key not in kind.takes and key != "max_grad_norm":
            what, remedy = f"{training.optimizer} takes no such parameter", did_you_mean(key, kind.takes) or "remove it"
            reading.add("optimizer.params", Severity.ERROR, where, what, remedy, _ENGINE, At.ENGINE)
        scheduled = key == "lr" and training.scheduler is not None  # which writes its own before the first step
        if scheduled or row.runtime is None or key not in row.runtime.defaults:
            continue
        default = row.runtime.defaults[key]
        if what := not_a_number(value, default):
            remedy = f"such as {list(default) if isinstance(default, tuple) else default}, without quotation marks"
            at = At.RUN if kind.fused and not training.torch_adam else At.ENGINE  # torch's classes compare when they are made
            reading.add("optimizer.params", Severity.ERROR, where, what, remedy, _ENGINE, at)
    if training.optimizer_params.get("amsgrad") and kind.fused and not (training.torch_adam or on_host):
        what, remedy = "DeepSpeed's fused class refuses AMSGrad", 'add "torch_adam": true' if kind.torch_adam else "remove it"
        reading.add("optimizer.params", Severity.ERROR, f"{_PARAMS}.amsgrad", what, remedy, _ENGINE, At.ENGINE)
