"""transformers: models without their weights, and a Trainer that ends after the steps asked for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zeroplan.capturing.recorder import StoppedError
from zeroplan.capturing.source import user_line

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture

#: Arguments of ``from_pretrained`` that find or read files, or place weights.
_OF_FILES = frozenset(
    ("cache_dir", "force_download", "local_files_only", "token", "use_auth_token", "revision", "code_revision", "subfolder",
     "use_safetensors", "variant", "weights_only", "state_dict", "ignore_mismatched_sizes", "output_loading_info", "from_tf",
     "from_flax", "low_cpu_mem_usage", "offload_folder", "offload_state_dict", "offload_buffers", "max_memory",
     "adapter_kwargs",
     "adapter_name", "use_kernels", "resume_download", "proxies", "mirror", "gguf_file", "tp_plan", "tp_size", "device_mesh",
     "key_mapping", "trust_remote_code", "_from_auto", "_from_pipeline", "_fast_init", "load_in_8bit", "load_in_4bit",
     "quantization_config", "device_map", "torch_dtype", "dtype", "attn_implementation", "config", "_commit_hash",
     "distributed_config", "fusion_config", "experts_implementation", "generation_config", "allow_all_kernels")
)  # fmt: skip


def install(capture: Capture, module: Any) -> None:
    """Let ``from_pretrained`` make the model from its config, in the dtype and on the device that were asked for."""
    base = module.PreTrainedModel

    def from_pretrained(cls: Any, /, name: Any = None, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        return _without_weights(capture, cls, name, config, args, kwargs)

    base.from_pretrained = classmethod(from_pretrained)
    own_save = base.save_pretrained

    def save_pretrained(model: Any, folder: Any, *args: Any, **kwargs: Any) -> None:
        _saved(capture, model, folder, kwargs)

    base.save_pretrained = save_pretrained
    del own_save


def _dtype_word() -> str:
    """The argument of ``_from_config`` for the dtype of the weights, which transformers renamed in 4.56."""
    import transformers

    return "dtype" if tuple(int(one) for one in transformers.__version__.split(".")[:2]) >= (4, 56) else "torch_dtype"


def _saved(capture: Capture, model: Any, folder: Any, kwargs: Mapping[str, Any]) -> None:
    """Write a model's config, and its weights as shapes."""
    import os

    if not kwargs.get("is_main_process", True):
        return
    os.makedirs(folder, exist_ok=True)
    model.config.save_pretrained(folder)
    state = kwargs.get("state_dict")
    torch.save(model.state_dict() if state is None else state, os.path.join(folder, "model.safetensors"))


