"""What the reader makes of the traps that people fall into."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import DType, OptimizerKind, Precision, Workload
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.findings import Severity
from zeroplan.ds_config.reader import fill_from, inspect_ds_config, read_ds_config
from zeroplan.ds_config.schema import MemoryEffect
from zeroplan.ds_config.sections import effects
from zeroplan.ds_config.wrappers import Wrapper, wrapper
from zeroplan.engines.deepspeed.resolved_config import resolve_config


def ids(config: dict[str, Any], *severities: Severity, **more: Any) -> set[str]:
    return {f.id for f in inspect_ds_config(config, **more).of_severity(*(severities or tuple(Severity)))}


def zero(stage: Any = 2, **knobs: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **knobs}}


class TestDefaults:
    def test_an_empty_file_is_stage_0_in_fp32(self) -> None:
        config = inspect_ds_config({})
        assert config.zero == ZeroConfig()
        assert config.training.dtype is DType.FP32
        assert not config.runs_alone
        assert config.runs_filled

    @pytest.mark.parametrize(("stage", "overlaps"), [(0, False), (1, False), (2, False), (3, True)])
    def test_overlap_comm_follows_the_stage(self, stage: int, overlaps: bool) -> None:
        assert read_ds_config(zero(stage)).zero.overlaps_comm is overlaps
        assert read_ds_config(zero(stage, overlap_comm=not overlaps)).zero.overlaps_comm is not overlaps

    def test_offload_is_pinned_unless_told_otherwise(self) -> None:
        pinned = read_ds_config(zero(2, offload_optimizer={"device": "cpu"}))
        assert pinned.zero.offload_optimizer.pin_memory
        assert "offload.pinned" in {f.id for f in pinned.findings}
        told = read_ds_config(zero(2, offload_optimizer={"device": "cpu", "pin_memory": False}))
        assert not told.zero.offload_optimizer.pin_memory
        assert "offload.pinned" not in {f.id for f in told.findings}

    def test_clipping_is_1_unless_told_otherwise(self) -> None:
        assert read_ds_config(zero()).zero.step.gradient_clipping == 1.0
        assert read_ds_config(zero() | {"gradient_clipping": 0}).zero.step.gradient_clipping == 0

    def test_both_spellings_of_stage_3_names(self) -> None:
        bare = read_ds_config(zero(3, prefetch_bucket_size=1, max_live_parameters=2, max_reuse_distance=3)).zero
        spelled = {"stage3_prefetch_bucket_size": 1, "stage3_max_live_parameters": 2, "stage3_max_reuse_distance": 3}
        assert bare == read_ds_config(zero(3, **spelled)).zero
        assert (bare.stage3.prefetch_bucket_size, bare.stage3.max_live_parameters, bare.stage3.max_reuse_distance) == (1, 2, 3)

    def test_deprecated_offload(self) -> None:
        config = read_ds_config(zero(3, cpu_offload=True, cpu_offload_param=True))
        assert config.zero.offload_optimizer.device is OffloadDevice.CPU
        assert config.zero.offload_param.device is OffloadDevice.CPU
        assert [f.id for f in config.warnings].count("key.deprecated") == 2


class TestAuto:
    CONFIG: ClassVar[dict[str, Any]] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "sub_group_size": "auto",
        },
    }

    def test_alone(self) -> None:
        config = inspect_ds_config(self.CONFIG)
        assert config.training.dtype is None
        assert config.zero.buckets.reduce_bucket_size == 500_000_000
        assert set(config.unresolved_auto) == {
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "bf16.enabled",
            "zero_optimization.reduce_bucket_size",
            "zero_optimization.prefetch_bucket_size",
            "zero_optimization.param_persistence_threshold",
            "zero_optimization.sub_group_size",
        }
        assert config.runs_filled
        assert not config.runs_alone

    def test_filled_by_flags(self) -> None:
        config = read_ds_config(self.CONFIG, fill=fill_from(dtype=DType.BF16, micro_batch=4, grad_accum=2), world_size=8)
        assert (config.training.dtype, config.training.micro_batch, config.training.grad_accum) == (DType.BF16, 4, 2)
        assert config.training.train_batch == 64
        assert set(config.unresolved_auto) == {p for p in config.unresolved_auto if p.startswith("zero_optimization.")}

    def test_the_trainers_buckets(self) -> None:
        # transformers' trainer_config_finalize at hidden size 2048
        found = inspect_ds_config(self.CONFIG, hidden_size=2048).zero
        assert found.buckets.reduce_bucket_size == 4_194_304
        assert found.stage3.prefetch_bucket_size == 3_774_873
        assert found.stage3.param_persistence_threshold == 20_480
        assert found.stage3.sub_group_size == 1_000_000_000

    def test_stage_auto_is_stage_0(self) -> None:
        config = read_ds_config(zero("auto"))
        assert config.zero.stage == 0
        assert "auto.dropped" in {f.id for f in config.warnings}

    def test_a_flag_that_contradicts_the_file(self) -> None:
        with pytest.raises(BadInput, match="the file says 8, the flags say 4"):
            read_ds_config(zero() | {"train_micro_batch_size_per_gpu": 8}, fill=fill_from(micro_batch=4))

    def test_a_flag_fills_what_is_missing(self) -> None:
        config = read_ds_config({"zero_optimization": {"stage": 2}}, fill=fill_from(dtype=DType.BF16, micro_batch=4))
        assert (config.training.dtype, config.training.micro_batch) == (DType.BF16, 4)
        assert config.runs_alone


class TestBatch:
    @pytest.mark.parametrize(
        ("train", "micro", "accum", "world", "expected"),
        [
            (64, None, None, 8, (8, 1, 64)),
            (64, 2, None, 8, (2, 4, 64)),
            (64, None, 4, 8, (2, 4, 64)),
            (64, 2, 4, 8, (2, 4, 64)),
            (None, 2, 4, 8, (2, 4, 64)),
            (None, 2, None, 8, (2, 1, 16)),
            (None, 2, None, None, (2, 1, None)),
            (64, 2, None, None, (2, None, 64)),
            (64, None, None, None, (None, 1, 64)),
            (64, 2, 32, None, (2, 32, 64)),
        ],
    )
    def test_what_is_missing_follows(
        self, train: int | None, micro: int | None, accum: int | None, world: int | None, expected: tuple[int | None, ...]
    ) -> None:
        sizes = {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accum}
        job = read_ds_config({k: v for k, v in sizes.items() if v is not None}, world_size=world).training
        assert (job.micro_batch, job.grad_accum, job.train_batch) == expected

    @pytest.mark.parametrize(
        ("sizes", "world", "message"),
        [
            ((64, 3, None), 8, "64 does not divide by micro batch 3 × 8 ranks; use a multiple of 24"),
            ((60, None, None), 8, "60 does not divide by accumulation 1 × 8 ranks; use a multiple of 8"),
            ((64, 2, 2), 8, "64 is not 2 × 2 × 8 ranks = 32; set train_batch_size to 32, or leave it out"),
            ((64, 3, 5), None, "64 is not a multiple of 3 × 5, so no number of ranks fits; use a multiple of 15"),
            ((0, None, None), None, "0 is not above zero; use 1 or more"),
            ((-8, 1, 1), 1, "-8 is not above zero"),
        ],
    )
    def test_impossible_arithmetic(self, sizes: tuple[int | None, ...], world: int | None, message: str) -> None:
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        config = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
        with pytest.raises(BadInput) as caught:
            read_ds_config(config, world_size=world)
        assert message in str(caught.value)

    def test_sequence_parallel_ranks_share_a_batch(self) -> None:
        config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 4}
        assert read_ds_config(config, world_size=16).training.grad_accum == 1


class TestNames:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (zero(2, reduce_buket_size=1), "did you mean 'reduce_bucket_size'"),
            (zero(2, offload_optimiser={"device": "cpu"}), "did you mean 'offload_optimizer'"),
            (zero(3, offload_param={"devise": "cpu"}), "did you mean 'device'"),
            (zero(3, stage3_max_live_paramters=1), "did you mean 'stage3_max_live_parameters'"),
            ({"train_batch_size": 1, "fp16": {"enable": True}}, "did you mean 'enabled'"),
            (zero(3, mics_shard_size=8), "was removed from DeepSpeed"),
        ],
    )
    def test_unknown_in_a_block_is_refused_with_the_nearest(self, config: dict[str, Any], message: str) -> None:
        with pytest.raises(BadInput, match=message):
            read_ds_config(config)

    def test_an_empty_name_is_unknown_too(self) -> None:
        assert "key.unknown" in ids(zero(2) | {"bf16": {"enabled": True, "": 1}}, Severity.ERROR)
        assert read_ds_config(zero() | {"aio": {"": 7}}).zero.aio.block_size == 1_048_576

    def test_unknown_at_the_top_is_a_warning_with_the_nearest(self) -> None:
        config = read_ds_config(zero() | {"gradient_cliping": 0.5})
        assert any("did you mean 'gradient_clipping'" in str(f) for f in config.warnings)
        assert config.zero.step.gradient_clipping == 1.0

    @pytest.mark.parametrize(
        ("path", "effect"),
        [
            ("zero_optimization.stage3_prefetch_bucket_size", MemoryEffect.MEMORY),
            ("zero_optimization.prefetch_bucket_size", MemoryEffect.MEMORY),
            ("bfloat16.enabled", MemoryEffect.MEMORY),
            ("optimizer.params.torch_adam", MemoryEffect.MEMORY),
            ("optimizer.params.lr", MemoryEffect.NONE),
            ("scheduler.params.anything", MemoryEffect.NONE),
            ("wandb.project", MemoryEffect.NONE),
            ("steps_per_print", MemoryEffect.NONE),
            ("compile.deepcompile", MemoryEffect.UNMODELLED),
            ("pipeline.stages", MemoryEffect.UNMODELLED),
            ("amp", MemoryEffect.REMOVED),
            ("zero_optimization.mics_shard_size", MemoryEffect.REMOVED),
            ("zero", MemoryEffect.UNKNOWN),
            ("zero_optimization.stages", MemoryEffect.UNKNOWN),
        ],
    )
    def test_effects(self, path: str, effect: MemoryEffect) -> None:
        assert effects(path) is effect

    def test_what_is_not_modelled_is_said(self) -> None:
        assert "key.unmodelled" in ids(zero() | {"compile": {"deepcompile": True}}, Severity.WARNING)
        assert "key.unmodelled" not in ids(zero() | {"compile": {"deepcompile": False}})
        assert "key.unmodelled" in ids(zero(3, zero_quantized_weights=True), Severity.WARNING)

    def test_a_second_part_cannot_be_made_on_a_disk(self) -> None:
        disk = {"device": "nvme", "nvme_path": "/tmp"}
        assert "hpz.nvme" in ids(zero(3, zero_hpz_partition_size=2, offload_param=disk), Severity.ERROR)
        assert "hpz.nvme" not in ids(zero(3, zero_hpz_partition_size=1, offload_param=disk))
        assert "hpz.nvme" not in ids(zero(3, zero_hpz_partition_size=2, offload_param={"device": "cpu"}))


class TestRemarks:
    @pytest.mark.parametrize(
        ("config", "id"),
        [
            (zero(2, offload_param={"device": "cpu"}), "param.ignored"),
            (zero(2, offload_optimizer={"device": "nvme"}), "offload.nvme_as_cpu"),
            (zero(0, offload_optimizer={"device": "cpu"}), "offload.ignored"),
            (zero(1, offload_optimizer={"device": "nvme"}) | {"data_types": {"grad_accum_dtype": "fp32"}}, "offload.lost"),
            (zero(2) | {"bf16": {}, "data_types": {"grad_accum_dtype": "bf16"}}, "accum.ignored"),
            (zero(3, offload_param={"device": "cpu", "pin_memory": False}), "param.pinned"),
            (zero(2, elastic_checkpoint=True) | {"bf16": {}}, "precision.fp32"),
            (zero(3, elastic_checkpoint=True), "elastic.stage3"),
            (zero(2, offload_optimizer={"device": "cpu", "super_offload": True}), "super.ignored"),
            (zero() | {"vocabulary_size": 50257}, "vocabulary.aligned"),
            (zero() | {"bfloat16": {"enabled": False}}, "key.shadowed"),
            (zero() | {"prescale_gradients": "false", "zero_optimization": {"stage": 1}}, "value.truth"),
        ],
    )
    def test_it_runs_with_a_warning(self, config: dict[str, Any], id: str) -> None:
        assert id in ids(config, Severity.WARNING)
        assert read_ds_config(config).runs_filled

    def test_accumulation_in_bf16_is_said_when_there_is_one(self) -> None:
        config = zero() | {"gradient_accumulation_steps": 8}
        assert "accum.bf16" in ids(config, Severity.NOTE)
        assert "accum.bf16" not in ids(config | {"gradient_accumulation_steps": 1})
        assert "accum.bf16" not in ids(config | {"data_types": {"grad_accum_dtype": "fp32"}})


class TestWorkload:
    BASE = Workload.of(micro_batch=7, grad_accum=3)

    def test_what_the_file_fixes_and_what_it_leaves(self) -> None:
        config = read_ds_config({"train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": True}})
        assert config.workload(self.BASE) == Workload.of(micro_batch=2, grad_accum=1, dtype=DType.FP16)

    def test_open_precision_is_the_users(self) -> None:
        config = read_ds_config({"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": "auto"}})
        assert config.workload(Workload.of(dtype=DType.FP16)).numerics.dtype is DType.FP16

    def test_fp32_without_a_block(self) -> None:
        assert read_ds_config({"train_batch_size": 1}).workload(self.BASE).numerics.precision is Precision.FP32

    def test_autocast(self) -> None:
        found = read_ds_config({"train_batch_size": 1, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
        assert found.workload(self.BASE).numerics.precision is Precision.AUTOCAST
        assert found.workload(self.BASE).numerics.dtype is DType.BF16

    @pytest.mark.parametrize(
        ("block", "name", "kind"),
        [
            ({"type": "AdamW"}, "adamw", OptimizerKind.FUSED),
            ({"type": "Adam", "params": {"torch_adam": True}}, "adamw", OptimizerKind.FOREACH),
            ({"type": "SGD", "params": {"momentum": 0.9}}, "sgd_momentum", OptimizerKind.FOREACH),
            ({"type": "SGD"}, "sgd", OptimizerKind.FOREACH),
            ({"type": "Lion"}, "lion", OptimizerKind.FUSED),
        ],
    )
    def test_optimizers(self, block: dict[str, Any], name: str, kind: OptimizerKind) -> None:
        found = read_ds_config({"train_batch_size": 1, "optimizer": block}).workload(self.BASE)
        assert (found.numerics.optimizer, found.numerics.optimizer_kind) == (name, kind)

    @pytest.mark.parametrize(
        ("type_", "params", "decays"),
        [
            ("SGD", {"weight_decay": 0.1}, True),
            ("SGD", {"weight_decay": 0}, False),
            ("SGD", {"weight_decay": "auto"}, False),
            ("SGD", {}, False),
            ("NAdam", {"weight_decay": 0.1}, True),
            ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, False),
            ("Adagrad", {"weight_decay": 0.1}, False),  # whose list takes the place of another
            ("AdamW", {"weight_decay": 0.1, "torch_adam": True}, False),
        ],
    )
    def test_weight_decay_in_tensors_of_its_own(self, type_: str, params: dict[str, Any], decays: bool) -> None:
        block = {"type": type_, "params": params}
        assert read_ds_config({"train_batch_size": 1, "optimizer": block}).workload(self.BASE).numerics.decays is decays

    def test_loss_scale(self) -> None:
        found = [
            read_ds_config({"train_batch_size": 1, "fp16": {"enabled": True, **said}}).zero.step.loss_scale
            for said in ({}, {"loss_scale": 0}, {"loss_scale": 64})
        ]
        assert found == [0, 0, 64]

    def test_a_given_flag_that_the_file_contradicts(self) -> None:
        config = read_ds_config({"train_micro_batch_size_per_gpu": 2})
        with pytest.raises(BadInput, match="--micro-batch: the ds_config says 2, the flag 7"):
            config.workload(self.BASE, given=frozenset({"micro_batch"}))


class TestSource:
    def test_comments_and_trailing_commas_as_hjson_takes_them(self, tmp_path: Path) -> None:
        path = tmp_path / "c.json"
        text = '{\n  // one\n  "train_batch_size": 8, # two, "x": 1\n  /* three\n */ "wandb": {"project": "a//b,}"},\n}\n'
        path.write_text(text)
        config = read_ds_config(path)
        assert config.raw == {"train_batch_size": 8, "wandb": {"project": "a//b,}"}}
        assert "json.relaxed" in {f.id for f in config.warnings}

    def test_byte_order_mark(self, tmp_path: Path) -> None:
        path = tmp_path / "c.json"
        path.write_bytes(b'\xef\xbb\xbf{"train_batch_size": 8}')
        assert read_ds_config(path).training.train_batch == 8

    def test_base64_as_deepspeed_takes_it(self) -> None:
        text = base64.urlsafe_b64encode(json.dumps(zero(3)).encode()).decode()
        assert read_ds_config(text).zero.stage == 3

    def test_the_object_is_not_touched(self) -> None:
        config = zero(2, offload_optimizer={"device": "cpu"})
        before = json.dumps(config)
        assert read_ds_config(config).raw == config
        assert json.dumps(config) == before

    @pytest.mark.parametrize(
        ("blob", "message"),
        [
            (b"\xff\xfe", "is not UTF-8"),
            (b"", "is not JSON (line 1"),
            (b"{", "is not JSON (line 1"),
            (b"[1]", "holds a list, not an object"),
            (b'"x"', "holds a string"),
            (b"null", "holds null"),
            (b'{"a": 1, "a": 2}', "the key 'a' stands twice"),
            (b'{"a": NaN}', "holds NaN"),
            (b'{"a": -Infinity}', "holds -Infinity"),
            (b'{"a": 1e999}', "holds inf"),
            (b'{"a": ' + b"9" * 5000 + b"}", "is not usable JSON"),
            (b"[" * 10_000, "is nested deeper"),
            (b'{"a":' * 40 + b"1" + b"}" * 40, "is nested deeper"),
            (b" " * (1 << 20) + b"{}", "is larger than 1 MiB"),
        ],
    )
    def test_what_is_no_ds_config(self, tmp_path: Path, blob: bytes, message: str) -> None:
        path = tmp_path / "c.json"
        path.write_bytes(blob)
        with pytest.raises(BadInput) as caught:
            read_ds_config(path)
        assert message in str(caught.value)
        assert str(path) in str(caught.value)

    def test_places_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match="no such file"):
            read_ds_config(tmp_path / "missing.json")
        with pytest.raises(BadInput, match="is a folder, not a file"):
            read_ds_config(tmp_path)


class TestWrapper:
    """Beside the agreement with the engine: what the CPU oracle cannot show."""

    def test_names(self) -> None:
        assert wrapper(ZeroConfig.of(3, "cpu"), DType.BF16) is Wrapper.ZERO_3
        assert wrapper(ZeroConfig(), DType.BF16, fused=False) is Wrapper.FP16_UNFUSED
        assert wrapper(ZeroConfig(), DType.BF16, pipeline=True) is Wrapper.BF16
        assert wrapper(ZeroConfig(), DType.FP32) is Wrapper.NONE
        super_offload = read_ds_config(zero(3, offload_optimizer={"device": "cpu", "super_offload": True}))
        assert super_offload.wrapper is Wrapper.SUPER_OFFLOAD

    def test_stage_0_with_another_accumulation_dtype(self) -> None:
        with pytest.raises(BadInput, match="stage 0 cannot accumulate"):
            wrapper(ZeroConfig.of(0, grad_accum_dtype=DType.FP32), DType.BF16)


@pytest.mark.parametrize("torchs", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_torchs_adam_is_told_from_deepspeeds(torchs: bool, fused: bool) -> None:
    """Stage 0 flattens for DeepSpeed's alone, whatever `fused` says (U04, X04 in benchmarks/results/mesh_deepspeed.jsonl)."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": torchs, "fused": fused}},
    }
    read = read_ds_config(config)
    assert not read.unmodelled
    work = read.workload(Workload())
    assert work.numerics.torch_adam is torchs
    assert resolve_config(work, read.zero).fused_adam is not torchs


