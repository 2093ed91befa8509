"""The schedules against DeepSpeed itself, run on the CPU: the same allocations, of the same sizes, in the same order.

Options that no measured run of a GPU turned: dtypes of accumulation and communication, wrappers, buckets. One rank, because
the copies that gloo makes would stand between DeepSpeed's; frees are left out, because gloo's threads make some of them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engines.deepspeed.scripts import rows_of
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, OptimizerKind, Precision, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.deepspeed.rank import deepspeed_rank
from zeroplan.engines.deepspeed.schedule import record_deepspeed
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op, TapeModule, TapeParam

pytestmark = [pytest.mark.long, pytest.mark.torch, pytest.mark.skipif(not find_spec("deepspeed"), reason="needs DeepSpeed")]

SHAPES = [[512, 512]] * 4 + [[501, 500]]
LEAST = 100_000
DTYPES = {"fp32": DType.FP32, "bf16": DType.BF16}
FP32 = {"grad_accum_dtype": "fp32"}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
SMALL = {"reduce_bucket_size": 200_000}

#: id: (stage, dtype, window, zero_optimization, other blocks of the config)
CASES: dict[str, tuple[int, str, int, dict[str, Any], dict[str, Any]]] = {
    "2": (2, "bf16", 1, {}, {}),
    "2, window": (2, "bf16", 2, {}, {}),
    "2, fp32 accumulation": (2, "bf16", 1, {}, {"data_types": FP32}),
    "2, fp32 accumulation, window": (2, "bf16", 2, {}, {"data_types": FP32}),
    "2, fp32 accumulation, parameters beyond the bucket": (2, "bf16", 1, SMALL, {"data_types": FP32}),
    "2, fp32 communication": (2, "bf16", 1, {}, {"communication_data_type": "fp32"}),
    "2, parameters beyond the bucket": (2, "bf16", 1, SMALL, {}),
    "2, no reduce-scatter": (2, "bf16", 1, {"reduce_scatter": False}, {}),
    "2, gradients scattered": (2, "bf16", 1, {"contiguous_gradients": False}, {}),
    "2, gradients scattered, window": (2, "bf16", 2, {"contiguous_gradients": False}, {}),
    "2, aligned": (2, "bf16", 1, {"parameter_alignment": True}, {}),
    "2, 16-bit masters": (2, "bf16", 1, {}, {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}),
    "2, no norm": (2, "bf16", 1, {"compute_grad_norm": False}, {"gradient_clipping": 0.0}),
    "2, fp32": (2, "fp32", 1, {}, {}),
    "1": (1, "bf16", 1, {}, {}),
    "1, window": (1, "bf16", 2, {}, {}),
    "1, overlapped": (1, "bf16", 1, {"overlap_comm": True}, {}),
    "1, BF16_Optimizer": (1, "bf16", 1, {}, {"data_types": FP32}),
    "1, BF16_Optimizer, window": (1, "bf16", 2, {}, {"data_types": FP32}),
    "1, BF16_Optimizer, immediate": (1, "bf16", 1, {}, {"data_types": FP32, "bf16": {"immediate_grad_update": True}}),
    "0, unfused": (0, "bf16", 1, {}, {}),
    "0, unfused, window": (0, "bf16", 2, {}, {}),
    "0, fp32": (0, "fp32", 1, {}, {}),
    "0, fp32, window": (0, "fp32", 2, {}, {}),
    "3": (3, "bf16", 1, {}, {}),
    "3, window": (3, "bf16", 2, {}, {}),
    "3, sub-groups": (3, "bf16", 1, {"sub_group_size": 300_000}, {}),
    "3, fp32": (3, "fp32", 1, {}, {}),
    "3, fp32 accumulation": (3, "bf16", 1, {}, {"data_types": FP32}),
    "3, fp32 communication": (3, "bf16", 1, {}, {"communication_data_type": "fp32"}),
    "3, fp32 communication, parameters beyond the bucket": (3, "bf16", 1, SMALL, {"communication_data_type": "fp32"}),
    "3, parameters beyond the bucket": (3, "bf16", 1, SMALL, {}),
    "3, no reduce-scatter": (3, "bf16", 1, {"reduce_scatter": False}, {}),
    "3, no reduce-scatter, fp32 accumulation": (3, "bf16", 1, {"reduce_scatter": False}, {"data_types": FP32}),
    "3, gradients scattered": (3, "bf16", 1, {"contiguous_gradients": False}, {}),
    "3, persistent": (3, "bf16", 1, {"stage3_param_persistence_threshold": 1_000_000}, {}),
    "3, 16-bit masters": (3, "bf16", 1, {}, {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}),
    # Last, because DeepSpeed does not forget within a process that autocast was on.
    "2, autocast": (2, "fp32", 1, {}, AUTOCAST),
    "1, autocast": (1, "fp32", 1, {}, AUTOCAST),
    "0, autocast": (0, "fp32", 1, {}, AUTOCAST),
    "3, autocast": (3, "fp32", 1, {}, AUTOCAST),
}


def ds_config(case: str) -> dict[str, Any]:
    """The case's ds_config. torch's AdamW, because DeepSpeed's kernels are CUDA's."""
    stage, dtype, window, zero, other = CASES[case]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": window,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 600_000, **zero},
        **other,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True, **other.get("bf16", {})}
    return config


@pytest.fixture(scope="module")
def allocations(tmp_path_factory: pytest.TempPathFactory, warm_python: Path) -> dict[str, list[list[Any]]]:
    """By case, what DeepSpeed allocates in each phase."""
    cases = [{"id": case, "dtype": CASES[case][1], "shapes": SHAPES, "config": ds_config(case)} for case in CASES]
    rows = rows_of("run_on_cpu.py", cases, tmp_path_factory.mktemp("deepspeed"), warm_python)
    return {row["id"]: row["phases"] for row in rows}


def chain_stream(width: int, shapes: list[list[int]] = SHAPES) -> ExpandedTape:
    """The chain's tape, without its activations, which are all below `LEAST`."""
    modules = [TapeModule("", "Chain", -1), TapeModule("layers", "ModuleList", 0)]
    modules += [TapeModule(f"layers.{i}", "Linear", 1, (i,)) for i in range(len(shapes))]
    params = [TapeParam(f"layers.{i}.weight", (out, into), True, width) for i, (out, into) in enumerate(shapes)]
    stream = ExpandedTape(tuple(modules), tuple(params))

    def add(op: Op, arg: int, aux: int = 0, kind: int = 0) -> None:
        columns = (stream.op, stream.arg, stream.aux, stream.kind, stream.module)
        for column, value in zip(columns, (op, arg, aux, kind, -1), strict=True):
            column.append(value)

    layers = range(2, 2 + len(shapes))
    add(Op.MARK, Mark.FORWARD_BEGIN)
    for op, module in ((Op.ENTER, 0), *((op, m) for m in layers for op in (Op.ENTER, Op.EXIT)), (Op.EXIT, 0)):
        add(op, module)
    add(Op.MARK, Mark.FORWARD_END)
    add(Op.MARK, Mark.BACKWARD_BEGIN)
    add(Op.BWD_ENTER, 0)
    for module in reversed(layers):
        i = module - 2
        add(Op.BWD_ENTER, module)
        add(Op.ALLOC, i, width * shapes[i][0] * shapes[i][1], Kind.GRAD)
        add(Op.GRAD, i, i)
        if i:  # the first layer's input needs no gradient
            add(Op.BWD_EXIT, module)
    add(Op.MARK, Mark.BACKWARD_END)
    return stream


