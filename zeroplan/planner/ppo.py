"""PPO by TRL's arguments: its four models as one live module, and the sizes of what passes before a step."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import DType
from zeroplan.engines.registry import find_engine
from zeroplan.interop.setups import Setup
from zeroplan.models.facts import spec_facts
from zeroplan.models.load import load_model
from zeroplan.models.spec import ModelSpec
from zeroplan.run.ask import Ask
from zeroplan.techniques.ppo import PpoTechnique, Rollout

#: The key under which a file's PPO stands among what is left out.
KEY = "task ppo"
_FP32 = 4
_SAYS = (
    "policy, value, reference and reward model are counted, a micro batch of the first two, and the logits of all that is "
    "generated; DeepSpeed makes engines of their own of the frozen ones, and no GPU has measured any of it"
)


def with_ppo(request: Ask, setup: Setup) -> Ask:
    """Return the request with PPO's models as its module; as it is with adapters, where no config tells the models, or where
    torch and transformers are not installed.
    """
    ppo, micro_batch = setup.ask[PpoTechnique.ppo], request.micro_batch or 1
    plain = not setup.degrees and not {"lora_rank", "quantize", "images", "audio_seconds"} & request.chosen.keys()
    if ppo is None or not plain or request.model is None or find_spec("torch") is None or find_spec("transformers") is None:
        return request
    policy = load_model(request.model)
    reward, named = _reward(ppo.reward, policy)
    if not policy.config or not policy.has_shapes:
        return request
    from zeroplan.trace.ppo import PpoModels, batch_of

    engine = find_engine(request.engine)
    dtype = DType(request.dtype or "bf16")
    casts = engine.casts_outputs and dtype is not DType.FP32
    accum = request.grad_accum or 1
    module = PpoModels(_config(policy), _config(reward), prompt=ppo.prompt, casts=casts, lasts=accum > 1)
    facts, width = spec_facts(policy), _FP32 if casts or dtype is DType.FP32 else dtype.bytes
    hidden = max((one.layers or 0) * (one.hidden_size or 0) for one in (facts, spec_facts(reward)))
    rollout = Rollout(
        samples=micro_batch * accum,
        at_once=min(ppo.rollout, micro_batch * accum),
        prompt=ppo.prompt,
        response=ppo.response,
        words=facts.vocab_size or 0,
        width=width,
        hidden=hidden * width,
        cache=2 * (facts.layers or 0) * (facts.kv_heads or 0) * (facts.head_dim or 0) * width,
    )
    says = _SAYS if named else f"{_SAYS}; value and reward model are taken to be as large as the policy"
    others = tuple(one for one in request.unmodelled if one.key != KEY)
    return request.replace(
        model=module,
        inputs=batch_of(micro_batch, ppo.prompt + ppo.response),
        micro_batch=micro_batch,
        gradient_checkpointing=False,
        eval_batch=None,
        reference=None,
        rollout=rollout,
        detached_loss=accum == 1,
        unmodelled=(*others, Unmodelled(KEY, Effect.MORE, says)),
    )


def _reward(name: str | None, policy: ModelSpec) -> tuple[ModelSpec, bool]:
    """Return the model that scores, and whether its own config tells of it; else the policy stands for it."""
    try:
        found = None if name is None else load_model(name)
    except BadInput:
        found = None
    return (found, True) if found is not None and found.config and found.has_shapes else (policy, False)


def _config(spec: ModelSpec) -> Mapping[str, Any]:
    return {**spec.config, "_name_or_path": spec.name}
