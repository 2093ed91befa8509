"""The included runtime's traffic: what it sends, copies and updates beside the model's own computation.

Amounts are those of one rank; those of the host and the disk, which the ranks of a node share, are of all its ranks. Lines of
the forward and the backward are of one micro batch. What happens once a step beside one of its micro batches is spread evenly
over them. Bytes on a link are those that one GPU sends in a ring.
Of a 1-bit optimizer they are those after its warm-up.
Source: zeroplan_runtime/schedule.py, gradient_reduction.py, optim/step.py and techniques/one_bit/momentum_exchange.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zeroplan.core.arena.layout import Flat, UnitLayout
from zeroplan.core.arena.layout_setup import RuntimeSetup
from zeroplan.core.buffers import Phase, Place
from zeroplan.core.cluster import Cluster
from zeroplan.core.one_bit import message_words
from zeroplan.core.optimizers import OPTIMIZERS
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.runtime_options import RuntimeOptions
from zeroplan.engines.compute_traffic import ComputeFacts
from zeroplan.engines.runtime.layouts import layout_of
from zeroplan.engines.runtime.rank import RuntimeRank
from zeroplan.engines.traffic import Traffic
from zeroplan.ledger.derive import fraction
from zeroplan.ledger.line import fact, means
from zeroplan.ledger.traffic import Resource, WorkBuilder, WorkLedger
from zeroplan.models.spec import ModelSpec


@dataclass(frozen=True)
class RuntimeFacts:
    """One rank of one configuration; all ranks own and do the same."""

    rank: RuntimeRank
    local_ranks: int = means("data-parallel ranks on one node")
    one_node: bool = True

    ranks = fact("data-parallel ranks", lambda c: c.setup.ranks)
    steps_before = fact("ranks − 1, the steps of a ring", lambda c: c.ranks - 1)
    micro_batches = fact("micro batches a step", lambda c: c.setup.grad_accum)
    repeats = fact("micro batches after the first", lambda c: c.micro_batches - 1)
    units = fact("units: blocks, large embeddings and heads, and the root", lambda c: len(c.rank.layout.units))
    gathered = fact(
        "elements that are gathered in each forward and backward in 16 or 32 bits (stage 3)",
        lambda c: (
            sum(unit.full for unit in c.rank.layout.units if unit not in c._narrow) if c.setup.shards_params and c._sent else 0
        ),
    )
    narrow = fact(
        "bytes of the messages of units that are gathered in 8 bits in each forward and backward",
        lambda c: c.ranks * sum(unit.float8_message for unit in c._narrow),
    )
    gathered_once = fact(
        "elements that are gathered once a step, after their update (stages 1 and 2)",
        lambda c: c._trainable if c.setup.shards_states and not c.setup.shards_params and c._sent else 0,
    )
    reduced = fact(
        "elements whose gradients are reduced in each micro batch (stages 2 and 3)",
        lambda c: c._reduced if c.setup.shards_grads else 0,
    )
    reduced_once = fact(
        "elements whose gradients are reduced once a step (stages 0 and 1)",
        lambda c: 0 if c.setup.shards_grads else c._reduced,
    )
    reduced_last = fact(
        "elements whose reduction has no backward left beside it, over all micro batches of a step", lambda c: c._last
    )
    exchanged = fact(
        "elements whose momentum the ranks exchange in one bit instead of gradients",
        lambda c: sum(flat.full for flat in c._compressed),
    )
    message_bytes = fact(
        "bytes of their messages, one a rank: a bit an element, and the scales",
        lambda c: sum(4 * c.ranks * message_words(flat.shard) for flat in c._compressed),
    )
    kept = fact("elements of gradients that this rank keeps until the step, on the GPU", lambda c: c.rank.grads_kept)
    on_gpu = fact("elements that this rank's optimizer updates on the GPU", lambda c: c.rank.stepped)
    on_host = fact("elements that this rank's optimizer updates on the host", lambda c: c.rank.stepped_offloaded)
    on_disk = fact(
        "elements that this rank's optimizer updates on the host whose masters and states are in files",
        lambda c: sum(share for unit, share in c.rank.stepping if unit.place is Place.NVME),
    )
    params_on_host = fact(
        "this rank's elements of parameters that stay in host memory", lambda c: c.rank.params_at(Place.PINNED)
    )
    params_on_disk = fact("this rank's elements of parameters that stay in files", lambda c: c.rank.params_at(Place.NVME))
    param_bytes = fact("bytes of one parameter", lambda c: c.rank.param_bytes)
    reduce_bytes = fact(
        "bytes of one gradient element in the reduction, times two where it is an all-reduce",
        lambda c: c.rank.reduce_bytes * (1 if c.setup.shards_states else 2),
    )
    grad_bytes = fact("bytes of one element of a kept gradient", lambda c: c.rank.grad_bytes)
    exchange_bytes = fact("bytes of one element of a gradient on the host", lambda c: c.rank.exchange_bytes)
    master_bytes = fact("bytes of one master that is read and written, 4 each way", lambda c: 8)
    state_bytes = fact("bytes of one element's optimizer states", lambda c: OPTIMIZERS[c.setup.optimizer].bytes_per_element())
    written_bytes = fact(
        "bytes of the 16-bit parameter that an update writes beside its master",
        lambda c: 0 if c.rank.keeps_masters_alone else c.rank.param_bytes,
    )

    @property
    def setup(self) -> RuntimeSetup:
        """The settings that decide the buffers of the rank."""
        return self.rank.setup

    @property
    def hooked(self) -> bool:
        """Whether units have hooks."""
        return self._sent or bool(self.rank.stepped_offloaded) or self.setup.shards_params

    @property
    def casts_masters(self) -> bool:
        """Whether masters are cast into the unit that is gathered."""
        return self.setup.casts_masters

    @property
    def _narrow(self) -> Sequence[UnitLayout]:
        return [unit for unit in self.rank.layout.units if unit.narrow] if self.setup.gathers_float8 else ()

    @property
    def _sent(self) -> bool:
        return self.rank.setup.ranks > 1

    @property
    def _compressed(self) -> Sequence[Flat]:
        return self.rank.flats if self.setup.compresses else ()

    @cached_property
    def _trainable(self) -> int:
        return sum(flat.full for flat in self.rank.flats)

    @property
    def _reduced(self) -> int:
        return 0 if self._compressed or not self._sent else self._trainable

    @property
    def _last(self) -> int:
        """The root, and of the others the unit that the forward enters first."""
        times = self.setup.grad_accum if self.setup.shards_grads else 1
        return sum(flat.full for flat in self.rank.flats[:2]) * times if self._reduced else 0


def _link(c: RuntimeFacts) -> Resource:
    return Resource.LINK if c.one_node else Resource.NODE_LINK


_lines = WorkBuilder()


@_lines.add(_link, Phase.FORWARD, Phase.BACKWARD)
def gather(c: RuntimeFacts) -> int:
    """Stage 3: every unit's parameters, gathered for the forward and again for the backward."""
    return fraction(c.param_bytes * c.gathered + c.narrow, c.steps_before, c.ranks)


