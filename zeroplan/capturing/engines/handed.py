"""What a script hands to an engine, as plain data: its parameters, its optimizer, and how its loop runs."""

from __future__ import annotations

import contextlib
import itertools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeroplan.capturing.engines.micro_batches import MicroBatches, MicroBatchSlice
from zeroplan.capturing.places import on_gpu
from zeroplan.capturing.recorder import StoppedError
from zeroplan.capturing.result import sizes_on
from zeroplan.capturing.source import CodeLine, user_line
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import known_optimizer, torch_row
from zeroplan.models.live import spec_from_module
from zeroplan.models.stored import as_data
from zeroplan.tape.codec import to_json
from zeroplan.tape.expanded import Op

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture

#: Bytes of further tensors on the GPU from which they are said.
_WORTH_SAYING = 1 << 20
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Handed:
    """One model in an engine's hands.

    Args:
        capture: the capture.
        engine: the name of the planner's engine.
        module: the model, on the GPU as the stand-in has put it there.
        options: of an ask, those that the engine's own arguments decide.
        zero3, both, keeps_grads: as :class:`MicroBatches` has them.
        since: the event from which the engine has it; None for this one.
        as_made: whether the engine leaves parameters as the script has made them.
    """

    def __init__(
        self,
        capture: Capture,
        engine: str,
        module: nn.Module,
        options: dict[str, Any],
        *,
        zero3: bool = False,
        both: bool = False,
        keeps_grads: bool = True,
        since: int | None = None,
        as_made: bool = False,
    ) -> None:
        line = user_line()
        if capture.handed is not None:
            first = capture.engine_notes["line"]
            raise StoppedError(f"a second model is handed to an engine (the first: {first}), and plans are of one", line)
        capture.handed, capture.engine_notes["line"] = self, line
        self.capture, self.engine, self.module, self.options, self.line = capture, engine, module, options, line
        self.optimizer: Any = None
        self.as_made = as_made
        self.notes: list[Any] = []
        self.made_on_host = not any(on_gpu(p) for p in module.parameters())
        self.before = len(capture.recorder.out.op) if since is None else since
        self.initialised = self.before
        try:
            self.spec = spec_from_module(module)
        except BadInput as error:
            raise StoppedError(str(error), line) from None
        self.batches = MicroBatches(capture, module, zero3=zero3, both=both, keeps_grads=keeps_grads)

    def ready(self) -> None:
        """The engine has the model where it trains it."""
        self.initialised = len(self.capture.recorder.out.op)

    def optimized(self, optimizer: Any) -> None:
        """Note the optimizer, by its class and its own switches."""
        self.optimizer = optimizer
        self.options |= optimizer_facts(optimizer)

    # ---- what the planner gets -----------------------------------------------------------------------------------------
    def as_data(self) -> dict[str, Any]:
        """Return all that the planner needs; notes of what it cannot have go to the capture."""
        batches, notes = self.batches, self.capture.engine_notes
        tapes = {}
        for note in self.notes:
            note()
        for name, zero3 in (("plain", False), ("zero3", True)):
            found = batches.recorded(zero3=zero3)
            if found is not None:
                tapes[name] = {
                    "tapes": [to_json(tape) for tape in found.tapes],
                    "shapes": [list(map(list, s)) for s in found.shapes],
                }
        said = dict(self.options)
        one = batches.slices[-1] if batches.slices else None
        if one is not None:
            self._of_batches(said, one)
        said["moved"] = self.made_on_host or self.capture.in_trainer
        if notes.get("saves"):
            said["save"] = notes["saves"]
            said["save_by"] = "trainer" if self.capture.in_trainer else "accelerate" if "accelerate" in sys.modules else "loop"
        said["gradient_checkpointing"] = any(getattr(m, "gradient_checkpointing", False) is True for m in self.module.modules())
        return {
            "engine": self.engine,
            "line": str(self.line or ""),
            "spec": as_data(self.spec),
            "said": {key: value for key, value in said.items() if value is not None},
            "tapes": tapes,
            "buffers": self._buffers(),
            "beside": self._other_bytes(),
            "before": self._peak(0, self.before),
            "outside": self._outside(),
        }

    def _of_batches(self, said: dict[str, Any], one: MicroBatchSlice) -> None:
        capture, batches = self.capture, self.batches
        sizes = [shape for _, shape in one.shapes]
        if "ds_config" not in said:  # which says both
            said["micro_batch"] = max(1, sizes[0][0] if sizes else 1)
            said["grad_accum"] = batches.accumulates
        said["seq_len"] = max(1, next((shape[1] for shape in sizes if len(shape) > 1), 1))
        if self.as_made:
            self._precision(said, one)
        said["own_loop"] = not capture.in_trainer
        said["detached_loss"] = capture.in_trainer or not batches.keeps_after(len(batches.slices) - 1)
        if any(each.backwards > 1 for each in batches.slices):
            capture.leave_out("backward", "unknown", "the script runs several backwards of one forward; one is planned")
        if any(each.forwards > 1 for each in batches.slices):
            capture.leave_out("forward", "unknown", "the script calls the model several times before a backward")
        if any(each.others for each in batches.slices):
            capture.leave_out("forward without gradients", "more", "the model answers without gradients before a backward")

    def _precision(self, said: dict[str, Any], one: MicroBatchSlice) -> None:
        """Set the dtypes of an engine that leaves parameters as the script has made them."""
        params = list(self.module.parameters())
        trained = {p.dtype for p in params if p.requires_grad and p.is_floating_point()}
        frozen = {p.dtype for p in params if not p.requires_grad and p.is_floating_point()} - trained
        arithmetic = dtype_name(one.autocast)
        if len(trained) > 1 or len(frozen) > 1:
            self.capture.leave_out("dtypes", "unknown", "parameters have several dtypes; those of most are counted")
        kept = dtype_name(max(trained, key=lambda dtype: sum(p.numel() for p in params if p.dtype == dtype), default=None))
        base = dtype_name(next(iter(frozen), None))
        if kept is None:
            self.capture.leave_out("dtypes", "unknown", "parameters of other dtypes than fp32, bf16 and fp16")
        elif kept == "fp32" and base in ("bf16", "fp16"):
            said["dtype"], said["precision"] = base, "half-autocast"
        elif kept == "fp32":
            said["dtype"], said["precision"] = (arithmetic, "autocast") if arithmetic else ("fp32", "fp32")
        else:
            said["dtype"], said["precision"] = kept, "pure"

    def _buffers(self) -> int:
        held = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in self.module.buffers() if on_gpu(b)}
        return sum(held.values())

    def _alive(self, until: int) -> set[int]:
        out = self.capture.recorder.out
        alive: set[int] = set()
        for op, arg in zip(out.op[:until], out.arg[:until], strict=True):
            if op == Op.ALLOC:
                alive.add(arg)
            elif op == Op.FREE:
                alive.discard(arg)
        return alive

    def _bytes(self, storages: set[int]) -> int:
        out = self.capture.recorder.out
        return sum(sizes_on([out.allocs[one].size for one in storages], self.batches._device))

    def _own(self) -> set[int]:
        """Storages of the model and of its optimizer."""
        ident = self.capture.recorder.ident
        own = {ident(t) for t in (*self.module.parameters(), *self.module.buffers()) if on_gpu(t)}
        own |= {ident(p.grad) for p in self.module.parameters() if p.grad is not None and on_gpu(p.grad)}
        for group in getattr(self.optimizer, "param_groups", ()):
            for param in group["params"]:
                if on_gpu(param):
                    own.add(ident(param))
                held = self.optimizer.state.get(param, {})
                own |= {ident(t) for t in (held.values() if isinstance(held, dict) else ()) if on_gpu(t)}
        return own

    def _other_bytes(self) -> int:
        """Bytes on the GPU as the last micro batch begins that are neither the model's, its optimizer's, nor its batch's."""
        if not self.batches.slices:
            return 0
        last = self.batches.slices[-1]
        out = self.capture.recorder.out
        graded = {out.aux[at] for at in range(len(out.op)) if out.op[at] == Op.GRAD}
        inside = {out.arg[at] for one in self.batches.slices for at in range(one.begin, one.end) if out.op[at] == Op.ALLOC}
        found = self._bytes(self._alive(last.begin) - self._own() - graded - inside)
        return found if found >= _WORTH_SAYING else 0

    def _peak(self, begin: int, end: int, base: int = 0) -> int:
        """The most bytes that the script holds on the GPU between two events, those that were there before aside."""
        out = self.capture.recorder.out
        sizes = sizes_on([alloc.size for alloc in out.allocs], self.batches._device)
        inside: set[int] = set()
        now = peak = base
        for op, arg in zip(out.op[begin:end], out.arg[begin:end], strict=True):
            if op == Op.ALLOC:
                inside.add(arg)
                now += sizes[arg]
                peak = max(peak, now)
            elif op == Op.FREE and arg in inside:
                inside.discard(arg)
                now -= sizes[arg]
        return peak

    def _outside(self) -> int:
        """The most that the script takes at once beside model and optimizer outside of its micro batches: as it evaluates."""
        slices = self.batches.slices
        if not slices:
            return 0
        stretches = [(one.end, other.begin) for one, other in itertools.pairwise(slices)]
        stretches.append((slices[-1].end, len(self.capture.recorder.out.op)))
        return max(self._evaluated(begin, end) for begin, end in stretches)

    def _evaluated(self, begin: int, end: int) -> int:
        """The peak of those spans of a stretch in which the model answers without gradients."""
        from zeroplan.capturing.spans import EVALUATION, FIRST, INIT

        out = self.capture.recorder.out
        peak = 0
        start = begin
        for at in range(begin, end):
            if out.op[at] == Op.MARK and out.arg[at] >= FIRST + INIT:
                if out.arg[at] == FIRST + EVALUATION:
                    peak = max(peak, self._peak(start, at))
                else:
                    start = at
        return peak


