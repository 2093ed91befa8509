"""``with zeroplan.capture() as plan:``: code of this process, after which the process is as before."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zeroplan
from zeroplan.core.sizes import MIB

torch = pytest.importorskip("torch")


def train(steps: int = 3) -> Any:
    """Train a layer on the GPU, by a loop without end after those steps."""
    model = torch.nn.Linear(1024, 1024, bias=False).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    while True:
        model(torch.randn(256, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def state() -> list[Any]:
    """What a capture replaces, as it is now."""
    import torch.nn.modules.module as home

    hooks = [len(home._global_forward_pre_hooks), len(home._global_forward_hooks)]
    names = [torch.cuda.is_available, torch.cuda.device_count, torch.save, torch.load, torch.compile, torch.Generator]
    return [
        open,
        os.open,
        os.mkdir,
        shutil.rmtree,
        socket.getaddrinfo,
        torch.nn.Parameter.__new__,
        *names,
        *hooks,
        dict(os.environ),
    ]


def test_a_block_is_captured_and_all_is_put_back() -> None:
    before = state()
    with zeroplan.capture("H100") as plan:
        train()
    assert state() == before
    weight, workspace = 4 * MIB, 32 * MIB
    assert plan.peak_allocated == 5 * weight + 2 * workspace
    layer = torch.nn.Linear(8, 8)
    layer(torch.randn(2, 8)).sum().backward()
    assert layer.weight.grad.device.type == "cpu"
    assert layer.weight.grad.abs().sum().item() > 0
    with zeroplan.capture("H100") as again:
        train()
    assert again.peak_allocated == plan.peak_allocated


def test_engines_of_torch_are_put_back() -> None:
    """The stand-ins set attributes of torch's own classes, and of every module that hands ``fully_shard`` on."""
    import torch.distributed.fsdp as fsdp
    from torch.nn.parallel import DistributedDataParallel

    def engines() -> list[dict[str, Any]]:
        kinds = (DistributedDataParallel, fsdp.FullyShardedDataParallel, fsdp.FSDPModule, torch.Tensor)
        return [dict(vars(kind)) for kind in kinds]

    before, shard = engines(), fsdp.fully_shard
    with zeroplan.capture("H100"):
        assert fsdp.fully_shard is not shard
        assert engines()[:3] != before[:3]
        fsdp.fully_shard(torch.nn.Linear(8, 8))
        train()
    assert fsdp.fully_shard is shard
    assert engines() == before


def test_fits_is_an_assertion_that_says_why() -> None:
    with zeroplan.capture() as plan:
        train()
    assert plan.fits("24G")
    assert not plan.fits("300M")
    assert repr(plan.fits("300M")).startswith("<Does not fit: the script as it runs")
    assert plan.fits(gpu="T4")
    with pytest.raises(zeroplan.BadInput, match="no limit"):
        plan.fits()


@pytest.mark.parametrize(("emptied", "reserved"), [(True, 100 * MIB), (False, 164 * MIB)])
def test_an_emptied_cache_goes_back_to_the_device(emptied: bool, reserved: int) -> None:
    with zeroplan.capture("H100") as plan:
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        if emptied:
            torch.cuda.empty_cache()
        held = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    del held
    assert plan.peak_allocated == 100 * MIB
    assert plan.peak_reserved == reserved


def test_a_script_reads_what_the_allocator_has_reserved() -> None:
    with zeroplan.capture("H100"):
        big = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        del big
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (0, 30 * MIB)
        torch.cuda.empty_cache()
        assert (torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()) == (0, 30 * MIB)
        assert torch.cuda.memory_stats()["reserved_bytes.all.peak"] == 30 * MIB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_reserved() == 0


def test_a_product_into_a_given_tensor_takes_a_workspace() -> None:
    with zeroplan.capture("H100") as plan:
        one = torch.empty(512, 512, device="cuda")
        torch.mm(one, one, out=torch.empty(512, 512, device="cuda"))
    assert plan.peak_allocated == 2 * MIB + 32 * MIB


def test_code_that_cannot_go_on_fits_nowhere() -> None:
    with zeroplan.capture() as plan:
        train_with = torch.empty(8, device="cuda")
        torch.ops.aten._cudnn_rnn_flatten_weight.default([train_with], 1, 0, 2, 8, 8, 1, False, False)
        raise AssertionError("not reached")
    assert plan.plan.capture is not None
    assert plan.plan.capture.stopped is not None
    assert not plan.fits("80G")


def test_its_own_errors_are_raised(tmp_path: Path) -> None:
    def write() -> None:
        with zeroplan.capture():
            (tmp_path / "made").write_text("never")
            torch.save({"a": torch.ones(2, device="cuda")}, tmp_path / "model.pt")
            assert (tmp_path / "made").exists()
            raise KeyError("own")

    before = state()
    with pytest.raises(KeyError):
        write()
    assert state() == before
    assert os.listdir(tmp_path) == []


def test_before_the_end_there_is_no_plan() -> None:
    with pytest.raises(zeroplan.BadInput, match="not ended"), zeroplan.capture() as plan:
        plan.fits("24G")


