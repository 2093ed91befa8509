"""A small engine, written as somebody outside zeroplan would: whole fp32 parameters, each gradient all-reduced by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.engines.toy.rank import ToyRank
from zeroplan.core.buffers import ALWAYS, FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.workload import DType, Precision
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.engines.technique_lines import with_techniques
from zeroplan.ledger.line import Ledger, LedgerBuilder
from zeroplan.ledger.optimizer_lines import add_state_lines
from zeroplan.models.spec import ModelSpec

if TYPE_CHECKING:
    from zeroplan.engines.simulation import Simulation
    from zeroplan.engines.traffic import Traffic
    from zeroplan.interop.forms.configuration import Configuration, Form, FormFiles
    from zeroplan.simulate.allocator.config import AllocatorConfig
    from zeroplan.tape.expanded import ExpandedTape

_lines = LedgerBuilder()


@_lines.add(Buffer.PARAM_FULL, Place.HBM, ALWAYS, state=True)
def param_full(c: ToyRank) -> int:
    """The whole model in fp32."""
    return 4 * c.params


@_lines.add(Buffer.GRAD_FULL, Place.HBM, (Phase.BACKWARD, Phase.STEP), state=True)
def grad_full(c: ToyRank) -> int:
    """Gradients, until zero_grad."""
    return 4 * c.trainable


add_state_lines(_lines, Place.HBM, lambda c: c.trainable)


@_lines.add(Buffer.WORKSPACE, Place.HBM, FROM_FIRST_STEP)
def cublas_workspace(c: ToyRank) -> int:
    """cuBLAS's workspaces: one for the forward's thread, one for the backward's."""
    return 2 * c.cublas_workspace


LEDGER = _lines.ledger()


class Toy(Engine):
    """Replicas whose gradients are averaged one by one."""

    name = "toy"
    version = "1.0"
    trainer = "tests.engines.toy.trainer:build"

    def options(self) -> list[ZeroConfig]:
        return [ZeroConfig.of(0)]

    def require_runnable(self, zero: ZeroConfig) -> None:
        if zero.stage or zero.offload_optimizer or zero.offload_param:
            raise BadInput("toy shards nothing", where="--stage", remedy="use --stage 0")

    def precision(self, dtype: DType) -> Precision:
        return Precision.FP32 if dtype is DType.FP32 else Precision.AUTOCAST

    def ledger(self, case: Case) -> tuple[Ledger, Any]:
        return with_techniques(LEDGER, case.workload), ToyRank(
            workload=case.workload,
            parameters=case.spec.parameters,
            layout=case.layout,
            cublas_workspace=case.cluster.gpu.workspace,
        )

    def simulate(self, case: Case, tape: ExpandedTape, config: AllocatorConfig | None = None) -> Simulation:
        from tests.engines.toy.schedule import simulate_toy

        return simulate_toy(case, tape, config)

    def traffic(self, spec: ModelSpec, cluster: Cluster) -> Traffic:
        from tests.engines.toy.traffic import ToyTraffic

        return ToyTraffic(spec, cluster)

    def forms(self) -> Mapping[str, Form]:
        from zeroplan.interop.forms.configuration import Form

        return {"toy": Form(_toy_json, main="toy.json")}


def _toy_json(one: Configuration) -> FormFiles:
    from zeroplan.interop.forms.configuration import FormFiles

    text = json.dumps({"micro_batch": one.workload.batch.micro_batch, "grad_accum": one.workload.batch.grad_accum}) + "\n"
    return FormFiles({one.output: text}, ("--config", one.output))
