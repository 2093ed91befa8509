"""Builds a model under each engine and gives one training step of it.

Every engine follows ``benchmarks/measure/README.md``: DeepSpeed builds the model on the GPU
in the run's dtype (under ``zero.Init`` at stage 3); FSDP2 and DDP hold fp32 parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.measure import classes
from benchmarks.measure.models import CLASS, auto_class, build_config
from benchmarks.measure.probe import Probe
from benchmarks.measure.saving import save
from benchmarks.measure.spec import FUSED, Spec
from zeroplan.techniques.freeze import FreezeRule, FrozenParts

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Trained:
    """A model ready to train: ``step(inputs)`` is one optimizer step and returns the loss; ``save()`` saves it."""

    def __init__(
        self,
        step: Callable[..., Any],
        model: Any,
        optimizer: str,
        skipped: Callable[[], int] = lambda: 0,
        save: Callable[[], None] = lambda: None,
    ) -> None:
        self.step, self.save = step, save
        self.optimizer = optimizer
        self.skipped = skipped  # optimizer steps that the loss scaler left out so far
        self.n_params, self.trainable = _count(model)


def build(spec: Spec, probe: Probe, device: torch.device) -> Trained:
    """Build the engine's training step; marks ``model`` once built and ``init`` once wrapped."""
    return {"deepspeed": _deepspeed, "fsdp": _fsdp, "fsdp2": _fsdp2, "ddp": _ddp}[spec.engine](spec, probe, device)


def _from_config(spec: Spec, dtype: torch.dtype) -> Any:
    if spec.model.startswith(CLASS):
        return classes.build(spec, dtype)
    config = build_config(spec.model, spec.model_overrides)
    if spec.task == "sequence-classification" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    model = auto_class(config.model_type, spec.task).from_config(config, dtype=dtype, attn_implementation=spec.attn)
    if spec.kernels == "liger":
        import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model)
    elif spec.kernels == "cut_cross_entropy":
        model.forward = partial(_cut_cross_entropy, model)
    if spec.freeze:
        half = spec.precision == "half-autocast"
        FrozenParts(tuple(spec.freeze), FreezeRule("freeze", half=half)).freeze(model, autocast=half)
    return model.train()


def _cut_cross_entropy(model: Any, *, labels: torch.Tensor, **inputs: Any) -> Any:
    """A causal language model's forward with its loss by cut cross-entropy (25.1.1 patches no model)."""
    hidden = model.base_model(**inputs).last_hidden_state
    loss = import_module("cut_cross_entropy").linear_cross_entropy(hidden, model.lm_head.weight, labels, shift=True)
    return SimpleNamespace(loss=loss)


def _count(model: Any) -> tuple[int, int]:
    """Parameters and trainable parameters of the whole model, however they are split."""
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)


def _prepare(spec: Spec, model: Any) -> Any:
    """Adapters, checkpointing and no key-value cache, as the spec asks."""
    if spec.lora_rank is not None:
        from peft import LoraConfig, get_peft_model

        targets: Any = spec.lora_targets or LORA_TARGETS
        targets = "all-linear" if targets == ["all-linear"] else targets
        causal = auto_class(model.config.model_type, spec.task).__name__ == "AutoModelForCausalLM"
        task = "CAUSAL_LM" if causal or spec.images or spec.audio_seconds else None
        saved = spec.modules_to_save
        lora = LoraConfig(r=spec.lora_rank, lora_alpha=32, target_modules=targets, task_type=task, modules_to_save=saved)
        if spec.quantize is not None and spec.engine in ("ddp", "deepspeed"):  # FSDP shards one dtype beside the adapters
            from peft import prepare_model_for_kbit_training

            kwargs = {"use_reentrant": spec.reentrant}
            how = {"use_gradient_checkpointing": spec.checkpointing, "gradient_checkpointing_kwargs": kwargs}
            model = prepare_model_for_kbit_training(model, **how)
        model = get_peft_model(model, lora, autocast_adapter_dtype=spec.precision == "half-autocast")
        if spec.kernels == "fused_adapters":  # a module beside that runs axolotl's own patcher
            model = import_module("fused_adapters_of_axolotl").apply(model)
        if spec.quantize is not None and saved:  # TRL makes all that is trained 16 bits
            for parameter in model.parameters():
                parameter.data = parameter.data.to(DTYPES[spec.dtype]) if parameter.requires_grad else parameter.data
        if spec.precision == "pure":  # on the meta device peft leaves adapters in fp32
            model = model.to(DTYPES[spec.dtype])
        if spec.checkpointing:
            model.enable_input_require_grads()
    if spec.offload_checkpoints:
        base = model.get_base_model() if spec.lora_rank is not None else model
        base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=_OnHost.apply)
    elif spec.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": spec.reentrant})
    model.config.use_cache = False
    return model


