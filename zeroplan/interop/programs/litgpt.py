"""LitGPT: YAML of ``litgpt finetune`` and ``litgpt pretrain``.

Note [LitGPT by version]
    LoRA on several GPUs: FSDP 1 whose units are blocks with the adapters in them before 0.5.8; FSDP 1 with a unit for each
    linear layer, which is not planned, from 0.5.8; FSDP 2 from 0.5.11. bitsandbytes is pinned to 0.42 before 0.5.5, and to 0.45
    since.
    From 0.5.0 on a quantised run has a new embedding with a norm behind it (``StableEmbedding``), made after everything was
    frozen: both get gradients that no optimizer steps and that nothing clears.
Source: LitGPT 0.5.13, ``litgpt/finetune/lora.py``, ``full.py``, ``litgpt/pretrain.py``, ``litgpt/args.py``;
``finetune/lora.py`` and ``pyproject.toml`` at the tags 0.3.1 to 0.5.13, and before the first of them at commit 8641822
(``setup.py`` says 0.1.0).
"""

from __future__ import annotations

from zeroplan.core.lit_model import LitModel
from zeroplan.core.unmodelled import Effect
from zeroplan.core.versions import parse_version, version_text
from zeroplan.interop.programs.adapters import optimizer_of, set_dropout
from zeroplan.interop.programs.builder import Builder, Keys
from zeroplan.interop.programs.document import Document
from zeroplan.interop.programs.program import Program
from zeroplan.interop.programs.trainer import set_fsdp
from zeroplan.interop.setups import Setup

UNKNOWN = Effect.UNKNOWN
#: ``precision`` by Lightning Fabric's names: arithmetic and weights.
_PRECISIONS = {
    "bf16-true": ("bf16", "bf16"),
    "16-true": ("fp16", "fp16"),
    "bf16-mixed": ("bf16", "fp32"),
    "16-mixed": ("fp16", "fp32"),
    "32-true": ("fp32", "fp32"),
}
#: Switches of adapters, each with the layers of transformers' models that it means.
_TARGETS = {
    "lora_query": ("q_proj",),
    "lora_key": ("k_proj",),
    "lora_value": ("v_proj",),
    "lora_projection": ("o_proj",),
    "lora_mlp": ("gate_proj", "up_proj", "down_proj"),
}
_ON_BY_DEFAULT = ("lora_query", "lora_value")
#: ``--quantize`` by Fabric's names.
_QUANTIZED = {"bnb.nf4": "nf4-single", "bnb.nf4-dq": "nf4", "bnb.fp4": "fp4-single", "bnb.fp4-dq": "fp4"}
#: The first versions that train LoRA by other units, by FSDP 2, with a new embedding, and with a bitsandbytes that keeps no
#: inputs. See Note [LitGPT by version].
_LAYERS_AS_UNITS, _FSDP_2, _STABLE_EMBEDDING, _KEEPS_NO_INPUTS = (0, 5, 8), (0, 5, 11), (0, 5, 0), (0, 5, 5)
#: The first that draws the longest sample as any other; before, the first micro batch held it.
_SHUFFLED = (0, 3, 0)
#: ``lora_mlp`` and the rest, the head's among them.
_SWITCHES = (*_TARGETS, "lora_head")


