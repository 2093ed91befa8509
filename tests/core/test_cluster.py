"""Presets and limits."""

from __future__ import annotations

import pytest

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.gpus import GPUS, find_gpu
from zeroplan.core.sizes import GIB, MIB


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100", "H100"),
        ("NVIDIA H200", "H200"),
        ("RTX 4090", "RTX4090"),
        ("A100", "A100-80G"),
        ("4090", "RTX4090"),
        ("t4", "T4"),
        ("RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
        ("TITAN RTX", "TitanRTX"),
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("A800", "A800-80G"),
    ],
)
def test_names_as_people_write_them(name: str, expected: str) -> None:
    assert find_gpu(name).name == expected


def test_every_preset_is_plausible_and_sourced() -> None:
    wanted = "T4 TitanRTX V100-16G V100-32G A10G A40 A6000 L4 L40S RTX3090 RTX4090 RTX5090 RTX6000Ada RTXPro6000"
    wanted += " A100-40G A100-80G A800-80G H20 H100 H200 GH200 B200 MI300X MI325X"
    wanted += " A30 B300 GB200 GB300 H100-NVL H100-PCIe H800 L40 MI355X"
    assert {gpu.name for gpu in GPUS.values()} == set(wanted.split())
    for gpu in GPUS.values():
        assert 15 * GIB <= gpu.usable < gpu.memory <= 288 * GIB or gpu.name == "T4"
        assert 60 <= gpu.bf16_tflops <= 2520
        assert 300 <= gpu.bandwidth_gbs <= 8000
        assert len(gpu.source) > 10


def test_hopper_has_the_larger_workspace() -> None:
    assert find_gpu("H100").workspace == 32 * MIB
    assert find_gpu("A100").workspace == 8_519_680


def test_vram_overrides_the_presets_memory() -> None:
    cluster = Cluster.of(gpu="H100", vram="24G")
    assert cluster.vram == 24 * GIB
    assert cluster.gpu.name == "H100"
    assert cluster.usable_vram is not None
    assert cluster.usable_vram < 24 * GIB


@pytest.mark.parametrize(
    ("name", "least_that_torch_reports"),
    [("A100-80G", 79.15), ("A100-40G", 39.38), ("H100", 79.10), ("A10G", 22.04), ("L4", 22.03), ("RTX4090", 23.52),
     ("A6000", 47.41), ("T4", 14.56), ("RTXPro6000", 94.97)],
)  # fmt: skip
def test_no_card_has_more_to_use_than_torch_reports(name: str, least_that_torch_reports: float) -> None:
    """The total that torch names in public out-of-memory errors, by which nobody can be beyond."""
    usable = Cluster.of(gpu=name).usable_vram
    assert usable is not None
    assert usable / GIB <= least_that_torch_reports


def test_without_a_card_nothing_is_limited() -> None:
    assert Cluster.of().usable_vram is None


def test_out_of_range() -> None:
    for wrong in ({"gpus": 0}, {"nodes": -1}, {"gpus": 1 << 40}, {"vram": "0G"}, {"vram": -5}):
        with pytest.raises(BadInput):
            Cluster.of(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("4xA100", 4, "A100-80G"),
        ("2 × RTX 4090", 2, "RTX4090"),
        ("8*h100", 8, "H100"),
        ("H200 x4", 4, "H200"),
        ("RTX4090", 1, "RTX4090"),
        ("MI300X", 1, "MI300X"),
        ("2xMI300X", 2, "MI300X"),
        ("4090", 1, "RTX4090"),
    ],
)
def test_a_gpu_may_bring_its_count(text: str, count: int, name: str) -> None:
    cluster = Cluster.of(gpu=text)
    assert (cluster.gpus, cluster.gpu.name) == (count, name)
    assert Cluster.of(gpu=text, gpus=count) == cluster


def test_two_counts_that_differ_are_refused() -> None:
    with pytest.raises(BadInput, match="'4xA100' is 4 GPUs, and --gpus says 8"):
        Cluster.of(gpu="4xA100", gpus=8)


@pytest.mark.parametrize(
    ("gpus", "gpu", "shape"),
    [
        (64, "H100", (8, 8)),
        (1, "64xH100", (8, 8)),
        (16, "A100-40G", (16, 1)),
        (32, "A100-40G", (8, 4)),
        (72, "GB200", (72, 1)),
        (144, "GB200", (4, 36)),
        (16, "RTX4090", (16, 1)),
        (64, None, (8, 8)),
    ],
)
def test_more_gpus_than_a_node_holds_are_whole_nodes(gpus: int, gpu: str | None, shape: tuple[int, int]) -> None:
    found = Cluster.of(gpus=gpus, gpu=gpu)
    assert (found.gpus, found.nodes) == shape


@pytest.mark.parametrize(("gpus", "nodes", "remedy"), [(12, 1, "--gpus 8 --nodes 2"), (64, 8, "--gpus 8 --nodes 8")])
def test_what_no_node_holds_is_refused(gpus: int, nodes: int, remedy: str) -> None:
    with pytest.raises(BadInput, match=f"no node holds {gpus} H100 GPUs; .*{remedy}"):
        Cluster.of(gpus=gpus, nodes=nodes, gpu="H100")
