"""Adapters in place of all weights: LoRA and QLoRA, for a model whose weights cannot all be trained on a machine."""

from __future__ import annotations

from collections.abc import Iterator

from zeroplan.core.errors import BadInput
from zeroplan.core.plan import Relief
from zeroplan.planner.formula import formula_plan
from zeroplan.planner.relief import stored_plan
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.simulate.allocator.config import AllocatorConfig

#: The engine of a quantised base: a GPU has measured its.
QUANTIZED_ENGINE = "ddp"
#: The usual rank where nobody says one.
RANK = 16


def with_adapters(request: Ask) -> Iterator[tuple[str, str, Ask]]:
    """Yield LoRA, and QLoRA under the engine that it is planned for: its name, its flags, and the request with it."""
    flags, lora = f"--lora-rank {RANK}", request.replace(lora_rank=RANK)
    yield f"LoRA adapters of rank {RANK}", flags, lora
    more = f"{flags} --quantize nf4 --engine {QUANTIZED_ENGINE}"
    yield f"QLoRA: adapters of rank {RANK} over 4-bit weights", more, lora.replace(quantize="nf4", engine=QUANTIZED_ENGINE)


def adapters_that_fit(request: Ask, config: AllocatorConfig | None, before: int) -> Relief | None:
    """Return LoRA, else QLoRA, where it surely fits, with the first stage and offload that do, and recomputed blocks only
    where they must be; None where none does, or its tape is neither shipped nor cached.

    Args:
        request: of training all weights, with what its files say.
        config: the allocator's settings.
        before: bytes of the plan that it would take the place of.
    """
    for what, flags, changed in with_adapters(request):
        again = f"{flags} --gradient-checkpointing"
        for words, one in ((flags, changed), (again, changed.replace(gradient_checkpointing=True))):
            try:
                resolved = resolve(one)
            except BadInput:
                continue
            for case in resolved.cases:
                if case.parallel is not None or formula_plan(resolved.engine, case).fits is False:
                    continue
                plan = stored_plan(resolved.engine, case, config)
                if plan is not None and plan.fits and plan.gpu.total is not None:
                    total = plan.gpu.total
                    return Relief(what=what, flags=words, saves=before - total, total=total, fits=True, adapters=True)
    return None
