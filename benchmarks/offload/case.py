"""One timed case: an engine, a stage, what leaves the device and where to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.step.case import CLIP, Case

#: What leaves the device, by the word in a case's name: optimizer, parameters.
PLACES = {
    "none": ("none", "none"),
    "opt": ("cpu", "none"),
    "all": ("cpu", "cpu"),
    "nvme": ("nvme", "none"),
    "params": ("cpu", "nvme"),
    "files": ("nvme", "nvme"),
}
#: All parameters in files, through buffers that DeepSpeed can hold the largest layer of a 1B model in.
PARAM_FILES = {"max_in_cpu": 0, "buffer_size": 300_000_000}

#: As DeepSpeed's tutorial on ZenFlow sets it: its updates run beside the next forwards and backwards.
ZENFLOW: dict[str, Any] = {
    "topk_ratio": 0.05,
    "select_strategy": "auto",
    "select_interval": "auto",
    "update_interval": 4,
    "full_warm_up_rounds": 0,
    "overlap_step": True,
}


@dataclass(frozen=True, slots=True)
class OffloadCase(Case):
    """``ENGINE:STAGE:WHAT[+free][+delayed][+zenflow][+ckpt][+r32]``, as in ``zeroplan:2:opt``.

    `engine` is zeroplan or deepspeed. WHAT is a key of :data:`PLACES`. ``free``: neither clipping nor an overflow check, so
    that no update waits for the last gradient. ``delayed``: the delayed parameter update (zeroplan only). ``zenflow``:
    DeepSpeed's ZenFlow as its tutorial has it, which updates most of the parameters every fourth step.
    """

    what: str = ""
    free: bool = False
    delayed: bool = False
    zenflow: bool = False
    nvme_path: str = ""

    @classmethod
    def parse(cls, text: str, nvme_path: str = "") -> OffloadCase:
        """Read the case that `text` names."""
        head, *options = text.split("+")
        engine, stage, what = head.split(":")
        flags = ("r32" in options, "ckpt" in options, "compile" in options, "within" in options)
        more: dict[str, Any] = {
            "what": what,
            "free": "free" in options,
            "delayed": "delayed" in options,
            "zenflow": "zenflow" in options,
            "nvme_path": nvme_path,
        }
        return cls(engine, int(stage), *flags, **more)

    def __str__(self) -> str:
        options = {"free": self.free, "delayed": self.delayed, "zenflow": self.zenflow}
        options |= {"ckpt": self.checkpointing, "r32": self.fp32_reduce}
        return f"{self.engine}:{self.stage}:{self.what}" + "".join(f"+{name}" for name, on in options.items() if on)

    @property
    def group(self) -> str:
        """Cases with equal groups do the same work and are compared; a delayed update is held against a prompt one."""
        return f"{self.stage}:{self.what}{'+free' * self.free}{'+ckpt' * self.checkpointing}{'+r32' * self.fp32_reduce}"

    @property
    def waits_for_all(self) -> bool:
        """Whether the first update waits for the last gradient, and the next forward for the update."""
        return not (self.free or self.delayed)

    def ds_config(self, micro: int, ranks: int) -> dict[str, Any]:
        """Return the ds_config of this case, for DeepSpeed and the included runtime alike."""
        # super() without arguments does not find the class that slots=True makes anew.
        config = Case.ds_config(self, micro, ranks)
        optimizer, param = PLACES[self.what]
        zero = config["zero_optimization"]
        for key, device in (("offload_optimizer", optimizer), ("offload_param", param)):
            if device != "none":
                zero[key] = {"device": device, "pin_memory": True}
                if device == "nvme":
                    zero[key] |= {"nvme_path": self.nvme_path, "buffer_count": 5}
                    zero[key] |= PARAM_FILES if key == "offload_param" else {}
        config["gradient_clipping"] = 0.0 if self.free else CLIP
        if self.free:
            config["bf16"] = {"enabled": True, "check_grad_overflow": False}
        if self.zenflow:
            zero["zenflow"] = ZENFLOW
        if self.delayed:
            config["zeroplan"] = {"delayed_update": 1}
        return config
