"""accelerate, with DeepSpeed and with FSDP2."""

from __future__ import annotations

from zeroplan.interop.forms.configuration import Configuration
from zeroplan.interop.forms.scripts.parts import (
    arithmetic,
    clipping,
    kept,
    reduction,
    require_optimizer_of_deepspeed,
    script,
    torch_optimizer,
)

_DEEPSPEED = """
def main() -> None:
    accelerator = Accelerator()
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    model = build_model()
    data = Tokens(STEPS * config["train_batch_size"], model.config.get_text_config().vocab_size)
    loader = DataLoader(data, batch_size=config["train_micro_batch_size_per_gpu"], drop_last=True)
    optimizer = DummyOptim([parameter for parameter in model.parameters() if parameter.requires_grad])  # the file names it
"""

_FSDP2 = """
MICRO_BATCH = @micro


def main() -> None:
    accelerator = Accelerator(@plugin)
    model = build_model()
    count = STEPS * MICRO_BATCH * accelerator.gradient_accumulation_steps * accelerator.num_processes
    loader = DataLoader(Tokens(count, model.config.get_text_config().vocab_size), batch_size=MICRO_BATCH, drop_last=True)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = @optimizer
"""

_LOOP = """\
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
@clip            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            accelerator.print(f"step {step}: loss {loss.item():.4f}", flush=True)
    print_peak()
    accelerator.end_training()
"""

#: DeepSpeed's engine clips by its config.
_CLIP = """\
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), @norm)
"""


def deepspeed_script(one: Configuration) -> str:
    """Write the script for accelerate with a ds_config.

    Raises:
        BadInput: a model or an optimizer that no script can be written for.
    """
    require_optimizer_of_deepspeed(one)
    others = (
        "from accelerate import Accelerator",
        "from accelerate.utils import DummyOptim",
        "from torch.utils.data import DataLoader",
    )
    return script(one, _DEEPSPEED + _LOOP.replace("@clip", ""), others=others)


def fsdp2_script(one: Configuration) -> str:
    """Write the script for accelerate with FSDP2: fp32 parameters, gradients reduced as planned.

    Raises:
        BadInput: a model or an optimizer that no script can be written for.
    """
    others = ["from accelerate import Accelerator", "from torch.utils.data import DataLoader"]
    plugin, compute = "", arithmetic(one.workload)
    if compute is not None:
        others += [
            "from accelerate.utils import FullyShardedDataParallelPlugin",
            "from torch.distributed.fsdp import MixedPrecisionPolicy",
        ]
        policy = f"MixedPrecisionPolicy(param_dtype={compute}, reduce_dtype={reduction(one.workload)})"
        plugin = f"fsdp_plugin=FullyShardedDataParallelPlugin(mixed_precision_policy={policy})"
    begin = _FSDP2.replace("@micro", str(one.workload.batch.micro_batch)).replace("@plugin", plugin)
    optimizer = torch_optimizer(one.workload, sharded=True, training=one.training)
    clip = _CLIP.replace("@norm", clipping(one.training))
    return script(
        one,
        begin.replace("@optimizer", optimizer) + _LOOP.replace("@clip", clip),
        others=tuple(others),
        checkpoints=False,  # accelerate's file does, and compiles
        compiles=False,
        dtype=kept(one.workload),
        learning_rate="the optimizer's default holds until you write lr=…",
    )
