"""The parts that all training scripts share: the head, the data, the model and what is printed."""

from __future__ import annotations

from string import Template

from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import CAUSAL_LM, MASKED_LM, SEQ2SEQ_LM
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.quantization import PackedWeights, Quantization
from zeroplan.core.workload import Compilation, DType, Precision, Workload
from zeroplan.interop.forms.configuration import Configuration
from zeroplan.interop.forms.program import attention, folder_of, must_else, must_feed
from zeroplan.interop.training import NO_TRAINING, Training, taken_by_optimizer, trained_optimizer

#: The first words of every script, by which a later one is known to overwrite no program of the user's.
MARK = '"""Trains '
#: Optimizer steps on random tokens, until the user names a text: memory and speed no longer change after a few.
_TRIAL_STEPS = 10
#: Classes whose models take tokens and labels of one shape, and the name that the script gives to the first.
_CLASSES = (CAUSAL_LM, SEQ2SEQ_LM, MASKED_LM)

#: Further arguments of ``from_pretrained`` for a quantised base, by names that stand before it.
_QUANTIZED = ", **quantized"
_DTYPES = {DType.BF16: "torch.bfloat16", DType.FP16: "torch.float16", DType.FP32: "torch.float32"}

#: The lines that compile blocks. Those of one kind share a graph, whatever wraps them later.
_COMPILED = {
    Compilation.BLOCKS: (
        'base = model.get_base_model() if hasattr(model, "get_base_model") else model',
        "for module in model.modules():",
        "    if type(module).__name__ in base._no_split_modules:",
        "        module.compile()",
    ),
    Compilation.CHECKPOINTED: ("compile_blocks(model)",),
}

_HEAD = Template('''"""Trains $place as planned: $planned.

Written by `zeroplan recommend`. $learning_rate.
"""

from __future__ import annotations

$imports

MODEL = $model
SEQ_LEN = $seq_len
#: A text file to train on. None: random tokens for $steps steps, which need the memory and the time of any others.
TEXT: str | None = None
STEPS = $steps


class Tokens(Dataset):
    """Pieces of SEQ_LEN tokens, each with itself as its labels."""

    def __init__(self, count: int, vocabulary: int) -> None:
        if TEXT is None:
            self.tokens = torch.randint(vocabulary, (count, SEQ_LEN), generator=torch.Generator().manual_seed(0))
        else:
            tokens = AutoTokenizer.from_pretrained(MODEL)(Path(TEXT).read_text(), return_tensors="pt").input_ids[0]
            self.tokens = tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def build_model($parameters):
$build
    return model.train()
''')

_REPORT = '''

def print_peak() -> None:
    """Say what torch's allocator had at most on the first rank."""
    if int(os.environ.get("RANK", "0")) == 0 and torch.cuda.is_available():
        allocated, reserved = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
        print(f"peak: {allocated:.2f} GiB allocated, {reserved:.2f} GiB reserved")
'''

#: Of every script; each adds its own.
_STANDARD = ("import os", "from pathlib import Path")
_OTHERS = ("import torch", "from torch.utils.data import Dataset")


def script(
    one: Configuration,
    loop: str,
    *,
    standard: tuple[str, ...] = (),
    others: tuple[str, ...] = (),
    checkpoints: bool = True,
    adapts: bool = True,
    builds_empty: bool = False,
    compiles: bool = True,
    dtype: DType | None = None,
    learning_rate: str = "the optimizer's default holds until you write optimizer.params.lr",
) -> str:
    """Join the parts into the text of a script.

    Args:
        loop: what follows the parts, ``main`` included.
        standard: import statements of the standard library.
        others: import statements of other packages.
        checkpoints: whether the script switches gradient checkpointing on itself, where it is planned.
        adapts: whether the script adds the adapters itself, where there are any.
        compiles: whether the script compiles blocks itself, where that is planned.
        builds_empty: whether the script also builds the model without reading its weights.
        dtype: of the parameters as loaded; None for that of the workload.
        learning_rate: whose holds where no file says one.

    Raises:
        BadInput: a model that no script can be written for.
    """
    work = one.workload
    _require_model(one)
    imports = [*sorted({*_STANDARD, *standard}, key=_import_order), ""]
    quantized = ["BitsAndBytesConfig"] if work.quantize is not None else []
    names = [
        one.model.auto_class,
        "AutoTokenizer",
        *quantized,
        *(["AutoConfig"] if builds_empty or not one.model.weights or work.loop.from_scratch else []),
    ]
    third = {*_OTHERS, *others, f"from transformers import {', '.join(sorted(names))}"}
    if work.lora_rank is not None and adapts:
        third.add("from peft import LoraConfig, get_peft_model")
    if work.compile is Compilation.CHECKPOINTED and compiles:
        third.add("from zeroplan_runtime import compile_blocks")
    imports += sorted(third, key=_import_order)
    head = _HEAD.substitute(
        place=one.model.place.encode("unicode_escape").decode().replace('"', "'"),
        planned=_planned(one),
        learning_rate=_rate(one, learning_rate),
        imports="\n".join(imports),
        model=repr(one.model.place),
        seq_len=work.batch.seq_len,
        steps=_TRIAL_STEPS,
        parameters="weights: bool = True" if builds_empty else "",
        build=_build(
            one,
            dtype or work.numerics.dtype,
            checkpoints=checkpoints,
            adapts=adapts,
            builds_empty=builds_empty,
            compiles=compiles,
        ),
    )
    return f'{head}{_REPORT}\n\n{loop.strip()}\n\n\nif __name__ == "__main__":\n    main()\n'


