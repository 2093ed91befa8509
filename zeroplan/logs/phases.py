"""The phase of training in which a traceback ends, told by the functions of torch, transformers, DeepSpeed and Lightning in
it.
"""

from __future__ import annotations

import re

#: Phases with what their frames look like, the one that decides first: a backward that recomputes a forward is a backward.
_PHASES = (
    (
        "saving a checkpoint",
        r":_?save_checkpoint|:save_pretrained|:_save_optimizer|:consolidated|:_zero3_consolidated|:save_model|:save_state\b|:full_state_dict",
    ),
    (
        "evaluation",
        r":evaluation_loop|:evaluate\b|:prediction_step|:_evaluate|evaluation_loop\.py:|:validation_step|:generate\b",
    ),
    (
        "the optimizer step",
        r"optim/\w+\.py:(?:step|_\w*adam\w*|_multi_tensor\w*|_init_group)|optimizer\.py:step|:_optimizer_step|:_take_model_step|stage_1_and_2\.py:step|stage3\.py:step|:unscale_and_clip|:optimizer_step",
    ),
    (
        "the backward",
        r"_tensor\.py:backward|autograd/\w+\.py:(?:backward|_engine_run_backward|apply)|engine\.py:backward|:reduce_partition_and_remove_grads|accelerator\.py:backward",
    ),
    (
        "loading the model",
        r":from_pretrained|:_load_pretrained_model|:load_state_dict|:_load_state_dict|:load_checkpoint|:load_model",
    ),
    (
        "initialisation",
        r"deepspeed/__init__\.py:initialize|:_configure_zero_optimizer|:_configure_distributed_model|:initialize_optimizer_states|:fully_shard|:prepare_model|:_prepare_deepspeed|:_broadcast_model|:setup_environment|zeroplan_runtime/api\.py:initialize",
    ),
    ("the loss", r":cross_entropy|:ForCausalLMLoss|:fixed_cross_entropy|:compute_loss_func|loss_utils\.py:"),
    ("the forward", r"modeling_\w+\.py:forward|:_call_impl|module\.py:__call__|:training_step|:compute_loss"),
)
#: The phase of the loss.
LOSS = "the loss"
_RULES = tuple((phase, re.compile(rule)) for phase, rule in _PHASES)


def phase_of(frames: tuple[str, ...]) -> str | None:
    """Return the phase in which the frames stand, in words; None where they say none."""
    return next((phase for phase, rule in _RULES if any(rule.search(frame) for frame in frames)), None)
