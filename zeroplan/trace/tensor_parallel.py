"""Tensor parallelism as torch builds it: torch's ``parallelize_module`` applies the layouts, as in programs on real ranks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from zeroplan.core.errors import BadInput
from zeroplan.core.tensor_parallel import TensorPlan, tensor_plan


class ReplicateParallel(ParallelStyle):
    """A module that every rank runs whole, with parameters that are DTensors like the others'.

    An optimizer's multi-tensor step takes DTensors of one mesh alone. Source: torchtitan, ``NoParallel``.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(_: str, owner: nn.Module, mesh: DeviceMesh) -> None:
            for name, param in owner.named_parameters(recurse=False):
                owner.register_parameter(name, nn.Parameter(distribute_tensor(param, mesh, [Replicate()])))

        def before(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            first, *rest = inputs
            if not isinstance(first, DTensor):
                first = DTensor.from_local(first, mesh, [Replicate()], run_check=False)
            return (first, *rest)

        def after(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, whole, before, after)


def parallelize(model: Any, mesh: DeviceMesh, *, sequence: bool, across: bool = False) -> None:
    """Lay a causal language model of transformers out over a tensor-parallel mesh. The logits stay split, for `loss_parallel`.

    Args:
        model: the model, on the meta device or with weights.
        mesh: one dimension of ranks.
        sequence: split the tokens between the matrices, too (sequence parallelism). The tokens are split behind the embedding,
            because transformers makes its masks of the embedding's output.
        across: the ranks have different experts, which exchange tokens already, and not parts of each.

    Raises:
        BadInput: an architecture without a known plan, or whose tokens are not split.
    """
    plan = tensor_plan(model.config.model_type)
    if sequence and not plan.splits_tokens:
        raise BadInput(
            f"sequence parallelism of {model.config.model_type} is not modelled", where="--sp", remedy="leave it out"
        )
    base, head = model.model, model.lm_head
    tied = head.weight is base.embed_tokens.weight
    inside = Shard(1) if sequence else Replicate()
    norm: ParallelStyle = SequenceParallel(use_local_output=True) if sequence else ReplicateParallel()
    top = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "model.norm": norm,
        "lm_head": ColwiseParallel(input_layouts=inside, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, top)
    if tied:
        head.weight = base.embed_tokens.weight
    for number, block in enumerate(base.layers):
        if sequence and not number:
            whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
            parallelize_module(block, mesh, whole)
        parallelize_module(block, mesh, _styles(block, plan, sequence, across))


def _styles(block: nn.Module, plan: TensorPlan, sequence: bool, across: bool) -> dict[str, ParallelStyle]:
    """The style of each module of a block that has parameters of its own."""
    outputs = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {}
    if sequence:
        styles["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        split, whole = (Shard(1),), (Replicate(),)
        styles["mlp"] = PrepareModuleInput(input_layouts=split, desired_input_layouts=whole)
        if hasattr(block.mlp, "experts"):  # their results are added as they are scattered
            styles["mlp"] = PrepareModuleInputOutput(
                input_layouts=split,
                desired_input_layouts=whole,
                use_local_input=True,
                output_layouts=(Partial(),),
                desired_output_layouts=split,
            )
    for name, module in block.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if name in plan.columns:
            styles[name] = ColwiseParallel()
        elif name in plan.rows:
            styles[name] = RowwiseParallel(output_layouts=outputs)
        elif name.endswith(".experts"):
            if any(isinstance(param, DTensor) for param in module.parameters()):
                continue  # ranks of ep share them, too
            from zeroplan.trace.tensor_parallel_experts import ExpertMatricesParallel, ExpertsAcross

            styles[name] = ExpertsAcross(partial=sequence) if across else ExpertMatricesParallel(plan, partial=sequence)
        elif name == "mlp.gate":
            from zeroplan.trace.tensor_parallel_experts import RouterParallel

            styles[name] = RouterParallel()
        elif name in plan.head_norms:  # tensors of [B, S, H, D], whose heads are split
            styles[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
        elif sequence and "." not in name:
            styles[name] = SequenceParallel(use_local_output=True)
        else:
            styles[name] = ReplicateParallel()
    return styles