class LitGpt(Program):
    """One GPU without a strategy; several by FSDP, which also checkpoints every block."""

    name = "litgpt"
    title = "LitGPT"
    version = "0.5.13"
    first = "0.1.0"

    def recognises(self, document: Document) -> tuple[str, ...]:
        """Return LitGPT's keys: a ``train`` block with its sizes beside its checkpoint or model."""
        train = document.data.get("train")
        sized = isinstance(train, dict) and "micro_batch_size" in train
        return document.has("checkpoint_dir", "model_name", "precision") if sized else ()

    def read(self, document: Document) -> Setup:
        """The run. Its model code is LitGPT's own, so activations of transformers' model stand in where it is not installed.

        Raises:
            BadInput: what LitGPT refuses, as quantised weights on several GPUs.
        """
        version = parse_version(document.version or self.version)
        run = Builder(document, self.name, f"{self.title} {version_text(version)}")
        train = run.block("train")
        fine = "checkpoint_dir" in run.data
        run.set("task", "sft" if fine else "pretrain")
        folder = run.text("checkpoint_dir" if fine else "model_name")
        if folder:
            run.set("model", folder.removeprefix("checkpoints/"), "checkpoint_dir" if fine else "model_name")
        micro = train.number("micro_batch_size") or 1
        run.set("micro_batch", micro, "train.micro_batch_size")
        gpus, nodes = self._machine(run)
        whole = train.number("global_batch_size")
        if whole and gpus:
            run.set("grad_accum", max(1, whole // (gpus * nodes) // micro), "train.global_batch_size")
        length = train.number("max_seq_length")
        if length:
            run.set("seq_len", length, "train.max_seq_length")
        else:
            run.leave_out("train.max_seq_length", UNKNOWN, "samples are as long as the model's window; give --seq-len")
        _precision(run)
        run.set("autocast", False)
        self._optimizer(run)
        several = gpus is None or gpus * nodes > 1
        lora = "lora_r" in run.data
        if several:
            set_fsdp(
                run,
                "devices",
                version=2 if lora and version >= _FSDP_2 else 1,
                reshard="true",
                offload=False,
                hybrid=not fine and nodes > 1,
                checkpointing=fine,
            )
            run.fields.setdefault("gradient_checkpointing", False)
            if lora and _LAYERS_AS_UNITS <= version < _FSDP_2:
                run.leave_out("devices: auto_wrap_policy", UNKNOWN, "a unit for each linear layer; blocks are counted as units")
        else:
            run.set("engine", "ddp")
            run.set("gradient_checkpointing", False)
        quantize = self._adapters(run, lora=lora, several=several)
        if quantize is not None and version >= _STABLE_EMBEDDING:
            run.leave_out("quantize: StableEmbedding", Effect.MORE, "the embedding's norm and gradients, which nothing steps")
        if folder:
            found = LitModel(
                folder.removeprefix("checkpoints/"),
                self._lora(run) if lora else (),
                chunked_head=lora,
                shifted=fine,
                quantize=quantize,
                keeps_inputs=version < _KEEPS_NO_INPUTS,
                mixed_units=lora and several and version < _LAYERS_AS_UNITS,
                longest_first=fine and version < _SHUFFLED,
            )
            run.set("lit_model", found)
        run.leave_out("model", UNKNOWN, "LitGPT's own model code keeps other tensors than transformers'")
        return run.setup(self.name)

    def _machine(self, run: Builder) -> tuple[int | None, int]:
        devices, nodes = run.value("devices"), run.number("num_nodes") or 1
        if devices is None and "devices" in run.data:
            run.assume("devices auto: all of the machine, so give --gpus")
            return None, nodes
        gpus = (run.number("devices") or 1) if devices is not None else 1
        run.set("gpus", gpus, "devices")
        run.set("nodes", nodes, "num_nodes")
        return gpus, nodes

    def _optimizer(self, run: Builder) -> None:
        value = run.value("optimizer")
        name = Keys(value, run.name).text("class_path") if isinstance(value, dict) else value
        plain = str(name or "AdamW").rpartition(".")[2].lower()
        if isinstance(name, str) and "galore" in name.lower():
            plain = "galore_adamw"
        row, kind = optimizer_of(run, "optimizer.class_path", plain)
        run.set("optimizer", row, "optimizer.class_path")
        run.set("optimizer_kind", kind)

    def _lora(self, run: Builder) -> tuple[tuple[str, int | float | bool], ...]:
        """Return the arguments of LitGPT's LoRA config."""
        switches = {key: bool(run.flag(key) is not False if key in _ON_BY_DEFAULT else run.flag(key)) for key in _SWITCHES}
        dropout = run.amount("lora_dropout")
        found: dict[str, int | float | bool] = {"lora_r": run.number("lora_r") or 8, "lora_alpha": 16}
        return tuple((found | {"lora_dropout": 0.05 if dropout is None else dropout} | switches).items())

    def _quantize(self, run: Builder, *, lora: bool, several: bool) -> str | None:
        """Return how the base is kept: None in 16 or 32 bits, and where that is not planned.

        Raises:
            BadInput: what LitGPT's ``setup`` refuses.
        """
        asked = run.word("quantize")
        if asked is None:
            return None
        if several:
            raise run.bad("quantize", "is not for several GPUs, LitGPT says", "leave it out, or set devices: 1")
        if "mixed" in (run.word("precision") or "mixed"):
            raise run.bad("quantize", "is not for mixed precision, LitGPT says", "set precision: bf16-true")
        if asked not in _QUANTIZED or not lora:
            says = (
                "weights stay in 16 bits, and their 8-bit copies are in no figure" if "int8" in asked else "is no format known"
            )
            run.leave_out("quantize", UNKNOWN, says if lora else "quantised weights of another training than LoRA's")
            return None
        run.set("quantize", _QUANTIZED[asked], "quantize")
        run.set("adapter_dtype", run.fields.get("model_dtype"))
        return _QUANTIZED[asked]

    def _adapters(self, run: Builder, *, lora: bool, several: bool) -> str | None:
        """Set the adapters; returns how the base is kept."""
        quantize = self._quantize(run, lora=lora, several=several)
        if not lora:
            run.set("method", "full")
            return quantize
        run.set("method", "qlora" if run.text("quantize") else "lora")
        run.count("lora_rank", "lora_r", default=8)
        set_dropout(run, 0.05)
        names: list[str] = []
        for key, layers in _TARGETS.items():
            on = run.flag(key)
            if on or (on is None and key in _ON_BY_DEFAULT):
                names += layers
        run.set("lora_targets", tuple(names), "lora_query")
        if run.flag("lora_head"):
            run.leave_out("lora_head", Effect.MORE, "an adapter on the head")
        return quantize


def _precision(run: Builder) -> None:
    """Set the dtypes of the model and of products."""
    precision = run.word("precision")
    if precision is None:
        run.assume("precision bf16-mixed", dtype="bf16", model_dtype="fp32")
    elif precision in _PRECISIONS:
        for field, value in zip(("dtype", "model_dtype"), _PRECISIONS[precision], strict=True):
            run.set(field, value, "precision")
    else:
        run.set("dtype", "bf16", "precision")
        run.leave_out("precision", UNKNOWN, f"precision {precision[:40]!r} is not modelled; bf16 is counted")