class TestOptimizerParams:
    """Names and numbers that no optimizer takes: the plan of such a file would be of a run that does not start."""

    def faults(self, kind: str, *, dialect: Dialect = Dialect.DEEPSPEED, **params: Any) -> list[str]:
        config = inspect_ds_config(zero(0) | {"optimizer": {"type": kind, "params": params}}, dialect=dialect)
        return [found.where for found in config.errors]

    @pytest.mark.parametrize(
        ("params", "where"),
        [
            ({"lr": "abc"}, "lr"),
            ({"lr": "1e-4"}, "lr"),
            ({"lr": None}, "lr"),
            ({"lr": [1e-4]}, "lr"),
            ({"betas": [0.9]}, "betas"),
            ({"betas": ["0.9", 0.95]}, "betas"),
        ],
    )
    def test_what_is_no_number_is_refused_by_both(self, params: dict[str, Any], where: str) -> None:
        for dialect in Dialect:
            assert self.faults("AdamW", dialect=dialect, **params) == [f"optimizer.params.{where}"]

    def test_the_runtime_refuses_what_its_optimizer_does(self) -> None:
        assert self.faults("OneBitAdam", dialect=Dialect.RUNTIME, freeze_step="abc") == ["optimizer.params.freeze_step"]
        assert self.faults("ZeroOneAdam", dialect=Dialect.RUNTIME, local_step_clipper=-1) == [
            "optimizer.params.local_step_clipper"
        ]
        assert self.faults("AdamW", dialect=Dialect.RUNTIME, lr=-1.0) == ["optimizer.params.lr"]
        assert not self.faults("AdamW", lr=-1.0)  # which DeepSpeed's class steps by
        assert not self.faults("Adam", dialect=Dialect.RUNTIME, lr=1e-4, adam_w_mode=False, torch_adam=True)

    def test_a_schedule_writes_the_rate(self) -> None:
        said = {"optimizer": {"type": "AdamW", "params": {"lr": "abc"}}, "scheduler": {"type": "WarmupLR", "params": {}}}
        assert not inspect_ds_config(zero(0) | said).errors

    def test_the_near_name_is_said(self) -> None:
        [fault] = inspect_ds_config(zero(0) | {"optimizer": {"type": "AdamW", "params": {"weigth_decay": 0.1}}}).errors
        assert "weight_decay" in fault.remedy

    def test_an_older_deepspeed_has_one_bit_optimizers_without_zero(self) -> None:
        said = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4, "freeze_step": 3}}}
        assert ids(zero(0) | said, Severity.ERROR) == {"optimizer.one_bit"}
        assert not ids(zero(0) | said, Severity.ERROR, engine_version="0.19.6")
        assert ids(zero(1) | said, Severity.ERROR, engine_version="0.19.6") == {"optimizer.one_bit_zero"}

    def test_what_the_runtime_leaves_out_is_said(self) -> None:
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": "auto"}}
        found = inspect_ds_config(config, dialect=Dialect.RUNTIME)
        assert [one.where for one in found.warnings] == ["bf16.enabled", "zero_optimization.stage"]
        filled = inspect_ds_config(config, dialect=Dialect.RUNTIME, fill={"bf16.enabled": True})
        assert [one.where for one in filled.warnings] == ["zero_optimization.stage"]
