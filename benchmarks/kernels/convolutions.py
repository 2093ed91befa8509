"""What a convolution's kernels allocate beside their results: forward, the image's gradient, the weight's. Needs a GPU.

    python -m benchmarks.kernels.convolutions benchmarks/results/convolutions.jsonl

A line a call: the shapes, and the bytes of each of the three workspaces as the allocator's blocks had them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

#: Channels, side, kernel, stride.
_DEPTHWISE = ((32, 112, 3, 1), (96, 56, 3, 2), (192, 28, 5, 1), (384, 14, 7, 1), (96, 56, 7, 1), (1152, 7, 3, 1))
#: Channels in and out, side, kernel, stride, padding, dilation, groups: of networks that are trained.
_PLANES: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {
    (4, 8, 32): (
        *(
            (3, 64, 224, 7, 2, 3),
            (64, 64, 56, 1),
            (64, 64, 56, 3, 1, 1),
            (64, 256, 56, 1),
            (256, 128, 56, 1),
            (128, 128, 56, 3, 2, 1),
        ),
        *((256, 512, 56, 1, 2), (512, 512, 14, 3, 1, 1), (1024, 2048, 14, 1, 2), (512, 512, 7, 3, 1, 1), (3, 32, 224, 3, 2, 1)),
        *((3, 768, 224, 16, 16), (3, 1024, 224, 14, 14), (3, 96, 224, 4, 4), (96, 192, 56, 2, 2)),
    ),
    (1, 4): (
        *((4, 320, 64, 3, 1, 1), (320, 320, 64, 3, 1, 1), (640, 640, 32, 3, 1, 1), (1280, 1280, 16, 3, 1, 1)),
        *((2560, 1280, 8, 3, 1, 1), (320, 4, 64, 3, 1, 1), (128, 128, 256, 3, 1, 1)),
    ),
    (4, 8): (
        *((c, c, side, k, s, k // 2, 1, c) for c, side, k, s in _DEPTHWISE),
        *((128, 128, 28, 3, 1, 1, 1, 32), (256, 256, 28, 3, 1, 2, 2), (512, 512, 14, 3, 1, 1, 1, 2), (3, 64, 224, 7, 4, 2)),
        *((64, 128, 56, 3, 2, 1), (128, 320, 28, 3, 2, 1), (320, 512, 14, 3, 2, 1), (3, 16, 256, 3, 2, 1), (16, 64, 128, 1)),
        *(
            (144, 144, 32, 3, 1, 1),
            (144, 96, 32, 1),
            (192, 240, 8, 3, 1, 1),
            (240, 160, 8, 1),
            (160, 640, 8, 1),
        ),
    ),
}
#: The same of sequences: of wav2vec 2, Whisper, Mamba, Conformer.
_SEQUENCES: tuple[tuple[int, ...], ...] = (
    *((1, 512, 159680, 10, 5), (512, 512, 31935, 3, 2), (512, 512, 15967, 3, 2), (512, 512, 1995, 2, 2)),
    *((768, 768, 499, 128, 1, 64, 1, 16), (80, 768, 3000, 3, 1, 1), (768, 768, 3000, 3, 2, 1), (128, 1280, 3000, 3, 1, 1)),
    *(
        (1280, 1280, 3000, 3, 2, 1),
        (1536, 1536, 1024, 4, 1, 3, 1, 1536),
        (512, 512, 1024, 31, 1, 15, 1, 512),
        (512, 1024, 1024, 1),
    ),
)


def calls() -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield dimensions, samples, and the sizes of each call."""
    for counts, sizes in _PLANES.items():
        yield from ((2, samples, one) for samples in counts for one in sizes)
    yield from ((1, samples, one) for samples in (2, 4, 8) for one in _SEQUENCES)


def workspace(call: Callable[[], Any]) -> int:
    """Return the bytes that a call allocates beyond what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del kept
    return found


def measure(dtype: torch.dtype, layout: str, dims: int, samples: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Measure one convolution."""
    come, go, side, kernel, *rest = sizes
    stride, padding, dilation, groups = (*rest, *(1, 0, 1, 1)[len(rest) :])
    order = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    made = {"device": "cuda", "dtype": dtype}
    image = torch.randn(samples, come, *[side] * dims, **made).contiguous(memory_format=order)  # type: ignore[call-overload]
    weight = torch.randn(go, come // groups, *[kernel] * dims, **made).contiguous(memory_format=order)  # type: ignore[call-overload]
    given = ([stride] * dims, [padding] * dims, [dilation] * dims, False, [0] * dims, groups)
    result = torch.ops.aten.convolution(image, weight, None, *given)
    gradient = torch.randn_like(result)
    found = [workspace(partial(torch.ops.aten.convolution, image, weight, None, *given))]
    backward = partial(torch.ops.aten.convolution_backward, gradient, image, weight, None, *given)
    found += [workspace(partial(backward, mask)) for mask in ([True, False, False], [False, True, False])]
    shapes = {name: list(tensor.shape) for name, tensor in (("x", image), ("w", weight), ("y", result))}
    facts = {"stride": given[0], "padding": given[1], "dilation": given[2], "groups": groups}
    return {"dtype": str(dtype).removeprefix("torch."), "layout": layout, **shapes, **facts, "workspace": found}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    with parser.parse_args().out.open("w") as out:
        head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
        out.write(json.dumps(head) + "\n")
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            for layout in ("contiguous", "channels_last"):
                for dims, samples, sizes in calls():
                    if layout == "contiguous" or dims == 2:
                        out.write(json.dumps(measure(dtype, layout, dims, samples, sizes)) + "\n")


if __name__ == "__main__":
    main()
