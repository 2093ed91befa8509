"""NVMe offload by hand: two ranks, bf16, five parameters, two sub-groups of which one finds room in host memory.

Parts are 2,000,002 (alone in its sub-group), 300 and 1,500,000 elements (together), and of frozen parameters 1,000,000 and
500. Below 1 MiB nothing is swapped. Files and buffers are multiples of 1 KiB: 512 elements in bf16, 256 in fp32.
"""

from __future__ import annotations

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import Aio, OffloadDevice, OffloadOptimizer, OffloadParam, ZeroConfig
from zeroplan.engines.deepspeed.lines import LEDGER
from zeroplan.engines.deepspeed.rank import deepspeed_rank
from zeroplan.engines.deepspeed.schedule_host import HostMark, record_host
from zeroplan.ledger.line import evaluate
from zeroplan.models.spec import ModelSpec, SpecUnit, Tensor
from zeroplan.tape.expanded import ExpandedTape, TapeModule, TapeParam

SIZES = [("a", 4_000_003, True), ("b", 600, True), ("c", 3_000_000, True), ("d", 2_000_000, False), ("e", 1_000, False)]
WORKLOAD = Workload.of(seq_len=8)


def config(*, threads: int = 1, pin: bool = True) -> ZeroConfig:
    optimizer = OffloadOptimizer(OffloadDevice.NVME, nvme_path="/nvme", buffer_count=4, pin_memory=pin)
    param = OffloadParam(OffloadDevice.NVME, nvme_path="/nvme", buffer_count=5, buffer_size=2_000_100, max_in_cpu=2_500_000)
    return ZeroConfig.of(3, optimizer, param, sub_group_size=1_000_000, aio=Aio(intra_op_parallelism=threads))


def lines(zero: ZeroConfig) -> dict[str, int]:
    spec = ModelSpec("five", (SpecUnit("", tuple(Tensor(name, (count,), on) for name, count, on in SIZES)),), "test")
    rank = deepspeed_rank(spec.parameters, WORKLOAD, zero, ParallelLayout(2))
    return {item.name: item.bytes for item in evaluate(LEDGER, rank) if item.place is not Place.HBM}


def marks(zero: ZeroConfig) -> dict[Phase, HostMark]:
    params = tuple(TapeParam(name, (count,), on, 2) for name, count, on in SIZES)
    stream = ExpandedTape((TapeModule("", "Five", -1, tuple(range(len(SIZES)))),), params)
    rank = deepspeed_rank(stream.parameters, WORKLOAD, zero, ParallelLayout(2))
    return {mark.phase: mark for mark in record_host(rank).marks}


def pages(count: int) -> int:
    return -(-count // 4096) * 4096


def test_every_line() -> None:
    states = 4 * (2_000_128 + 1_500_416)
    assert lines(config()) == {
        "param_shard_nvme": 2 * (2_000_384 + 1_500_160 + 1_000_448),
        "param_shard_host": 1 << 23,  # 5,000,000 bytes
        "param_first_shards": 1024,  # a block for the 600 bytes of b
        "param_frozen_host": 1024,  # a block for the 1,000 bytes of e
        "param_swap_buffers": 5 * 2 * 2_000_384,
        "param_swap_reserve": 2 * 2_000_384,
        "param_master_nvme": states,
        "optim_exp_avg_nvme": states,
        "optim_exp_avg_sq_nvme": states,
        "grad_master_nvme": 4 * (1_999_872 + 1_499_904),
        "grad_accum_host": 1 << 23,  # 7,000,604 bytes
        "optimizer_swap_buffers": 4 * 4 * 2_000_128,
    }


def test_more_threads_align_to_more() -> None:
    found, plain = lines(config(threads=8)), lines(config())
    assert found["param_master_nvme"] == 4 * (2_000_896 + 1_501_184)  # multiples of 2,048
    assert found["optimizer_swap_buffers"] == 4 * 4 * 2_000_896
    assert found["param_swap_reserve"] == 2 * 2_002_944  # of 4,096
    assert found["param_shard_host"] == plain["param_shard_host"]


def test_buffers_are_locked_to_the_page_and_the_rest_is_rounded_by_torch() -> None:
    found = marks(config())
    small = 2 * pages(1024)
    load = pages(5 * 2 * 2_000_384) + small
    init = load + (1 << 23) + pages(2 * 2_000_384) + 4 * 4 * 2_000_128 + (1 << 23)
    assert (found[Phase.LOAD].pinned, found[Phase.LOAD].pageable) == (load, 0)
    assert (found[Phase.INIT].pinned, found[Phase.INIT].pageable) == (init, 0)
    assert found[Phase.STEP].pinned == init
    # while the flat buffer of gradients is pinned, its pageable original lies beside it
    assert found[Phase.INIT].peak == init + 7_000_604
    # the first step makes a sub-group's states in pageable memory
    assert found[Phase.STEP].peak == init + 2 * 4 * 2_000_002
    kept = found[Phase.STEP].kept
    assert kept[Buffer.SWAP_BUFFER, Place.PINNED] == 2 * 5 * 2_000_384 + 2 * 2_000_384 + 16 * 2_000_128
    assert sum(kept.values()) == init
    # CUDA maps what torch pins, and not what is locked
    assert found[Phase.STEP].host_phase().unmapped == init - small - 2 * (1 << 23)


def test_the_buffer_of_the_largest_gradient_passes_through_memory() -> None:
    """Without pinning, the accumulated gradients are pageable and come after it."""
    found = marks(config(pin=False))
    assert found[Phase.INIT].alive[Buffer.INIT_TEMP, Place.DRAM] == 4 * 2_000_002
    assert found[Phase.INIT].pageable == 7_000_604


def test_with_the_optimizer_alone_updated_parameters_are_cast_on_the_host() -> None:
    zero = ZeroConfig.of(3, OffloadOptimizer(OffloadDevice.NVME, nvme_path="/nvme"), "none", sub_group_size=1_000_000)
    step = marks(zero)[Phase.STEP]
    assert step.peak - step.pageable - step.pinned == 2 * 4 * 2_000_002 + 2 * 2_000_002
    assert lines(zero)["updated_params_cast"] == 2 * 2_000_002
    assert "param_shard_nvme" not in lines(zero)
