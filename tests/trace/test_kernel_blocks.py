"""What kernels take inside: sizes recorded on an H100 (CUDA allocator histories, torch 2.11), by the shapes that took them."""

from __future__ import annotations

import pytest

from zeroplan.tape.sizes import FUNCTIONS, KernelDevice

H100 = KernelDevice()


@pytest.mark.parametrize(
    "function, args, recorded",
    [
        # Sum of [1024, 2048] bf16 over its rows: 16 thread blocks an output, each with 128 partial sums.
        ("reduce_partial", (2048, 1024, 0, 4, 4), 16_777_216),
        ("reduce_semaphores", (2048, 1024, 0, 4, 4), 64),
        # Sum of [4096, 1024] fp16 over its rows.
        ("reduce_partial", (1024, 4096, 0, 4, 4), 33_554_432),
        ("reduce_semaphores", (1024, 4096, 0, 4, 4), 32),
        # A mean over the last dimension is not split.
        ("reduce_partial", (1024, 2048, 1, 1, 4), 0),
        # cuDNN's attention backward: 32 query heads with 8 KV heads; 16 heads; 32 heads of two samples.
        ("cudnn_backward", (1 * 32 * 1024, 64, 1), 16_908_544),
        ("cudnn_backward", (1 * 32 * 1024, 64, 1, 1 * 32 * 512), 16_908_544 - 32 * 512 * 64 * 4),  # half the keys
        ("cudnn_backward", (4 * 16 * 512, 64, 0), 8_519_936),
        ("cudnn_backward", (2 * 32 * 1024, 64, 0), 17_039_616),
        # The embedding's backward over 4096 indices: 50,265 rows of 1024, then 514.
        ("embedding_partial_index", (4096, 50265), 36_040),
        ("embedding_partial_grad", (4096, 50265, 1024), 18_452_480),
        ("embedding_partial_index", (4096, 514), 7_384),
        ("embedding_partial_grad", (4096, 514, 1024), 3_780_608),
        ("sort_scratch", (4096,), 83_455),
        # Up to 3072 indices are not sorted.
        ("embedding_partial_grad", (2048, 50265, 1024), 0),
    ],
)
def test_recorded_sizes(function: str, args: tuple[int, ...], recorded: int) -> None:
    assert FUNCTIONS[function](H100, *args) == recorded
