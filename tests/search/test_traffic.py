"""Lines of work against hand-computed figures, and the properties that hold for all of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.workloads import with_flat
from zeroplan.core.buffers import Phase
from zeroplan.core.cluster import Cluster
from zeroplan.core.gpus import GPUS
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.rates import rates_of
from zeroplan.core.workload import Attention, Workload
from zeroplan.core.zero_config import OffloadDevice, OffloadParam, ZeroConfig
from zeroplan.engines import torch_traffic
from zeroplan.engines.compute_traffic import COMPUTE
from zeroplan.engines.deepspeed import traffic
from zeroplan.engines.registry import find_engine
from zeroplan.engines.runtime import traffic as runtime_traffic
from zeroplan.ledger.traffic import Executor, Resource, WorkItem
from zeroplan.ledger.work import Counts, count_tape, guess_counts, matrices, scale_counts
from zeroplan.models.load import load_model
from zeroplan.search.cost import CostModel, compose
from zeroplan.tape.expanded import ExpandedTape, Mark, Op, TapeModule, TapeParam

LLAMA = "meta-llama/Llama-3.2-1B"
COUNTS = Counts(700, 1100, 4_000_000_000, 10_000_000_000, 214, 0, 213)
WORK = Workload.of(micro_batch=2, seq_len=1024)


def items(stage: int, *, gpus: int = 4, nodes: int = 1, model: str = LLAMA, **changes: object) -> dict[str, WorkItem]:
    spec = load_model(model)
    cluster = Cluster.of(gpus=gpus, nodes=nodes, gpu="H100")
    offload = {k: str(changes.pop(k)) for k in ("offload_optimizer", "offload_param") if k in changes}
    zero = ZeroConfig.of(stage, **offload)  # type: ignore[arg-type]
    cost = CostModel(find_engine("deepspeed"), spec, cluster, rates_of(cluster.gpu))
    work = with_flat(WORK, **changes)  # type: ignore[arg-type]
    return {item.name: item for item in cost.items(work, zero, COUNTS, derive=True)}


def test_matrix_products_are_counted_by_hand() -> None:
    # Llama-3.2-1B: hidden 2048, 8 of 64 for keys and values, inner 8192, 16 blocks, and the tied head.
    block = 2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 8192
    whole = 16 * block + 128256 * 2048
    found = matrices(load_model(LLAMA))
    assert (found.all, found.blocks, found.trained) == (whole, 16 * block, whole)
    assert found.attention == 16 * 32 * 64
    lines = items(0)
    assert lines["matmul_forward"].amount == 2 * whole * 2048
    assert lines["matmul_backward"].amount == 4 * whole * 2048
    assert lines["attention_forward"].amount == 2 * 16 * 2048 * 1024 * 2048
    assert lines["attention_backward"].amount == 5 * 16 * 2048 * 1024 * 2048
    eager = items(0, attn=Attention.EAGER)  # the whole square, whose scores stay for the backward
    assert eager["attention_forward"].amount == 4 * 16 * 2048 * 1024 * 2048
    assert eager["attention_backward"].amount == 8 * 16 * 2048 * 1024 * 2048


def test_a_mixture_multiplies_only_the_experts_that_a_token_meets() -> None:
    # Mixtral: 2 of 8 experts of three matrices 4096 × 14336; attention, router and head are whole.
    experts = 32 * 2 * 3 * 4096 * 14336
    rest = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 4096) + 32000 * 4096
    assert matrices(load_model("mistralai/Mixtral-8x7B-v0.1")).all == experts + rest


def test_lora_skips_the_gradients_of_frozen_weights() -> None:
    from zeroplan.models.lora import with_lora

    spec = load_model(LLAMA)
    found = matrices(with_lora(spec, 16))
    added = 16 * 16 * ((2048 + 2048) * 2 + (2048 + 512) * 2 + (2048 + 8192) * 3)
    assert found.trained == added
    assert found.all == matrices(spec).all + added


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rings_carry_what_the_textbook_says(ranks: int) -> None:
    params = 1_235_814_400
    reduced = math.ceil(2 * 2 * params * (ranks - 1) / ranks)
    assert items(0, gpus=ranks)["reduce_at_step"].amount == reduced
    assert items(2, gpus=ranks)["reduce_each_micro_batch"].amount == reduced  # all-reduced, as DeepSpeed does by default
    third = items(3, gpus=ranks)
    last = third["reduce_last_buckets"].amount  # the embedding's and what stays in the bucket before it
    assert third["reduce_each_micro_batch"].amount + last == pytest.approx(reduced / 2, abs=2)
    assert 2 * 128256 * 2048 * (ranks - 1) / ranks <= last <= 2 * 2 * 500_000_000 * (ranks - 1) / ranks
    assert "reduce_last_buckets" not in items(2, gpus=ranks)
    gathered = params - 33 * 2048  # 33 norms stay gathered
    assert items(3, gpus=ranks)["gather_forward"].amount == math.ceil(2 * gathered * (ranks - 1) / ranks)


def test_one_rank_sends_nothing() -> None:
    for stage in (0, 1, 2, 3):
        assert not [i for i in items(stage, gpus=1).values() if i.resource.executor is Executor.LINK]


def test_several_nodes_use_the_slower_link() -> None:
    assert items(2, gpus=4, nodes=2)["gather_updated"].resource is Resource.NODE_LINK
    assert items(2, gpus=8)["gather_updated"].resource is Resource.LINK


def test_offload_moves_the_step_to_the_host() -> None:
    lines = items(2, gpus=4, offload_optimizer="cpu")
    share = -(-1_235_814_400 // 4)
    assert lines["step_on_host"].amount == 28 * share * 4  # all ranks of the node share its memory
    assert lines["download_gradients"].amount == 4 * share
    assert "step_on_gpu" not in lines
    both = items(3, gpus=4, offload_optimizer="cpu", offload_param="cpu")
    assert both["upload_forward"].amount == 2 * -(-(1_235_814_400 - 33 * 2048) // 4)
    assert "cast_updated" not in both
    assert "cast_updated" in items(3, gpus=4, offload_optimizer="cpu")


def test_the_runtime_reads_from_disk_what_host_memory_does_not_keep() -> None:
    cluster = Cluster.of(gpus=1, gpu="H100")
    cost = CostModel(find_engine("zeroplan"), load_model(LLAMA), cluster, rates_of(cluster.gpu))
    found = {}
    for kept in (0, 10**6, 4 * 10**8, 10**10):
        param = OffloadParam(OffloadDevice.NVME, "/disk", max_in_cpu=kept)
        lines = {item.name: item for item in cost.items(WORK, ZeroConfig.of(3, "cpu", param), COUNTS)}
        found[kept] = lines["read_params_forward"].amount if "read_params_forward" in lines else 0
        assert lines["upload_forward"].amount >= found[0]
    assert found[0] > 2 * 1.2e9
    assert found[10**6] == found[0]  # less than the first unit
    root, block = 128256 * 2048 + 2048, 2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048
    assert found[0] - found[4 * 10**8] == 2 * (root + 2 * block)  # whole units stay
    assert found[10**10] == 0


def test_the_runtimes_amounts_by_hand() -> None:
    """What is sent once a step is spread over its micro batches."""
    spec = load_model(LLAMA)
    cluster = Cluster.of(gpus=2, gpu="H100")
    cost = CostModel(find_engine("zeroplan"), spec, cluster, rates_of(cluster.gpu))
    work = with_flat(WORK, grad_accum=4)
    found = {}
    for stage in (0, 1, 2, 3):
        found[stage] = {item.name: item.amount for item in cost.items(work, ZeroConfig.of(stage), COUNTS, derive=True)}
    params = spec.params  # every flat of this model is a multiple of 64 × ranks
    block = 2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048
    last = params - 15 * block  # the root, and the block that the backward reaches last
    assert found[3]["gather_forward"] == found[3]["gather_backward"] == params  # 2 bytes, half of them sent
    assert found[2]["gather_updated"] == found[1]["gather_updated"] == params // 4
    assert "gather_updated" not in found[0]
    assert found[2]["reduce_gradients"] == found[3]["reduce_gradients"] == params - last
    assert found[1]["reduce_gradients"] == (params - last) // 4
    assert found[0]["reduce_gradients"] == 2 * (params - last) // 4
    assert found[2]["reduce_last"] == 4 * last
    assert found[0]["reduce_last"] == 2 * last
    # Gradient, master and two moments read; master, moments and (but at stage 3) the 16-bit parameter written.
    assert found[3]["step_on_gpu"] == params // 2 * (2 + 8 + 16)
    assert found[2]["step_on_gpu"] == params // 2 * (2 + 8 + 16 + 2)
    assert found[0]["step_on_gpu"] == params * (2 + 8 + 16 + 2)


def test_every_line_says_what_it_is_and_derives_its_number() -> None:
    for line in (*COMPUTE, *traffic.TRAFFIC, *torch_traffic.TRAFFIC, *runtime_traffic.TRAFFIC):
        assert line.doc, line.name
    for stage, offload in ((0, "none"), (1, "none"), (2, "cpu"), (3, "none"), (3, "nvme")):
        for item in items(stage, gpus=4, offload_optimizer=offload).values():
            assert item.formula, item.name
            assert item.formula != f"{item.amount:,}", item.name
            assert item.seconds == pytest.approx(item.resource.seconds(item.amount, rates_of(GPUS["h100"])))


def test_python_and_device_overlap_and_the_step_does_not() -> None:
    def item(resource: Resource, phase: Phase, seconds: float) -> WorkItem:
        return WorkItem("x", resource, phase, 1, seconds)

    work = Workload.of(micro_batch=1, seq_len=100, grad_accum=3)
    lines = [
        item(Resource.LAUNCH, Phase.FORWARD, 2.0),
        item(Resource.MATMUL, Phase.FORWARD, 3.0),
        item(Resource.LINK, Phase.BACKWARD, 1.0),
        item(Resource.MATMUL, Phase.BACKWARD, 4.0),
        item(Resource.HBM, Phase.STEP, 0.5),
        item(Resource.LINK, Phase.STEP, 0.25),
    ]
    serial = compose(lines, work, overlap=False, layout=ParallelLayout(2))
    assert (serial.forward, serial.backward, serial.step) == (3.0, 5.0, 0.75)
    assert serial.total == 3 * 8.0 + 0.75
    assert serial.tokens_per_second == pytest.approx(600 / serial.total)
    assert compose(lines, work, overlap=True, layout=ParallelLayout(2)).backward == 4.0
    beside = compose(lines, work, overlap=True, layout=ParallelLayout(2), taken=0.2)
    assert beside.backward == pytest.approx(4.0 + 0.2 * 1.5)  # the reduction takes half as long again beside kernels


def test_what_is_issued_before_the_first_wait_hides_behind_the_backward() -> None:
    def item(resource: Resource, phase: Phase, seconds: float, ahead: bool = False) -> WorkItem:
        return WorkItem("x", resource, phase, 1, seconds, ahead=ahead)

    lines = [
        item(Resource.LAUNCH, Phase.FORWARD, 1.0),
        item(Resource.MATMUL, Phase.FORWARD, 2.0),
        item(Resource.AUTOGRAD, Phase.BACKWARD, 1.0),
        item(Resource.MATMUL, Phase.BACKWARD, 4.0),  # the host is done at 2, the device at 6: 4 behind
        item(Resource.GRADIENT_HOOK, Phase.STEP, 3.0, ahead=True),
        item(Resource.LINK, Phase.STEP, 0.5, ahead=True),
        item(Resource.OPERATION, Phase.STEP, 0.25),
    ]
    work = Workload.of(micro_batch=1, seq_len=100)
    assert compose(lines, work, overlap=False, layout=ParallelLayout(2)).total == 6.0 + 0.5 + 0.25
    longer = [*lines, item(Resource.GRADIENT_HOOK, Phase.STEP, 2.0, ahead=True)]  # 5 to issue, 4.5 of the device to hide them
    assert compose(longer, work, overlap=False, layout=ParallelLayout(2)).total == 2.0 + 5.0 + 0.25
    waiting = [one._replace(ahead=False) for one in lines]
    assert compose(waiting, work, overlap=False, layout=ParallelLayout(2)).total == 6.0 + 3.0 + 0.5 + 0.25


def test_stage_1_reduces_as_stage_2_does_but_once_a_step() -> None:
    first, second = items(1), items(2)
    assert first["bucket_copies_at_step"].amount == second["bucket_copies"].amount == 6 * 2 * 1_235_814_400
    assert first["gradient_hooks_at_step"].ahead
    assert first["overflow_operations"].ahead
    assert not first["step_operations"].ahead
    tensors = 16 * 9 + 2  # nine matrices and norms a block, the embedding and the last norm
    assert first["gradient_hooks_at_step"].amount == second["gradient_hooks"].amount == tensors
    assert first["overflow_operations"].amount == 6 * -(-tensors // 4)


def test_stage_0_waits_for_each_test_and_offload_for_its_own() -> None:
    plain = items(0)
    assert plain["overflow_awaited"].amount == 146
    assert not plain["overflow_operations"].ahead
    assert "overflow_awaited" not in items(1)
    assert items(2, offload_optimizer="cpu")["offload_awaited"].amount == -(-146 // 4)


def test_recomputation_leaves_out_the_last_product_of_a_block() -> None:
    def recomputed(after: tuple[int, ...]) -> Counts:
        """A block of two matrices of which the second, and `after`, are entered again."""
        modules = (
            TapeModule("", "Block", -1),
            *(TapeModule(str(i), "Linear", 0, (i,)) for i in range(2)),
            TapeModule("n", "Norm", 0, (2,)),
        )
        params = (TapeParam("0", (64, 8), True, 2), TapeParam("1", (8, 64), True, 2), TapeParam("n", (8,), True, 2))
        stream = ExpandedTape(modules, params)
        again = [(Op.ENTER, 0), (Op.ENTER, 1), (Op.ALLOC, 0), (Op.EXIT, 1), (Op.ENTER, 2)]
        if after:
            again += [(Op.ALLOC, 1), (Op.EXIT, 2), *((Op.ENTER, module) for module in after)]
        for op, arg in [(Op.MARK, Mark.BACKWARD_BEGIN), *again, (Op.BWD_ENTER, 2)]:
            stream.op.append(op)
            stream.arg.append(arg)
            stream.aux.append(0)
        return count_tape(stream)

    assert recomputed(()).unfinished == 8 * 64  # its operands are saved before it runs, and nothing more is needed
    assert recomputed((3,)).unfinished == 0  # a norm behind it saves what the product made
    spec = load_model(LLAMA)
    work = with_flat(WORK, gradient_checkpointing=True)
    cost = CostModel(find_engine("deepspeed"), spec, Cluster.of(gpus=1, gpu="H100"), rates_of(GPUS["h100"]))
    block = 2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 8192
    counts = replace(COUNTS, unfinished=16 * 2048 * 8192)
    again = {item.name: item.amount for item in cost.items(work, ZeroConfig.of(0), counts)}
    assert again["matmul_recomputed"] == 2 * 16 * (block - 2048 * 8192) * 2048


def test_counts_grow_by_a_line_and_guesses_say_so() -> None:
    two = replace(COUNTS, forward_written=7_000_000_000)
    assert scale_counts(COUNTS, two, 4).forward_written == 13_000_000_000
    guess = guess_counts(matrices(load_model(LLAMA)), WORK, 2048)
    assert not guess.traced
    assert 0.5 < guess.forward_kernels / 708 < 2  # a tape of it counts 708
