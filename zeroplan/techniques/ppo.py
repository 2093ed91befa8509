"""PPO as TRL ran it until 1.8: four models on the GPUs that train, and what each of them passes.

Source: TRL 1.8, ``experimental/ppo/ppo_config.py`` and ``ppo_trainer.py`` (earlier ``trainer/ppo_trainer.py``), and its example
``ppo.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from zeroplan.core.option import Option
from zeroplan.core.workload import Workload
from zeroplan.techniques.base import OptionValues, TakesTechniques, Technique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape

_FP32 = 4


@dataclass(frozen=True, slots=True)
class Ppo:
    """What a run's arguments say.

    Attributes:
        reward: the model that scores, of which the value model is a second copy; None where none is named.
        prompt: tokens of a prompt.
        response: tokens that are generated (``response_length``).
        rollout: samples that are generated and scored at once (``local_rollout_forward_batch_size``).
    """

    reward: str | None
    prompt: int
    response: int
    rollout: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """Sizes of what passes before a step, on one rank.

    Attributes:
        samples: generated for one step.
        at_once: of them, those that are generated and scored at once.
        prompt: tokens of a prompt.
        response: tokens generated.
        words: of the vocabulary.
        width: bytes of a logit as the reference returns it.
        hidden: bytes of one token's hidden states of all layers of the largest model.
        cache: bytes of one token's keys and values of all layers of the policy.
    """

    samples: int
    at_once: int
    prompt: int
    response: int
    words: int
    width: int
    hidden: int
    cache: int


class PpoTechnique(Technique[Rollout]):
    """Four models that generate, score and train. Files say `ppo`, of which the planner makes the sizes (`rollout`)."""

    name = "PPO"
    kind = Rollout
    where = "--from"
    ppo = Option[Ppo | None](object, None, merges=False)
    rollout = Option[Rollout | None](object, None)

    def value(self, asked: OptionValues, engine: TakesTechniques) -> Rollout | None:
        """Return what passes before a step."""
        return asked[PpoTechnique.rollout]

    def expanded(self, value: Rollout, tape: ExpandedTape, workload: Workload) -> ExpandedTape:
        """Return the tape with what passes before a step."""
        return replace(tape, generation=rollout_tape(tape, value))


def rollout_tape(tape: ExpandedTape, rollout: Rollout) -> ExpandedTape:
    """Return what passes before a step: completions with the scores of all their tokens, then the other models over them.

    ``generate`` returns a token's scores in fp32, one tensor a token; they are stacked for each part of the batch, and all
    parts are padded into one tensor while they are still there. Then, part after part, the reference's logits stand beside it,
    with the hidden states of its layers; the value and the reward model keep theirs alone. Weights are multiplied as they are,
    since the autocast is on the wrapper's forward.
    """
    from zeroplan.tape.edit import EventWriter
    from zeroplan.tape.expanded import Kind

    write = EventWriter(count())
    parts = -(-rollout.samples // rollout.at_once)
    length = rollout.prompt + rollout.response
    scores = rollout.at_once * rollout.response * rollout.words * _FP32
    made = []
    for _ in range(parts):
        cache = write.alloc(rollout.at_once * length * rollout.cache, Kind.SAVED)
        tokens = write.alloc(scores, Kind.LOGITS)
        write.free(cache)
        made.append(write.alloc(scores, Kind.LOGITS))
        write.free(tokens)
    whole = write.alloc(parts * scores, Kind.LOGITS)
    write.free(*made)
    hidden = write.alloc(rollout.at_once * length * rollout.hidden)
    logits = write.alloc(rollout.at_once * length * rollout.words * rollout.width, Kind.LOGITS)
    write.free(logits, hidden, whole)
    return tape.with_events(write.events)
