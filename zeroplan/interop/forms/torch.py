"""FSDP2 and DDP: a program of plain torch, which reads no file, and accelerate's file for FSDP2."""

from __future__ import annotations

from collections.abc import Callable

from zeroplan.core.workload import Compilation, DType
from zeroplan.interop.forms.accelerate_config import accelerate_fsdp2
from zeroplan.interop.forms.configuration import Configuration, Form, FormFiles, document_text
from zeroplan.interop.forms.program import adapter_files, must_adapt, must_load, training_notes
from zeroplan.interop.forms.scripts.accelerate import fsdp2_script as accelerate_script
from zeroplan.interop.forms.scripts.parts import arithmetic, clipping, kept, reduction, script, taken_by_script, torch_optimizer

_LOOP = """
MICRO_BATCH, GRAD_ACCUM = @micro, @accum

@wrap

def main() -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    model = wrapped(device)
@compile    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = @optimizer
    ranks = dist.get_world_size()
    vocabulary = getattr(model, "module", model).config.get_text_config().vocab_size
    data = Tokens(STEPS * MICRO_BATCH * GRAD_ACCUM * ranks, vocabulary)
    loader = DataLoader(data, batch_size=MICRO_BATCH, sampler=DistributedSampler(data), drop_last=True)
    for index, batch in enumerate(loader, 1):
        last = index % GRAD_ACCUM == 0
        sync_gradients(model, last)
        @autocastloss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        (loss / GRAD_ACCUM).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(trainable, @norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if dist.get_rank() == 0:
                print(f"step {index // GRAD_ACCUM}: loss {loss.item():.4f}", flush=True)
    print_peak()
    del model, loss  # DDP holds the process group, which must not end with what Python frees last
    dist.destroy_process_group()
"""

_FSDP2 = '''
def wrapped(device: torch.device):
    """Blocks and root sharded while their parameters hold nothing; then the first rank's weights are dealt out."""
    weights = build_model().state_dict() if dist.get_rank() == 0 else {}
    with init_empty_weights(include_buffers=False):
        model = build_model(weights=False)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.tie_weights()
    options = {@options}
    for module in model.modules():
        if type(module).__name__ in base._no_split_modules:
            fully_shard(module, **options)
    fully_shard(model, **options)
    model.to_empty(device=@device)
    base.tie_weights()
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True@cpu))
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer.to(device))
    return model


def sync_gradients(model, last: bool) -> None:
    """Only the last micro batch of a step reduces gradients."""
    model.set_requires_gradient_sync(last)
'''

_DDP = '''
def wrapped(device: torch.device):
    """Replicas with fp32 parameters. One rank alone has no use for buckets of gradients."""
    model = build_model().to(device)
    if dist.get_world_size() == 1:
        return model
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def sync_gradients(model, last: bool) -> None:
    """Only the last micro batch of a step reduces gradients."""
    model.require_backward_grad_sync = last
'''
_SHARED = (
    "import torch.distributed as dist",
    "from torch.utils.data import DataLoader",
    "from torch.utils.data.distributed import DistributedSampler",
)
_LEARNING_RATE = "the optimizer's default holds until you write lr=…"


def fsdp2_script(one: Configuration) -> str:
    """Write the script that shards blocks and root by ``fully_shard``.

    Raises:
        BadInput: a model or an optimizer that no script can be written for.
    """
    compute, offload = arithmetic(one.workload), bool(one.zero.offload_param)
    options = [f'"reshard_after_forward": {one.zero.stage == 3}']
    names = ["fully_shard"]
    if compute is not None:
        options.append(f'"mp_policy": MixedPrecisionPolicy(param_dtype={compute}, reduce_dtype={reduction(one.workload)})')
        names.append("MixedPrecisionPolicy")
    if offload:
        options.append('"offload_policy": CPUOffloadPolicy()')
        names.append("CPUOffloadPolicy")
    wrap = _FSDP2.replace("@options", ", ".join(options)).replace("@device", '"cpu"' if offload else "device")
    wrap = wrap.replace("@cpu", ", cpu_offload=True" if offload else "")
    others = (
        *_SHARED,
        "from accelerate import init_empty_weights",
        f"from torch.distributed.fsdp import {', '.join(sorted(names))}",
        "from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict",
    )
    return _torch_script(one, wrap, others, "", sharded=True)


def ddp_script(one: Configuration) -> str:
    """Write the script that replicates the model by DistributedDataParallel, with 16-bit arithmetic by autocast.

    Raises:
        BadInput: a model or an optimizer that no script can be written for.
    """
    compute = arithmetic(one.workload)
    autocast = "" if compute is None else f"with torch.autocast(device.type, dtype={compute}):\n            "
    others = (*_SHARED, "from torch.nn.parallel import DistributedDataParallel")
    return _torch_script(one, _DDP, others, autocast)


def _torch_script(one: Configuration, wrap: str, others: tuple[str, ...], autocast: str, *, sharded: bool = False) -> str:
    work = one.workload
    loop = _LOOP.replace("@micro", str(work.batch.micro_batch)).replace("@accum", str(work.batch.grad_accum))
    loop = loop.replace("@norm", clipping(one.training))
    loop = loop.replace("@compile", "    model.compile()\n" if work.compile is Compilation.MODEL else "")
    loop = (
        loop.replace("@wrap", wrap)
        .replace("@optimizer", torch_optimizer(work, sharded=sharded, training=one.training))
        .replace("@autocast", autocast)
    )
    return script(one, loop, others=others, dtype=kept(one.workload), builds_empty=sharded, learning_rate=_LEARNING_RATE)


#: What accelerate 1.15 does otherwise (``utils/fsdp_utils.py``, fsdp2_prepare_model).
_ACCELERATE_DIFFERS = (
    "accelerate also shards the embedding, and the last norm with the head, as units of their own: its peak may differ "
    "from the plan's, which is of blocks and root"
)


def _script_alone(one: Configuration) -> FormFiles:
    """Return the adapters' files alone: the script holds the batch's split."""
    notes = training_notes(one, taken_by_script(one), where="the optimizer's lr in the script")
    return FormFiles(adapter_files(one), notes=notes)


def _fsdp2_by_accelerate(one: Configuration) -> FormFiles:
    work = one.workload
    config = accelerate_fsdp2(one.zero, work, one.cluster)
    reduced = ("pass FullyShardedDataParallelPlugin(mixed_precision_policy=…) with reduce_dtype=torch.float32, as planned",)
    return FormFiles(
        {one.output: document_text(one.output, config), **adapter_files(one)},
        environment={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(work.batch.grad_accum)},
        accelerate_config=one.output,
        program_must=(
            *must_load(one),
            f"give its DataLoader batch_size={work.batch.micro_batch}",
            "step in accelerator.accumulate(model)",
            *must_adapt(one),
            "leave the model's own gradient checkpointing off",
            *(reduced if config["mixed_precision"] != "no" and work.numerics.reduce_dtype in (None, DType.FP32) else ()),
            f"step by {work.numerics.optimizer}",
        ),
        notes=(
            _ACCELERATE_DIFFERS,
            *training_notes(one, taken_by_script(one) if one.new_script else (), where="the program's optimizer"),
        ),
    )


def _torch(script: Callable[[Configuration], str]) -> Form:
    return Form(_script_alone, main="", script=script)


FSDP2, DDP = _torch(fsdp2_script), _torch(ddp_script)
FSDP2_BY_ACCELERATE = Form(_fsdp2_by_accelerate, ("accelerate", "slurm"), main="accelerate.yaml", script=accelerate_script)