def test_a_kept_block_is_taken_by_the_verbs(tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    with zeroplan.capture("H100") as plan:
        train()
    plan.save(str(tmp_path / "run.json"))
    assert cli("check", str(tmp_path / "run.json"), "--vram", "24G")[0] == 0


def test_a_trainer_believes_in_the_gpu_within_the_block_alone(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from_pretrained, train_of = transformers.PreTrainedModel.from_pretrained.__func__, transformers.Trainer.train
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    data = [{"input_ids": torch.arange(32), "labels": torch.arange(32)} for _ in range(64)]

    def trainer(**more: Any) -> Any:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=512, **sizes))
        arguments = transformers.TrainingArguments(str(tmp_path / "out"), max_steps=3, report_to=[], disable_tqdm=True, **more)
        return transformers.Trainer(model=model, args=arguments, train_dataset=data)

    with zeroplan.capture("H100") as plan:
        one = trainer(bf16=True)
        assert one.args.device.type == "cuda"
        one.train()
    assert not (tmp_path / "out").exists()
    assert plan.plan.capture is not None
    assert (plan.plan.capture.steps, plan.plan.capture.stopped) == (3, None)
    assert transformers.PreTrainedModel.from_pretrained.__func__ is from_pretrained
    assert transformers.Trainer.train is train_of
    assert trainer(use_cpu=True).args.device.type == "cpu"


@pytest.mark.parametrize(
    ("use", "refused"),
    [
        ("gpu + host", True),
        ("torch.nn.functional.embedding(rows, gpu)", True),
        ("torch.cat([gpu, host])", True),
        ("torch.nn.Linear(8, 8)(gpu)", True),
        ("torch.where(host > 0, gpu, gpu)", True),
        ("host[rows.cuda()]", True),
        ("gpu.__setitem__(rows, host[rows])", True),
        ("torch.stack([gpu.sum(), host.sum()])", True),
        ("host * gpu.sum()", True),
        ("gpu * host.sum() + torch.tensor(2.0)", False),
        ("gpu[rows]", False),
        ("gpu.__setitem__(rows, torch.tensor(1.0))", False),
        ("gpu.__setitem__(slice(0, 8), host)", False),
        ("host.copy_(gpu)", False),
        ("torch.nn.utils.rnn.pack_padded_sequence(gpu[None], torch.tensor([8]), batch_first=True)", False),
    ],
)
def test_tensors_of_a_gpu_and_of_the_host_meet_where_torch_lets_them(use: str, refused: bool) -> None:
    """Which operators take both is what torch does with CUDA tensors (``TensorIterator``, ``TensorAdvancedIndexing.cpp``)."""

    def run() -> None:
        with zeroplan.capture("H100"):
            names = {
                "torch": torch,
                "gpu": torch.randn(8, 8, device="cuda"),
                "host": torch.randn(8, 8),
                "rows": torch.arange(4),
            }
            eval(use, names)

    if not refused:
        run()
        return
    with pytest.raises(RuntimeError, match=r"on the same device, but .* cuda:0 and some on cpu"):
        run()


def test_the_name_costs_no_torch(fresh_python: Callable[..., Any]) -> None:
    done = fresh_python(
        "import sys, zeroplan; zeroplan.capture; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_autocast_casts_what_einsum_multiplies() -> None:
    """The weight's 16-bit copy is kept for the backward, as that of any product is."""
    with zeroplan.capture("H100") as plan:
        weight = torch.nn.Parameter(torch.randn(2, 1024, 1024)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            out = torch.einsum("e,eio->io", torch.ones(2, device="cuda", requires_grad=True), weight)
        held = torch.cuda.memory_allocated()
    assert out.dtype is torch.bfloat16
    assert held == 8 * MIB + 4 * MIB + 2 * MIB + 2 * 512
    assert plan.peak_allocated >= held


def test_names_that_accelerate_has_taken_are_watched_and_put_back() -> None:
    taken = pytest.importorskip("accelerate.accelerator")
    own = taken.save_fsdp_model
    with zeroplan.capture("H100"):
        torch.zeros(4, device="cuda")
        assert taken.save_fsdp_model is not own
    assert taken.save_fsdp_model is own


def test_a_model_of_the_cpu_trains_there_beside_one_on_a_gpu() -> None:
    with zeroplan.capture("H100") as plan:
        beside = torch.ones(8, device="cuda", requires_grad=True)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD([*model.parameters(), beside], lr=0.1)
        for _ in range(2):  # the gradient of a clamp is a choice between it and a zero that torch makes within
            beside.clamp(min=0.5).sum().backward()
            model(torch.ones(3, 4)).clamp(min=0.5).sum().backward()
            optimizer.step()
        assert str(model.weight.grad.device) == "cpu"
    assert plan.plan.capture is not None
    assert plan.plan.capture.stopped is None
    assert plan.peak_allocated < 4096


def test_an_epoch_behind_the_steps_has_no_batch() -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")

    def older(self: Any) -> Any:  # of accelerate 0.34, where the loader below has nothing
        yield None

    own = data_loader.DataLoaderShard.__iter__
    try:
        data_loader.DataLoaderShard.__iter__ = older
        with zeroplan.capture("H100"):
            assert list(data_loader.DataLoaderShard([torch.zeros(2)])) == []
        assert list(data_loader.DataLoaderShard([torch.zeros(2)])) == [None]
    finally:
        data_loader.DataLoaderShard.__iter__ = own
