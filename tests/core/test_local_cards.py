"""``--gpu local``: this machine's cards by a stand-in for NVML."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.sizes import GIB, MIB

Cli = Callable[..., tuple[int, str, str]]
A100 = "NVIDIA A100-SXM4-40GB"


class Card(SimpleNamespace):
    """One device: its name, bytes, processes by pid, and MIG slices."""

    def __init__(self, name: str = A100, total: int = 40960 * MIB, free: int = 40320 * MIB, **more: Any) -> None:
        super().__init__(**{"name": name, "total": total, "free": free, "used": {}, "slices": None, "uuid": "GPU-0"} | more)


def _stand_in(cards: list[Card], names: dict[int, str]) -> ModuleType:
    nvml: Any = ModuleType("pynvml")
    nvml.NVML_DEVICE_MIG_ENABLE = 1
    nvml.NVMLError = type("NVMLError", (Exception,), {})
    for name in ("NotFound", "NotSupported", "InvalidArgument", "FunctionNotFound"):
        setattr(nvml, f"NVMLError_{name}", type(name, (nvml.NVMLError,), {}))

    def by_index(index: int) -> Card:
        if index >= len(cards):
            raise nvml.NVMLError_InvalidArgument
        found: Card = cards[index]
        return found

    def by_uuid(uuid: str) -> Card:
        found = [one for card in cards for one in (card, *(card.slices or ())) if one.uuid == uuid]
        if not found:
            raise nvml.NVMLError_NotFound
        first: Card = found[0]
        return first

    def mig_mode(card: Card) -> list[int]:
        if card.slices is None:
            raise nvml.NVMLError_NotSupported
        return [1, 1]

    def slice_of(card: Card, index: int) -> Card:
        found: Card | None = card.slices[index]
        if found is None:
            raise nvml.NVMLError_NotFound
        return found

    def process(pid: int) -> str:
        if pid not in names:
            raise nvml.NVMLError_NotFound
        return names[pid]

    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetCount = lambda: len(cards)
    nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID = by_index, by_uuid
    nvml.nvmlDeviceGetName = lambda card: card.name.encode()
    nvml.nvmlDeviceGetMemoryInfo = lambda card: SimpleNamespace(total=card.total, free=card.free)
    nvml.nvmlDeviceGetMigMode = mig_mode
    nvml.nvmlDeviceGetMaxMigDeviceCount = lambda card: len(card.slices)
    nvml.nvmlDeviceGetMigDeviceHandleByIndex = slice_of
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda card: [
        SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in card.used.items()
    ]
    nvml.nvmlDeviceGetGraphicsRunningProcesses = lambda card: []
    nvml.nvmlSystemGetProcessName = process
    made: ModuleType = nvml
    return made


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts cards into this machine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(*cards: Card, names: dict[int, str] | None = None) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", _stand_in(list(cards), names or {}))

    return put


def test_free_memory_is_the_limit_and_who_holds_the_rest_is_named(here: Callable[..., None], cli: Cli) -> None:
    used = {77: 9 * GIB, 4242: 1 * GIB}
    here(Card(free=30 * GIB, used=used), names={77: "/usr/bin/python3 train.py"})
    code, out, err = cli("estimate", "openai-community/gpt2", "--gpu", "local", "--stage", "1", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["cluster"]["gpu"] == "A100-40G"
    assert (found["cluster"]["vram"], found["cluster"]["usable_vram"]) == (40960 * MIB, 30 * GIB)
    assert found["cluster"]["cpu_ram_assumed"] is False
    assert found["cluster"]["held"] == "python3 (process 77) 9.0 GiB, a process (process 4242) 1.0 GiB"
    for verb in ("estimate", "recommend"):
        said = " ".join(cli(verb, "openai-community/gpt2", "--gpu", "local", "--depth", "formula")[1].split())
        assert "(30.0 GiB free: python3 (process 77) 9.0 GiB, a process (process 4242) 1.0 GiB held)" in said


def test_an_idle_card_has_nothing_to_say(here: Callable[..., None]) -> None:
    here(Card())
    cluster = Cluster.of(gpu="local")
    assert cluster.held == ""
    assert cluster.usable_vram == 40320 * MIB
    assert Cluster.of(gpu="1xlocal") == cluster
    assert Cluster.of(gpu="local", vram="24G").usable_vram == Cluster.of(gpu="A100-40G", vram="24G").usable_vram


def test_the_fullest_of_several_cards_decides(here: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    here(Card(uuid="GPU-a"), Card(free=8 * GIB, uuid="GPU-b"), Card(uuid="GPU-c"))
    assert Cluster.of(gpu="local", gpus=3).usable_vram == 8 * GIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-a")
    assert Cluster.of(gpu="local", gpus=2).usable_vram == 40320 * MIB
    with pytest.raises(BadInput, match="2 GPUs are here, and 3 are asked for"):
        Cluster.of(gpu="local", gpus=3)


def test_a_mig_slice_has_its_own_memory_and_its_share_of_the_rates(here: Callable[..., None]) -> None:
    part = Card(name=f"{A100} MIG 1g.5gb", total=4864 * MIB, free=4800 * MIB)
    here(Card(slices=[None, part, part]))
    cluster = Cluster.of(gpu="local")
    assert cluster.usable_vram == 4800 * MIB
    assert cluster.gpu.bf16_tflops == pytest.approx(312 / 7)
    assert cluster.gpu.bandwidth_gbs == pytest.approx(1555 * 4864 / 40960)
    with pytest.raises(BadInput, match="NCCL works between no MIG slices"):
        Cluster.of(gpu="local", gpus=2)


def test_holders_of_another_container_are_not_seen(here: Callable[..., None]) -> None:
    here(Card(free=10 * GIB))
    assert Cluster.of(gpu="local").held == "processes that are not seen from here 30.0 GiB"


def test_without_a_card_there_is_no_local(here: Callable[..., None], cli: Cli) -> None:
    here()
    code, out, err = cli("estimate", "openai-community/gpt2", "--gpu", "local")
    assert (code, out) == (2, "")
    assert err.startswith("zeroplan: --gpu local: no GPU is found here")
    here(Card(), Card(name="NVIDIA L40S"))
    with pytest.raises(BadInput, match="the GPUs differ"):
        Cluster.of(gpu="local", gpus=2)


def test_verify_knows_a_card_by_its_drivers_name() -> None:
    from zeroplan.validate.machine import VerifyMachine

    machine = VerifyMachine("cuda", 1, A100, 40 * GIB, (8, 0))
    assert machine.cluster(1).gpu.name == "A100-40G"
    assert VerifyMachine("cuda", 1, "Some Card", 40 * GIB, (8, 0)).cluster(1).gpu.name == "Some Card"
