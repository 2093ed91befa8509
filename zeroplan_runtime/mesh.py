"""The ranks of a run by what they share: the dimensions of a DeviceMesh.

Note [Mesh]
    A dimension of the mesh is known by its name. ``dp`` (or ``dp_shard``) and ``cp`` are data dimensions: their ranks hold the
    same part of the model and see other samples or other tokens, so ZeRO shards over both and averages gradients over both.
    ``tp`` and ``pp`` divide the model: each rank shards the parts that it has over the ranks that have the same. The
    collectives of ``tp`` and ``pp`` are torch's own (``parallelize_module``, ``torch.distributed.pipelining``); the engine adds
    the gradients' sum of squares over them, so that norm, clip factor and skipped steps are the whole model's.

    ``ep`` is a data dimension, too: its ranks see other samples, and ZeRO shards over them what they have alike. Of experts,
    which they divide, each shards its part over the ranks that have the same, those of the other data dimensions. The exchange
    of tokens is :mod:`zeroplan_runtime.expert_parallel`'s. The loss is the mean over all these ranks, and an expert's gradient
    is that of the tokens of its ``ep`` ranks; so it is divided by their number (:meth:`ModelStates.grad_scale`). The ranks that
    share experts may also be those of other data dimensions: ``ep`` is then a name for them, made by
    ``mesh["dp", "cp"]._flatten("ep")``. Each rank of ``tp`` has the same experts, or its part of their matrices.

    Ranks of ``tp`` may also have different experts, whole ones: the ranks that share them are then called ``ep_tp``, the name
    of dimensions with ``tp`` among them, such as ``mesh["dp", "tp"]._flatten("ep_tp")``. Ranks of ``tp`` have the same tokens,
    of which each exchanges its part, so an expert's gradient is divided by the number of its ranks that have samples of their
    own.

    What several ranks of ``tp`` hold alike (norms, the biases of row-wise layers) gets equal gradients on all of them, if the
    layers around it are parallelized as torch means them to be. :mod:`zeroplan_runtime.replicas` checks it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroplan.core.errors import BadInput
from zeroplan_runtime.comm import Communicator

#: Names of the dimension whose ranks see other samples.
SAMPLES = ("dp", "dp_shard")
#: Dimensions that divide the model.
MODEL = ("pp", "tp")
_KNOWN = (*SAMPLES, "cp", "ep", *MODEL)
#: The name of the ranks that share experts, those of ``tp`` among them.
ACROSS = "ep_tp"


@dataclass(frozen=True, slots=True)
class MeshRanks:
    """One rank's groups. See Note [Mesh].

    Attributes:
        world: all ranks of the run.
        shard: the ranks that hold the same part of the model but for experts, over which ZeRO shards.
        experts: those that shard the same experts: of `shard`, or of several such groups where ranks of ``tp`` have others.
        ep: the ranks that share the experts; None where there is one.
        across: those of `ep` that see the same tokens: ranks of ``tp`` that have different experts, else 1.
        samples: the number of ranks, of one model replica each, that see different samples.
        sample: this rank's place among them.
        model: by dimension, the ranks that hold other parts; dimensions of one rank are left out.
        coordinate: this rank's place in each of these dimensions.
        mesh: the mesh; None without one.
        expert_mesh: the mesh of `ep`.
    """

    world: Communicator
    shard: Communicator
    samples: int
    sample: int
    model: Mapping[str, Communicator] = field(default_factory=dict)
    coordinate: Mapping[str, int] = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    experts: Communicator = field(default_factory=Communicator.alone)
    ep: Communicator | None = None
    expert_mesh: DeviceMesh | None = None
    across: int = 1

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None) -> MeshRanks:
        """The ranks of data parallelism alone."""
        comm = Communicator(group)
        return cls(comm, comm, comm.world_size, comm.rank, experts=comm)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> MeshRanks:
        """The ranks of `mesh`. Every rank of it must call this.

        Raises:
            BadInput: for a mesh without names or without this rank, and for dimensions that the engine does not know.
        """
        sizes = _sizes(mesh)
        if mesh.get_coordinate() is None:
            raise BadInput(f"rank {dist.get_rank()} is not in it", where="mesh", remedy="give a mesh that has every rank")
        place = dict(zip(sizes, mesh.get_coordinate() or (), strict=True))
        whole = mesh.size() == dist.get_world_size()
        world = Communicator(None if whole else _group(mesh, tuple(sizes)))
        data = tuple(name for name in sizes if name not in MODEL)
        samples = next((name for name in data if name in SAMPLES), None)
        shard = Communicator(_group(mesh, data)) if data else Communicator.alone()
        ep, experts, expert_mesh, over = None, shard, *_expert_ranks(mesh, data)
        if expert_mesh is not None:
            holders = (*data, "tp") if "tp" in over else data
            ep, beside = Communicator(expert_mesh.get_group()), tuple(name for name in holders if name not in over)
            wide = any(sizes[name] > 1 for name in beside)
            experts = Communicator(_group(mesh, beside)) if wide else Communicator.alone()
        shared = sizes.get("ep", 1)
        model = {name: Communicator(mesh.get_group(name)) for name in MODEL if sizes.get(name, 1) > 1}
        return cls(
            world,
            shard,
            (sizes[samples] if samples else 1) * shared,
            (place[samples] if samples else 0) * shared + place.get("ep", 0),
            model,
            {name: place[name] for name in model},
            mesh,
            experts,
            ep,
            expert_mesh,
            sizes["tp"] if "tp" in over else 1,
        )

    @property
    def tp(self) -> Communicator | None:
        """The tensor-parallel ranks; None where there is one."""
        return self.model.get("tp")

    @property
    def pp(self) -> Communicator | None:
        """The pipeline's ranks; None where there is one."""
        return self.model.get("pp")

    @property
    def replicas(self) -> int:
        """The ranks beside this one's shard group that hold a parameter that is not distributed."""
        return self.tp.world_size if self.tp is not None else 1

    @property
    def part(self) -> str:
        """The name of the part of the model that this rank's shard group holds, such as ``pp0.tp1/``; empty for the whole."""
        return ".".join(f"{name}{place}" for name, place in self.coordinate.items()) + "/" if self.coordinate else ""

    @property
    def expert_part(self) -> str:
        """The name of the part that this rank has of what is shared by experts."""
        if self.ep is None:
            return self.part
        return ".".join(f"{name}{place}" for name, place in {**self.coordinate, "ep": self.ep.rank}.items()) + "/"

    @property
    def degrees(self) -> dict[str, int]:
        """The sizes of the dimensions that divide the model or its experts."""
        shared = {"ep": self.ep.world_size} if self.ep is not None else {}
        return {name: comm.world_size for name, comm in self.model.items()} | shared

    @property
    def leads_stage(self) -> bool:
        """Whether this is the first rank of its pipeline stage."""
        return self.shard.rank == 0 and self.coordinate.get("tp", 0) == 0

    @property
    def reports(self) -> bool:
        """Whether this rank shows the run's progress: the first of those that see the loss."""
        return self.leads_stage and (self.pp is None or self.pp.rank == self.pp.world_size - 1)

    def explain_losses(self, explain: Callable[[str], str] | None) -> None:
        """Lets all of this rank's groups name a rank that is lost; None lets none."""
        for comm in (self.world, self.shard, self.experts, self.ep, *self.model.values()):
            if comm is not None:
                comm.explain = explain

    def sum_over_model(self, values: torch.Tensor) -> None:
        """Replaces `values` by their sum over the ranks that hold the other parts of the model."""
        for comm in self.model.values():
            comm.all_reduce_sum(values)


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    """The mesh's dimensions.

    Raises:
        BadInput: where a name is missing, unknown or not supported.
    """
    known = ", ".join(_KNOWN)
    if not mesh.mesh_dim_names:
        raise BadInput("its dimensions have no names", where="mesh", remedy=f"give mesh_dim_names of {known}")
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    for name, size in sizes.items():
        if name in _KNOWN:
            continue
        if name == "dp_replicate" and size > 1:
            what, remedy = "replicas of the shards (dp_replicate) are not supported", "shard over all data-parallel ranks"
        elif name == "dp_replicate":
            continue
        else:
            what, remedy = f"dimension {name!r} is unknown", f"name it one of {known}"
        raise BadInput(what, where="mesh", remedy=remedy)
    if all(name in sizes for name in SAMPLES):
        raise BadInput("it has dp and dp_shard", where="mesh", remedy="give one of the two")
    return sizes


