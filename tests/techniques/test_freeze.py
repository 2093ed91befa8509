"""Frozen parts of a full fine-tune: what gets gradients and states, and what a forward then keeps, beside plain torch."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from pathlib import Path

import pytest

import zeroplan
from tests.small_llama import small_llama
from zeroplan.core.errors import BadInput
from zeroplan.core.workload import Attention
from zeroplan.models.from_config import spec_from_config
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan.tape.expanded import Mark, Op
from zeroplan.tape.options import Arithmetic, Checkpointing, TraceOptions
from zeroplan.techniques.freeze import FreezeRule, FreezeTechnique, FrozenParts

B, S = 2, 64
LAYERS = tuple(f"model.layers.{number}" for number in range(4))


def test_frozen_parts_have_no_states_under_any_engine() -> None:
    config = small_llama(layers=4)
    for engine, stage in (("ddp", 0), ("fsdp2", 3), ("deepspeed", 2), ("deepspeed", 3)):
        whole, frozen = (
            zeroplan.estimate(config, engine=engine, stage=stage, gpus=2, seq_len=64, depth="formula", freeze=parts)[0]
            for parts in ((), ("mlp", "embed_tokens"))
        )
        states = [sum(line.bytes for line in plan.lines if line.buffer == "optim.exp_avg") for plan in (whole, frozen)]
        spec = spec_from_config(config, name="", source="")
        left = FreezeTechnique().trained(FrozenParts(("mlp", "embed_tokens")), spec)
        assert left.trainable < spec.trainable == spec.params
        assert states[1] / states[0] == pytest.approx(left.trainable / spec.params, rel=0.02)


def test_parts_are_whole_and_known() -> None:
    config = small_llama(layers=4)
    for parts, words in ((("no_such",), "no parameter lies in 'no_such'"), (("model", "lm_head"), "nothing is left to train")):
        with pytest.raises(BadInput, match=words):
            zeroplan.estimate(config, engine="ddp", freeze=parts, depth="formula")
    with pytest.raises(BadInput, match="adapters freeze the whole model"):
        zeroplan.estimate(config, engine="ddp", freeze=("mlp",), lora_rank=4, depth="formula")
    with pytest.raises(BadInput, match="not modelled under fsdp"):
        zeroplan.estimate(config, engine="fsdp", freeze=("mlp",), depth="formula")


def test_a_tied_head_is_frozen_with_its_embedding() -> None:
    config = {**small_llama(layers=2), "tie_word_embeddings": True}
    spec = FreezeTechnique().trained(FrozenParts(("lm_head",)), spec_from_config(config, name="", source=""))
    assert not [
        t.name for unit in spec.units for t in unit.tensors if "embed_tokens" in f"{unit.name}.{t.name}" and t.trainable
    ]


@pytest.mark.parametrize(
    ("rule", "trained"),
    [
        (FreezeRule("k", blocks=1), {"model.layers.3"}),
        (FreezeRule("k", blocks=-2, modules=("mlp",), beside=("lm_head",)), {*LAYERS[:2], "lm_head"}),
        (FreezeRule("k", patterns=(r"^lm_head\.weight$", r"model\.layers\.[12]+\.mlp")), {"lm_head", *LAYERS[1:3]}),
        (FreezeRule("k", prefixes=("model.layers.0", "model.embed")), {"lm_head", "model.norm", *LAYERS[1:]}),
    ],
)
def test_a_rule_names_the_parts_of_a_model(rule: FreezeRule, trained: set[str]) -> None:
    technique, spec = FreezeTechnique(), spec_from_config(small_llama(layers=4), name="", source="")
    named = technique.named(FrozenParts((), rule), spec)
    assert named is not None
    left = technique.trained(named, spec)
    assert left.params == spec.params
    assert {name for unit in left.units for name in unit.names() if any(tensor.trainable for tensor in unit.tensors)} == trained


def test_towers_are_frozen_where_a_program_does_so_unasked(tmp_path: Path) -> None:
    """LLaMA-Factory's full fine-tuning trains the language model alone; a text model is trained whole, and searched."""
    vision = {"depth": 2, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
    text = {
        **small_llama(layers=2),
        "model_type": "qwen2_5_vl_text",
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    seeing = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": vision, "vocab_size": 400}
    for config, keys, frozen in (
        (seeing, "", {"model.visual"}),
        (seeing, "freeze_vision_tower: false\n", {"model.visual.merger"}),
        (seeing, "freeze_multi_modal_projector: false\nfreeze_language_model: true\n", {"model.language_model", "lm_head"}),
        (small_llama(layers=2), "", None),
    ):
        (tmp_path / "run.yaml").write_text(f"finetuning_type: full\ncutoff_len: 64\nbf16: true\n{keys}")
        asked = Ask(model=config, files=(str(tmp_path / "run.yaml"),), program="llama-factory", depth="formula")
        shown = estimate_report(asked).workload.get("freeze")
        assert frozen is None or frozen <= set(shown or ())
        assert (shown is None) == (frozen is None)


@pytest.mark.torch
def test_blocks_of_a_stack_that_are_not_frozen_alike_are_simulated() -> None:
    """What trains nothing before the first trained block keeps nothing; what is frozen behind it passes gradients on."""
    pytest.importorskip("transformers")
    config, peaks = small_llama(layers=12), []
    for frozen in (range(1, 12), range(11)):
        parts = ("embed_tokens", *(f"layers.{number}" for number in frozen))
        (plan,) = zeroplan.estimate(config, engine="ddp", freeze=parts, micro_batch=8, seq_len=512, gpu="H100")
        assert (plan.depth, plan.fits) == ("simulated", True)
        peaks.append(plan.gpu.peak_allocated)
    assert peaks[0] > 2 * peaks[1]


def test_a_search_counts_what_files_freeze_as_trained(tmp_path: Path) -> None:
    path, model = tmp_path / "run.yaml", tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(small_llama(layers=4)))
    keys = "finetuning_type: freeze\ncutoff_len: 64\nbf16: true\nstage: sft\ndataset: d\ntemplate: q\noutput_dir: o\n"
    path.write_text(f"model_name_or_path: {model}\n{keys}")
    found = zeroplan.recommend(source=[str(path)], gpu="H100", depth="formula")
    assert found.answer is not None
    assert any("which a search counts as trained" in one for one in found.answer.warnings)
    best = found[0].plan
    assert "finetuning_type" in [one.key for one in best.unmodelled]
    (asked,) = zeroplan.estimate(files=[str(path)], gpu="H100", depth="formula")
    states = [sum(line.bytes for line in one.lines if line.buffer == "optim.exp_avg") for one in (asked, best)]
    assert 0 < states[0] < states[1]


@pytest.mark.torch
@pytest.mark.parametrize(
    "parts",
    [
        ("embed_tokens",),
        ("embed_tokens", "self_attn"),
        ("layers.1.mlp", "layers.3", "layers.5"),
        ("embed_tokens", *(f"layers.{number}" for number in (0, 1, 2, 3, 5, 6))),
    ],
)
def test_a_trace_keeps_what_a_real_forward_saves(parts: tuple[str, ...]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from zeroplan.trace.api import TracePoint, trace_at

    config = small_llama(layers=8)
    made = transformers.AutoConfig.for_model(**config)
    made.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").train()
    FrozenParts(parts).freeze(model)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: list[weakref.ref[object]] = []

    def pack(tensor: object) -> object:
        kept.append(weakref.ref(tensor.untyped_storage()))  # type: ignore[attr-defined]
        return tensor.detach()  # type: ignore[attr-defined]

    ids = torch.randint(0, 100, (B, S))
    own.add(ids.untyped_storage().data_ptr())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    assert torch.isfinite(loss)
    alive = {one.data_ptr(): one.nbytes() for one in (ref() for ref in kept) if one is not None}  # type: ignore[attr-defined]
    real = Counter(size for place, size in alive.items() if place not in own)

    options = TraceOptions(attn=Attention.EAGER, arithmetic=Arithmetic.FP32, techniques=(FrozenParts(parts),))
    stream = trace_at(config, "AutoModelForCausalLM", options, TracePoint(B, S)).expand(B, S)
    traced: dict[int, int] = {}
    for op, arg, aux in zip(stream.op, stream.arg, stream.aux, strict=True):
        if op == Op.ALLOC:
            traced[arg] = aux
        elif op == Op.FREE:
            traced.pop(arg, None)
        elif op == Op.MARK and arg == Mark.FORWARD_END:
            break
    assert not real - Counter(traced.values())
    assert sum((Counter(traced.values()) - real).elements()) < 4096  # the loss, and small numbers of positions


@pytest.mark.torch
def test_a_program_s_checkpoints_and_inputs_decide_how_far_gradients_flow() -> None:
    """transformers checkpoints frozen blocks, too, and lets gradients flow to the embedding's output; LLaMA-Factory does
    neither; axolotl does the latter without checkpoints, where it trains the head.
    """
    pytest.importorskip("transformers")
    from zeroplan.trace.api import TracePoint, trace_at

    def entered(rule: FreezeRule, trained: int, way: Checkpointing) -> tuple[list[int], list[int]]:
        """The blocks that run again in the backward, and those through which a gradient flows."""
        parts = ("embed_tokens", *(f"layers.{number}" for number in range(6) if number != trained))
        options = TraceOptions(checkpointing=way, techniques=(FrozenParts(parts, rule),))
        tape = trace_at(small_llama(layers=6), "AutoModelForCausalLM", options, TracePoint(B, S)).expand(B, S)
        number = {at: int(one.name.split(".")[2]) for at, one in enumerate(tape.modules) if one.type == "LlamaDecoderLayer"}
        behind = list(zip(tape.op, tape.arg, strict=True))[tape.backward :]
        kinds = (Op.ENTER, Op.BWD_ENTER)
        again, flows = ({number[arg] for op, arg in behind if op == kind and arg in number} for kind in kinds)
        return sorted(again), sorted(flows)

    plain, factory, axolotl = FreezeRule("k"), FreezeRule("k", skips_frozen=True), FreezeRule("k", to_inputs=True)
    again, whole = Checkpointing.NON_REENTRANT, Checkpointing.NONE
    assert entered(plain, 3, again) == (list(range(6)), list(range(6)))
    assert entered(factory, 3, again) == ([3], [3, 4, 5])
    assert entered(factory, 3, Checkpointing.REENTRANT) == ([3], [3, 4, 5])
    assert entered(plain, 3, whole) == ([], [3, 4, 5])
    assert entered(axolotl, 3, whole) == ([], list(range(6)))


def test_a_report_says_the_parts() -> None:
    plans = zeroplan.estimate(small_llama(layers=2), engine="ddp", freeze=("mlp",), depth="formula")
    assert plans.report.workload["freeze"] == ["mlp"]
