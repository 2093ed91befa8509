"""How the time of a profiled step is shared out (benchmarks.step.limit), and what a step cannot do without."""

from __future__ import annotations

import pytest

from benchmarks.step.bounds import least_bytes, products_of
from benchmarks.step.limit import COMMUNICATION, GAP, Kernel, kind_of, shares


def test_each_moment_has_one_owner_and_the_shares_add_up_to_the_whole() -> None:
    kernels = [
        Kernel("nvjet_hsh_128x256", 0.0, 100.0),
        Kernel("ncclDevKernel_AllGather", 50.0, 180.0),  # 80 µs hidden: 50 behind the product, 30 behind the loss
        Kernel("zp_cross_entropy", 120.0, 150.0),
        Kernel("zp_adam", 200.0, 260.0),
    ]
    found = shares(kernels)
    assert found["ms"] == pytest.approx({"products": 0.1, "loss": 0.03, COMMUNICATION: 0.05, GAP: 0.02, "optimizer": 0.06})
    assert sum(found["ms"].values()) == pytest.approx(0.26)
    assert found["busy_ms"]["communication"] == pytest.approx(0.13)
    assert found["hides_ms"] == pytest.approx({"products": 0.05, "loss": 0.03})
    assert found["gaps"] == [["communication", "optimizer", pytest.approx(0.02), 1, pytest.approx(0.02)]]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>", "attention"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", "norms, residuals"),
        ("triton_poi_fused_mul_silu_7", "swiglu"),
        ("triton_poi_fused__scaled_mm__to_copy_abs_add_bitwise_and_div_mul_silu_17", "8-bit casts"),
        ("triton_poi_fused_something_3", "fused, other"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("whatever", "other"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_products_are_all_parameters_but_the_embedding_and_the_norms() -> None:
    count = sum(outputs * inputs * times for _, outputs, inputs, times in products_of("llama-1b", 1))
    assert count + 33 * 2048 == 1_235_814_400  # of Llama-3.2-1B, whose head is its embedding


def test_two_ranks_update_half_and_stage_two_gathers_no_masters() -> None:
    one, two = (least_bytes("llama-1b", 1, 128, ranks=ranks, checkpointing=False, stage=3) for ranks in (1, 2))
    assert one["optimizer"] == pytest.approx(2 * two["optimizer"], rel=1e-6)
    assert one["loss"] == two["loss"] == 128 * 128_256 * 2 * 3
    assert least_bytes("llama-1b", 1, 128, ranks=2, checkpointing=False, stage=2)["casts for gathers"] == 0
