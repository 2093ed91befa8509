"""Weights that stage 3 gathers because a module reads them that is not theirs.

Note [Outside reads]
    Stage 3 replaces each module's dictionary of parameters (zero/parameter_offload.py, ZeROOrderedDict). One that is read
    where it is not gathered, if only for its dtype, is gathered there and then: by itself, on the stream of the computation.
    From then on it counts among the parameters of the module that read it, whose next fetch gathers it with them.
    peft's linear layer asks for the dtype of its first adapter before it drops out (tuners/lora/layer.py, Linear.forward), T5's
    dense layer for that of its second matrix (modeling_t5.py, T5DenseActDense.forward).
    Of some modules a function takes the weight, and nobody calls them: short convolutions (modeling_lfm2.py,
    Lfm2ShortConv.forward) and adapters of experts (tuners/lora/layer.py, ParamWrapper), a layer of them for each stack of
    experts, which it reads as well. What the products of uncalled modules save for the backward are views of the gathered
    block, which stays until then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zeroplan.tape.expanded import ExpandedTape, Op, TapeModule

#: What peft names its adapters' parts, and a layer without a task's own class of theirs.
_DROPOUT, _FIRST, _WRAPPER = "lora_dropout", "lora_A", "LoraModel"
_CONVOLUTION = "Conv"
#: peft's layer around a stack of experts.
_STACK = "ParamWrapper"
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
        if first and layer in places and module.params and modules[places[layer]].type == "Linear":
            before = places.get(f"{layer}.{_DROPOUT}.{part}", places[module.name])
            found[before] = (places[layer], module.params)
        elif module.type == _STACK and modules[module.parent].type != _STACK:
            found |= _stacks(modules, places, module.name)
        elif module.name.endswith(".wo") and modules[module.parent].type.endswith(_READS_WO):
            found[places[module.name]] = (module.parent, module.params)
    return found


def _stacks(modules: Sequence[TapeModule], places: dict[str, int], outermost: str) -> dict[int, tuple[int, tuple[int, ...]]]:
    """The stack of experts that each of the layers around them reads: the outermost one the last stack."""
    layers = [places[outermost]]
    while modules[layers[-1]].type == _STACK and (inner := f"{modules[layers[-1]].name}.base_layer") in places:
        layers.append(places[inner])
    stacks = reversed(modules[layers[-1]].params)
    return {layer: (layer, (stack,)) for layer, stack in zip(layers[:-1], stacks, strict=False)}


def never_called(tape: ExpandedTape, given: Collection[int] = ()) -> dict[int, tuple[int, ...]]:
    """Return by module the parameters below it that it reads because nobody calls the modules that own them.

    Args:
        tape: of the model.
        given: modules whose readers are known.

    Trained parameters are read if they have a gradient, of the frozen ones those of convolutions.
    """
    modules, found = tape.modules, dict[int, tuple[int, ...]]()
    called = {m for op, m in zip(tape.op, tape.arg, strict=True) if op == Op.ENTER}
    graded = {p for op, p in zip(tape.op, tape.arg, strict=True) if op == Op.GRAD}
    shared = {p for m in called for p in modules[m].params}
    for m, module in enumerate(modules):
        if m in called or m in given:
            continue
        convolves = module.type.startswith(_CONVOLUTION)
        read = tuple(p for p in module.params if p not in shared and (p in graded or convolves))
        reader = module.parent
        while reader >= 0 and reader not in called:
            reader = modules[reader].parent
        if read and reader >= 0:
            found[reader] = (*found.get(reader, ()), *read)
    return found


def passed_through(tape: ExpandedTape) -> dict[int, int]:
    """Return the module that each module calls at once, where a tape leaves it out: peft's wrapper within its class for causal
    language models (peft_model.py, PeftModelForCausalLM.forward). Tapes are traced in its class for no task.

    Over a quantised base the measured runs (B05, B06, TB1) are met without the wrapper's own fetch, and B05 would reserve 5.9 %
    more with it. What keeps it away is not known, so a plan over one has to fit with it, too (simulation.py).
    """
    modules = tape.modules
    between = [m for m, module in enumerate(modules) if module.type == _WRAPPER and module.parent == 0]
    for m in between:
        causal = m + 1 < len(modules) and modules[m + 1].type.endswith(_CAUSAL)
        if causal and (int(Op.ENTER), m) not in zip(tape.op, tape.arg, strict=True):
            return {0: m}
    return {}
