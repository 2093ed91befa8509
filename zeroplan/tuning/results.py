"""Results of a tuning so far: one file that every run adds to, and that the next start goes on from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import CONFIG, parse_json, text_of
from zeroplan.core.plumbing.files import read_bytes, write_atomic
from zeroplan.search.results import Recommendation

_FILE = "tune.json"


class Outcome(StrEnum):
    """Ways in which a candidate's run ends."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out of memory"
    FAILED = "failed"
    KILLED = "killed"  # with the process that tuned


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate's run. `total` is the most that a GPU's process held, in bytes; None where the machine does not tell."""

    outcome: Outcome
    step_seconds: float | None = None
    total: int | None = None
    says: str = ""


@dataclass(slots=True)
class Trials:
    """The trials of one question (a model, a workload, a machine), by the key of their configuration.

    Attributes:
        path: the file that holds them; None keeps them in memory.
        question: what is asked; a file of another question is refused.
        found: the trials.
        running: the key of the candidate that is being run.
    """

    path: Path | None
    question: Mapping[str, Any]
    found: dict[str, Trial] = field(default_factory=dict)
    running: str = ""

    @classmethod
    def of(cls, folder: str | os.PathLike[str] | None, question: Mapping[str, Any]) -> Trials:
        """Read what a folder holds; a candidate that was running when its process ended counts as killed.

        Raises:
            BadInput: a file that is no tuning's, or of another question.
        """
        path = None if folder is None else Path(folder) / _FILE
        trials = cls(path, question)
        if path is None or not path.exists():
            return trials
        remedy = "name another folder, or remove the file"
        data = parse_json(text_of(read_bytes(str(path), CONFIG.size), str(path)), str(path))
        try:
            trials.found = {key: Trial(**{**one, "outcome": Outcome(one["outcome"])}) for key, one in data["trials"].items()}
            asked, running = data["question"], str(data["running"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise BadInput("holds no trials", where=str(path), remedy=remedy) from None
        if asked != json.loads(json.dumps(question)):
            differs = sorted(key for key in question if asked.get(key) != json.loads(json.dumps(question[key])))
            raise BadInput(f"is of another {' and '.join(differs) or 'question'}", where=str(path), remedy=remedy)
        if running:
            trials.end(running, Trial(Outcome.KILLED, says="the process that tuned ended during this run"))
        return trials

    def begin(self, key: str) -> None:
        """Write down that a candidate is being run, before anything can go wrong."""
        self.running = key
        self._write()

    def end(self, key: str, trial: Trial) -> None:
        """Write down how it ended."""
        self.found[key], self.running = trial, ""
        self._write()

    def forget(self) -> None:
        """Write down that the running candidate was stopped by the user, so that it may run again."""
        self.running = ""
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        trials = {key: asdict(one) for key, one in self.found.items()}
        data = {"schema": 1, "question": self.question, "running": self.running, "trials": trials}
        write_atomic(self.path, json.dumps(data, indent=2) + "\n")


def key_of(one: Recommendation) -> str:
    """Return a name of a configuration that is the same in every process."""
    work = one.workload
    said = {
        "engine": one.engine.name,
        "zero": one.zero.label,
        "ds_config": one.ds_config(),
        "batch": [work.batch.micro_batch, work.batch.grad_accum],
        "gradient_checkpointing": work.gradient_checkpointing,
        "alloc_conf": one.alloc_conf,
        **({} if work.compile is None else {"compile": work.compile.value}),
    }
    return sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Tuned:
    """One candidate with its trial; None where it was not run. `expected` is its time after what others measured."""

    recommendation: Recommendation
    trial: Trial | None
    expected: float

    @property
    def tokens(self) -> float:
        """Tokens of one step of all ranks."""
        return self.recommendation.tokens_per_second * self.recommendation.step_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """The measured tokens a second."""
        seconds = None if self.trial is None else self.trial.step_seconds
        return self.tokens / seconds if seconds else None


@dataclass(frozen=True, slots=True)
class Tuning:
    """The answer of ``tune``: candidates by what they measured, fastest first, then those that were not run or ended early.

    `predicted` is whether the rates are this machine's. Else no speed is predicted for it: a preset's rates choose what is run.
    """

    model: dict[str, Any]
    machine: dict[str, Any]
    ranking: tuple[Tuned, ...]
    runs: int
    warnings: tuple[str, ...] = ()
    predicted: bool = True

    @property
    def best(self) -> Tuned | None:
        """The fastest that was measured."""
        return next((one for one in self.ranking if one.tokens_per_second is not None), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; bytes are integers, times seconds."""
        return {
            "schema": 1,
            "model": self.model,
            "machine": self.machine,
            "runs": self.runs,
            "warnings": list(self.warnings),
            "predicted": self.predicted,
            "ranking": [
                {
                    **one.recommendation.to_dict(),
                    **({} if self.predicted else dict.fromkeys(("tokens_per_second", "step_seconds", "time"))),
                    "measured": None if one.trial is None else asdict(one.trial),
                    "measured_tokens_per_second": one.tokens_per_second,
                    "expected_step_seconds": one.expected if self.predicted or self.best else None,
                }
                for one in self.ranking
            ],
        }
