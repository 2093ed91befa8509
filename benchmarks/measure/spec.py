"""One configuration to measure, as read from a line of a specs file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

#: Classes of torch.optim that step in one kernel.
FUSED = ("Adam", "AdamW", "SGD")
#: Types of a ds_config's optimizer that take none.
WITHOUT_BETAS = ("SGD", "Adagrad")
#: Fields that a row has where they differ from their defaults.
OPTIONAL = (
    "model_overrides",
    "optimizer_type",
    "reshard",
    "offload",
    "task",
    "images",
    "image_size",
    "video_frames",
    "audio_seconds",
    "freeze",
    "quantize",
    "fp8",
    "set_to_none",
    "strategy",
    "orig_params",
    "save",
    "target_len",
    "lora_targets",
    "reentrant",
    "offload_checkpoints",
    "precision",
    "reduce_dtype",
    "compile",
    "kernels",
    "modules_to_save",
    "label_smoothing",
    "ema",
)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One training run to measure. Sizes are bytes unless a name says otherwise."""

    id: str
    model: str
    engine: str = "deepspeed"  # deepspeed | fsdp | fsdp2 | ddp
    stage: int = 0
    world: int = 1
    dtype: str = "bf16"  # bf16 | fp16 | fp32
    micro_batch: int = 1
    seq_len: int = 1024
    grad_accum: int = 1
    checkpointing: bool = False
    attn: str = "sdpa"
    lora_rank: int | None = None
    lora_targets: list[str] | None = None  # None: the seven linear kinds of Llama's blocks; ["all-linear"] as peft reads it
    reentrant: bool = False  # the kind of checkpointing
    offload_checkpoints: bool = False  # fsdp2, ddp: blocks' inputs wait on the host by a function of autograd, as Unsloth's do
    precision: str | None = None  # fsdp2, ddp: "pure" keeps all in `dtype`, "half-autocast" frozen parts
    reduce_dtype: str | None = None  # fsdp2: of the reduced gradients, where it is not fp32
    compile: str | None = None  # fsdp2, ddp: "blocks", each by itself, or "model"
    kernels: str | None = None  # liger, cut_cross_entropy or fused_adapters, over the built model
    model_overrides: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)  # overrides of zero_optimization
    ds: dict[str, Any] = field(default_factory=dict)  # overrides at the config's top level
    optimizer: dict[str, Any] = field(default_factory=dict)  # overrides of optimizer.params
    optimizer_type: str = "AdamW"  # fsdp, fsdp2, ddp: torch's class, or MODULE.CLASS of bitsandbytes.optim or transformers
    task: str | None = None  # another head than the config's
    images: int = 0  # of each sample, for vision-language models
    image_size: int | None = None  # pixels of a side; None: the config's
    video_frames: int = 0  # each of the images is a video of so many
    audio_seconds: int = 0  # of the recording that comes with each sample
    freeze: list[str] = field(default_factory=list)  # parts that are not trained
    quantize: str | None = None  # a quantised base: nf4, fp4, nf4-single, fp4-single; under ddp int8 too
    target_len: int | None = None  # of an encoder-decoder, where it is not seq_len
    save: str | None = None  # after the steps, by a loop's own calls: sharded or full; two more steps follow
    fp8: str | None = None  # fsdp2, ddp: a recipe of torchao, over the layers that accelerate picks
    set_to_none: bool = True  # fsdp, fsdp2, ddp: of zero_grad
    strategy: str = "FULL_SHARD"  # fsdp: its sharding strategy
    orig_params: bool = True  # fsdp: use_orig_params
    reshard: bool = True  # fsdp2: reshard_after_forward
    offload: bool = False  # fsdp2: CPUOffloadPolicy; fsdp: CPUOffload
    modules_to_save: list[str] | None = None  # trained whole beside adapters
    label_smoothing: float | None = None  # by transformers' own smoother, outside the model
    ema: str | None = None  # fsdp2, ddp: an average of the weights on the gpu or the cpu (torch.optim.swa_utils)
    cap: int | None = None  # upper limit of this process on its GPU
    env: dict[str, str] = field(default_factory=dict)
    steps: int = 5
    history: bool = False  # record every allocator event
    cpp_stacks: bool = False  # with history: keep the C++ frames that name an autograd node
    free_stacks: bool = True  # with history: keep who frees; see history.start
    gib: float = 20.0  # what the launcher reserves on each GPU for this run, GiB
    limit: float = 180.0  # seconds until the launcher gives the run up

    def __post_init__(self) -> None:
        if self.engine not in ("deepspeed", "fsdp", "fsdp2", "ddp"):
            raise ValueError(f"{self.id}: engine must be deepspeed, fsdp, fsdp2 or ddp, not {self.engine}")
        if self.dtype not in ("bf16", "fp16", "fp32"):
            raise ValueError(f"{self.id}: dtype must be bf16, fp16 or fp32, not {self.dtype}")
        if self.stage not in range(4):
            raise ValueError(f"{self.id}: stage must be 0 to 3, not {self.stage}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Spec:
        """Raises ``ValueError`` naming the keys that no spec has."""
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"unknown spec keys: {', '.join(sorted(unknown))}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values that ``from_dict`` reads."""
        return asdict(self)

    def ds_config(self) -> dict[str, Any]:
        """Return the DeepSpeed config of the run: what the spec says, else DeepSpeed's defaults."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.grad_accum,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": self.stage, **self.zero},
            "optimizer": {
                "type": self.optimizer_type,
                "params": {
                    "lr": 1e-5,
                    **({} if self.optimizer_type in WITHOUT_BETAS else {"betas": [0.9, 0.95]}),
                    "weight_decay": 0.1,
                    **self.optimizer,
                },
            },
            "wall_clock_breakdown": False,
            "steps_per_print": 10**9,
        }
        if self.dtype != "fp32":
            config[self.dtype] = {"enabled": True}
        return config | self.ds