@_lines.add(_link, Phase.FORWARD)
def gather_updated(c: RuntimeFacts) -> int:
    """Stages 1 and 2: updated parameters, gathered unit by unit beside the step's end and the next forward."""
    return fraction(c.param_bytes * c.gathered_once, c.steps_before, c.ranks * c.micro_batches)


@_lines.add(Resource.COLLECTIVE, Phase.FORWARD, Phase.BACKWARD)
def gather_calls(c: RuntimeFacts) -> int:
    """Stage 3: gathers times the ring's steps, for their latency."""
    return c.units * c.steps_before if c.gathered or c.narrow else 0


@_lines.add(_link, Phase.BACKWARD)
def reduce_gradients(c: RuntimeFacts) -> int:
    """Gradients reduced unit by unit beside the backward: all-reduced at stage 0, else reduce-scattered."""
    sent = c.reduce_bytes * (c.reduced * c.micro_batches + c.reduced_once - c.reduced_last)
    return fraction(sent, c.steps_before, c.ranks * c.micro_batches)


@_lines.add(_link, Phase.STEP)
def reduce_last(c: RuntimeFacts) -> int:
    """The units whose reduction has no backward left beside it."""
    return fraction(c.reduce_bytes * c.reduced_last, c.steps_before, c.ranks)


@_lines.add(_link, Phase.STEP)
def exchange_momentum(c: RuntimeFacts) -> int:
    """1-bit Adam after its warm-up: the signs of each rank's momentum, then those of the mean."""
    return fraction(2 * c.message_bytes, c.steps_before, c.ranks)


@_lines.add(Resource.HBM, Phase.STEP)
def compress_momentum(c: RuntimeFacts) -> int:
    """The passes beside that exchange: momentum and error are read and written, the gradient is read."""
    return c.exchanged * (16 + c.grad_bytes)


@_lines.add(Resource.HBM, Phase.FORWARD, Phase.BACKWARD)
def cast_masters(c: RuntimeFacts) -> int:
    """Stage 3 keeps no 16-bit shard: masters are cast into the unit that is gathered."""
    return (4 + c.param_bytes) * c.on_gpu if c.casts_masters else 0


