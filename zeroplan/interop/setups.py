"""A Setup is what other programs' files say of a training run, in zeroplan's words; None is what they leave open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroplan.core.generation import Colocated, Generation
from zeroplan.core.lit_model import LitModel
from zeroplan.core.ppo import Ppo
from zeroplan.core.unmodelled import Unmodelled
from zeroplan.interop.training import NO_TRAINING, Training


@dataclass(frozen=True, slots=True)
class Setup:
    """One run as files describe it.

    Attributes:
        program: the short name of the program that owns the first file, such as ``trl``.
        title: the program as people write it, with the version whose defaults are assumed.
        files: the files that were read.
        method: ``full``, ``lora``, ``qlora``, or the program's own word for another way.
        task: ``sft``, ``pretrain``, ``dpo``, …; empty where no file says.
        engine: what trains, by zeroplan's name; None where no file decides it.
        model: a hub id, a path, or a config.
        micro_batch: samples a GPU and pass.
        grad_accum: passes a step.
        seq_len: tokens a sample.
        target_len: tokens of an encoder-decoder's target, where a script for one says so.
        dtype: of the arithmetic.
        model_dtype: of the base model's weights as they are loaded; DeepSpeed casts them.
        autocast: whether 16-bit arithmetic is autocast's; else the model itself is in 16 bits.
        optimizer: the row's name in the optimizer table.
        optimizer_kind: how it walks its tensors, where the program decides that.
        attn: the attention implementation.
        gradient_checkpointing: whether blocks are recomputed.
        reentrant: whether checkpoints are reentrant, where the file says so.
        checkpoint_policy: which, in the words of ``--checkpoint-policy``; None for all.
        lora_rank: of the adapters; None trains the model itself.
        lora_dropout: whether adapters drop some of their input.
        lora_targets: layers to adapt, one regular expression among them; empty for all linear layers.
        stage: of the engine; None for what the ds_config or the engine says.
        offload_optimizer: where optimizer states go, for engines without a ds_config.
        offload_param: where parameters go, for engines without a ds_config.
        gpus: a node.
        nodes: nodes.
        degrees: of parallelism, by their names; their keys stand among `unmodelled`, too, for verbs
            without layouts.
        dp_shard: data-parallel ranks that shard, where the program asks that all degrees together are the ranks.
        replicates: whether ranks beyond `dp_shard` are replicas; else the program refuses them.
        global_batch: samples a step of all ranks together, where accumulation follows from it.
        ds_config: what DeepSpeed is given.
        deepspeed_version: that the file's project pins.
        quantize: how a frozen base is kept: ``nf4``, or None for 16 or 32 bits.
        fp8: how linear layers multiply in 8-bit floats (:class:`zeroplan.core.float8.Float8Recipe`); None in 16 or 32 bits.
        compile: what ``torch.compile`` is called on (:class:`zeroplan.core.workload.Compilation`); None for nothing.
        whole_base: whether 4-bit weights are stored in bytes, which FSDP does not shard.
        adapter_dtype: of adapters beside a quantised base, where the program casts them.
        whole_embedding_states: whether an 8-bit optimizer keeps the embeddings' states in fp32.
        accelerate_units: whether accelerate applies ``fully_shard``, with units of its own for embedding, norm and head.
        reduce_dtype: in which FSDP2 reduces gradients: a dtype's name, or ``products`` for that of the products; None where the
            program reduces in fp32.
        one_unit: whether FSDP 1 wraps the model as a whole.
        pairs: whether a chosen and a rejected sample pass together.
        head: the task whose head the model has, where it is not the one of its own checkpoint.
        reference: ``model`` or ``base``: what is asked beside the trained model; None for nothing.
        kl_batch: whether a second batch passes for KTO's KL term.
        pair_loss: how pairs meet in a loss over all their logits (:class:`zeroplan.core.preferences.PairLoss`); None elsewhere.
        moved: whether the model is made on the host and then moved to its GPU.
        lit_model: the model of LitGPT's own code that the run trains; None for other code.
        generation: what the model generates before each step (:class:`zeroplan.core.generation.Generation`); None for nothing.
        colocated: vLLM's engine on the GPUs that train (:class:`zeroplan.core.generation.Colocated`); None for none.
        ppo: what PPO's four models pass (:class:`zeroplan.core.ppo.Ppo`); None for other tasks.
        chunked_head: whether TRL computes head and loss together in tiles.
        labelled_share: of the tokens that have a label, where the head sees those alone.
        detached_loss: whether the loop keeps the loss without its graph, as the Trainer's does.
        eval_batch: samples a GPU and pass of an evaluation between steps; None without one.
        saves: whether the run saves between steps, where its file says so.
        state_dict: the form of what FSDP saves: ``sharded`` or ``full``; None for the program's default.
        saver: whose code saves: ``trainer``, ``accelerate``, …; None for a loop of one's own.
        save_only_model: whether no optimizer states are saved.
        fsdp_version: 1 where FSDP is the older one, whose `engine` is ``fsdp`` if that plans the run.
        pads: whether the program pads each batch to its longest sample, at most `seq_len`, so that lengths vary.
        options: values of options that files of techniques declare (:mod:`zeroplan.techniques`).
        open: fields that the file cannot hold and no line of it tells, with what is missing: a flag gives them.
        alloc_conf: what the command line gives ``PYTORCH_ALLOC_CONF``; empty for nothing.
        zero_init: whether the model is built under ``deepspeed.zero.Init``; None where nothing says.
        training: what moves training and no memory, which written files carry.
        keys: the key that said each field.
        assumed: what the program's defaults decide, one clause each.
        unmodelled: keys that the fields do not hold.
        unknown: keys that the program does not have.
    """

    program: str
    title: str = ""
    files: tuple[str, ...] = ()
    method: str = "full"
    task: str = ""
    engine: str | None = None
    model: str | Mapping[str, Any] | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    seq_len: int | None = None
    target_len: int | None = None
    dtype: str | None = None
    model_dtype: str | None = None
    autocast: bool = True
    optimizer: str | None = None
    optimizer_kind: str | None = None
    attn: str | None = None
    gradient_checkpointing: bool | None = None
    reentrant: bool | None = None
    checkpoint_policy: str | None = None
    lora_rank: int | None = None
    lora_dropout: bool = False
    lora_targets: tuple[str, ...] = ()
    stage: int | None = None
    offload_optimizer: str | None = None
    offload_param: str | None = None
    gpus: int | None = None
    nodes: int | None = None
    degrees: Mapping[str, int | bool | str] = field(default_factory=dict)
    dp_shard: int | None = None
    replicates: bool = False
    global_batch: int | None = None
    ds_config: Mapping[str, Any] | None = None
    deepspeed_version: str | None = None
    quantize: str | None = None
    fp8: str | None = None
    compile: str | None = None
    whole_base: bool = False
    adapter_dtype: str | None = None
    whole_embedding_states: bool = False
    accelerate_units: bool = False
    reduce_dtype: str | None = None
    one_unit: bool = False
    pairs: bool = False
    head: str | None = None
    reference: str | None = None
    kl_batch: bool = False
    pair_loss: str | None = None
    lit_model: LitModel | None = None
    generation: Generation | None = None
    colocated: Colocated | None = None
    ppo: Ppo | None = None
    moved: bool = False
    chunked_head: bool = False
    labelled_share: float | None = None
    detached_loss: bool = False
    eval_batch: int | None = None
    saves: bool = False
    state_dict: str | None = None
    saver: str | None = None
    save_only_model: bool = False
    fsdp_version: int | None = None
    pads: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    open: Mapping[str, str] = field(default_factory=dict)
    alloc_conf: str = ""
    zero_init: bool | None = None
    training: Training = NO_TRAINING
    keys: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    unmodelled: tuple[Unmodelled, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """Task and method in a few words, such as ``sft, lora``."""
        return ", ".join(part for part in (self.task, self.method) if part)

    @property
    def line(self) -> str:
        """One line that says what was read, by which program's rules, and what was assumed."""
        head = f"{self.title} ({self.what})" if self.what else self.title
        parts = [f"{head}: {', '.join(self.files)}"]
        if self.assumed:
            parts.append(f"assumed: {', '.join(self.assumed)}")
        if self.unknown:
            parts.append(f"no keys of {self.title.rpartition(' ')[0]}: {', '.join(self.unknown)}")
        return "; ".join(parts)
