"""An encoder classifier under Lightning. To train it under ZeRO, two things change: an import and the strategy's name.

The shape is that of a course on IMDB: 6 layers of width 256, at most 1,024 tokens, 50,265 words, batch 32, Adam in fp32.
The plan comes first, plan beside measurement last; docs/reported.md has the course's figures.

    python examples/lightning_sentiment.py --small --strategy zeroplan_stage_2
    torchrun --nproc-per-node 2 examples/lightning_sentiment.py --small --devices 2 --strategy zeroplan_stage_3

``--strategy ddp`` trains the same without ZeRO. The reviews are made up: what counts is whether good words outnumber bad ones.
"""

from __future__ import annotations

import argparse
import re
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from planned import print_beside
from sentiment import PADDING, VOCABULARY, Reviews
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import zeroplan
from zeroplan.core.sizes import format_bytes
from zeroplan_runtime.integrations.lightning import ZeroplanStrategy  # importing it registers its names with Lightning


class Classifier(pl.LightningModule):
    """``nn.TransformerEncoder`` over tokens and positions, the mean over the words, two linear layers."""

    def __init__(self, width: int, layers: int, heads: int, length: int, words: int, rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.words = nn.Embedding(words, width, padding_idx=PADDING)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.classify = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens` [batch, length] to logits [batch, 2]."""
        padding = tokens == PADDING
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.encoder(x, src_key_padding_mask=padding)
        keep = (~padding)[:, : x.shape[1]].unsqueeze(-1).to(x.dtype)
        return self.classify((x * keep).sum(1) / keep.sum(1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        tokens, labels = batch
        loss = functional.cross_entropy(self(tokens).float(), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        tokens, labels = batch
        logits = self(tokens).float()
        self.log("val_loss", functional.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", (logits.argmax(-1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["rate"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.6)]


class SecondsPerBatch(pl.Callback):
    """Logs the time of each batch."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        module.log("second_per_batch", time.perf_counter() - self._start)


class Beside(pl.Callback):
    """Prints plan beside measurement at the end of the training."""

    def __init__(self, planned: Any) -> None:
        self._planned = planned

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if trainer.strategy.root_device.type == "cuda":
            planned, reserved = self._planned.gpu.peak_reserved, torch.cuda.max_memory_reserved()
            print(f"reserved: planned {format_bytes(planned)}, measured {format_bytes(reserved)}")
        elif isinstance(trainer.strategy, ZeroplanStrategy):
            print_beside(self._planned, trainer.strategy.precision_plugin.engine)


def plan(model: Classifier, tokens: torch.Tensor, arguments: argparse.Namespace) -> Any:
    """What the run takes on a GPU: the model is traced with one batch of the full length."""
    stage = re.search(r"stage_(\d)", arguments.strategy)
    how: dict[str, Any] = {"engine": "ddp"}
    if stage is not None:
        offload = "cpu" if "offload" in arguments.strategy else "none"
        how = {"engine": "zeroplan", "stage": int(stage[1]), "offload_optimizer": offload, "offload_param": "none"}
    dtype = "fp32" if arguments.precision.startswith("32") else "bf16"
    batch = {"tokens": tokens}
    (found,) = zeroplan.estimate(model, inputs=batch, dtype=dtype, optimizer="adam", gpus=arguments.devices, **how)
    print(f"plan: {format_bytes(found.gpu.peak_reserved)} reserved, {format_bytes(found.gpu.total)} in all a GPU")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="zeroplan_stage_2")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="2 layers of width 64, length 64: for a CPU")
    parser.add_argument("--save", default="checkpoints", help="folder of the best checkpoint")
    arguments = parser.parse_args()

    width, layers, heads, length, batch = (64, 2, 4, 64, 16) if arguments.small else (256, 6, 8, 1024, 32)
    words = VOCABULARY if arguments.small else 50_265  # RoBERTa's
    pl.seed_everything(0)
    batches = 32 if arguments.small else 64
    data = Reviews(batches * batch, length)
    train, test = torch.utils.data.random_split(data, [(batches - 4) * batch, 4 * batch])
    model = Classifier(width, layers, heads, length, words, rate=2e-3 if arguments.small else 2e-4)
    planned = plan(model, data.tokens[:batch], arguments)
    best = ModelCheckpoint(arguments.save, monitor="val_loss")
    trainer = pl.Trainer(
        strategy=arguments.strategy,
        accelerator="cpu" if arguments.small else "auto",
        devices=arguments.devices,
        precision=arguments.precision,
        max_epochs=arguments.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        callbacks=[best, SecondsPerBatch(), Beside(planned)],
    )
    trainer.fit(model, DataLoader(train, batch, shuffle=True), DataLoader(test, batch))
    found = trainer.validate(model, DataLoader(test, batch), ckpt_path="best", verbose=False)[0]
    if trainer.is_global_zero:
        print(f"{arguments.strategy}: loss {found['val_loss']:.4f}  accuracy {found['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
