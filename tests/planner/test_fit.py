"""Whether a plan fits: yes, no, or unknown where something that decides is in no figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zeroplan.core.plan import MemoryPlan
from zeroplan.core.sizes import GIB
from zeroplan.core.unmodelled import Effect, Unmodelled, may_add, may_save
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

Cli = Callable[..., tuple[int, str, str]]
LLAMA_70B, LLAMA_8B = "meta-llama/Llama-2-70b-hf", "meta-llama/Llama-3.1-8B"
LORA_70B: dict[str, Any] = {"model": LLAMA_70B, "lora_rank": 16, "attn": "flash", "stage": 3, "gpus": 8, "gpu": "H100"}


def the_plan(**asked: Any) -> MemoryPlan:
    (plan,) = estimate_report(Ask(**asked)).plans
    return plan


def quantized(**zero: Any) -> dict[str, Any]:
    section = {"stage": 3, **zero}
    return {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": section}


def test_formulas_without_activations_do_not_say_fits() -> None:
    """17.6 GiB of states on a card of 79.1: simulated, the same run needs more than the card has."""
    plan = the_plan(**LORA_70B, seq_len=4096, depth="formula")
    assert (plan.fits, plan.misfits, plan.undecided) == (None, (), True)
    assert [(one.key, one.effect) for one in plan.unmodelled] == [("activations", Effect.MORE)]
    assert "--depth formula" in plan.settle
    simulated = the_plan(**LORA_70B, seq_len=4096)
    assert (simulated.fits, simulated.unmodelled, simulated.settle) == (False, (), "")
    assert plan.gpu.bound is not None
    assert simulated.gpu.total is not None
    assert plan.gpu.usable is not None
    assert plan.gpu.needed < plan.gpu.usable < simulated.gpu.total < plan.gpu.bound


def test_states_that_exceed_the_card_are_known_not_to_fit() -> None:
    plan = the_plan(model=LLAMA_70B, stage=3, gpus=8, gpu="H100", depth="formula")
    assert (plan.fits, plan.misfits, plan.settle) == (False, ("gpu",), "")


def test_without_limits_nothing_is_to_settle() -> None:
    plan = the_plan(model="gpt2", stage=2, depth="formula")
    assert (plan.fits, plan.undecided) == (None, False)


def test_a_bare_count_is_settled_by_a_model() -> None:
    plan = the_plan(params=8_000_000_000, stage=3, gpus=4, gpu="H100")
    assert plan.fits is None
    assert "config.json" in plan.settle
    assert plan.gpu.bound is None


@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"])
def test_a_key_that_adds_memory_leaves_a_fit_unknown(key: str) -> None:
    asked: dict[str, Any] = {"model": "gpt2", "gpus": 8, "gpu": "H100"}
    plan = the_plan(**asked, ds_config=quantized(**{key: True}))
    assert plan.fits is None
    assert key in plan.decides
    assert [one.key for one in plan.unmodelled] == [f"zero_optimization.{key}"]
    assert the_plan(**asked, ds_config=quantized(**{key: False})).fits is True


def test_a_section_of_unknown_effect_leaves_both_answers_unknown() -> None:
    config = {**quantized(), "compile": {"deepcompile": True}}
    for model, gpu in (("gpt2", "H100"), (LLAMA_70B, "T4")):
        plan = the_plan(model=model, gpu=gpu, ds_config=config, depth=None if model == "gpt2" else "formula")
        assert plan.fits is None
        assert "compile" in plan.decides


@pytest.mark.parametrize(
    ("effect", "adds", "saves"),
    [(Effect.MORE, True, False), (Effect.LESS, False, True), (Effect.UNKNOWN, True, True), (Effect.NONE, False, False)],
)
def test_which_effects_decide(effect: Effect, adds: bool, saves: bool) -> None:
    left_out = (Unmodelled("key", effect, "says"),)
    assert (may_add(left_out), may_save(left_out)) == (adds, saves)


def test_check_fails_on_an_unknown_fit(cli: Cli) -> None:
    asked = ["estimate", "gpt2", "--gpu", "H100", "--stage", "3", "--gpus", "2", "--check"]
    assert cli(*asked)[0] == 0
    code, out, _ = cli(*asked, "--depth", "formula")
    assert (code, out[:9]) == (1, "Unknown: ")
    assert "To settle it" in " ".join(out.split())


def test_several_plans_are_not_all_called_misfits(cli: Cli) -> None:
    """Where some may fit, the answer is about one of these, and the table says unknown."""
    code, out, _ = cli("estimate", LLAMA_8B, "--gpu", "H100", "--gpus", "8", "--depth", "formula", "--check")
    assert (code, out[:9]) == (1, "Unknown: ")
    for says in (" unknown", " no"):
        assert says in out


def test_a_host_that_reads_pretrained_weights_holds_them() -> None:
    """Without ZeRO-3 each of four ranks reads 8B's weights, 15 GiB each, before they move to its card."""
    asked: dict[str, Any] = {"model": LLAMA_8B, "gpus": 4, "gpu": "H200", "stage": 2, "gradient_checkpointing": True}
    read, built = the_plan(**asked).cpu, the_plan(**asked, from_scratch=True).cpu
    assert read.peak_phase == "weights"
    assert read.per_node == read.phases["weights"] > 4 * 14.9 * GIB
    assert built.per_node < read.per_node
    assert built.phases == read.phases


