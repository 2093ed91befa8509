"""The engine's counts and settings, by the names of DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zeroplan.core.curriculum import CurriculumKind
from zeroplan.core.errors import BadInput
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.optim.scaler import LossScaler


class EngineGetters(EngineParts):
    """Getters; none changes the training, except that a step that has ended is counted first."""

    @property
    def global_steps(self) -> int:
        """The number of steps, those that were skipped included."""
        return self.progress.global_steps

    @property
    def micro_steps(self) -> int:
        """The number of micro batches."""
        return self.progress.micro_steps

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because gradients were not finite."""
        self.finish_step()
        return self.progress.skipped_steps

    @property
    def scaler(self) -> LossScaler:
        """The loss scale and how it changes."""
        return self.progress.scaler

    @property
    def loss_scale(self) -> float:
        """The factor on the loss of the next backward."""
        self.finish_step()
        return self.scaler.scale

    @property
    def cur_scale(self) -> float:
        """:attr:`loss_scale` by DeepSpeed's name."""
        return self.loss_scale

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return self.ranks.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.ranks.world.world_size

    def unit_names(self) -> list[str]:
        """The names of the units that the model was divided into, the root first."""
        return [unit.name for unit in self.model_states.units]

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns whether this micro batch is the last before the parameters are updated."""
        return self.progress.ends_accumulation()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether the coming micro batches end an accumulation, instead of counting them.

        Buffers and their dtypes follow the config's ``gradient_accumulation_steps``, so set it to about the real number.

        Raises:
            BadInput: where the config's ``managed_gradient_accumulation`` is false, as then every step ends one.
        """
        if not self.settings.counts_micro_batches:
            raise BadInput(
                "every step ends an accumulation, as managed_gradient_accumulation is false",
                where="set_gradient_accumulation_boundary",
                remedy="leave the call out",
            )
        self.progress.boundary = is_boundary

    def get_global_grad_norm(self) -> float | None:
        """Returns the norm of the last step's gradients before clipping; None where neither clipping nor overflow checks need
        it.
        """
        if self.last_step is None or not (self.settings.zero.step.gradient_clipping or self.settings.check_overflow):
            return None
        return self.last_step.norm

    def get_lr(self) -> list[float]:
        """Returns the learning rate of each parameter group for the next step."""
        self.finish_step()
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def gradient_accumulation_steps(self) -> int:
        """Returns the number of micro batches in a step."""
        return self.settings.grad_accum

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the number of samples in a micro batch of one rank."""
        return self.settings.micro_batch

    def train_batch_size(self) -> int:
        """Returns the number of samples in a step, over all ranks."""
        return self.settings.micro_batch * self.settings.grad_accum * self.ranks.samples

    def zero_optimization_stage(self) -> int:
        """Returns the ZeRO stage."""
        return self.settings.zero.stage

    def pld_enabled(self) -> bool:
        """Returns whether the config asks for progressive layer dropping."""
        return self.techniques.layer_drop is not None

    def get_pld_theta(self) -> float | None:
        """Returns θ of the last forward or step; None without progressive layer dropping."""
        return self.techniques.layer_drop.theta if self.techniques.layer_drop is not None else None

    def curriculum_enabled_legacy(self) -> bool:
        """Returns whether the config asks for a curriculum by sequence length."""
        return self.techniques.curriculum is not None

    def curriculum_seqlen(self) -> int | None:
        """Returns the tokens of a sample in the last training forward, or before it in the shortest; None without a curriculum.

        It is what DeepSpeed's legacy engine gave the model's forward under this name. Batches may be shorter.
        """
        return self.techniques.curriculum.current if self.techniques.curriculum is not None else None

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Sets the function of a curriculum whose ``schedule_type`` is custom. Call it again after a restart.

        Args:
            schedule_func_dict: by the metric, ``seqlen``, a function of the step, counted from 1, that gives tokens.

        Raises:
            BadInput: without such a curriculum, and for other metrics.
        """
        where = "engine.set_custom_curriculum_learning_schedule"
        if self.techniques.curriculum is None or self.techniques.curriculum.schedule.schedule_type != CurriculumKind.CUSTOM:
            raise BadInput("the config has no custom schedule", where=where, remedy='write "schedule_type": "custom"')
        if set(schedule_func_dict) != {"seqlen"}:
            raise BadInput("it takes one function, by the name seqlen", where=where, remedy="give {'seqlen': function}")
        self.techniques.curriculum.custom = schedule_func_dict["seqlen"]
