"""PPO by TRL's arguments: four models, the two that are trained in one tape, and what is generated before a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.unmodelled import Effect
from zeroplan.interop.readers import read_setup
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan.tape.expanded import ExpandedTape, Op
from zeroplan.techniques.ppo import Rollout, rollout_tape

#: As people start it.
COMMAND = (
    "accelerate launch --num_processes 2 ppo_tldr.py --dataset_name trl-internal-testing/tldr-preference-sft-trl-style "
    "--learning_rate 3e-6 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --total_episodes 30000 "
    "--sft_model_path EleutherAI/pythia-14m --reward_model_path EleutherAI/pythia-31m --max_prompt_length 32 "
    "--local_rollout_forward_batch_size 2 --missing_eos_penalty 1.0 --stop_token eos --response_length 16 --eval_strategy steps"
)
WORDS = 1000


def read(tmp_path: Path, command: str = COMMAND) -> Any:
    path = tmp_path / "ppo.sh"
    path.write_text(command + "\n")
    return path, read_setup(str(path))


def test_what_the_arguments_say(tmp_path: Path) -> None:
    """Its loop never switches checkpointing on, and its evaluation generates."""
    _, setup = read(tmp_path)
    assert (setup.task, setup.ask.model, setup.value("gradient_checkpointing"), setup.ask.value("eval_batch")) == (
        "ppo",
        "EleutherAI/pythia-14m",
        False,
        None,
    )
    ppo = setup.ask.values["ppo"]
    assert ppo is not None
    assert (ppo.reward, ppo.prompt, ppo.response, ppo.rollout) == (
        "EleutherAI/pythia-31m",
        32,
        16,
        2,
    )
    assert [(one.key, one.effect) for one in setup.unmodelled] == [("ppo_tldr.py", Effect.UNKNOWN), ("task ppo", Effect.MORE)]


def test_scores_are_stacked_and_then_padded_into_one_tensor() -> None:
    rollout = Rollout(samples=8, at_once=2, prompt=10, response=5, words=100, width=4, hidden=64, cache=32)
    events = list(rollout_tape(ExpandedTape((), ()), rollout).events())
    now = most = 0
    sizes: dict[int, int] = {}
    for op, arg, aux, *_ in events:
        if op == Op.ALLOC:
            sizes[arg] = aux
            now += aux
        else:
            now -= sizes.pop(arg)
        most = max(most, now)
    part = 2 * 5 * 100 * 4
    assert (now, most) == (0, max(2 * 4 * part, 4 * part + 2 * 15 * (64 + 100 * 4)))


@pytest.mark.torch
def test_four_models_are_planned(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    small = {"model_type": "llama", "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": WORDS}
    for name, width in (("policy", 64), ("scorer", 32)):
        (tmp_path / name).mkdir()
        config = {**small, "hidden_size": width, "intermediate_size": 2 * width, "architectures": ["LlamaForCausalLM"]}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    command = COMMAND.replace("EleutherAI/pythia-14m", "./policy").replace("EleutherAI/pythia-31m", str(tmp_path / "scorer"))
    path, _ = read(tmp_path, command)
    report = estimate_report(Ask(files=(str(path),), gpu="H200"))
    plan = report.plans[0]
    # two matrices of words, attention, MLP and norms; the other model's head is a score of one number
    policy = 2 * WORDS * 64 + 4 * 64 * 64 + 3 * 64 * 128 + 3 * 64
    value = WORDS * 32 + 4 * 32 * 32 + 3 * 32 * 64 + 3 * 32 + 32
    assert (report.model.params, report.model.trainable) == (2 * (policy + value), policy + value)
    assert plan.depth == "simulated"
    live = plan.gpu.live_after_step or 0
    assert 12 * (policy + value) < live - 4 * (policy + value) < 1.02 * 12 * (policy + value) + 100_000_000
    assert plan.gpu.phases["generation"] > live + 4 * 2 * 16 * WORDS * 4
    assert (plan.fits, [one.key for one in plan.unmodelled]) == (None, ["ppo_tldr.py", "task ppo"])
    assert plan.unmodelled[1].says.endswith("no GPU has measured any of it")


def test_with_adapters_the_further_models_are_named(tmp_path: Path) -> None:
    path, _ = read(tmp_path, COMMAND + " --use_peft --lora_r 8")
    plan = estimate_report(Ask(files=(str(path),), depth="formula")).plans[0]
    assert ("task ppo", Effect.MORE) in [(one.key, one.effect) for one in plan.unmodelled]
