"""Plans of a live module with an example batch, which decides the micro batch."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.lengths import padded_batches
from zeroplan.core.workload import DType
from zeroplan.ds_config.dialect import Dialect
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.interop.setups import Setup
from zeroplan.planner.tapes import ExpandedTapes, NoTapeError
from zeroplan.run.ask import Ask
from zeroplan.tape.expanded import ExpandedTape
from zeroplan.tape.sizes import KernelDevice
from zeroplan.techniques.ppo import PpoTechnique, Rollout
from zeroplan.techniques.quantized_base import QuantizedBaseTechnique


def with_shape(request: Ask) -> Ask:
    """Return the request with the micro batch and the length of its example batch.

    Raises:
        BadInput: inputs without a module, that its forward does not take, or of another size than the request asks for.
    """
    if not hasattr(request.model, "named_parameters"):
        raise BadInput("inputs are an example batch for a live module", where="inputs", remedy="give the module as the model")
    if ("lora_rank" in request or "quantize" in request) and not request[QuantizedBaseTechnique.built]:
        raise BadInput(
            "an example batch is traced through the module as it is", where="inputs", remedy="give the module with its adapters"
        )
    from zeroplan.trace.example import arguments, shape_of

    samples, positions = shape_of(arguments(request.model, request.inputs))
    for name, value, own in (("micro_batch", request.micro_batch, samples), ("seq_len", request.seq_len, positions)):
        if value is not None and value != own:
            raise BadInput(f"{value} differs from the inputs' {own}", where=name, remedy=f"leave {name} out")
    return request.replace(micro_batch=samples, seq_len=positions)


#: Micro batches of another length that are traced before the longest: each takes a trace of its own.
_SHORTER = 1


class ModuleTapes(ExpandedTapes):
    """Tapes of one module for one batch, in the dtypes that each case asks for.

    Args:
        engine: what trains.
        module: the module.
        inputs: one micro batch.
        cut: whether the batch's tensors are of shape (samples, tokens), so that shorter ones can be made of it.
    """

    def __init__(self, engine: Engine, module: Any, inputs: Any, *, cut: bool = False) -> None:
        super().__init__(engine)
        self._asked, self._module, self._inputs, self._cut = engine, module, inputs, cut
        self._made: dict[str, ExpandedTape | NoTapeError] = {}

    def of(self, case: Case) -> ExpandedTape:
        """Return the tape; see :meth:`ExpandedTapes.of`."""
        options = self._asked.trace_options(case)
        if options.key not in self._made:
            self._made[options.key] = self._traced(case)
        found = self._made[options.key]
        if isinstance(found, NoTapeError):
            raise found
        return found

    def _traced(self, case: Case) -> ExpandedTape | NoTapeError:
        work = case.workload
        try:
            tape = self._of_length(case, work.batch.seq_len or 1)
            if (rollout := work.technique(Rollout)) is not None:
                return PpoTechnique().expanded(rollout, tape, work)
            if not (self._cut and work.batch.lengths):
                return tape
            drawn = padded_batches(work.batch.lengths, work.batch.rows, cut=work.batch.seq_len)[-1 - _SHORTER : -1]
            return replace(tape, shapes=tuple(self._of_length(case, length) for length in drawn))
        except Exception as fault:  # the user's own code runs here
            text = " ".join(str(fault).split())[:160]
            return NoTapeError(f"the module cannot be traced ({type(fault).__name__}: {text})")

    def _of_length(self, case: Case, length: int) -> ExpandedTape:
        from zeroplan.trace.example import buffer_bytes, trace_example

        work, inputs = case.workload, self._inputs
        if length != work.batch.seq_len:
            inputs = {name: tensor[:, :length] for name, tensor in inputs.items()}
        tape = trace_example(self._module, inputs, self._asked.trace_options(case), self._asked.graded(case))
        expanded = tape.expand(work.batch.micro_batch, length, None, device=KernelDevice.of(case.cluster.gpu))
        # DeepSpeed casts the module, the included runtime what a state_dict holds; FSDP and autocast leave buffers as they are.
        dialect = self._asked.dialect if work.numerics.param_bytes == 2 else None
        persistent = dialect is Dialect.RUNTIME
        return replace(expanded, buffers=buffer_bytes(self._module, half=dialect is not None, persistent=persistent))


#: Keys that its own code has: that code itself, and an adapter of the head.
_OWN = ("model", "lora_head")


def with_own_code(request: Ask, setup: Setup) -> Ask:
    """Return the request with LitGPT's own model and loss; as it is where LitGPT is not installed.

    A model that the command line names in place of the file's stays.
    """
    lit = setup.ask.lit_model
    if (
        lit is None
        or request.model != setup.ask.model
        or request.seq_len is None
        or request[QuantizedBaseTechnique.quantize] != setup.ask[QuantizedBaseTechnique.quantize]
    ):
        return request
    if find_spec("litgpt") is None or find_spec("torch") is None:
        return request
    from zeroplan.trace.litgpt import batch_of, litgpt_module

    micro_batch = request.micro_batch or 1
    module = litgpt_module(lit, seq_len=request.seq_len, converts=request.dtype != DType.FP16)
    if module is None:
        return request
    return request.replace(
        model=module,
        inputs=batch_of(micro_batch, request.seq_len),
        built=True,
        micro_batch=micro_batch,
        lora_rank=None,
        lora_targets=(),
        lora_dropout=False,
        adapter_dtype=None,
        mixed_units=lit.mixed_units,
        longest_first=lit.longest_first,
        unmodelled=tuple(one for one in request.unmodelled if one.key not in _OWN),
    )
