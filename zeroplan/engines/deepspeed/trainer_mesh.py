"""DeepSpeed's own parallelism on a rank of ``verify``: Ulysses' exchange, AutoTP's groups, AutoEP with a forced balance.

Note [Routers that spread tokens evenly]
    An untrained router sends each rank another number of tokens at each step. A measurement that can be held against a plan
    wants the plan's case, so what each of AutoEP's routers found is overwritten where it lies: experts follow one another, and
    each has as many tokens. The router itself runs, and its weights and their gradients are kept.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroplan.core.losses import IGNORED_LABEL
from zeroplan.core.parallel import ParallelLayout

_Batch = dict[str, torch.Tensor]


class Mesh:
    """The ranks that divide what data parallelism does not.

    Args:
        layout: the degrees.
        micro_batch: samples of a forward.
    """

    def __init__(self, layout: ParallelLayout, micro_batch: int) -> None:
        self.layout, self.micro_batch = layout, micro_batch
        self._exchanged = ""

    def join(self, model: Any) -> Any:
        """Put Ulysses' exchange around the attention of transformers, if ranks share samples.

        Returns:
            What DeepSpeed's engine takes as ``mpu``; None where it makes all groups itself.
        """
        if self.layout.ulysses == 1:
            return None
        made = import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").UlyssesSPAttentionHF
        self._exchanged = str(model.config.get_text_config()._attn_implementation)
        return made.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=self._exchanged,
            sequence_parallel_size=self.layout.ulysses,
            micro_batch_size=self.micro_batch,
            seq_length_is_variable=True,
        )

    def leave(self) -> None:
        """Undo what would outlive the run: the exchange, and the groups that DeepSpeed keeps in its modules."""
        if self._exchanged:
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

            del functions[self._exchanged]  # which uncovers transformers' own
        release_groups()

    def part(self, batch: _Batch) -> _Batch:
        """Return this rank's part of a batch of whole samples.

        Ranks of Ulysses take neighbouring tokens, with their positions and with labels that were shifted before they were
        divided. Source: DeepSpeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py (``UlyssesSPDataLoaderAdapter``)
        """
        if self.layout.ulysses == 1:
            return batch
        ids, labels = batch["input_ids"], batch["labels"]
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:]
        tokens = ids.shape[1] // self.layout.ulysses
        first = dist.get_rank() % self.layout.ulysses * tokens
        own = slice(first, first + tokens)
        positions = torch.arange(first, first + tokens, device=ids.device).expand(ids.shape[0], tokens)
        targets = shifted[:, own].clone()
        return {
            "input_ids": ids[:, own].clone(),
            "position_ids": positions.contiguous(),
            "shift_labels": targets,
            "labels": targets,
        }


def release_groups() -> None:
    """Let DeepSpeed forget the groups that it keeps in its modules, so that a later run makes its own."""
    release = getattr(import_module("deepspeed.utils.groups"), "_release_process_group_references", None)
    if release is not None:
        release()


def spread_evenly(engine: nn.Module) -> None:
    """Let AutoEP's routers give every expert as many tokens. See Note [Routers that spread tokens evenly]."""
    layers = import_module("deepspeed.module_inject.auto_ep_layer")
    even = _Even()
    for module in engine.modules():
        if isinstance(module, layers.AutoEPMoELayer):
            module.router.register_forward_hook(partial(even.spread, int(module.num_experts)))


class _Even:
    """Which experts tokens take, and how many each has, of all layers alike."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def spread(self, experts: int, module: Any, given: Any, found: Any) -> None:
        """Overwrite what a router found: scores, experts [tokens, k], and tokens of each expert."""
        _, chosen, counts = found
        key = (experts, *chosen.shape)
        if key not in self._made:
            flat = torch.arange(chosen.numel(), device=chosen.device).remainder_(experts)
            self._made[key] = flat.view(chosen.shape).to(chosen.dtype), torch.bincount(flat, minlength=experts).to(counts)
        pattern, even = self._made[key]
        chosen.data.copy_(pattern)
        counts.copy_(even)
