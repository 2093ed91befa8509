"""When the toy allocates and frees."""

from __future__ import annotations

from tests.engines.toy.rank import ToyRank
from zeroplan.core.buffers import Buffer
from zeroplan.engines.case import Case
from zeroplan.engines.player import EngineSchedule, Run, play
from zeroplan.engines.simulation import Simulation
from zeroplan.engines.torch_step import STEPS_UNTIL_STEADY, optimizer_step
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.recorder import Recorder, simulate
from zeroplan.tape.expanded import ExpandedTape


class ToySchedule(EngineSchedule):
    def __init__(self, rank: ToyRank, recorder: Recorder) -> None:
        self.rank, self.recorder = rank, recorder
        self.grads: dict[int, int] = {}
        self.stepped = False

    def build(self) -> None:
        for param, count in enumerate(self.rank.numel):
            self.recorder.alloc(4 * count, Buffer.PARAM_FULL, note=param)

    def grad(self, param: int, handle: int) -> None:
        if param in self.grads:
            self.recorder.free(handle)
        else:
            self.grads[param] = handle

    def step(self, applied: bool) -> None:
        optimizer_step(self.recorder, self.rank, applied=applied, first=not self.stepped)
        self.stepped |= applied
        for handle in self.grads.values():
            self.recorder.free(handle)
        self.grads.clear()


def simulate_toy(case: Case, tape: ExpandedTape, config: AllocatorConfig | None) -> Simulation:
    workspace = case.cluster.gpu.workspace
    rank = ToyRank(workload=case.workload, parameters=tape.parameters, layout=case.layout, cublas_workspace=workspace)
    recorder = Recorder()
    run = Run(case.workload.batch.grad_accum, STEPS_UNTIL_STEADY, cublas_workspace=workspace)
    play(run, tape, recorder, ToySchedule(rank, recorder))
    return Simulation(simulate(recorder, config, device_memory=case.cluster.vram))
