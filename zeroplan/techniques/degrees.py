"""The techniques that a layout carries: ways in which ranks share more than samples."""

from __future__ import annotations

from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import auto_class_of
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.option import DATA_PARALLEL, MESH, Option
from zeroplan.techniques.base import Degree, Facts
from zeroplan.techniques.context_parallel import ContextParallelTechnique
from zeroplan.techniques.experts import ExpertParallelTechnique
from zeroplan.techniques.pipeline import PipelineTechnique
from zeroplan.techniques.tensor_parallel import TensorParallelTechnique
from zeroplan.techniques.ulysses import UlyssesTechnique

#: A row each, in the order in which their rules are held against a layout.
DIVIDING: list[Degree] = [
    TensorParallelTechnique(),
    ContextParallelTechnique(),
    UlyssesTechnique(),
    ExpertParallelTechnique(),
    PipelineTechnique(),
]


class MeshOptions:
    """Their options, in the order of the help; replicas of a shard group (`dp_replicate`) follow the ranks' rule alone."""

    __slots__ = ()
    tp, sp = TensorParallelTechnique.tp, TensorParallelTechnique.sp
    cp = ContextParallelTechnique.cp
    ulysses = UlyssesTechnique.ulysses
    pp, vpp = PipelineTechnique.pp, PipelineTechnique.vpp
    ep, etp = ExpertParallelTechnique.ep, ExpertParallelTechnique.etp
    schedule, partition = PipelineTechnique.schedule, PipelineTechnique.partition
    dp_replicate = Option(int, 1, "Replicas of the group of GPUs that shards (HSDP). [1]", MESH, without=DATA_PARALLEL)


def require_language_model(facts: Facts) -> None:
    """Refuse what no degree that divides the model, a sample or its layers is modelled with.

    Raises:
        BadInput: naming a flag.
    """
    divided = [name for name, degree in facts.degrees.items() if degree > 1 and name not in ("sp", "dp_replicate")]
    work, spec = facts.workload, facts.spec
    if facts.task is not None or (spec.config and auto_class_of(spec.config) != "AutoModelForCausalLM"):
        where = f"--{divided[0]}" if divided else "--pp"
        raise BadInput("is modelled for causal language models alone", where=where, remedy="leave it at 1, and --task out")
    where = next((f"--{name}" for name in divided if name in ("cp", "ulysses", "pp")), "")
    if where and work.batch.lengths:
        raise BadInput(f"batches of different lengths are not modelled with {where}", where="--lengths", remedy="leave it out")
    if Buffer.OPTIM_FACTORED in (row := find_optimizer(work.numerics.optimizer)).buffers or row.rest:
        what = f"{row.name} steps whole matrices, and is not modelled on their parts"
        raise BadInput(what, where="--optimizer", remedy="use adamw")