def optimizer_facts(optimizer: Any) -> dict[str, Any]:
    """Return the options that say an optimizer: its row by its class's name, and the way in which it walks its tensors."""
    kind = type(optimizer).__name__
    row = torch_row(kind) if type(optimizer).__module__.startswith("torch.optim") else None
    found: dict[str, Any] = {"optimizer": known_optimizer(kind) if row is None else row.name}
    defaults = getattr(optimizer, "defaults", {})
    if type(optimizer).__module__.startswith("torch.optim"):
        found["torch_adam"] = True
        if "fused" in defaults:
            fused, foreach = defaults.get("fused"), defaults.get("foreach")
            found["optimizer_kind"] = "fused" if fused else "loop" if foreach is False else "foreach"
    return found


def watch_optimizers(capture: Capture, handed: Handed) -> None:
    """Note the optimizer that steps the model's parameters, once it does."""
    mine = {id(p) for p in handed.module.parameters()}

    def stepped(optimizer: Any) -> None:
        if handed.optimizer is None and any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            handed.optimized(optimizer)

    capture.spans.on_optimizer.append(stepped)


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """The planner's name of a dtype; None for one that it has not."""
    return _DTYPES.get(dtype) if dtype is not None else None


def in_trainer() -> bool:
    """Whether transformers' Trainer calls."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("transformers/trainer.py"):
            return True
        frame = frame.f_back
    return False


def place(line: CodeLine | None) -> str:
    """A line's name, for a sentence."""
    return str(line) if line is not None else "the script"


@contextlib.contextmanager
def nothing() -> Any:
    """A context that does nothing."""
    yield