def test_the_system_keeps_its_share_of_the_host() -> None:
    """Weights of 65 GiB exceed a host of 64 GiB, and one of 66 GiB of which a server's system keeps three."""
    asked: dict[str, Any] = {"model": LLAMA_8B, "gpus": 4, "gpu": "H200", "stage": 2, "gradient_checkpointing": True}
    need = the_plan(**asked).cpu.per_node
    for spare, host, fits in ((1, "server", False), (4, "server", True), (4, "desktop", False), (6, "desktop", True)):
        plan = the_plan(**asked, cpu_ram=need + spare * GIB, host=host)
        assert (plan.fits, plan.misfits) == (fits, () if fits else ("cpu",)), (spare, host)


def test_the_plan_states_the_hosts_share() -> None:
    report = estimate_report(Ask(model="gpt2", gpu="H100", cpu_ram=64 * GIB, depth="formula"))
    assert (report.cluster["host"], report.cluster["usable_cpu_ram"]) == ("server", 61 * GIB)
    assert estimate_report(Ask(model="gpt2", gpu="RTX 4090", cpu_ram=64 * GIB, depth="formula")).cluster["host"] == "desktop"


@pytest.mark.parametrize(
    ("engine", "more", "fits"),
    [
        ("fsdp2", {}, True),
        ("fsdp2", {"dynamic_padding": True}, None),  # other lengths leave other fragments
        ("fsdp", {}, None),  # never measured at its limit
    ],
)
def test_a_run_that_has_to_empty_its_cache_fits_where_such_runs_were_measured(
    engine: str, more: dict[str, Any], fits: bool | None
) -> None:
    asked: dict[str, Any] = {"model": "meta-llama/Llama-3.2-1B", "seq_len": 4096, "gpus": 2, "engine": engine, "stage": 3}
    asked |= more
    total = the_plan(**asked).gpu.total
    assert total is not None
    tight = the_plan(**asked, vram=f"{(total / GIB - 1) * 64 / 63:.2f}G")
    assert tight.gpu.at_limit
    assert tight.fits is fits
    assert [one.key for one in tight.unmodelled] == ([] if fits else ["limit"])
    roomy = the_plan(**asked, vram=f"{1.2 * total / GIB:.2f}G")
    assert (roomy.fits, roomy.gpu.at_limit) == (True, False)


def test_a_plan_is_named_by_what_runs() -> None:
    """Below stage 3 DeepSpeed takes NVMe as the host, and ignores the parameters' block."""
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}, "offload_param": {"device": "cpu"}}
    plan = the_plan(model="gpt2", gpus=2, depth="formula", ds_config={"bf16": {"enabled": True}, "zero_optimization": zero})
    assert (plan.offload_optimizer, plan.offload_param) == ("cpu", "none")