class _OnHost(torch.autograd.Function):
    """A block whose input waits on the host until the backward runs it again, as under Unsloth and LLaMA-Factory."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, block: Any, hidden: torch.Tensor, *others: Any) -> Any:
        ctx.save_for_backward(hidden.to("cpu", non_blocking=True))
        ctx.block, ctx.others, ctx.device = block, others, hidden.device
        with torch.no_grad():
            return block(hidden, *others)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden = ctx.saved_tensors[0].to(ctx.device, non_blocking=True).detach().requires_grad_()
        with torch.enable_grad():
            again = ctx.block(hidden, *ctx.others)
        torch.autograd.backward(again, gradients)
        return None, hidden.grad, *(None for _ in ctx.others)


def _deepspeed(spec: Spec, probe: Probe, device: torch.device) -> Trained:
    import deepspeed

    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")
    config, dtype = spec.ds_config(), DTYPES[spec.dtype]
    if spec.quantize is not None:
        model = _quantized(spec, device)
    elif spec.stage == 3:
        # zero.Init replaces torch.tensor, whose signature dynamo checks when first imported.
        import_module("torch._dynamo")

        # What is split already is empty: nothing would be drawn, and the padding row of an embedding is not there to be zeroed.
        undrawn = patch.object(import_module("transformers").PreTrainedModel, "initialize_weights", lambda _: None)
        with undrawn, deepspeed.zero.Init(config_dict_or_path=config, dtype=dtype):
            model = _from_config(spec, dtype)
    else:
        with torch.device(device):
            model = _from_config(spec, dtype)
    probe.mark("model")
    model = _prepare(spec, model)
    probe.mark("prepared")  # DeepSpeed's see_memory_usage forgets the peak of what came before
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trainable)
    probe.mark("init")

    def step(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        for micro in range(spec.grad_accum):
            loss = _loss(spec, engine, inputs)
            probe.mark("fwd")
            engine.backward(loss)
            probe.mark("bwd")
            engine.step()
            if micro + 1 < spec.grad_accum:
                probe.mark("accumulated")
        return loss

    inner = getattr(optimizer, "optimizer", optimizer)
    name = f"{type(optimizer).__name__}/{type(inner).__name__}"
    return Trained(step, engine.module, name, lambda: int(engine.skipped_steps), lambda: save(spec, engine, optimizer))


def _fsdp2(spec: Spec, probe: Probe, device: torch.device) -> Trained:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _init_process_group(device, host=spec.offload)
    if spec.quantize is not None:
        model = _prepare(spec, _quantized(spec, device))
    else:
        with torch.device("meta"):
            model = _prepare(spec, _from_config(spec, _parameters(spec)))
    if spec.fp8 is not None:
        _convert(model, spec.fp8)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (spec.world,)),
        "reshard_after_forward": spec.reshard,
        "mp_policy": MixedPrecisionPolicy()
        if spec.precision == "pure"
        else MixedPrecisionPolicy(param_dtype=DTYPES[spec.dtype], reduce_dtype=DTYPES[spec.reduce_dtype or "fp32"]),
    }
    if spec.offload:
        options["offload_policy"] = CPUOffloadPolicy()
    _compile(spec, model)
    for block in _blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    if spec.quantize is not None:
        return _torch_loop(spec, probe, device, model)
    model.to_empty(device="cpu" if spec.offload else device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    return _torch_loop(spec, probe, device, model)


def _fsdp(spec: Spec, probe: Probe, device: torch.device) -> Trained:
    """Return FSDP 1 as accelerate wraps a model: fp32 flat parameters, block by block, gathered and reduced in the run's
    dtype.
    """
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    _init_process_group(device)
    model = _prepare(spec, _from_config(spec, torch.float32) if spec.quantize is None else _quantized(spec, device))
    blocks = {type(block) for block in _blocks(model)}
    dtype = DTYPES[spec.dtype]
    policy: Any = ModuleWrapPolicy(blocks)
    if spec.lora_rank is not None:  # as the HF Trainer sets it for adapters
        from peft.utils.other import fsdp_auto_wrap_policy

        policy = fsdp_auto_wrap_policy(model)
        for (
            module
        ) in model.modules():  # peft 0.21.2 casts inputs to the dtype of an adapter's part, which is not its gathered one
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy[spec.strategy],
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype),
        device_id=device if device.type == "cuda" else None,
        use_orig_params=spec.orig_params,
        limit_all_gathers=True,
        cpu_offload=CPUOffload(offload_params=True) if spec.offload else None,
    )
    return _torch_loop(spec, probe, device, wrapped)


def _quantized(spec: Spec, device: torch.device) -> Any:
    """A bf16 model whose linear layers, but for the head, are kept in 4 or 8 bits, as transformers loads one.

    What is sharded stores its 4 bits in the run's dtype (``bnb_4bit_quant_storage``).
    """
    import bitsandbytes
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = _from_config(spec, DTYPES[spec.dtype])
    head = model.get_output_embeddings()
    levels, _, single = str(spec.quantize).partition("-")
    eight = spec.quantize == "int8"
    storage = torch.uint8 if spec.engine == "ddp" else DTYPES[spec.dtype]
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not torch.nn.Linear or child is head:
                continue
            weight = torch.empty(child.weight.shape, dtype=child.weight.dtype, device=device).normal_(0, 0.02)
            shape = (child.in_features, child.out_features, child.bias is not None)
            if eight:
                made = bitsandbytes.nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=6.0, device="meta")
                kept = bitsandbytes.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
            else:
                stored = {"quant_type": levels, "compress_statistics": not single, "quant_storage": storage}
                made = bitsandbytes.nn.Linear4bit(*shape, DTYPES[spec.dtype], device="meta", **stored)
                kept = bitsandbytes.nn.Params4bit(weight, requires_grad=False, module=made, **stored)
            made.weight = kept.to(device)
            if spec.offload:  # as what loads a base for FSDP 1 leaves it: packed weights on the host, scales on the GPU
                made.weight.data = made.weight.data.cpu()
            made.bias = child.bias
            setattr(module, name, made)
            del weight, kept
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = eight, not eight
    for tensor in (*model.parameters(), *model.buffers()) if spec.offload else ():
        if not isinstance(tensor, bitsandbytes.nn.Params4bit):
            tensor.data = tensor.data.to(device)
    return model if spec.offload else model.to(device)


def _convert(model: torch.nn.Module, recipe: str) -> None:
    """Let linear layers multiply in 8-bit floats, as accelerate asks torchao to, without gathering weights in 8 bits."""
    from dataclasses import replace

    from accelerate.utils.ao import convert_model_to_fp8_ao
    from torchao.float8 import Float8LinearConfig

    convert_model_to_fp8_ao(model, config=replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True))


def _ddp(spec: Spec, probe: Probe, device: torch.device) -> Trained:
    _init_process_group(device)
    if spec.quantize is not None:
        return _torch_loop(spec, probe, device, _quantized(spec, device))
    with torch.device(device):
        model = _prepare(spec, _from_config(spec, _parameters(spec)))
    if spec.fp8 is not None:
        _convert(model, spec.fp8)
    _compile(spec, model)
    if spec.world > 1:
        ids = [device.index] if device.type == "cuda" else None
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
    return _torch_loop(spec, probe, device, model)


def _parameters(spec: Spec) -> torch.dtype:
    """The dtype in which FSDP2 and DDP hold parameters."""
    return torch.float32 if spec.precision is None else DTYPES[spec.dtype]


def _blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The entries of module lists that no other such entry holds: what a plan counts as blocks."""
    numbered = {name: module for name, module in model.named_modules() if name.rpartition(".")[2].isdigit()}
    return [module for name, module in numbered.items() if not any(name.startswith(f"{other}.") for other in numbered)]


