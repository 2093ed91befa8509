"""Finds the largest model that each method trains on three machines, and writes ``docs/pictures/largest.json``.

``python docs/largest.py`` searches anew (about a quarter of an hour); with ``--check`` it plans one of the answers again, and
the model that is one layer deeper, and exits with 1 where they no longer hold. Models are as wide as Llama 2 13B and as deep as
fits: the number of layers is bisected.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zeroplan import estimate

DATA = Path(__file__).resolve().parent / "pictures" / "largest.json"
#: Llama 2 13B, but for its depth.
SHAPE = {
    "model_type": "llama",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
#: Sequences of 2,048 tokens, one a GPU, started from random weights; the allocator's segments grow where they are.
WORK: dict[str, Any] = {
    "seq_len": 2048,
    "micro_batch": 1,
    "gradient_checkpointing": True,
    "from_scratch": True,
    "alloc_conf": "expandable_segments:True",
}
MACHINES: dict[str, dict[str, Any]] = {
    "8 × RTX 4090, 24 GB": {"gpus": 8, "gpu": "RTX4090", "cpu_ram": "256G", "nvme": "2T"},
    "8 × A100, 40 GB": {"gpus": 8, "gpu": "A100-40G", "cpu_ram": "1T", "nvme": "2T"},
    "8 × H100, 80 GB": {"gpus": 8, "gpu": "H100", "cpu_ram": "2T", "nvme": "2T"},
}
_NOWHERE = {"offload_optimizer": "none", "offload_param": "none"}
METHODS: dict[str, dict[str, Any]] = {
    "data parallel": {"engine": "ddp"},
    "ZeRO-1": {"stage": 1, **_NOWHERE},
    "ZeRO-2": {"stage": 2, **_NOWHERE},
    "ZeRO-3": {"stage": 3, **_NOWHERE},
    "ZeRO-2, optimizer on the host": {"stage": 2, "offload_optimizer": "cpu", "offload_param": "none"},
    "ZeRO-3, all on the host": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "ZeRO-3, all on disk": {"stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"},
}

#: Parts of a depth that does not fit at which deeper models are tried.
_FURTHER = (1.2, 1.5, 2)
#: The most layers that zeroplan simulates.
_DEEPEST = 512


@dataclass
class Search:
    """The search for the deepest model of one method on one machine. By depth: the part of each limit that is `used`, the
    number of `params`; and `over`, the depths that do not fit.
    """

    machine: str
    method: str
    used: dict[int, dict[str, float]] = field(default_factory=dict)
    params: dict[int, int] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)

    def plan(self, layers: int) -> bool:
        """Plan one depth; returns whether it fits."""
        config = {**SHAPE, "num_hidden_layers": layers}
        found = estimate(config, **WORK, **MACHINES[self.machine], **METHODS[self.method])
        (plan,), cluster = found, found.report.cluster
        if not (plan.gpu.usable and plan.gpu.interval):
            raise SystemExit(f"{self.machine}, {self.method}: planned without a tape; torch and transformers are needed")
        self.used[layers] = {
            "gpu": plan.gpu.interval[1] / plan.gpu.usable,
            "host": plan.cpu.per_node / cluster["usable_cpu_ram"],
            "disk": plan.nvme.per_node / cluster["nvme"],
        }
        self.params[layers] = found.report.model.params
        return bool(plan.fits)

    def deepest(self) -> dict[str, Any]:
        """Bisect, every other time at the depth where a line through two others would meet the first limit.

        A deeper model may fit where one does not: DeepSpeed makes the flat parameters of stages 1 and 2 on the host where the
        GPU has no room for both copies. So deeper ones are tried before the answer stands.
        """
        fits, fails, at = 0, 0, 1
        while at:
            if self.plan(at):
                fits = at
                if fits == _DEEPEST:
                    raise SystemExit(f"{self.machine}, {self.method}: {fits} layers fit, and no more are simulated")
                fails = min((depth for depth in self.over if depth > fits), default=0)
            else:
                self.over.add(at)
                fails = at if at < fails or not fails else fails
            if fails != fits + 1:
                at = self._next(fits, fails)
            else:
                deeper = (round(part * fails) for part in _FURTHER)
                at = next((depth for depth in deeper if depth <= _DEEPEST and depth not in self.used), 0)
        held = self.used[fails]
        return {
            "layers": fits,
            "params": self.params.get(fits, 0),
            "limit": max(held, key=held.__getitem__),
            "params_over": self.params[fails],
        }

    def _next(self, fits: int, fails: int) -> int:
        if len(self.used) == 1:
            return 4 if fits else 1
        if fails and len(self.used) % 2:
            return (fits + fails) // 2
        low, high = sorted(self.used)[-2:] if not fails else (max(d for d in self.used if d < fails), fails)
        meets = [
            low + (1 - self.used[low][key]) * (high - low) / slope
            for key in self.used[low]
            if (slope := self.used[high][key] - self.used[low][key]) > 0
        ]
        least, most = fits + 1, fails - 1 if fails else _DEEPEST
        return max(least, min(most, round(min(meets, default=most))))


def check() -> None:
    """Plan one answer again, and what is a layer deeper."""
    held = json.loads(DATA.read_text())
    settings = {"shape": SHAPE, "work": WORK, "machines": MACHINES, "methods": METHODS}
    stale = [key for key, value in settings.items() if held[key] != value]
    one = Search("8 × A100, 40 GB", "ZeRO-3")
    layers = held["largest"][one.machine][one.method]["layers"]
    if stale or not one.plan(layers) or one.plan(layers + 1):
        raise SystemExit(f"{DATA} is stale ({', '.join(stale) or f'{layers} layers'}): run python docs/largest.py")


def main() -> None:
    """Search, or check."""
    if "--check" in sys.argv[1:]:
        check()
        return
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for machine in MACHINES:
        for method in METHODS:
            search = Search(machine, method)
            found.setdefault(machine, {})[method] = search.deepest()
            print(f"{machine}, {method}: {found[machine][method]} ({len(search.used)} plans)", flush=True)
    DATA.parent.mkdir(exist_ok=True)
    data = {"shape": SHAPE, "work": WORK, "machines": MACHINES, "methods": METHODS, "largest": found}
    DATA.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
