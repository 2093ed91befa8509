"""Cuts a batch's sequences to the length of the step's curriculum, before the model sees them.

DeepSpeed's legacy engine handed the length to the model's forward as ``curriculum_seqlen``, and the user's model cut its own
inputs. Here the engine cuts: every tensor [batch, tokens] of a training forward becomes [batch, length]. A forward in
evaluation mode and without gradients sees whole sequences; one with gradients is a training's, since transformers loads models
in evaluation mode and people train them so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from zeroplan.core.curriculum import CURRICULUM_LEARNING, Curriculum, CurriculumKind
from zeroplan.core.errors import BadInput
from zeroplan_runtime.config import RuntimeConfig
from zeroplan_runtime.mesh import MeshRanks
from zeroplan_runtime.pytree import map_tensors, tensors_of

_WHERE = CURRICULUM_LEARNING


class SequenceCurriculum:
    """The curriculum of one training.

    Attributes:
        current: tokens of a sample in the last training forward.
        custom: gives the length at a step, counted from 1, where ``schedule_type`` is custom. Checkpoints do not hold it.
    """

    def __init__(self, schedule: Curriculum) -> None:
        self.schedule = schedule
        self.current = schedule.min_difficulty
        self.custom: Callable[[int], int] | None = None

    def update(self, step: int) -> int:
        """Returns the length of `step`, counted from 1, and makes it the current one.

        Raises:
            BadInput: when a custom schedule is not set, or gives no length.
        """
        if self.schedule.schedule_type != CurriculumKind.CUSTOM:
            self.current = self.schedule.next(self.current, step)
        elif self.current < self.schedule.max_difficulty:
            self.current = self._custom(step)
        return self.current

    def _custom(self, step: int) -> int:
        if self.custom is None:
            remedy = "call engine.set_custom_curriculum_learning_schedule({'seqlen': function}) before the first step"
            raise BadInput("the custom schedule has no function", where=_WHERE, remedy=remedy)
        length = self.custom(step)
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            what = f"the custom schedule gives {length!r} at step {step}"
            raise BadInput(what, where=_WHERE, remedy="return a whole number of tokens above zero")
        return length

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any], step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cuts the inputs of a forward of `step`, counted from 1, to its length. Shorter ones stay as they are.

        The sequence is the second dimension of ``input_ids``, or of the first tensor [batch, tokens] of whole numbers.

        Raises:
            BadInput: as :meth:`update`, where no tensor holds tokens, and for a tensor of another shape that has a dimension
                of the sequence's size, of which it is not known how it is to be cut.
        """
        length = self.update(step)
        batch, tokens = _tokens((args, kwargs)).shape
        if packed := next((name for name in kwargs if name.startswith("cu_seq")), ""):
            remedy = "give one sample a row"
            raise BadInput(f"samples that {packed} tells apart in one row are not cut", where=_WHERE, remedy=remedy)
        if tokens <= length:
            return args, kwargs

        def shorter(tensor: torch.Tensor) -> torch.Tensor:
            if tuple(tensor.shape) in ((batch, tokens), (1, tokens)):
                return tensor[:, :length].contiguous()
            if tokens in tensor.shape[1:] or (tensor.dim() == 1 and len(tensor) == tokens != batch):
                what = f"it does not know how to cut an input of shape {list(tensor.shape)} from {tokens} to {length} tokens"
                raise BadInput(what, where=_WHERE, remedy="give inputs of shape [batch, tokens], or make this one in the model")
            return tensor

        cut: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors((args, kwargs), shorter)
        return cut

    def state_dict(self) -> dict[str, int]:
        """Returns the state for a checkpoint."""
        return {"current_difficulty": self.current}

    def load_state_dict(self, state: Mapping[str, int] | None) -> None:
        """Continues from :meth:`state_dict`; None, from a training without one, lets the step decide alone."""
        self.current = self.schedule.min_difficulty if state is None else state["current_difficulty"]


def make_curriculum(settings: RuntimeConfig, ranks: MeshRanks) -> SequenceCurriculum | None:
    """Returns the curriculum that a config asks for; None for none.

    Raises:
        BadInput: where ranks share the tokens of a sample, or the layers, between which activations of one shape are sent.
    """
    if settings.curriculum is None:
        return None
    name = "pp" if ranks.pp is not None else "cp" if ranks.shard.world_size > ranks.samples else ""
    if name:
        raise BadInput(f"it is not supported with {name}", where=_WHERE, remedy="use a mesh of dp and tp")
    return SequenceCurriculum(settings.curriculum)


def _tokens(inputs: Any) -> torch.Tensor:
    """The tensor [batch, tokens] whose second dimension is the sequence."""
    named = _named(inputs)
    found = named if named is not None else next((one for one in tensors_of(inputs) if _holds_tokens(one)), None)
    if found is None or not _holds_tokens(found):
        what = "no input has the shape [batch, tokens] and whole numbers"
        raise BadInput(what, where=_WHERE, remedy="give input_ids, or leave the section out")
    return found


def _named(value: Any) -> torch.Tensor | None:
    """The tensor of the key ``input_ids`` at any depth of mappings."""
    if isinstance(value, Mapping):
        own = value.get("input_ids")
        return own if isinstance(own, torch.Tensor) else next(filter(_is_tensor, map(_named, value.values())), None)
    if isinstance(value, list | tuple):
        return next(filter(_is_tensor, map(_named, value)), None)
    return None


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _holds_tokens(tensor: torch.Tensor) -> bool:
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    return tensor.dim() == 2 and whole