def predicted(case: str) -> list[list[Any]]:
    """By phase, the sizes that the schedule allocates."""
    stage, dtype, window, zero, other = CASES[case]
    knobs: dict[str, Any] = {k: v for k, v in other.items() if k == "gradient_clipping"} | other.get("bf16", {})
    for key, value in {**other.get("data_types", {}), **other}.items():
        if key in ("grad_accum_dtype", "communication_data_type"):
            knobs[key] = DTYPES[value]
    config = ZeroConfig.of(stage, **{"reduce_bucket_size": 600_000, **zero}, **knobs)
    precision = Precision.FP32 if dtype == "fp32" else Precision.MIXED
    autocast = "torch_autocast" in other
    workload = Workload.of(
        grad_accum=window,
        dtype=DType.BF16 if autocast else DTYPES[dtype],
        precision=Precision.AUTOCAST if autocast else precision,
        optimizer_kind=OptimizerKind.LOOP,
    )
    stream = chain_stream(4 if dtype == "fp32" else 2)
    rank = deepspeed_rank(stream.parameters, workload, config, ParallelLayout(), zero_init=False)
    recorder = record_deepspeed(rank, stream, steps=2)
    phases: list[list[Any]] = []
    sizes: list[int] = []
    for code, value in zip(recorder.code, recorder.value, strict=True):
        op = code & ((1 << OP_BITS) - 1)
        if op == AllocatorOp.ALLOC and value >= LEAST:
            sizes.append(value)
        elif op == AllocatorOp.MARK and (name := recorder.marks[value]) not in ("fwd", "bwd"):
            phases.append([name, sizes])
            sizes = []
    return phases[1:]


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("3") and "autocast" not in case])
def test_same_allocations(case: str, allocations: dict[str, list[list[Any]]]) -> None:
    assert predicted(case) == allocations[case]


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("3") or "autocast" in case])
def test_same_allocations_among_others(case: str, allocations: dict[str, list[list[Any]]]) -> None:
    """Stage 3 gathers and scatters with one rank as well, and gloo copies what it is given; autocast casts weights."""
    for (name, sizes), (measured_name, measured) in zip(predicted(case), allocations[case], strict=True):
        assert name == measured_name
        rest = iter(measured)
        assert all(size in rest for size in sizes), name  # in this order
        if "no reduce-scatter" in case and name.startswith("step"):
            assert sizes == measured
