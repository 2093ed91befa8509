"""Curriculum by sequence length: how many tokens of each sample a step trains on.

Keys and values are those of DeepSpeed 0.19.8 (``runtime/data_pipeline/curriculum_scheduler.py``), whose legacy section
``curriculum_learning`` was read until 0.19.7. Paper: Li, Zhang and He, The Stability-Efficiency Dilemma (arXiv 2108.06084).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from zeroplan.core.errors import BadInput, did_you_mean

#: The legacy section's name, and the key of what plans leave out of a curriculum in either spelling.
CURRICULUM_LEARNING = "curriculum_learning"


class CurriculumKind(StrEnum):
    """Schedules by their names in a ds_config (``schedule_type``)."""

    FIXED_LINEAR = "fixed_linear"
    FIXED_ROOT = "fixed_root"
    FIXED_DISCRETE = "fixed_discrete"
    CUSTOM = "custom"


#: The keys of ``schedule_config`` that each kind needs.
NEEDED: dict[str, tuple[str, ...]] = {
    CurriculumKind.FIXED_LINEAR: ("total_curriculum_step", "difficulty_step"),
    CurriculumKind.FIXED_ROOT: ("total_curriculum_step", "difficulty_step", "root_degree"),
    CurriculumKind.FIXED_DISCRETE: ("difficulty", "max_step"),
    CurriculumKind.CUSTOM: (),
}


@dataclass(frozen=True, slots=True)
class Curriculum:
    """A schedule of sequence lengths in tokens; steps are counted from 1.

    Attributes:
        min_difficulty: the first length.
        max_difficulty: a length at which the schedule stops.
        schedule_type: a :class:`CurriculumKind`.
        total_curriculum_step: steps from the first length to the last (linear, root).
        difficulty_step: lengths are multiples of it (linear, root).
        root_degree: 2 grows as the square root of the steps.
        difficulty: the lengths, in order (discrete).
        max_step: the last step of each of them but the last (discrete).

    Raises:
        BadInput: naming the key that is missing or impossible.
    """

    min_difficulty: int
    max_difficulty: int
    schedule_type: str
    total_curriculum_step: int | None = None
    difficulty_step: int | None = None
    root_degree: float | None = None
    difficulty: tuple[int, ...] = ()
    max_step: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        known = [kind.value for kind in CurriculumKind]
        if self.schedule_type not in known:
            remedy = did_you_mean(str(self.schedule_type), known) or f"use {', '.join(known)}"
            raise BadInput(f"{self.schedule_type!r} is no schedule", where="schedule_type", remedy=remedy)
        for name in NEEDED[self.schedule_type]:
            if getattr(self, name) in (None, ()):
                raise BadInput(f"{self.schedule_type} needs it", where=f"schedule_config.{name}", remedy="write it")
        _require_counts("min_difficulty", self.min_difficulty)
        _require_counts("max_difficulty", self.max_difficulty)
        if self.min_difficulty > self.max_difficulty:
            what = f"{self.min_difficulty} is more than max_difficulty {self.max_difficulty}"
            raise BadInput(what, where="min_difficulty", remedy="write the shortest length")
        for name in ("total_curriculum_step", "difficulty_step"):
            if getattr(self, name) is not None:
                _require_counts(f"schedule_config.{name}", getattr(self, name))
        degree = self.root_degree
        if degree is not None and (
            isinstance(degree, bool) or not isinstance(degree, int | float) or not 0 < degree < math.inf
        ):
            raise BadInput(f"{degree!r} is no degree of a root", where="schedule_config.root_degree", remedy="write 2")
        _require_counts("schedule_config.difficulty", *self.difficulty)
        _require_counts("schedule_config.max_step", *self.max_step)
        if self.schedule_type == CurriculumKind.FIXED_DISCRETE and len(self.difficulty) != len(self.max_step) + 1:
            what = f"{len(self.max_step)} steps for {len(self.difficulty)} lengths"
            raise BadInput(what, where="schedule_config.max_step", remedy="write one less: the last length has no end")
        if list(self.max_step) != sorted(set(self.max_step)):
            raise BadInput("the steps do not rise", where="schedule_config.max_step", remedy="write them in ascending order")

    def at(self, step: int) -> int:
        """Return the length that the schedule gives at `step`, as DeepSpeed's ``get_difficulty`` does.

        Raises:
            ValueError: for a custom schedule, which only its run has.
        """
        if self.schedule_type == CurriculumKind.CUSTOM:
            raise ValueError("a custom schedule is a function of the run")
        if self.schedule_type == CurriculumKind.FIXED_DISCRETE:
            stages = zip(self.max_step, self.difficulty, strict=False)
            return next((length for last, length in stages if step <= last), self.difficulty[-1])
        assert self.total_curriculum_step is not None
        assert self.difficulty_step is not None
        degree = 1 if self.schedule_type == CurriculumKind.FIXED_LINEAR else self.root_degree
        assert degree is not None
        try:
            grown = math.pow(float(step) / self.total_curriculum_step, 1.0 / degree)
        except OverflowError:  # far beyond the last step, of a degree far below 1
            return self.max_difficulty
        length = math.floor(grown * (self.max_difficulty - self.min_difficulty) + self.min_difficulty)
        multiple = self.difficulty_step
        first = math.ceil(self.min_difficulty / multiple) * multiple
        return min(max(length - length % multiple, first), self.max_difficulty)

    def next(self, current: int, step: int) -> int:
        """Return the length at `step` after a step of `current` tokens: the schedule stops at ``max_difficulty``, as
        DeepSpeed's ``update_difficulty`` does.
        """
        return current if current >= self.max_difficulty else self.at(step)

    @property
    def longest(self) -> int | None:
        """The most tokens of a sample that any step trains on; None for a custom schedule, which only its run has."""
        if self.schedule_type == CurriculumKind.CUSTOM:
            return None
        if self.schedule_type != CurriculumKind.FIXED_DISCRETE or self.min_difficulty == self.max_difficulty:
            return self.max_difficulty
        stops = next((at for at, length in enumerate(self.difficulty) if length >= self.max_difficulty), len(self.difficulty))
        return max(self.difficulty[: stops + 1])

    def as_section(self) -> dict[str, Any]:
        """Return the legacy section ``curriculum_learning`` of a ds_config."""
        head = ("min_difficulty", "max_difficulty", "schedule_type")
        rest = {f.name: getattr(self, f.name) for f in fields(self) if f.name in NEEDED[self.schedule_type]}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in rest.items()}
        found = {"enabled": True, "curriculum_type": "seqlen", **{name: getattr(self, name) for name in head}}
        return {**found, "schedule_config": plain} if plain else found


def _require_counts(where: str, *values: object) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise BadInput(f"{value!r} is no whole number above zero", where=where, remedy="write one")
