"""Trains a vision transformer on images of 32 × 32 in ten classes: the plan first, then the run.

    python examples/cifar10.py                              # on a GPU a ViT of 5 M parameters, else a tiny one
    python examples/cifar10.py --data FOLDER                # CIFAR-10 as torchvision keeps it there
    torchrun --nproc-per-node 8 examples/cifar10.py --stage 3

Without --data the images are generated: each class is a colour and a direction in which it fades, under noise.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from planned import ds_config, plan, print_beside, train
from torch.utils.data import Dataset

CLASSES, SIDE = 10, 32


class Images(Dataset[dict[str, torch.Tensor]]):
    """Generated images [3, 32, 32] from -1 to 1, with their classes."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, CLASSES, (count,), generator=generator)
        angle = 2 * math.pi * self.labels / CLASSES
        line = torch.linspace(-1, 1, SIDE)
        fades = angle.cos()[:, None, None] * line + angle.sin()[:, None, None] * line[:, None]
        colors = torch.stack([angle.cos(), angle.sin(), -angle.cos()], dim=1)[:, :, None, None]
        noise = torch.randn(count, 3, SIDE, SIDE, generator=generator)
        self.images = (0.5 * fades[:, None] + 0.5 * colors + 0.5 * noise).clamp(-1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


class Cifar10(Images):
    """CIFAR-10 in a folder where torchvision has put it."""

    def __init__(self, folder: Path) -> None:
        from torchvision.datasets import CIFAR10

        data: Any = CIFAR10(str(folder), train=True, download=False)
        self.images = torch.from_numpy(data.data).permute(0, 3, 1, 2) / 127.5 - 1
        self.labels = torch.tensor(data.targets)


def main() -> None:
    """Plan, train, measure."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", default=not cuda, help="2 layers of width 64: for a CPU")
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--data", type=Path, help="torchvision's folder of CIFAR-10")
    arguments = parser.parse_args()

    from transformers import ViTConfig, ViTForImageClassification

    width, layers, patch = (64, 2, 8) if arguments.tiny else (256, 6, 4)
    torch.manual_seed(0)
    shape = ViTConfig(
        image_size=SIDE,
        patch_size=patch,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        num_labels=CLASSES,
        architectures=["ViTForImageClassification"],
    )
    config = ds_config(arguments.micro_batch, arguments.stage, 1e-3, "bf16")
    planned = plan(shape.to_dict(), config, from_scratch=True)
    data = Cifar10(arguments.data) if arguments.data else Images(4096)
    engine = train(ViTForImageClassification(shape), config, data, arguments.steps, _loss)
    print_beside(planned, engine)
    engine.destroy()


def _loss(engine: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    pixels = batch["pixel_values"].to(torch.bfloat16)
    loss: torch.Tensor = engine(pixel_values=pixels, labels=batch["labels"]).loss
    return loss


if __name__ == "__main__":
    main()
