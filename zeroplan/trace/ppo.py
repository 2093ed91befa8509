"""The models of PPO as one module, and the loss of a micro batch, operator by operator as TRL computes it.

Policy and value model are trained as one module, each asked for the hidden states of all its layers; the reference and the
reward model lie beside them, frozen, and pass before the step (:mod:`zeroplan.techniques.ppo`). TRL's trainer has a loop of its
own, which never switches checkpointing on.
Source: TRL 1.8, ``experimental/ppo/ppo_trainer.py`` (PolicyAndValueWrapper, train), ``trainer/utils.py``
(selective_log_softmax); accelerate 1.15, ``utils/operations.py`` (ConvertOutputsToFp32).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zeroplan.trace.build import full_config
from zeroplan.trace.quiet import errors_alone

_CLIP = 0.2


class PpoModels(nn.Module):
    """Policy, value, reference and reward model.

    Args:
        policy: config of the policy and the reference.
        reward: config of the value and the reward model.
        prompt: tokens of a prompt, whose logits the loss leaves out.
        casts: whether the wrapper makes what policy and value model return fp32.
        lasts: whether the micro batch before left its softmax, which the loop's figures are of.
    """

    def __init__(self, policy: Mapping[str, Any], reward: Mapping[str, Any], *, prompt: int, casts: bool, lasts: bool) -> None:
        super().__init__()
        self.policy = _built(policy, "AutoModelForCausalLM")
        self.value_model = _built(reward, "AutoModelForSequenceClassification")
        self.reference = _built(policy, "AutoModelForCausalLM").requires_grad_(False)
        self.reward = _built(reward, "AutoModelForSequenceClassification").requires_grad_(False)
        self.prompt, self.casts, self.lasts = prompt, casts, lasts
        name = policy.get("_name_or_path") or policy.get("model_type")
        self.config = {"_name_or_path": f"PPO of {name}"}

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of `input_ids`, (batch, prompt and response)."""
        critic = getattr(self.value_model, self.value_model.base_model_prefix)
        found = critic(input_ids=input_ids, output_hidden_states=True, use_cache=False)
        values = self.value_model.score(found.hidden_states[-1])
        del found
        output = self.policy(input_ids=input_ids, output_hidden_states=True, use_cache=False)
        whole, hidden = output.logits, output.hidden_states
        del output
        if self.casts:
            whole, hidden, values = whole.float(), [one.float() for one in hidden], values.float()
        logits = whole[:, self.prompt - 1 : -1]
        logits /= 0.7
        answers = input_ids[:, self.prompt :]
        made = _log_probabilities(logits, answers)
        pads = torch.zeros_like(answers, dtype=torch.bool)
        old = torch.zeros_like(made.detach(), dtype=torch.float32)
        made = torch.masked_fill(made, pads, 1.0)
        predicted = torch.masked_fill(values[:, self.prompt - 1 : -1].squeeze(-1), pads, 0)
        clipped = torch.clamp(predicted, old - _CLIP, old + _CLIP)
        worst = torch.max(torch.square(predicted - old), torch.square(clipped - old))
        value_loss = 0.5 * (worst * ~pads).sum() / (~pads).sum()
        ratio = torch.exp(made - old)
        both = torch.max(-old * ratio, -old * torch.clamp(ratio, 1.0 - _CLIP, 1.0 + _CLIP))
        loss: torch.Tensor = (both * ~pads).sum() / (~pads).sum() + 0.1 * value_loss
        kept = [whole, *hidden]
        if self.lasts:
            kept.append(torch.empty_like(logits, memory_format=torch.contiguous_format))  # the last one's softmax
        held: torch.Tensor = _LastOutputs.apply(loss, *kept)
        return held


class _LastOutputs(torch.autograd.Function):
    """Hands the loss on and keeps tensors as long as its graph: those that the loop has by name until the next forward."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *kept: torch.Tensor) -> torch.Tensor:
        ctx.kept = [one.detach() for one in kept]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], *(None for _ in ctx.kept)


def _log_probabilities(logits: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of one word a token; row by row, in fp32 by a log-sum-exp alone."""
    index = answers.unsqueeze(-1)
    if logits.dtype == torch.float32:
        picked = torch.gather(logits, dim=-1, index=index)
        sums = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
        return (picked - sums.unsqueeze(-1)).squeeze(-1)
    rows = [F.log_softmax(row, dim=-1).gather(dim=-1, index=at) for row, at in zip(logits, index, strict=True)]
    return torch.stack(rows).squeeze(-1)


def _built(config: Mapping[str, Any], auto_class: str) -> Any:
    import transformers
    from transformers.initialization import no_init_weights

    values = {**full_config(config), "num_labels": 1} if "Sequence" in auto_class else full_config(config)
    with errors_alone():
        built = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    built.use_cache = False
    if "Sequence" in auto_class and getattr(built, "pad_token_id", None) is None:
        built.pad_token_id = 0
    with torch.device("meta"), no_init_weights():
        model = getattr(transformers, auto_class).from_config(built, attn_implementation="sdpa")
    model.tie_weights()
    for module in model.modules():  # disable_dropout_in_model
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def batch_of(micro_batch: int, length: int) -> dict[str, torch.Tensor]:
    """Return the tokens of one micro batch."""
    return {"input_ids": torch.zeros(micro_batch, length, dtype=torch.long)}
