"""Completions that a model under training generates before its step: how many samples, and how long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Generation:
    """What is generated before each step, by transformers on the GPUs that train.

    Attributes:
        prompt: tokens of a prompt.
        completion: tokens that are generated at most.
        micro_batches: micro batches that are generated at once (``steps_per_generation``); None for those of a step.
        of_all_ranks: samples that all ranks generate at once (``generation_batch_size``), which decides where it is given.
        casts: whether the model's wrapper returns logits in fp32 (accelerate's ``convert_outputs_to_fp32``).
    """

    prompt: int
    completion: int
    micro_batches: int | None = None
    of_all_ranks: int | None = None
    casts: bool = False

    def rows(self, micro_batch: int, grad_accum: int, ranks: int) -> int:
        """Return the samples that one rank generates at once."""
        if self.of_all_ranks is not None:
            return max(1, -(-self.of_all_ranks // ranks))
        return micro_batch * (self.micro_batches or grad_accum)


@dataclass(frozen=True, slots=True)
class Colocated:
    """An engine of vLLM that generates on the GPUs that train.

    It takes its weights, what its own forward needs and as many blocks of cache as make the share full; so the share is of all
    of the card's memory, whatever the model, and adds to what the training takes.

    Attributes:
        share: of the card's memory (``gpu_memory_utilization``).
        sleeps: whether it gives back what it holds while the model trains; its share is then there between two steps alone.

    Source: vLLM 0.12, ``v1/worker/gpu_worker.py`` (``init_device``, ``determine_available_memory``); TRL 1.16,
    ``generation/vllm_generation.py`` (``sleep``, ``wake_up``).
    """

    share: float
    sleeps: bool = False
