"""The ledger's lines for DeepSpeed's Muon: momentum of matrices, and what gathers them. See Note [Muon's groups].

Sources are files of DeepSpeed 0.19.8's runtime/zero.
"""

from __future__ import annotations

from zeroplan.core.buffers import ALWAYS, FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.ledger.line import LedgerBuilder


def add_muon_lines(lines: LedgerBuilder) -> None:
    """Register them: zero bytes for every other optimizer."""
    _add = lines.add

    @_add(Buffer.OPTIM_MOMENTUM, Place.HBM, FROM_FIRST_STEP, state=True)
    def muon_momentum(c: DeepSpeedRank) -> int:
        """Momentum of the matrices that Muon updates: of this rank's parts, or whole where the backward orthogonalises them.

        Source: Note [Muon's groups] in engines/deepspeed/stepped_groups.py
        """
        if c.optimizer_device is not OffloadDevice.NONE or c.stage == 3:
            return 0
        return c.momentum_bytes * (c.most_momentum if c.stages_momentum else c.matrix)

    @_add(Buffer.OPTIM_MOMENTUM, Place.HBM, ALWAYS, state=True)
    def muon_momentum_stage3(c: DeepSpeedRank) -> int:
        """Momentum of this rank's parts of the matrices, made at initialisation, as wide as a gradient on its way.

        Source: stage3.py, _create_momentum_buffer
        """
        return c.momentum_bytes * c.matrix if c.stage == 3 and c.optimizer_device is OffloadDevice.NONE else 0

    @_add(Buffer.OPTIM_MOMENTUM, Place.HBM, FROM_FIRST_STEP, state=True)
    def muon_momentum_staged(c: DeepSpeedRank) -> int:
        """The momentum of the step under way, until no gradient of it is found to be infinite.

        Source: stage_1_and_2.py, _muon_staging_momentum
        """
        return c.momentum_bytes * c.most_momentum

    @_add(Buffer.OPTIM_MOMENTUM, Place.DRAM, FROM_FIRST_STEP, state=True)
    def muon_momentum_host(c: DeepSpeedRank) -> int:
        """Momentum of this rank's parts of the matrices, offloaded.

        Source: stage_1_and_2.py and stage3.py, _apply_muon_updates_cpu_offload
        """
        return 0 if c.optimizer_device is OffloadDevice.NONE else c.momentum_bytes * c.matrix_in_memory

    @_add(Buffer.OPTIM_MOMENTUM, Place.NVME, FROM_FIRST_STEP, state=True)
    def muon_momentum_nvme(c: DeepSpeedRank) -> int:
        """Momentum of this rank's parts of the matrices in files, one a sub-group.

        Source: stage3.py, _create_momentum_buffer
        """
        return c.momentum_bytes * c.matrix_in_files

    @_add(Buffer.COMM_ALL_GATHER, Place.HBM, FROM_FIRST_STEP)
    def muon_gathers(c: DeepSpeedRank) -> int:
        """Buffers through which Muon gathers whole matrices in the step, kept for the next one.

        Source: stage_1_and_2.py, _muon_all_gather_partitions; stage3.py, _partitioned_buffers_all_gather
        """
        return c.muon_gathers

    @_add(Buffer.OPTIM_TEMP, Place.HBM, (Phase.STEP,))
    def muon_matrices(c: DeepSpeedRank) -> int:
        """Whole gradients, momentum and updates of the matrices that Muon updates together.

        Source: engines/deepspeed/muon.py
        """
        return c.muon_together

    @_add(Buffer.GRAD_SHARD, Place.HBM, (Phase.STEP,))
    def muon_updates(c: DeepSpeedRank) -> int:
        """Updates of the whole matrices that the backward orthogonalises, until the step.

        Source: stage_1_and_2.py, get_flat_partition
        """
        return c.momentum_bytes * c.most_momentum