def _config_of(cls: Any, name: Any, config: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config, changed by those arguments that are its own, and the arguments that the model takes.

    Raises:
        StoppedError: a model whose config is neither here nor in the catalog.
    """
    from transformers import AutoConfig, PretrainedConfig

    rest = {key: value for key, value in kwargs.items() if key not in _OF_FILES}
    if isinstance(config, PretrainedConfig):
        return config, rest
    source = config if config is not None else name
    try:
        found, unused = AutoConfig.from_pretrained(
            source,
            return_unused_kwargs=True,
            trust_remote_code=kwargs.get("trust_remote_code"),
            **{key: kwargs[key] for key in ("revision", "subfolder", "cache_dir") if kwargs.get(key)},
            **rest,
        )
        return found, unused
    except (OSError, ValueError) as error:
        from zeroplan.models.catalog import find

        known = find(str(source))
        if known is None:
            text = " ".join(str(error).split())[:120]
            raise StoppedError(
                f"{str(source)[:80]}: its config is neither in the cache nor in the catalog ({text})", user_line()
            ) from None
        values = dict(known.config)
        found = AutoConfig.for_model(values.pop("model_type"), **values)
        found._name_or_path = str(source)
        unused = {}
        for key, value in rest.items():
            if hasattr(found, key):
                setattr(found, key, value)
            else:
                unused[key] = value
        return found, unused


def _without_weights(capture: Capture, cls: Any, name: Any, config: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    found, rest = _config_of(cls, name, config, kwargs)
    quantized = _quantization(found, kwargs)
    implementation = kwargs.get("attn_implementation")
    _provide_attention(implementation or getattr(found, "_attn_implementation", None))
    dtype = _dtype(name, found, kwargs)
    options: dict[str, Any] = {_dtype_word(): dtype} if dtype is not None else {}
    if implementation is not None:
        options["attn_implementation"] = implementation
    model = cls._from_config(found, **options, **rest)
    model.name_or_path = str(name or "")
    model.eval()
    device_map = kwargs.get("device_map")
    if quantized is not None:
        _quantise(model, quantized)
        device_map = device_map if device_map is not None else "auto"  # as transformers lays it
    if device_map is not None:
        device = _one_device(device_map)
        if quantized is None:
            _warm_up(model, torch.device(device) if not isinstance(device, int) else torch.device("cuda", device))
        model.to(device)
        model.hf_device_map = {"": device}
    if kwargs.get("output_loading_info"):
        return model, {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
    return model


def _quantization(config: Any, kwargs: Mapping[str, Any]) -> Any:
    """What a model's weights are to be quantised by, None where they stay whole.

    Raises:
        StoppedError: by another package than bitsandbytes.
    """
    from transformers import BitsAndBytesConfig

    asked = kwargs.get("quantization_config") or getattr(config, "quantization_config", None)
    if asked is None and (kwargs.get("load_in_4bit") or kwargs.get("load_in_8bit")):
        asked = {key: kwargs[key] for key in ("load_in_4bit", "load_in_8bit") if kwargs.get(key)}
    if asked is None:
        return None
    if isinstance(asked, Mapping) and (asked.get("load_in_4bit") or asked.get("load_in_8bit")):
        asked = BitsAndBytesConfig.from_dict(dict(asked))
    if not isinstance(asked, BitsAndBytesConfig):
        raise StoppedError("the model is quantised by another package than bitsandbytes, and no rule knows it", user_line())
    return asked


def _quantise(model: Any, config: Any) -> None:
    """Quantise a model's linear layers, and say of it what transformers does."""
    from zeroplan.capturing.kernels.bitsandbytes import quantise

    quantise(model, config)
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = config.load_in_4bit, config.load_in_8bit
    model.config.quantization_config = config


#: Implementations of attention in transformers, and the package of each.
_ATTENTION = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def _provide_attention(implementation: Any) -> None:
    """Let transformers find the package of an attention that a script asks for."""
    package = _ATTENTION.get(str(implementation))
    if package is None:
        return
    from transformers.utils import import_utils

    from zeroplan.capturing.kernels import provide

    provide(package)
    known: Any = getattr(import_utils, "PACKAGE_DISTRIBUTION_MAPPING", None)
    if known is not None:
        known[package] = ["flash-attn" if package == "flash_attn" else "flash-attn-3"]
    for name in ("is_flash_attn_2_available", "is_flash_attn_3_available"):
        function: Any = getattr(import_utils, name, None)
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _warm_up(model: Any, device: torch.device) -> None:
    """Take one block for all weights and free it, as transformers does before it loads them onto a GPU, by its own code.

    Weights then lie in that block side by side, without what the allocator would round up of each.
    """
    from transformers import modeling_utils

    warm_up = getattr(modeling_utils, "caching_allocator_warmup", None)
    if warm_up is not None and device.type == "cuda":
        quantizer = {"hf_quantizer": None} if "hf_quantizer" in inspect.signature(warm_up).parameters else {}
        warm_up(model, dict.fromkeys(model.state_dict(), device), **quantizer)


def _one_device(device_map: Any) -> Any:
    """The one device of a device map.

    Raises:
        StoppedError: a map over several.
    """
    if isinstance(device_map, Mapping):
        devices = {str(torch.device("cuda", one) if isinstance(one, int) else one) for one in device_map.values()}
        if len(devices) > 1:
            raise StoppedError("a device map lays one model over several devices, which no rule follows", user_line())
        return devices.pop()
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return torch.device("cuda", torch.cuda.current_device())
    return device_map


def _dtype(name: Any, config: Any, kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of the weights: as asked for; "auto" (transformers 5's default) is the config's, else the file's own."""
    import transformers

    asked = kwargs.get("dtype", kwargs.get("torch_dtype"))
    if asked is None and int(transformers.__version__.split(".")[0]) >= 5:
        asked = "auto"
    if isinstance(asked, str) and asked != "auto":
        return getattr(torch, asked)  # type: ignore[no-any-return]
    if isinstance(asked, torch.dtype):
        return asked
    if asked is None:
        return torch.float32
    said = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(said, str):
        said = getattr(torch, said)
    return said or _stored(name) or torch.float32


def _stored(name: Any) -> torch.dtype | None:
    """The first floating dtype in the header of a local safetensors file."""
    if not isinstance(name, str) or not Path(name).is_dir():
        return None
    import json

    for file in sorted(Path(name).glob("*.safetensors")):
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > 100 << 20:
                return None
            header = json.loads(opened.read(size))
        kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
        for key, entry in header.items():
            if key != "__metadata__" and entry["dtype"] in kinds:
                return kinds[entry["dtype"]]
    return None


def install_trainer(capture: Capture, module: Any) -> None:
    """Let a Trainer take the steps asked for, then evaluate and save once where it does either."""
    own = module.Trainer.train

    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = trainer.args
        capture.trains(trainer.model)
        capture.in_trainer = True
        steps = capture.job.steps
        if arguments.max_steps <= 0 or arguments.max_steps > steps:
            arguments.max_steps = steps
        arguments.dataloader_num_workers = 0
        trainer.add_callback(_AtTheEnd(arguments))
        return own(trainer, *args, **kwargs)

    module.Trainer.train = train


def _AtTheEnd(arguments: Any) -> Any:
    from transformers import TrainerCallback

    class AtTheEnd(TrainerCallback):  # type: ignore[misc]
        """Evaluates and saves once, after the last step, where the run ever does."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_evaluate = control.should_save = False
            if state.global_step >= args.max_steps:
                control.should_evaluate = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
                control.should_save = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
                control.should_training_stop = True
            return control

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_evaluate = control.should_save = False
            return control

    return AtTheEnd()
