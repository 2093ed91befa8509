"""Saving: what state dicts and writers of files keep in memory equals what the plan says of them."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.workloads import flat_workload
from zeroplan.core.buffers import Phase
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.parameters import Parameters
from zeroplan.core.saving import Saver, Saving, StateDict
from zeroplan.core.sizes import KIB, MIB
from zeroplan.core.workload import Precision
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.deepspeed.checkpoint import checkpoint_phases
from zeroplan.engines.deepspeed.rank import deepspeed_rank
from zeroplan.engines.fsdp2.rank import Fsdp2Rank
from zeroplan.engines.saved_files import LARGEST_FILE, largest_file, pinned_copies

if TYPE_CHECKING:
    from tests.runtime.ranks import RankPool

torch = pytest.importorskip("torch")
FULL = Saving(StateDict.FULL, Saver.ACCELERATE)


def test_a_full_state_dict_of_fsdp2_gathers_one_tensor_at_a_time_and_keeps_all_on_the_first_rank(pool: RankPool) -> None:
    from tests.engines.torch.saving_on_ranks import SHAPES, full_state_dicts

    shapes, count = tuple(SHAPES.values()), len(SHAPES)
    names = tuple(SHAPES)
    parameters = Parameters(names, shapes, (True,) * count, (True,) * count, ("",) * count, (tuple(range(count)),))
    work = flat_workload(precision=Precision.FP32, saving=FULL)
    rank = Fsdp2Rank(workload=work, parameters=parameters, layout=ParallelLayout(2))
    first, second = pool.run(2, full_state_dicts)
    sizes = [whole for _, whole in rank.gathered(FULL)]
    weights, states = sizes[:count], sizes[count:]
    assert len(states) == 2 * count
    # The other rank drops each soon after it is gathered: the transport may hold one for a moment.
    for name, sizes in (("weights", weights), ("states", states)):
        peak, _, kept = second[name]
        assert max(sizes) <= peak < sum(sizes) / 2
        assert kept == 0
        # On a CPU what is gathered is what the first rank keeps, with the padding that a copy from a GPU leaves behind.
        assert first[name] == (sum(sizes), sum(sizes), len(sizes))
    padding = 4 * (34 - 33) * 64
    assert [part.first for part in rank.parts_of_save(FULL)] == [sum(weights) - padding, sum(states) - 2 * padding]


def test_files_of_safetensors_are_those_of_the_hub() -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    sizes = [LARGEST_FILE // 3, LARGEST_FILE // 2, LARGEST_FILE // 4, LARGEST_FILE + 4, 4096, LARGEST_FILE // 5]
    sizes = [size // 4 * 4 for size in sizes]
    with torch.device("meta"):
        tensors = {str(at): torch.empty(size // 4) for at, size in enumerate(sizes)}
    files = split_torch_state_dict_into_shards(tensors, max_shard_size="50GB").filename_to_tensors.values()
    assert largest_file(sizes) == max(sum(sizes[int(name)] for name in names) for names in files)
    assert largest_file(sizes[:3]) == max(sizes[0] + sizes[1], sizes[2])


def test_a_distributed_checkpoint_keeps_every_copy_until_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's writer, on views of larger storages, which it copies on a CPU as it copies tensors of a GPU."""
    import weakref

    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import filesystem

    from zeroplan.simulate.allocator.pinned_host import PinnedAllocator

    sizes = [3 * KIB, 40 * KIB, 1 * KIB, 17 * KIB, 2 * KIB, 5 * KIB, 5 * KIB, 6 * KIB, 12 * KIB, 33 * KIB]
    pinned, write = PinnedAllocator(), filesystem._write_item

    def counted(transforms: Any, stream: Any, copied: Any, *rest: Any) -> Any:
        weakref.finalize(copied, pinned.free, pinned.alloc(copied.nbytes))
        return write(transforms, stream, copied, *rest)

    monkeypatch.setattr(filesystem, "_write_item", counted)
    views = {str(at): torch.zeros(2, size, dtype=torch.uint8)[0] for at, size in enumerate(sizes)}
    checkpoint.save(views, checkpoint_id=tmp_path, no_dist=True)
    assert pinned.peak_resident == pinned_copies(sizes) > sum(sizes)


def test_lightning_makes_the_whole_file_in_memory_and_torch_does_not() -> None:
    cloud_io = pytest.importorskip("lightning.fabric.utilities.cloud_io")
    state = {"weights": torch.zeros(MIB), "states": [torch.zeros(MIB), torch.zeros(MIB)]}
    whole = 12 * MIB

    def peak(write: Any) -> int:
        tracemalloc.start()
        write()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    class Sink(io.RawIOBase):
        def write(self, data: Any) -> int:
            return len(data)

    assert peak(lambda: torch.save(state, Sink())) < MIB
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cloud_io.fsspec.core, "url_to_fs", lambda path: (_Files(Sink()), path))
        assert whole <= peak(lambda: cloud_io._atomic_save(state, "file")) < 1.3 * whole


def test_below_stage_3_every_rank_clones_the_whole_model_for_the_trainer() -> None:
    clone = pytest.importorskip("deepspeed.checkpoint.utils").clone_tensors_for_torch_save
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight  # tied: written twice
    cloned = clone(model.state_dict())
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in cloned.values()}
    parameters = Parameters(("0.weight",), ((8, 8),), (True,), (True,), ("",), ((0,), (0,)))
    work = flat_workload(precision=Precision.FP32, saving=Saving(StateDict.FULL, Saver.TRAINER, optimizer=False))
    rank = deepspeed_rank(parameters, work, ZeroConfig.of(2), ParallelLayout(2))
    phases = {one.phase: one for one in checkpoint_phases(rank, after_init=0, after_step=0, host_init=0, host_step=7)}
    assert (phases[Phase.SAVE].host, phases[Phase.SAVE].host_once) == (7 + sum(storages.values()), 0)


class _Files:
    """A file system whose only file forgets."""

    def __init__(self, sink: Any) -> None:
        self.transaction, self.sink = _Nothing(), sink

    def open(self, path: str, mode: str) -> Any:
        return self.sink


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None