def _compile(spec: Spec, model: torch.nn.Module) -> None:
    """Compile each block, within its checkpoint, or the model as a whole."""
    if spec.compile == "model":
        model.compile()
    elif spec.compile == "blocks":
        for block in _blocks(model):
            block.compile()


def _optimizer(spec: Spec, trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a loop over torch's engines: fused where torch can, unless the spec says otherwise."""
    package, _, name = spec.optimizer_type.rpartition(".")
    kind = getattr(import_module(package or "torch.optim"), name)
    fused = {"fused": True} if not package and name in FUSED else {}
    made: torch.optim.Optimizer = kind(trained, **{"lr": 1e-5, **fused, **spec.optimizer})
    return made


def _init_process_group(device: torch.device, *, host: bool = False) -> None:
    """Join the ranks; `host` asks for collectives of tensors on the host, too, which saving offloaded shards needs."""
    if device.type == "cuda":
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if host else "nccl", device_id=device)
    else:
        torch.distributed.init_process_group("gloo")


def _torch_loop(spec: Spec, probe: Probe, device: torch.device, model: Any) -> Trained:
    """Return the step of AdamW with clipping around an FSDP2 or DDP model; autocast for DDP's fp32 parameters."""
    if spec.engine == "ddp" and spec.quantize is not None:
        model = _prepare(spec, model)
    probe.mark("model")
    trained = [p for p in model.parameters() if p.requires_grad]
    averages = _averages(spec, model, device)
    optimizer = _optimizer(spec, trained)
    probe.mark("init")
    dtype = DTYPES[spec.dtype]
    mixed = spec.engine == "ddp" and dtype != torch.float32 and spec.precision != "pure"
    autocast = torch.autocast(device.type, dtype=dtype, enabled=mixed)

    def step(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        for micro in range(spec.grad_accum):
            _sync_gradients(model, micro + 1 == spec.grad_accum)
            last = micro + 1 == spec.grad_accum
            with model.no_sync() if spec.engine == "fsdp" and not last else nullcontext():
                with autocast:
                    loss = _loss(spec, model, inputs, wide=mixed)
                probe.mark("fwd")
                torch.autograd.backward(loss)
            probe.mark("bwd")
        if hasattr(model, "clip_grad_norm_"):
            model.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=spec.set_to_none)
        averages(model)
        return loss

    return Trained(step, model, type(optimizer).__name__, save=lambda: save(spec, model, optimizer))


