"""A Llama's modules in the order in which they run, with gradients and no activations: a stream made without torch."""

from __future__ import annotations

import math
from dataclasses import replace

from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op, TapeModule, TapeParam

#: The config of that model, with two layers.
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
_IN_ORDER = {
    "LlamaModel": ("embed_tokens", "rotary_emb", "layers", "norm"),
    "LlamaDecoderLayer": ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    "LlamaMLP": ("gate_proj", "act_fn", "up_proj", "down_proj"),
}


class _Builder:
    def __init__(self) -> None:
        self.modules: list[TapeModule] = []
        self.params: list[TapeParam] = []

    def param(self, name: str, *shape: int) -> int:
        self.params.append(TapeParam(name, shape, True, 2))
        return len(self.params) - 1

    def module(self, name: str, kind: str, parent: int, *params: int) -> int:
        self.modules.append(TapeModule(name, kind, parent, params))
        return len(self.modules) - 1

    def linear(self, name: str, parent: int, out: int, into: int) -> None:
        self.module(name, "Linear", parent, self.param(f"{name}.weight", out, into))

    def norm(self, name: str, parent: int, width: int) -> None:
        self.module(name, "LlamaRMSNorm", parent, self.param(f"{name}.weight", width))


def llama_tape(layers: int, itemsize: int = 2) -> ExpandedTape:
    """The shape of Llama-3.2-1B with `layers` layers; `itemsize` bytes an element of each gradient."""
    hidden, inner, kv, vocab = 2048, 8192, 512, 128256
    b = _Builder()
    root = b.module("", "LlamaForCausalLM", -1)
    model = b.module("model", "LlamaModel", root)
    embedding = b.param("model.embed_tokens.weight", vocab, hidden)
    b.module("model.embed_tokens", "Embedding", model, embedding)
    blocks = b.module("model.layers", "ModuleList", model)
    for i in range(layers):
        name = f"model.layers.{i}"
        layer = b.module(name, "LlamaDecoderLayer", blocks)
        attention = b.module(f"{name}.self_attn", "LlamaAttention", layer)
        for part, out in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv), ("o_proj", hidden)):
            b.linear(f"{name}.self_attn.{part}", attention, out, hidden)
        mlp = b.module(f"{name}.mlp", "LlamaMLP", layer)
        b.linear(f"{name}.mlp.gate_proj", mlp, inner, hidden)
        b.linear(f"{name}.mlp.up_proj", mlp, inner, hidden)
        b.linear(f"{name}.mlp.down_proj", mlp, hidden, inner)
        b.module(f"{name}.mlp.act_fn", "SiLU", mlp)
        b.norm(f"{name}.input_layernorm", layer, hidden)
        b.norm(f"{name}.post_attention_layernorm", layer, hidden)
    b.norm("model.norm", model, hidden)
    b.module("model.rotary_emb", "LlamaRotaryEmbedding", model)
    b.module("lm_head", "Linear", root, embedding)
    stream = ExpandedTape(tuple(b.modules), tuple(b.params))
    _run(stream, root, embedding, itemsize)
    return stream


def _run(tape: ExpandedTape, root: int, embedding: int, itemsize: int) -> None:
    children: dict[int, list[int]] = {}
    for m, module in enumerate(tape.modules):
        children.setdefault(module.parent, []).append(m)

    def add(op: Op, arg: int, aux: int = 0, kind: int = 0) -> None:
        tape.op.append(op)
        tape.arg.append(arg)
        tape.aux.append(aux)
        tape.kind.append(kind)
        tape.module.append(-1)

    def ordered(m: int) -> list[int]:
        names = _IN_ORDER.get(tape.modules[m].type)
        inside = children.get(m, [])
        return sorted(inside, key=lambda c: names.index(tape.modules[c].name.rpartition(".")[2])) if names else inside

    def forward(m: int) -> None:
        called = tape.modules[m].type != "ModuleList"
        if called:
            add(Op.ENTER, m)
        for child in ordered(m):
            forward(child)
        if called:
            add(Op.EXIT, m)

    def backward(m: int) -> None:
        kind = tape.modules[m].type
        if kind == "LlamaRotaryEmbedding":
            return
        if kind != "ModuleList":
            add(Op.BWD_ENTER, m)
        for child in reversed(ordered(m)):
            backward(child)
        for p in tape.modules[m].params:
            if p == embedding and kind == "Linear":
                continue  # the tied weight's gradient is complete at the embedding
            storage = sum(1 for op in tape.op if op == Op.ALLOC)
            add(Op.ALLOC, storage, itemsize * math.prod(tape.params[p].shape), Kind.GRAD)
            add(Op.GRAD, p, storage)
        if kind not in ("ModuleList", "Embedding", "LlamaForCausalLM", "LlamaModel"):
            add(Op.BWD_EXIT, m)

    add(Op.MARK, Mark.FORWARD_BEGIN)
    forward(root)
    add(Op.MARK, Mark.FORWARD_END)
    add(Op.MARK, Mark.BACKWARD_BEGIN)
    backward(root)
    add(Op.MARK, Mark.BACKWARD_END)


def adapters_only(tape: ExpandedTape) -> ExpandedTape:
    """The same model with everything frozen but the attention's projections."""
    params = tuple(replace(p, trainable="_proj" in p.name) for p in tape.params)
    rows = list(zip(tape.op, tape.arg, tape.aux, tape.kind, tape.module, strict=True))
    gone = {aux for op, arg, aux, *_ in rows if op == Op.GRAD and not params[arg].trainable}
    kept = [row for row in rows if not (row[0] == Op.ALLOC and row[1] in gone) and not (row[0] == Op.GRAD and row[2] in gone)]
    return ExpandedTape(tape.modules, params, *(list(column) for column in zip(*kept, strict=True)))
