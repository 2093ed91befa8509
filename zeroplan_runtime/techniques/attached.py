"""The techniques that an engine puts on its model: one list, in the order in which they are attached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan_runtime.config import RuntimeConfig
from zeroplan_runtime.mesh import MeshRanks
from zeroplan_runtime.offload.activations import ActivationOffload
from zeroplan_runtime.schedule import Schedule
from zeroplan_runtime.techniques.chunked_cross_entropy import attach_chunked_cross_entropy
from zeroplan_runtime.techniques.curriculum import SequenceCurriculum, make_curriculum
from zeroplan_runtime.techniques.fused_loss import attach_fused_loss
from zeroplan_runtime.techniques.labelled_tokens import LabelledTokens, attach_labelled_tokens
from zeroplan_runtime.techniques.layer_drop import LayerDrop, make_layer_drop


class Techniques:
    """What the config asks for beside ZeRO, on one model.

    Attributes:
        layer_drop: leaves blocks out of steps; None where the config asks for none.
        curriculum: cuts the sequences of training batches; None where the config asks for none.
        activations: keeps what a backward needs on the host or on several ranks; None where the config asks for neither.
    """

    layer_drop: LayerDrop | None = None
    curriculum: SequenceCurriculum | None = None
    activations: ActivationOffload | None = None

    def __init__(self, model: nn.Module, config: RuntimeConfig, schedule: Schedule, ranks: MeshRanks) -> None:
        self.model, self.config, self.schedule, self.ranks = model, config, schedule, ranks
        self.labelled: dict[nn.Module, LabelledTokens] = {}  # what picks rows for a model's head
        self._undo = [undo for attach in ATTACHED if (undo := attach(self)) is not None]

    def choose_layers(self, step: int, *, in_forward: bool = False) -> None:
        """Chooses the layers of the step after `step` others; a forward for evaluation, or without gradients, keeps all."""
        if self.layer_drop is not None:
            self.layer_drop.choose(step, active=self.model.training and (torch.is_grad_enabled() or not in_forward))

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any], step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the inputs of a forward of `step`, counted from 1, as long as a curriculum wants them."""
        if self.curriculum is None or not (self.model.training or torch.is_grad_enabled()):
            return args, kwargs
        return self.curriculum.cut(args, kwargs, step)

    def saving(self) -> AbstractContextManager[object]:
        """Returns the context of a forward."""
        return self.activations.saving() if self.activations is not None else nullcontext()

    def require_compilable(self) -> None:
        """Refuses ``engine.compile`` where steps leave blocks out.

        Raises:
            BadInput: with the remedy.
        """
        if self.layer_drop is not None:
            raise BadInput("blocks that may be left out are not compiled", where="engine.compile", remedy="leave it out")

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "curriculum": self.curriculum.state_dict() if self.curriculum is not None else None,
            "layer_drop": self.layer_drop.state_dict() if self.layer_drop is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from :meth:`state_dict`; what another training did not have begins anew."""
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state.get("curriculum"))
        if self.layer_drop is not None:
            self.layer_drop.load_state_dict(state.get("layer_drop"))

    def remove(self) -> None:
        """Gives the model its own forwards back."""
        for undo in reversed(self._undo):
            undo()


#: Undoes what was attached.
Undo = Callable[[], None]


def _fused_loss(on: Techniques) -> Undo | None:
    return attach_fused_loss(on.model) if on.config.runtime_options.fused_loss else None


def _sparse_attention(on: Techniques) -> Undo | None:
    if on.config.sparse_attention is None:
        return None
    from zeroplan_runtime.techniques.sparse_attention.section import attach_sparse_attention  # slow to import

    return attach_sparse_attention(on.model, on.config.sparse_attention, on.ranks)


def _layer_drop(on: Techniques) -> Undo | None:
    on.layer_drop = make_layer_drop(on.config.layer_drop, on.model, on.schedule, on.ranks)
    return on.layer_drop.remove if on.layer_drop is not None else None


def _labelled_tokens(on: Techniques) -> Undo | None:
    return attach_labelled_tokens(on.model, on.labelled) if on.config.runtime_options.labelled_tokens_only else None


def _chunked_cross_entropy(on: Techniques) -> Undo | None:
    tokens = on.config.runtime_options.chunked_cross_entropy
    return attach_chunked_cross_entropy(on.model, tokens, on.labelled) if tokens else None


def _float8(on: Techniques) -> Undo | None:
    recipe, states = on.config.runtime_options.float8_recipe, on.schedule.model_states
    if recipe is None:
        return None
    from zeroplan_runtime.techniques.float8 import attach_float8  # makes an operation of torch's

    if states.setup.bf16_layers is not None and on.ranks.pp is not None:
        what = "the first and last blocks of a pipeline's stages are not the model's"
        raise BadInput(what, where="zeroplan.num_layers_at_start_in_bf16", remedy="leave the keys out")
    blocks = [unit.module for unit in states.units if unit.layout.multiplies_in_float8]
    gathered = states.units if states.setup.gathers_float8 else []
    return attach_float8(blocks, recipe, states.arena.device, gathered)


def _activations(on: Techniques) -> Undo | None:
    wanted, states = on.config.zero.activation_checkpointing, on.schedule.model_states
    alike = on.ranks.tp if wanted.partition_activations else None
    if not wanted.cpu_checkpointing and alike is None:
        return None
    on.activations = ActivationOffload(states.blocks, states.arena, to_host=wanted.cpu_checkpointing, alike=alike)
    return on.activations.remove


def _curriculum(on: Techniques) -> Undo | None:
    on.curriculum = make_curriculum(on.config, on.ranks)
    return None


#: Each attaches one technique where the config asks for it.
ATTACHED: tuple[Callable[[Techniques], Undo | None], ...] = (
    _curriculum,
    _fused_loss,
    _sparse_attention,
    _layer_drop,
    _labelled_tokens,
    _chunked_cross_entropy,
    _float8,
    _activations,
)
