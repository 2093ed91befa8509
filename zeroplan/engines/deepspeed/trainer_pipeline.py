"""A stage of DeepSpeed's ``PipelineModule`` on a rank: a Llama or its like as a list of layers, which pass hidden states on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from zeroplan.engines.deepspeed.trainer_mesh import release_groups
from zeroplan.engines.deepspeed.trainer_rows import rows_of
from zeroplan.engines.verification import Row, Trainer, TrainingRun

#: The rotary positions of a stage's last micro batch, which its first block makes and all of its blocks use.
_positions: list[Any] = []
_owner: list[int] = []


class EmbeddingPipe(nn.Module):
    """The embedding."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of token ids."""
        found: torch.Tensor = self.embed_tokens(ids)
        return found


class DecoderPipe(nn.Module):
    """One block, of the classes that the model has."""

    def __init__(self, block: Callable[..., nn.Module], rotary: Callable[..., nn.Module], config: Any, number: int) -> None:
        super().__init__()
        self.number = number
        self.layer = block(config, number)
        self.rotary = rotary(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the next hidden states; the stage's first block makes the positions."""
        if not _owner or _owner[0] == self.number:
            _owner[:] = [self.number]
            _positions[:] = [self.rotary(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])]
        found: torch.Tensor = self.layer(hidden, attention_mask=None, position_embeddings=_positions[0])
        return found


class NormPipe(nn.Module):
    """The final norm."""

    def __init__(self, norm: Callable[..., nn.Module], config: Any) -> None:
        super().__init__()
        self.norm = norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normed hidden states."""
        found: torch.Tensor = self.norm(hidden)
        return found


class HeadPipe(nn.Module):
    """The head."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        found: torch.Tensor = self.lm_head(hidden)
        return found


def pipeline_module(whole: Any, stages: int, partition: str, *, together: int) -> Any:
    """Return this rank's stage, of layers in the default dtype and on the default device.

    Args:
        whole: the causal language model of transformers, anywhere: only its classes and its config are read.
        partition: DeepSpeed's ``partition_method``. ``type:…`` counts the blocks, whatever a program calls their class.
        together: layers that are recomputed together, 0 for no recomputation.
    """
    pipe, config, base = import_module("deepspeed.pipe"), whole.config, whole.model
    classes = type(base.layers[0]), type(base.rotary_emb)
    blocks = [pipe.LayerSpec(DecoderPipe, *classes, config, number) for number in range(config.num_hidden_layers)]
    ends = [pipe.LayerSpec(EmbeddingPipe, config), pipe.LayerSpec(HeadPipe, config)]
    if config.tie_word_embeddings:
        shared = {"tied_weight_attr": "embed_tokens.weight"}
        ends = [
            pipe.TiedLayerSpec("words", EmbeddingPipe, config, **shared),
            pipe.TiedLayerSpec("words", EmbeddingPipe, config, forward_fn=_tied_head, **shared),
        ]
    return pipe.PipelineModule(
        [ends[0], *blocks, pipe.LayerSpec(NormPipe, type(base.norm), config), ends[1]],
        num_stages=stages,
        loss_fn=partial(_loss, config.vocab_size),
        partition_method="type:decoder" if partition.lower().startswith("type:") else partition,
        activation_checkpoint_interval=together,
        checkpointable_layers=["DecoderPipe"],
    )


def _tied_head(table: EmbeddingPipe, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(hidden, table.embed_tokens.weight)


def _loss(words: int, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = ForCausalLMLoss(logits, labels, words)
    return found


def build_stage(run: TrainingRun, deepspeed: Any) -> Trainer:
    """Build this rank's stage and its engine, whose ``train_batch`` runs all micro batches of a step."""
    with torch.device("meta"):
        whole = run.make_model(run.dtype)
    together = int(run.ds_config.get("pipeline", {}).get("activation_checkpoint_interval", 0))
    before = torch.get_default_dtype()
    torch.set_default_dtype(run.dtype)
    try:
        with run.device:
            model = pipeline_module(whole, run.layout.pp, run.partition, together=together)
    finally:
        torch.set_default_dtype(before)
    del whole
    run.mark("load", "init")
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=dict(run.ds_config), model_parameters=model.parameters())
    run.mark("init", "forward")

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = engine.train_batch(_forever(batch["input_ids"], batch["labels"]))
        return found

    def rows() -> list[Row]:
        return rows_of(run, engine, optimizer)

    return Trainer(step, rows, close=_forget)


def _forever(ids: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield ids, labels


def _forget() -> None:
    _positions.clear()
    _owner.clear()
    release_groups()
