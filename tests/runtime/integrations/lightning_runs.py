"""Runs of a small LightningModule, as one call that a pair of ranks or one process makes."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

WORDS, LENGTH, SAMPLES, BATCH = 40, 6, 64, 4


def make(pl: Any, **changes: Any) -> Any:
    """A classifier as a LightningModule of the package `pl`, the same each time; `changes` replace its methods."""

    class Classifier(pl.LightningModule):
        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.words = nn.Embedding(WORDS, width)
            layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            self.classify = nn.Linear(width, 2)
            self.losses: list[float] = []

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.classify(self.encoder(self.words(tokens)).mean(1)).float()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = functional.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

        def test_step(self, batch: Any, index: int) -> None:
            self.log("test_loss", functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

        def predict_step(self, batch: Any, index: int) -> torch.Tensor:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)  # no steps by rounding errors alone
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.6)]

    torch.manual_seed(0)
    return type("Classifier", (Classifier,), changes)()


def data() -> DataLoader[Any]:
    tokens = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(tokens, (tokens.sum(1) > LENGTH * WORDS / 2).long()), BATCH)


def trainer(pl: Any, strategy: Any, **options: Any) -> Any:
    """A quiet Trainer on this process's ranks: 3 micro batches a step, which do not divide an epoch, and clipping."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    plugins: list[Any] = []
    if dist.is_initialized():
        fabric = "lightning_fabric" if pl.__name__ == "pytorch_lightning" else "lightning.fabric"
        ranks = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
        os.environ.update({key: str(value) for key, value in ranks.items()})
        plugins = [import_module(f"{fabric}.plugins.environments").TorchElasticEnvironment()]
    wanted: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.5,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        **options,
    }
    return pl.Trainer(
        strategy=strategy,
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        plugins=plugins,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **wanted,
    )


def whole_run(pl: Any, strategy: Any, folder: Path) -> dict[str, Any]:
    """Fit with a checkpoint after each epoch, then validate, test and predict."""
    name = strategy if isinstance(strategy, str) else "given"
    keep = pl.callbacks.ModelCheckpoint(folder / name, "{epoch}", save_top_k=-1, monitor="val_loss")
    model = make(pl)
    runs = trainer(pl, strategy, callbacks=[keep], enable_checkpointing=True)
    torch.manual_seed(1 + int(os.environ.get("RANK", "0")))  # dropout's
    runs.fit(model, data(), data())
    return {
        "losses": model.losses,
        "steps": runs.global_step,
        "rate": runs.optimizers[0].param_groups[0]["lr"],
        "after fit": {name: value.clone() for name, value in model.state_dict().items()},
        "validate": runs.validate(model, data(), verbose=False)[0]["val_loss"],
        "test": runs.test(model, data(), ckpt_path=folder / name / "epoch=0.ckpt", verbose=False)[0]["test_loss"],
        "predict": torch.cat(runs.predict(model, data())),
    }


def resume(pl: Any, strategy: Any, checkpoint: Path, **options: Any) -> dict[str, Any]:
    """A second epoch, begun from a checkpoint."""
    model, runs = make(pl), trainer(pl, strategy, **options)
    torch.nn.init.ones_(model.classify.weight)  # what is loaded must replace it
    torch.manual_seed(1)
    runs.fit(model, data(), data(), ckpt_path=checkpoint)
    return {"losses": model.losses, "steps": runs.global_step, "params": dict(model.state_dict())}


@contextlib.contextmanager
def ended() -> Any:
    """A context after which there is no default process group."""
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