def _require_model(one: Configuration) -> None:
    for said in (
        *must_else(one),
        *(must_feed(one) if one.workload.batch.lengths or one.workload.batch.target_len is not None else ()),
    ):
        raise BadInput(f"no script is written that would {said}", where="--new-script", remedy="give your own by --script")
    if one.workload.quantize is not None and not one.model.weights:
        raise BadInput("a base is quantised as its weights are read", where="--new-script", remedy="name a model with weights")
    sharded = one.ds_config is not None or one.zero.stage > 0
    if one.workload.quantize is not None and (sharded or isinstance(one.workload.quantize, PackedWeights)):
        what = "that an engine shards or casts" if sharded else "that comes with its checkpoint"
        raise BadInput(
            f"no script is written for a quantised base {what}", where="--new-script", remedy="give your own by --script"
        )
    if not one.model.place:
        raise BadInput(
            "needs a model that it can load", where="--new-script", remedy="name a hub id, a folder or a config.json"
        )
    if one.model.auto_class not in _CLASSES:
        raise BadInput(
            f"no script is written for {one.model.auto_class or 'a model of unknown class'}",
            where="--new-script",
            remedy="give your own by --script",
        )


def _rate(one: Configuration, otherwise: str) -> str:
    """Return the clause on the learning rate."""
    said = one.training.values.get("learning_rate")
    return f"No learning rate is: {otherwise}" if said is None else f"The learning rate {said} is that of the run in use"


def taken_by_script(one: Configuration) -> tuple[str, ...]:
    """Return the names of what a script of plain torch takes from the run in use."""
    row = find_optimizer(one.workload.numerics.optimizer)
    own = {} if row.torch is None else trained_optimizer(row.torch.name, one.training)
    return (*taken_by_optimizer(own), *(("max_grad_norm",) if "max_grad_norm" in one.training.values else ()))


def clipping(training: Training) -> str:
    """Return the norm that a script clips gradients to; 0 clips nothing, as in the Trainer."""
    return str(training.values.get("max_grad_norm", 1.0) or "float('inf')")


def _import_order(line: str) -> tuple[bool, str]:
    """Return the sort key that puts plain imports before those of names."""
    return line.startswith("from"), line.split()[1]


def _planned(one: Configuration) -> str:
    work = one.workload
    batch = f"{work.batch.micro_batch} x {work.batch.grad_accum} sequences a GPU and step"
    compiled = f", {work.compile} compiled" if work.compile is not None else ""
    return f"{work.numerics.dtype}, {batch}, checkpointing {'on' if work.gradient_checkpointing else 'off'}{compiled}"


