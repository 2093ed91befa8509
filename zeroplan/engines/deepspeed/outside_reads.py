"""Weights that stage 3 gathers because a module reads them that is not theirs.

Note [Outside reads]
    Stage 3 replaces each module's dictionary of parameters (zero/parameter_offload.py, ZeROOrderedDict). One that is read where it
    is not gathered, if only for its dtype, is gathered there and then: by itself, on the stream of the computation. From then
    on it counts among the parameters of the module that read it, whose next fetch gathers it with them.
    peft's linear layer asks for the dtype of its first adapter before it drops out (tuners/lora/layer.py, Linear.forward), T5's
    dense layer for that of its second matrix (modeling_t5.py, T5DenseActDense.forward).
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroplan.core.tape import ExpandedTape, Op, TapeModule

#: What peft names its adapters' parts, and a layer without a task's own class of theirs.
_DROPOUT, _FIRST, _WRAPPER = ("lora_dropout", "lora_A", "LoraModel")
#: Ends of the names of classes that read the weight of their child ``wo``.
_READS_WO = ("DenseActDense", "DenseGatedActDense")
#: Ends of the names of causal language models' classes, whose adapters have a class of peft's for their task.
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def outside_reads(modules: Sequence[TapeModule]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Return what is read just before a module is entered: by which other module, and which parameters.

    See Note [Outside reads].
    """
    found: dict[int, tuple[int, tuple[int, ...]]] = {}
    places = {module.name: m for m, module in enumerate(modules)}
    for module in modules:
        layer, first, part = module.name.rpartition(f".{_FIRST}.")
        if first and layer in places and module.params:
            before = places.get(f"{layer}.{_DROPOUT}.{part}", places[module.name])
            found[before] = (places[layer], module.params)
        elif module.name.endswith(".wo") and modules[module.parent].type.endswith(_READS_WO):
            found[places[module.name]] = (module.parent, module.params)
    return found


def passed_through(tape: ExpandedTape) -> dict[int, int]:
    """Return the module that each module calls at once, where a tape leaves it out: peft's wrapper within its class for causal
    language models (peft_model.py, PeftModelForCausalLM.forward). Tapes are traced in its class for no task.
    """
    modules = tape.modules
    between = [m for m, module in enumerate(modules) if module.type == _WRAPPER and module.parent == 0]
    for m in between:
        causal = m + 1 < len(modules) and modules[m + 1].type.endswith(_CAUSAL)
        if causal and (int(Op.ENTER), m) not in zip(tape.op, tape.arg, strict=True):
            return {0: m}
    return {}