@_lines.add(Resource.HBM, Phase.BACKWARD)
def accumulate_gradients(c: RuntimeFacts) -> int:
    """Gradients of later micro batches, added to those that are there: a read and a write more."""
    return fraction(2 * c.grad_bytes * c.kept, c.repeats, c.micro_batches)


@_lines.add(Resource.PINNED, Phase.FORWARD, Phase.BACKWARD)
def upload(c: RuntimeFacts) -> int:
    """This rank's parameters from host memory, those in files by way of it."""
    return c.param_bytes * (c.params_on_host + c.params_on_disk)


@_lines.add(Resource.READ, Phase.FORWARD, Phase.BACKWARD)
def read_params(c: RuntimeFacts) -> int:
    """Parameters from files, all ranks of the node."""
    return c.param_bytes * c.params_on_disk * c.local_ranks


@_lines.add(Resource.PINNED, Phase.BACKWARD)
def download_gradients(c: RuntimeFacts) -> int:
    """Gradients to the host, where their units are updated."""
    return c.exchange_bytes * c.on_host


@_lines.add(Resource.PINNED, Phase.BACKWARD)
def upload_sums(c: RuntimeFacts) -> int:
    """Offloaded sums over micro batches, brought up to be added to."""
    return fraction(c.exchange_bytes * c.on_host, c.repeats, c.micro_batches)


@_lines.add(Resource.UNIT_HOOK, Phase.FORWARD, Phase.BACKWARD)
def unit_hooks(c: RuntimeFacts) -> int:
    """Hooks around each unit, with its gather and, in the backward, its reduction."""
    return c.units if c.hooked else 0


@_lines.add(Resource.OPERATION, Phase.STEP, ahead=True)
def step_operations(c: RuntimeFacts) -> int:
    """Two kernels a unit, its sum of squares and its update; the host waits for neither."""
    return 2 * c.units


@_lines.add(Resource.HBM, Phase.STEP)
def norm_on_gpu(c: RuntimeFacts) -> int:
    """The norm reads each gradient once."""
    return c.grad_bytes * c.on_gpu


@_lines.add(Resource.HBM, Phase.STEP)
def step_on_gpu(c: RuntimeFacts) -> int:
    """The update reads gradients, masters and states once, and writes masters, states and 16-bit parameters once."""
    return c.on_gpu * (c.grad_bytes + c.master_bytes + 2 * c.state_bytes + c.written_bytes)


@_lines.add(Resource.CPU_ADAM, Phase.STEP)
def step_on_host(c: RuntimeFacts) -> int:
    """The update on the host, all ranks of the node."""
    return c.on_host * c.local_ranks * (c.exchange_bytes + c.master_bytes + 2 * c.state_bytes + c.written_bytes)


@_lines.add(Resource.PINNED, Phase.STEP)
def upload_updated(c: RuntimeFacts) -> int:
    """Updated parameters to the GPU, where they stay there."""
    return 0 if c.params_on_host + c.params_on_disk else c.param_bytes * c.on_host


@_lines.add(Resource.READ, Phase.STEP)
def read_states(c: RuntimeFacts) -> int:
    """Masters and states from files, all ranks of the node."""
    return c.on_disk * c.local_ranks * (4 + c.state_bytes)


@_lines.add(Resource.WRITE, Phase.STEP)
def write_states(c: RuntimeFacts) -> int:
    """Masters, states and updated parameters to files, all ranks of the node."""
    return c.local_ranks * (c.on_disk * (4 + c.state_bytes) + c.param_bytes * c.params_on_disk)


TRAFFIC: WorkLedger = _lines.ledger()


class RuntimeTraffic(Traffic):
    """The runtime's traffic for one model on one cluster; its collectives always overlap the computation."""

    ledger = TRAFFIC

    def __init__(self, spec: ModelSpec, cluster: Cluster, runtime_options: RuntimeOptions) -> None:
        self._spec, self._cluster, self._runtime_options = spec, cluster, runtime_options
        self._known: dict[object, RuntimeFacts] = {}

    def facts(self, compute: ComputeFacts, workload: Workload, zero: ZeroConfig) -> RuntimeFacts:
        """Return one rank's facts; they are kept by configuration."""
        key = (zero, workload.numerics.dtype, workload.numerics.optimizer, workload.batch.grad_accum)
        found = self._known.get(key)
        if found is None:
            parallel = self._cluster.layout
            layout = layout_of(self._spec, workload, zero, parallel, self._runtime_options)
            rank = RuntimeRank(layout=layout)
            found = RuntimeFacts(rank, parallel.gpus, parallel.shards_on_one_node)
            self._known[key] = found
        return found
