"""What users call engines and their ways to shard, and the engine that is offered beside one."""

from __future__ import annotations

from collections.abc import Set

from zeroplan.core.plan import MemoryPlan

#: Engines by the words of their users.
TITLES = {
    "deepspeed": "DeepSpeed",
    "zeroplan": "zeroplan's runtime",
    "fsdp": "FSDP1",
    "fsdp2": "FSDP2",
    "ddp": "DDP",
    "megatron": "Megatron-LM",
}
#: What shards, by stage; elsewhere it is ZeRO's stage.
_SHARDINGS = {
    "fsdp": {0: "FSDP1 no shard", 2: "FSDP1 shard grad op", 3: "FSDP1 full shard"},
    "fsdp2": {2: "FSDP2 without reshard after forward", 3: "FSDP2"},
    "ddp": {0: "DDP"},
    "megatron": {0: "Megatron-LM", 1: "Megatron-LM distributed optimizer"},
}
#: What a higher stage is called where it is not ZeRO's.
_HIGHER = {"fsdp": "full shard", "fsdp2": "reshard after forward", "megatron": "distributed optimizer"}
#: The engine that is searched beside the one that files have, to say what it gains.
_OTHER = {"ddp": "deepspeed", "fsdp": "deepspeed", "fsdp2": "deepspeed", "deepspeed": "fsdp2"}


def engine_title(engine: str) -> str:
    """Return the engine's name as its users write it."""
    return TITLES.get(engine, engine)


def sharding_text(engine: str, stage: int, offload_optimizer: str, offload_param: str) -> str:
    """Return ``"ZeRO-3, optimizer and parameters on cpu"``; what is not ZeRO has its engine's own words."""
    name = _SHARDINGS.get(engine, {}).get(stage, f"ZeRO-{stage}")
    away = {"optimizer": offload_optimizer, "parameters": offload_param}
    places: dict[str, list[str]] = {}
    for what, where in away.items():
        if where != "none":
            places.setdefault(where, []).append(what)
    return ", ".join([name, *(f"{' and '.join(names)} on {where}" for where, names in places.items())])


def higher_stage(engine: str, stage: int) -> str:
    """Return what a stage that shards more is called: ``"ZeRO-3"``, ``"full shard"``."""
    return _HIGHER.get(engine, f"ZeRO-{stage}")


def other_engine(engine: str) -> str:
    """Return the engine to offer beside one; empty where none is."""
    return _OTHER.get(engine, "")


def may_become(engine: str) -> tuple[str, ...]:
    """Return the engines that a run's files can be changed to: its own, and DeepSpeed where files have only DDP."""
    return (engine, "deepspeed") if engine == "ddp" else (engine,)


def stage_header(engines: Set[str]) -> str:
    """Return the header of a table's stages: ZeRO's, or what another engine calls sharding."""
    return "ZeRO" if engines <= {"deepspeed", "zeroplan"} else "reshard" if engines == {"fsdp2"} else "stage"


def stage_text(plan: MemoryPlan) -> str:
    """Return a row's cell below :func:`stage_header`."""
    return ("yes" if plan.stage == 3 else "no") if plan.engine == "fsdp2" else str(plan.stage)
