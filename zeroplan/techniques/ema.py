"""An exponential moving average of the weights, kept beside the model (Polyak and Juditsky 1992; Tarvainen and Valpola 2017).

A copy of every trained parameter, in the parameter's own dtype, from the initialisation on: ``AveragedModel`` of
``torch.optim.swa_utils``, diffusers' ``EMAModel``, timm's ``ModelEma``. From the second step on an update mixes one parameter
after the other through three temporaries of its size: both scaled, and their sum (``get_ema_avg_fn``). One that mixes in place
(``get_ema_multi_avg_fn``) needs less, as one of shards, which ``AveragedModel`` does not copy: a temporary is planned there.
An average on the host has the whole model brought there at each update.

Lightning's callback copies the module before it is moved to the GPU: without a ``device`` the average is on the host.
Source: torch 2.11, optim/swa_utils.py (AveragedModel.update_parameters); Lightning 2.6, pytorch/callbacks/weight_averaging.py
(WeightAveraging.setup) and pytorch/trainer/trainer.py (_run: ``_call_setup_hook`` before ``strategy.setup``)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from zeroplan.core.buffers import ALWAYS, Buffer, Phase, Place
from zeroplan.core.errors import BadInput, member_named
from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ledger.line import LedgerBuilder
from zeroplan.techniques.base import Facts, FileFacts, HoldsTrained, KeptBlocks, OptionValues, TakesTechniques, Technique

_lines = LedgerBuilder()


class AverageDevice(StrEnum):
    """Where the average is kept."""

    GPU = "gpu"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Ema:
    """The average is kept here."""

    device: AverageDevice


def _place(c: HoldsTrained) -> Place:
    average = c.workload.technique(Ema)
    return Place.DRAM if average is not None and average.device is AverageDevice.CPU else Place.HBM


@_lines.add(Buffer.OPTIM_AVERAGE, _place, ALWAYS)
def weight_average(c: HoldsTrained) -> int:
    """A copy of the trained parameters that this rank holds. Source: torch/optim/swa_utils.py, AveragedModel"""
    return c.original_bytes * c.sharded_trainable


@_lines.add(Buffer.OPTIM_TEMP, _place, (Phase.STEP,))
def weight_average_update(c: HoldsTrained) -> int:
    """What an update of the average brings to it: all parameters on the host, else one parameter, scaled and mixed.

    Source: torch/optim/swa_utils.py, AveragedModel.update_parameters, get_ema_avg_fn
    """
    whole = _place(c) is Place.DRAM
    return c.original_bytes * (c.sharded_trainable if whole else _mixed(c) * c.largest_trained)


def _mixed(c: HoldsTrained) -> int:
    """Temporaries of one parameter's size while its average is mixed."""
    return 3 if c.plain else 1


class EmaTechnique(Technique[Ema]):
    """An average of the weights."""

    name = "an average of the weights"
    kind = Ema
    where = "--ema"
    decides = "ema"
    ema = Option[str | None](
        str,
        None,
        "Keep an average of the weights (EMA) on the gpu or the cpu.",
        WORK,
        metavar="DEVICE",
        page=True,
        without=RUNS,
        merges=False,
    )
    keys: ClassVar[Mapping[str, Mapping[str, str]]] = {"lightning": {"WeightAveraging": "ema", "EMAWeightAveraging": "ema"}}
    engines = ("ddp", "fsdp2")
    refusal = "an average of the weights is not modelled under {engine}"
    remedy = "use --engine ddp or fsdp2"
    apart = ("--lora-rank", "--quantize")
    because = "whether the frozen base is copied, too, is up to the program"
    lines = _lines.ledger()

    def value(self, asked: OptionValues, engine: TakesTechniques) -> Ema | None:
        """Return the average that ``--ema`` asks for."""
        device = asked[EmaTechnique.ema]
        return None if device is None else Ema(member_named(AverageDevice, device, where=self.where))

    def filled(self, value: Any, facts: FileFacts) -> Mapping[str, Any] | Unmodelled:
        """Return the average of Lightning's callback, on its ``device``, else where the module is made; under a strategy that
        shards it is left out.
        """
        if facts.engine.name != "ddp":
            says = "averaged weights beside sharded ones, which the callback does not do"
            return Unmodelled(facts.key(EmaTechnique.ema), Effect.UNKNOWN, says)
        device = str(value).partition(":")[0]
        return {"ema": AverageDevice.GPU.value if device in ("gpu", "cuda") else AverageDevice.CPU.value}

    def require_degrees(self, value: Ema, facts: Facts) -> None:
        """Refuse ranks that share a model."""
        self.require_unshared(facts, "an average of the weights is modelled under data parallelism alone")

    def require_sharding(self, value: Ema, engine: TakesTechniques, zero: ZeroConfig) -> None:
        """Refuse offloaded parameters."""
        if zero.offloads_param:
            raise BadInput(
                "an average of parameters on the host is not modelled", where=self.where, remedy="leave --offload-param out"
            )

    def blocks(self, value: Ema, rank: HoldsTrained) -> KeptBlocks | None:
        """Return a block for each parameter, and one that passes at each one's update."""
        if value.device is AverageDevice.CPU:
            return None
        each = tuple(rank.original_bytes * rank.chunks[p] for p in rank.parameters.trained)
        return KeptBlocks(Buffer.OPTIM_AVERAGE, each, Buffer.OPTIM_TEMP, each, _mixed(rank))

    def setting(self, value: Ema) -> None:
        """Return none: Lightning's callback is an object with arguments of its own."""

    def instructions(self, value: Ema) -> tuple[str, ...]:
        """Return who keeps it."""
        return (f"keep an average of the weights on the {value.device.value}: AveragedModel(model, device=…)",)

    def described(self, value: Ema) -> Mapping[str, Any]:
        """Return where it is kept."""
        return {"ema": value.device.value}
