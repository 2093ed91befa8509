"""The schema is DeepSpeed's: every field, alias, bound and default of its models, and every top-level key that it reads."""

from __future__ import annotations

import enum
import logging
from typing import Any, ClassVar

import pytest

from zeroplan.core.zero_config import DEEPSPEED_VERSION
from zeroplan.ds_config.coercion import ValueKind
from zeroplan.ds_config.dialect import Support
from zeroplan.ds_config.schema import Key, Mode
from zeroplan.ds_config.sections import REMOVED, SECTIONS

pytestmark = pytest.mark.torch
deepspeed = pytest.importorskip("deepspeed")
logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)


def models() -> dict[str, type]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.zenflow": ZenFlowConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "csv_monitor": CSVConfig,
        "wandb": WandbConfig,
        "comet": CometConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
        "hybrid_engine": HybridEngineConfig,
        "compile": CompileConfig,
        "tensor_parallel": TPTrainingConfig,
        "weight_quantization": WeightQuantConfig,
    }


def plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return tuple(value) if isinstance(value, list) else value


def bounds(info: Any) -> dict[str, float]:
    names = {"ge": "lo", "le": "hi", "gt": "above", "lt": "below"}
    return {names[n]: getattr(m, n) for m in info.metadata for n in names if getattr(m, n, None) is not None}


def our_bounds(key: Key) -> dict[str, float]:
    pairs = {"lo": key.lo, "hi": key.hi, "above": key.above, "below": key.below}
    return {name: bound for name, bound in pairs.items() if bound is not None}


def deepspeeds(path: str) -> dict[str, Key]:
    """The keys of a section that DeepSpeed reads."""
    return {name: key for name, key in SECTIONS[path].keys.items() if key.deepspeed is Support.HONOURED}


def test_version() -> None:
    assert deepspeed.__version__ == DEEPSPEED_VERSION


def test_every_strict_section_has_a_model() -> None:
    assert {path for path, section in SECTIONS.items() if section.mode is Mode.MODEL} == set(models())


@pytest.mark.parametrize("path", [path for path, section in SECTIONS.items() if section.mode is Mode.MODEL])
def test_fields_aliases_bounds_and_defaults(path: str) -> None:
    theirs, ours = models()[path].model_fields, SECTIONS[path].keys
    assert set(theirs) == set(ours)
    for name, info in theirs.items():
        key = ours[name]
        assert (info.alias or "") == key.alias, name
        assert bounds(info) == our_bounds(key), name
        if key.kind is ValueKind.SECTION or (path, name) in {
            ("tensor_parallel", "dtype"),
            ("zero_optimization", "overlap_comm"),
        }:
            continue
        default = plain(info.get_default(call_default_factory=True))
        assert plain(key.default) == default, name


def test_optional_fields_are_those_that_admit_null() -> None:
    for path in ("zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        for name, info in models()[path].model_fields.items():
            assert (type(None) in getattr(info.annotation, "__args__", ())) == SECTIONS[path].keys[name].optional, name


class Recorder(dict[str, Any]):
    """A dict that remembers which keys were asked for."""

    asked: ClassVar[set[str]] = set()  # shared on purpose: DeepSpeed copies the dict

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # ``name in config.keys()``


def test_top_level_keys_are_those_that_deepspeed_asks_for() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    Recorder.asked.clear()
    DeepSpeedConfig(Recorder(train_batch_size=1, zero_optimization=True))
    asked = Recorder.asked
    assert asked >= {"train_batch_size", "zero_optimization", "aio"}
    removed = {path for path in REMOVED if "." not in path}
    ours = set(deepspeeds(""))
    assert asked - ours - removed == set()
    assert removed <= asked
    assert ours - asked <= {"data_parallel_size", "sequence_parallel_size"}  # read once torch.distributed runs


def test_plain_defaults() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = DeepSpeedConfig({"train_batch_size": 1})
    for name, key in SECTIONS[""].keys.items():
        if key.kind in (ValueKind.BOOL, ValueKind.FLOAT) or name in ("gradient_allreduce_op", "steps_per_print", "log_level"):
            attribute = {"use_data_before_expert_parallelism": "use_data_before_expert_parallel_"}.get(name, name)
            assert getattr(config, attribute) == key.default, name
    assert config.aio_config == {name: key.default for name, key in deepspeeds("aio").items()}
    blocks = {
        "activation_checkpointing": config.activation_checkpointing_config,
        "flops_profiler": config.flops_profiler_config,
    }
    for path, block in blocks.items():
        assert vars(block) == {name: key.default for name, key in SECTIONS[path].keys.items()}
    for name in ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"):
        assert getattr(config, name) == SECTIONS["data_types"].keys[name].default
    assert str(config.seq_parallel_communication_data_type) == "torch.float32"


def test_removed_keys_are_deepspeeds() -> None:
    from deepspeed.runtime import config

    removed = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    removed |= {f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS}
    assert removed == set(REMOVED)


def test_optimizer_names_are_deepspeeds_and_torchs() -> None:
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    from zeroplan.core import optimizers

    assert set(DEEPSPEED_OPTIMIZERS) == optimizers.DEEPSPEED_OPTIMIZERS
    theirs = {n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    assert theirs - {"Optimizer"} == optimizers.torch_optimizers()


def test_trainer_fills_what_we_say_it_fills() -> None:
    """The dotted keys in the source of transformers' Trainer config are the keys that we say it fills."""
    import inspect
    import re

    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    from zeroplan.ds_config.sections import HF_FILLS

    filled = set(re.findall(r'"([a-z0-9_]+(?:[.][a-z0-9_]+)*)"', inspect.getsource(HfTrainerDeepSpeedConfig)))
    stage3 = {"prefetch_bucket_size", "param_persistence_threshold"}
    spelled = {
        f"zero_optimization.stage3_{name.split('.')[-1]}" if name.split(".")[-1] in stage3 else name for name in HF_FILLS
    }
    assert spelled <= filled
    assert {name for name in filled if "." in name} <= spelled