def _averages(spec: Spec, model: Any, device: torch.device) -> Callable[[Any], None]:
    """Return what mixes the weights into their average after a step: torch's own, or a list of copies of shards, which torch's
    does not copy.
    """
    place = torch.device("cpu") if spec.ema == "cpu" else device
    if spec.ema is None:
        return lambda _: None
    if spec.engine == "ddp":
        from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

        averaged = AveragedModel(model, device=place, avg_fn=get_ema_avg_fn(0.999))
        return averaged.update_parameters
    kept = [(parameter.to_local().detach().to(place, copy=True), parameter) for parameter in model.parameters()]

    def update(_: Any) -> None:
        for average, parameter in kept:
            average.lerp_(parameter.to_local().detach().to(place), 0.001)

    return update


def _loss(spec: Spec, model: Any, inputs: dict[str, torch.Tensor], *, wide: bool = False) -> torch.Tensor:
    """Return the model's own loss, or the Trainer's of smoothed labels (transformers' ``compute_loss``), of logits that
    accelerate's wrapper makes fp32 where `wide`.
    """
    if spec.label_smoothing is None:
        loss: torch.Tensor = model(**inputs).loss
        return loss
    from accelerate.utils.operations import convert_to_fp32
    from transformers.trainer_pt_utils import LabelSmoother

    given = dict(inputs)
    labels = given.pop("labels")
    returned = model(**given)
    if wide:
        returned = convert_to_fp32(returned)
    smoothed: torch.Tensor = LabelSmoother(spec.label_smoothing)(returned, labels, shift_labels=True)
    return smoothed


def _sync_gradients(model: Any, last: bool) -> None:
    """Let only the last micro batch reduce gradients across the ranks."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    elif hasattr(model, "require_backward_grad_sync"):
        model.require_backward_grad_sync = last