def _build(one: Configuration, dtype: DType, *, checkpoints: bool, adapts: bool, builds_empty: bool, compiles: bool) -> str:
    work, auto = one.workload, one.model.auto_class
    asked = f'dtype={_DTYPES[dtype]}, attn_implementation="{attention(work)}"'
    loaded = f"model = {auto}.from_pretrained(MODEL, {asked}{_QUANTIZED if work.quantize is not None else ''})"
    empty = f"model = {auto}.from_config(AutoConfig.from_pretrained(MODEL), {asked})"
    if not one.model.weights or work.loop.from_scratch:
        why = "Trained from scratch" if one.model.weights else "MODEL holds no weights"
        lines = [f"# {why}: these are random.", empty]
    elif builds_empty:
        lines = ["if weights:", f"    {loaded}", "else:", f"    {empty}"]
    else:
        lines = [loaded]
    lines = [*_quantization(work), *lines, "model.config.use_cache = False"]
    if work.gradient_checkpointing and work.lora_rank is not None:
        lines.append("model.enable_input_require_grads()")
    if work.gradient_checkpointing and checkpoints:
        lines.append('model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})')
    if work.lora_rank is not None and adapts:
        lora = f"LoraConfig.from_pretrained({folder_of(one)!r})"
        wide = work.numerics.precision is Precision.HALF_AUTOCAST
        lines.append(f"model = get_peft_model(model, {lora}, autocast_adapter_dtype={wide})")
    if work.compile is not None and auto == SEQ2SEQ_LM:
        lines.append("model.decoder.config.use_cache = False  # a cache makes another graph of each block")
    if compiles and work.compile in _COMPILED:
        lines += _COMPILED[work.compile]
    return "\n".join(f"    {line}" for line in lines)


def _quantization(work: Workload) -> list[str]:
    """Return the lines that say how bitsandbytes keeps the base; none where it is not quantised."""
    if not isinstance(work.quantize, Quantization):
        return []
    if work.quantize is Quantization.INT8:
        kept = ["bits = BitsAndBytesConfig(load_in_8bit=True)"]
    else:
        computed = arithmetic(work) or _DTYPES[DType.FP32]
        levels, _, single = work.quantize.partition("-")
        kept = [
            f'levels = {{"bnb_4bit_quant_type": "{levels}", "bnb_4bit_use_double_quant": {not single}}}',
            f"bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype={computed}, **levels)",
        ]
    return [
        *kept,
        'place = int(os.environ["LOCAL_RANK"]) if torch.cuda.is_available() else "cpu"',
        'quantized = {"quantization_config": bits, "device_map": {"": place}}',
    ]


def torch_optimizer(work: Workload, *, sharded: bool = False, training: Training = NO_TRAINING) -> str:
    """Return the call that makes the workload's optimizer of ``trainable``, as its engine runs it.

    Where parameters are `sharded` (DTensors), torch 2.13 has no fused step for a class whose loops hold nothing beside the
    parameters anyway; the loops run it then.

    Raises:
        BadInput: an optimizer that is no single class of ``torch.optim``.
    """
    row = find_optimizer(work.numerics.optimizer)
    if row.torch is None or row.rest:
        raise BadInput(f"no script steps by {row.name}", where="--new-script", remedy="give your own by --script, or use adamw")
    fused = row.torch.fused and (not sharded or row.torch.foreach_lists > 0)
    own = trained_optimizer(row.torch.name, training)
    arguments = {**own, **row.torch.params, **({"fused": True} if fused else {})}
    return f"torch.optim.{row.torch.name}(trainable{''.join(f', {name}={value!r}' for name, value in arguments.items())})"


def reduction(workload: Workload) -> str:
    """Return torch's name of the dtype in which FSDP2 reduces gradients."""
    if workload.numerics.reduce_dtype in (None, DType.FP32):
        return "torch.float32"
    return arithmetic(workload) or "torch.float32"


def kept(work: Workload) -> DType:
    """Return the dtype in which a script of torch's engines reads the model: fp32, or 16 bits under fp32 adapters."""
    return work.numerics.dtype if work.numerics.precision is Precision.HALF_AUTOCAST else DType.FP32


def arithmetic(work: Workload) -> str | None:
    """Return torch's name of the dtype that 16-bit arithmetic runs in; None in full precision."""
    return (
        None if work.numerics.precision is Precision.FP32 or work.numerics.dtype is DType.FP32 else _DTYPES[work.numerics.dtype]
    )


#: The end of ``main`` under an engine of DeepSpeed's interface: a step each time that the engine takes one.
TRAIN_BY_ENGINE = """\
    for batch in loader:
        before = engine.global_steps
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        if engine.global_steps > before and engine.global_rank == 0:
            print(f"step {engine.global_steps}: loss {loss.item():.4f}", flush=True)
    print_peak()
    engine.destroy()
"""


def require_optimizer_of_deepspeed(one: Configuration) -> None:
    """Refuse a script whose ds_config has no optimizer that DeepSpeed builds."""
    if "optimizer" not in one.explicit:
        raise BadInput(
            f"DeepSpeed builds no {one.workload.numerics.optimizer} from a config",
            where="--new-script",
            remedy="use --form trainer, or another --optimizer",
        )
