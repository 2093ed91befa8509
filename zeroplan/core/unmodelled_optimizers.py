"""Optimizers that programs know and no row of the optimizer table has: why, and what stands for them in a plan of a file."""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.unmodelled import Effect


@dataclass(frozen=True, slots=True)
class UnmodelledOptimizer:
    """Optimizers whose memory zeroplan does not model, with the reason.

    Attributes:
        names: as transformers' ``OptimizerNames`` and other programs write them.
        why: one clause.
        stands_in: the row whose memory a file's plan has in their place; empty where a file that names one is refused.
        effect: on the memory of the run, compared with that row's.
        torch: the class of ``torch.optim``, if it is one.
    """

    names: tuple[str, ...]
    why: str
    stands_in: str = ""
    effect: Effect = Effect.UNKNOWN
    torch: str = ""


def _of(names: str, why: str, stands_in: str, effect: Effect = Effect.UNKNOWN) -> UnmodelledOptimizer:
    return UnmodelledOptimizer(tuple(names.split()), why, stands_in, effect)


_LOW_BIT = "the blocks and scales of its quantised states are not measured"
_LOW_RANK = "its states follow each matrix's projection rank, which no flag states"
_IN_BACKWARD = "it steps within the backward, so gradients never stand together"
_AVERAGED = "its averaged iterate is not in the table"
_COMPRESSED = "its states are compressed"
UNMODELLED = (
    UnmodelledOptimizer(("lbfgs",), "its history of past steps is as long as the user says", torch="LBFGS"),
    UnmodelledOptimizer(("sparseadam",), "it takes sparse gradients, which no plan here has", torch="SparseAdam"),
    _of("adamw_torch_8bit ao_adamw_8bit ao_adamw_fp8", _LOW_BIT, "adamw8bit"),
    _of("adamw_torch_4bit ao_adamw_4bit", _LOW_BIT, "adamw8bit", Effect.LESS),
    _of("lion_8bit paged_lion_8bit", _LOW_BIT, "lion", Effect.LESS),
    _of("rmsprop_bnb rmsprop_bnb_32bit", "bitsandbytes's step for it is not measured", "rmsprop"),
    _of("rmsprop_bnb_8bit", _LOW_BIT, "rmsprop", Effect.LESS),
    _of("ademamix paged_ademamix_32bit", "its third moment is not in the table", "adamw", Effect.MORE),
    _of("ademamix_8bit paged_ademamix_8bit", _LOW_BIT, "adamw", Effect.LESS),
    _of("adamw_anyprecision", "the dtypes of its states are arguments of its own", "adamw"),
    _of("galore_adamw galore_adamw_layerwise apollo_adamw apollo_adamw_layerwise", _LOW_RANK, "adamw"),
    _of("galore_adamw_8bit galore_adamw_8bit_layerwise q_galore_adamw8bit", _LOW_RANK, "adamw8bit"),
    _of("galore_adafactor galore_adafactor_layerwise", _LOW_RANK, "adafactor"),
    _of("lomo", _IN_BACKWARD, "sgd", Effect.LESS),
    _of("adalomo", _IN_BACKWARD, "adafactor", Effect.LESS),
    _of("grokadamw", "its average of past gradients is not in the table", "adamw", Effect.MORE),
    _of("schedule_free_adamw", _AVERAGED, "adamw"),
    _of("schedule_free_radam", _AVERAGED, "radam"),
    _of("schedule_free_sgd", _AVERAGED, "sgd_momentum"),
    _of("stable_adamw", "its states are those of its own package, which is not measured", "adamw"),
    _of("adopt_adamw", "ADOPT's step is not measured", "adamw"),
    _of("came_pytorch", "CAME's momentum and confidence are not in the table", "adafactor", Effect.MORE),
    _of("dion", "Dion's momentum and factors are not in the table", "muon"),
    _of("sinkgd", "SinkGD's step is not measured", "sgd"),
    _of("flash_adamw", _COMPRESSED, "adamw", Effect.LESS),
    _of("flash_adam", _COMPRESSED, "adam", Effect.LESS),
    _of("flash_sgd flash_sgdw", _COMPRESSED, "sgd_momentum", Effect.LESS),
    _of("flash_lion", _COMPRESSED, "lion", Effect.LESS),
)

_BY_NAME = {name: group for group in UNMODELLED for name in group.names}


def unmodelled_optimizer(name: str) -> UnmodelledOptimizer | None:
    """Return what is known of an optimizer that no row has, by its name in lower case; None for any other name."""
    return _BY_NAME.get(name)