def _expert_ranks(mesh: DeviceMesh, data: tuple[str, ...]) -> tuple[DeviceMesh | None, tuple[str, ...]]:
    """The mesh of the ranks that share experts with this one, and the dimensions that it is made of; None for no others.

    Raises:
        BadInput: for a mesh ``ep`` or ``ep_tp`` of other ranks.
    """
    across = _named(mesh, ACROSS)
    found = across or _named(mesh, "ep")
    if found is None:
        return None, ()
    names, place = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
    ranks = sorted(found.mesh.flatten().tolist())
    among = (*data, "tp") if across is not None and "tp" in names else data
    for count in range(1, len(among) + 1):
        for over in combinations(among, count):
            here = tuple(slice(None) if name in over else at for name, at in zip(names, place, strict=True))
            if sorted(mesh.mesh[here].flatten().tolist()) == ranks and (across is None or "tp" in over):
                return found, over
    if across is not None:
        raise BadInput(
            f"the ranks of {ACROSS} are not those of dimensions with tp among them",
            where="mesh",
            remedy=f"make it by mesh['tp']._flatten('{ACROSS}'), or of dp or ep and tp",
        )
    raise BadInput(
        "the ranks of ep are not those of dimensions that see other samples or tokens",
        where="mesh",
        remedy="make ep a dimension of the mesh, or of dp and cp by mesh['dp', 'cp']._flatten('ep')",
    )


def _named(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    """The mesh of that name, a dimension or a flattened one; None where there is none, or of one rank."""
    with warnings.catch_warnings():  # torch warns of names that were made by flattening
        warnings.simplefilter("ignore")
        try:
            found: DeviceMesh = mesh[name]
        except KeyError:
            return None
    return found if found.size() > 1 else None


def _group(mesh: DeviceMesh, names: tuple[str, ...]) -> dist.ProcessGroup:
    """The group of the ranks that differ in these dimensions only."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    wide = tuple(name for name in names if sizes[name] > 1) or names[:1]
    return mesh.get_group(wide[0]) if len(wide) == 1 else mesh[wide]._flatten("_".join(wide)).get_group()
