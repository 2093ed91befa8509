"""Expert parallelism: which parameters are experts', and what one rank holds of them.

Note [Expert-parallel plan]
    transformers keeps the experts of a block in one module named ``experts``, whose parameters have a row for each expert. `ep`
    ranks share the rows of all of them; attention, router and shared experts are whole on every rank. The ranks of one
    ``ep`` group read different samples, and send each other the tokens that their experts take.

    FSDP shards an expert's parameters over the ranks that hold the same experts, ``efsdp`` in torchtitan: all ranks of a
    stage / ep. It takes the rows, as for other parameters, unless ep × those ranks are more than the experts: then it takes
    the second dimension, so that no rank's part is padding.

    Source: torchtitan, ``distributed/parallel_dims.py`` (``build_mesh``), ``distributed/fsdp.py``
    (``apply_fsdp_to_decoder``), ``models/common/token_dispatcher.py`` (``AllToAllTokenDispatcher``).
"""

from __future__ import annotations

from dataclasses import replace

from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.parameters import Parameters

#: Architectures whose experts transformers runs by grouped matrix products (``use_experts_implementation``), which is what the
#: ranks share.
GROUPED = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
)
_EXPERTS = "experts"


def is_expert(name: str) -> bool:
    """Return whether a parameter, by its full name, is one of the experts that the router chooses from."""
    return name.rpartition(".")[0].rpartition(".")[2] == _EXPERTS


def of_experts(name: str) -> bool:
    """Return whether a parameter, by its full name, is of all experts of a block or of one of them."""
    return f".{_EXPERTS}." in name


def experts_of(parameters: Parameters) -> int:
    """Return the number of experts of a block; 0 for a model without."""
    shapes = (shape for name, shape in zip(parameters.names, parameters.shapes, strict=True) if is_expert(name))
    return next((shape[0] for shape in shapes), 0)


def with_local_experts(parameters: Parameters, ep: int) -> Parameters:
    """Return what one of `ep` ranks holds: the same list, with its share of the experts."""
    if ep == 1:
        return parameters
    shapes = (
        (shape[0] // ep, *shape[1:]) if is_expert(name) else shape
        for name, shape in zip(parameters.names, parameters.shapes, strict=True)
    )
    return replace(parameters, shapes=tuple(shapes))


def sharded_dimension(layout: ParallelLayout, experts: int) -> int:
    """Return the dimension that FSDP shards of a rank's experts, of which the model has `experts` a block."""
    return 1 if layout.ep * layout.expert_shard_group > experts else 0


def require_experts(parameters: Parameters, model_type: str, layout: ParallelLayout) -> None:
    """Refuse degrees that do not divide the experts or their matrices, and models whose experts ranks do not share."""
    ep = layout.ep
    if parameters.stand_in:
        raise BadInput(
            "a count of parameters does not tell the experts", where="--ep", remedy="give the model's id or config.json"
        )
    experts = experts_of(parameters)
    if not experts:
        raise BadInput(f"{model_type or 'this model'} has no experts to share", where="--ep", remedy="leave it at 1")
    if model_type not in GROUPED:
        known = ", ".join(GROUPED)
        raise BadInput(f"expert parallelism of {model_type} is not modelled", where="--ep", remedy=f"of {known} it is")
    if experts % ep:
        raise BadInput(f"ep {ep} does not divide the {experts:,} experts", where="--ep", remedy=f"use a divisor of {experts:,}")
    ranks = layout.expert_shard_group
    if sharded_dimension(layout, experts) == 0:
        return
    for name, shape in zip(parameters.names, parameters.shapes, strict=True):
        if is_expert(name) and shape[1] % ranks:
            leaf = name.rpartition(".")[2]
            raise BadInput(
                f"the {ranks:,} ranks that hold the same experts do not divide the {shape[1]:,} rows of {leaf}",
                where="--ep",
                remedy="use another --ep, or other --nodes",
            )
