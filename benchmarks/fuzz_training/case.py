"""One training to compare: a model, how it is used, and a configuration. All of it follows from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Case:
    """The defaults are the plainest training; a case is made smaller by going back to them field by field.

    Attributes of the model:
        depth, width: blocks, and features between them.
        container: of the blocks: ``list``, ``sequential``, or ``none`` (attributes, so that all parameters are the root's).
        blocks: ``mlp``, ``attention``, ``mha`` (torch's module), ``lstm``, or ``mixed``: the first two in turn.
        embedding: ``sparse`` gradients.
        weights: of the blocks' last layers: ``weight-norm`` or ``spectral-norm``, by torch's parametrizations.
        dropout: in the blocks.
        batch_norm: a layer with running statistics of its own.
        tied: the head's weight is the embedding's.
        unused: a parameter gets no gradient.
        buffers: running statistics that the forward writes and reads.
        checkpointing: ``reentrant`` or ``plain``.
        frozen: ``embed``, ``blocks`` (LoRA alone is trained), or ``first`` (block).
        lora: low-rank additions.
        reads: the root uses a weight of the last block ``before`` or ``after`` that block.
        clamps: what changes a weight in its forward: ``each`` block, each by its ``data``, the ``root``, or an embedding with
            ``max-norm``.
        order: of the blocks: one runs ``twice``, ``alternating`` ones are left out, or ``backwards``.
        output: of a block: ``tuple`` or ``dict``.
        compiled: ``torch.compile`` of ``each`` block.
        odd: an empty parameter, a scalar, a column-major one.
        float8: the recipe by which blocks' linear layers multiply in 8 bits; ``gathers``: tensorwise, and so gathered, too.

    Attributes of the use:
        steps: optimizer steps.
        loss: a penalty before or after the forward, two backwards, a retained graph, two forwards, a gradient by
            ``torch.autograd.grad``, a gradient of a gradient.
        drops: ``zero_grad()`` at the ``start`` of each step, or ``between`` two backwards.
        schedule: torch's ``step`` or ``cycle``, or rates set by hand ``before`` or ``between`` backward and step.
        hooks: of the user's: on a ``weight``, a module's ``forward`` or ``backward``, or the ``optimizer``'s steps.
        autocast: the forward runs in bf16 by ``torch.autocast``.
        overflows: the number of the step, from 1, whose loss is infinite on the first rank; 0 for none.
        by_hand: the ends of accumulations are set, not counted.
        within: what is done between forward and backward: ``norm``, ``eval``, ``data-write``.
        before_step: what is done between the last backward and the step: ``eval``, or the whole ``state`` is taken.
        changes: of the model after the first step: ``swap`` two blocks, ``delete`` the last one, or ``tie`` head and embedding.
        after: what is done after each step.
        alias: how the forward takes what ``caught`` in `after` looks at: ``detach``, ``data``, ``view``, ``parameter``.
        late: aliases and writes in the forward begin with the second step.

    The others are the configuration's.
    """

    depth: int = 2
    width: int = 6
    container: str = "list"
    blocks: str = "mlp"
    tied: bool = False
    unused: bool = False
    buffers: bool = False
    checkpointing: str = ""
    frozen: str = ""
    lora: bool = False
    reads: str = ""
    clamps: str = ""
    order: str = ""
    output: str = ""
    odd: bool = False
    float8: str = ""
    embedding: str = ""
    weights: str = ""
    compiled: str = ""
    dropout: bool = False
    batch_norm: bool = False

    steps: int = 2
    loss: str = ""
    drops: str = ""
    schedule: str = ""
    hooks: str = ""
    autocast: bool = False
    overflows: int = 0
    by_hand: bool = False
    within: str = ""
    before_step: str = ""
    changes: str = ""
    after: tuple[str, ...] = ()
    alias: str = "detach"
    late: bool = False

    ranks: int = 1
    stage: int = 0
    dtype: str = "fp32"
    accum: int = 1
    clip: float = 0.0
    optimizer: str = "sgd"
    maximize: bool = False
    groups: int = 1
    given: bool = False
    offload: str = ""
    delayed: int = 0
    reduce_dtype: str = ""
    accum_dtype: str = ""
    wide_numel: int = 100
    ring: int = 2
    direct: bool = True
    audit: int = 1
    seed: int = 0

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Case({', '.join(changed)})"

    @property
    def precision(self) -> str:
        """The dtype that numbers are rounded to."""
        return "bf16" if self.autocast else self.dtype

    def plainer(self) -> list[Case]:
        """Yield the cases with one thing less."""
        made = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "seed" or value == field.default:
                continue
            if field.name == "after":
                made += [replace(self, after=tuple(one for one in value if one != less)) for less in value]
            else:
                change: dict[str, Any] = {field.name: field.default}
                made.append(replace(self, **change))
        return [case for case in made if case == legal(case)]


def _often(common: Any, *others: Any, times: int) -> tuple[Any, ...]:
    """Return `others` once each, after `common` `times` times."""
    return (common,) * times + others


#: Optimizers of torch's that run without a kernel.
ELEMENTWISE = (
    "amsgrad",
    "adamw-amsgrad",
    "rmsprop",
    "rmsprop-momentum",
    "rmsprop-centered",
    "adagrad",
    "adadelta",
    "adamax",
    "nadam",
    "radam",
    "asgd",
    "rprop",
)
#: The values of each field, the plainest first; what stands there several times is drawn as often.
CHOICES: dict[str, tuple[Any, ...]] = {
    "depth": (2, 1, 3, 4),
    "width": (6, 8, 12),
    "container": _often("list", "sequential", "none", times=3),
    "blocks": _often("mlp", "attention", "mixed", "mha", "lstm", times=3),
    "tied": _often(False, True, times=3),
    "unused": _often(False, True, times=4),
    "buffers": _often(False, True, times=4),
    "checkpointing": _often("", "reentrant", "plain", times=5),
    "frozen": _often("", "embed", "blocks", "first", times=8),
    "lora": _often(False, True, times=5),
    "reads": _often("", "before", "after", times=8),
    "clamps": _often("", "each", "data", "root", "max-norm", times=15),
    "order": _often("", "twice", "alternating", "backwards", times=6),
    "output": _often("", "tuple", "dict", times=8),
    "odd": _often(False, True, times=4),
    "embedding": _often("", "sparse", times=9),
    "float8": _often("", "tensorwise", "rowwise", "gathers", times=30),
    "weights": _often("", "weight-norm", "spectral-norm", times=12),
    "compiled": _often("", "each", times=39),
    "dropout": _often(False, True, times=7),
    "batch_norm": _often(False, True, times=7),
    "steps": (2, 3, 4),
    "loss": _often(
        "",
        "penalty-before",
        "penalty-after",
        "two-backwards",
        "retained",
        "two-forwards",
        "input-gradient",
        "gradient-penalty",
        times=7,
    ),
    "drops": _often("", "start", "between", times=5),
    "schedule": _often("", "step", "cycle", "before", "between", times=6),
    "hooks": _often("", "weight", "forward", "backward", "optimizer", times=8),
    "autocast": _often(False, True, times=11),
    "overflows": _often(0, 1, 2, times=10),
    "by_hand": _often(False, True, times=7),
    "within": _often("", "norm", "eval", "data-write", times=12),
    "before_step": _often("", "eval", "state", times=12),
    "changes": _often("", "swap", "delete", "tie", times=14),
    "alias": ("detach", "data", "view", "parameter"),
    "late": (False, True),
    "ranks": (2, 1, 2, 2, 3, 4),
    "stage": (0, 1, 2, 3),
    "dtype": _often("fp32", "bf16", "fp16", times=5),
    "accum": (1, 1, 2, 3),
    "clip": (0.0, 0.0, 0.05, 1e9),
    "optimizer": _often("sgd", "momentum", "nesterov", "adamw", "adam", "lamb", "lion", *ELEMENTWISE, times=3),
    "maximize": _often(False, True, times=6),
    "groups": (1, 1, 2, 3),
    "given": _often(False, True, times=2),
    "offload": _often("", "cpu", "cpu", "nvme", "half", "param-cpu", "param-nvme", times=9),
    "delayed": (0, 0, 1, 2),
    "reduce_dtype": _often("", "fp32", "bf16", times=5),
    "accum_dtype": _often("", "fp32", times=2),
    "wide_numel": (100, 100, 10000),
    "ring": _often(2, 3, times=4),
    "direct": _often(True, False, times=4),
    "audit": (1, 0),
}
#: Values of `after`.
AFTER = (
    "ema",
    "norm",
    "eval",
    "write",
    "data-write",
    "state-dict",
    "load-state",
    "save",
    "held",
    "caught",
    "gathered",
    "anew",
    "module-eval",
    "momentum",
    "array-write",
    "whole-state",
    "without-optimizer",
)
_CHANCE = 0.12


def draw(seed: int, ranks: tuple[int, int] = (1, 4)) -> Case:
    """Draw the case of `seed`, on a number of ranks within the bounds."""
    dice = random.Random(seed)
    chosen = {name: dice.choice(values) for name, values in CHOICES.items()}
    chosen["after"] = tuple(one for one in AFTER if dice.random() < _CHANCE)
    chosen["ranks"] = min(max(chosen["ranks"], ranks[0]), ranks[1])
    return legal(Case(**chosen, seed=seed))


def from_choices(after: tuple[str, ...], **chosen: Any) -> Case:
    """Make the case of a value for each field in :data:`CHOICES`; for hypothesis, which makes cases smaller by earlier
    choices.
    """
    return legal(Case(**chosen, after=after))


def legal(case: Case) -> Case:
    """`case` without what a config's reader refuses for sure, plain torch refuses, or has no meaning."""
    while (changed := _more_legal(case)) != case:
        case = changed
    return case


def _more_legal(case: Case) -> Case:
    """`case` after one look at each rule; what a rule takes out may be what another asks for."""
    change: dict[str, Any] = {}
    after = set(case.after)
    for rules in (_of_config, _of_float8, _of_weights, _of_optimizer, _of_changes, _of_what_follows):
        rules(case, change, after)
    change["after"] = tuple(one for one in case.after if one in after)
    return replace(case, **change)


def _of_config(case: Case, change: dict[str, Any], _: set[str]) -> None:
    if case.offload.startswith("param") or case.offload == "half":
        change["stage"] = 3
    elif case.offload and not case.stage:
        change["offload"] = ""
    if case.dtype == "fp32":
        change |= {"reduce_dtype": "", "accum_dtype": ""}
    if case.dtype == "fp16" and case.reduce_dtype == "bf16":
        change["reduce_dtype"] = ""
    if case.frozen == "blocks":
        change["lora"] = True
    if case.frozen == "embed":
        change["tied"] = False
    if case.loss == "gradient-penalty":
        change |= {"blocks": "mlp", "batch_norm": False}  # torch's attention has no second derivative on a CPU
    if case.checkpointing == "reentrant" and (
        case.output or case.frozen or case.loss in ("input-gradient", "gradient-penalty")
    ):
        change["checkpointing"] = "plain"  # the reentrant one asks for a tensor with a gradient, and for backward()
    if case.depth < 2:
        change |= {"order": "", "reads": ""}
    if case.tied or case.frozen == "embed" or case.dtype == "fp16":  # torch adds no sparse gradients in fp16
        change["embedding"] = ""
    if case.dtype != "fp32":
        change["autocast"] = False
    if case.dtype == "fp32" or case.overflows > case.steps:
        change["overflows"] = 0


def _of_float8(case: Case, change: dict[str, Any], after: set[str]) -> None:
    """Rules of 8-bit products, which stand in for bf16's of plain linear layers in blocks."""
    if not case.float8:
        return
    change |= {"dtype": "bf16", "width": 16, "weights": "", "lora": False, "autocast": False}
    if case.optimizer in ("lion", "rprop"):
        change["optimizer"] = "sgd"
    if case.frozen == "blocks":
        change["frozen"] = ""
    if case.container == "none":
        change["container"] = "list"
    if case.depth < 2:
        change["depth"] = 2
    if case.blocks in ("mha", "lstm"):
        change["blocks"] = "mlp"
    if case.loss == "gradient-penalty":
        change["loss"] = ""
    if case.float8 == "gathers":  # a forward sees rounded matrices, and refuses writes to them and arrays that share them
        change |= {"stage": 3, "offload": "", "reads": "", "clamps": ""}
        after -= {"caught", "array-write"}


def _of_weights(case: Case, change: dict[str, Any], _: set[str]) -> None:
    if case.clamps in ("each", "data"):
        change["weights"] = ""
    if case.weights == "spectral-norm" and (case.order == "twice" or case.loss or case.checkpointing or case.dtype != "fp32"):
        change["weights"] = ""  # each forward changes its vectors in place, which autograd refuses then
    if change.get("lora", case.lora) and case.blocks in ("mha", "lstm"):
        change["blocks"] = "mlp"
    if case.clamps and (case.loss in ("two-forwards", "input-gradient", "gradient-penalty", "retained") or case.checkpointing):
        change["clamps"] = ""  # autograd refuses a weight that was changed after it was used


def _of_optimizer(case: Case, change: dict[str, Any], after: set[str]) -> None:
    if case.optimizer in ("lamb", "lion"):
        change |= {"given": False, "maximize": False}  # torch has neither
    if case.optimizer in ("lion", "rprop"):
        # They take a sign: in 16 bits, and where a gradient is zero in theory (biases of keys, what a batch norm takes out),
        # nothing but rounding decides it.
        change |= {"dtype": "fp32", "autocast": False, "batch_norm": False}
        if case.blocks in ("attention", "mha", "mixed"):
            change["blocks"] = "mlp"
    offload = change.get("offload", case.offload)
    if case.optimizer == "lamb" and offload:
        change |= {"offload": "", "delayed": 0}  # its norms need all ranks
    elif offload != "cpu":
        change["delayed"] = 0
    if case.optimizer not in ("momentum", "nesterov"):
        after -= {"momentum"}
    if case.schedule == "cycle" and case.optimizer in ("sgd", "rmsprop", "adagrad", "adadelta", "asgd", "rprop"):
        change["schedule"] = "step"  # they have no momentum to cycle


def _of_changes(case: Case, change: dict[str, Any], after: set[str]) -> None:
    """Rules of step hooks, of a changed structure, and of loads."""
    if case.hooks == "optimizer" and case.overflows:
        change["hooks"] = ""  # those before a step run before one that is skipped, too
    if case.changes in ("delete", "swap") and (case.depth < 2 or (case.changes == "delete" and case.container == "none")):
        change["changes"] = ""
    if change.get("changes", case.changes):
        after -= {"save", "anew", "gathered", "ema"}  # what follows is under other names, and less
    if "save" not in after:
        after -= {"without-optimizer"}


def _of_what_follows(case: Case, change: dict[str, Any], after: set[str]) -> None:
    if "caught" not in after:
        change["alias"] = "detach"
        if not case.clamps:
            change["late"] = False
    if change.get("delayed", case.delayed):
        after -= {
            "write",
            "data-write",
            "load-state",
            "state-dict",
            "gathered",
            "anew",
            "array-write",
            "whole-state",
        }  # a write is refused, a state dict ends it
        change |= {"within": "" if case.within == "data-write" else case.within, "clamps": "", "before_step": ""}
        if case.drops == "between":
            change["drops"] = ""  # a backward brings the update before, even if its gradients are dropped
    if case.compiled:
        change |= {"weights": "", "hooks": "", "checkpointing": "", "clamps": "", "output": "", "batch_norm": False}
        if case.blocks == "lstm":
            change["blocks"] = "mlp"
        if case.loss in ("gradient-penalty", "retained"):
            change["loss"] = ""  # torch's compiled graphs have no second derivative and are not kept
        after -= {"caught"}
    if change.get("stage", case.stage) == 3:
        after -= {"load-state", "state-dict", "write", "data-write"}
        if "gathered" not in after:
            after -= {"array-write"}
    if "nvme" in case.offload:
        after -= {"load-state", "write", "data-write", "gathered", "array-write"}
    if "save" in after:
        after -= {"anew"}
