"""PPO as TRL ran it until 1.8: four models on the GPUs that train, and what each of them passes.

Source: TRL 1.8, ``experimental/ppo/ppo_config.py`` and ``ppo_trainer.py`` (earlier ``trainer/ppo_trainer.py``), and its example
``ppo.py``.
"""

from __future__ import annotations

from dataclasses import dataclass


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
