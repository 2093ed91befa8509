"""The engine's unsharded parameters: one unit's, all one after another, and as a state dict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeroplan.core.errors import BadInput
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.full_tensors import full_state_dict, persistent_buffers, whole_params


class EngineParameters(EngineParts):
    """Reads of unsharded parameters between the calls of a training."""

    def wait_parameters(self) -> None:
        """Makes the current stream wait for every all-gather that the last step has issued.

        Call it before reading parameters directly at stages 0 to 2; forwards wait by themselves.
        """
        self.schedule.wait_for_unshard()

    def unit_names(self) -> list[str]:
        """The names of the units that the model was divided into, the root first."""
        return [unit.name for unit in self.model_states.units]

    @contextmanager
    def gathered(self, name: str = "root") -> Iterator[None]:
        """A context in which one unit's parameters are unsharded. Every rank must enter it.

        What is written to them stays, if every rank writes the same. At stage 3 no gradients can be taken of what is computed
        from them, as their backward would come after the context.

        Args:
            name: one of :meth:`unit_names`.

        Raises:
            BadInput: for an unknown name, and when the engine cannot be used.
        """
        self.checks.require_usable("engine")
        unit = next((u for u in self.model_states.units if u.name == name), None)
        if unit is None:
            raise BadInput(f"there is no unit {name!r}", where="gathered", remedy="see engine.unit_names()")
        with self.schedule.unsharded(unit):
            yield
            self.writes.keep()

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every parameter, then every persistent buffer, by name and unsharded.

        A tensor is valid until the next is asked for. Every rank must iterate to the end. Tied parameters come once, under
        their first name.
        """
        self.checks.require_usable("engine")
        yield from ((name, values) for name, _, values in whole_params(self.schedule))
        yield from persistent_buffers(self.module)

    def module_state_dict(self) -> dict[str, torch.Tensor] | None:
        """Returns the model's unsharded state dict in the model's dtype, in the first rank's host memory; None on the other
        ranks.

        Every rank must call it. Tied parameters appear under each of their names and share memory.
        """
        self.checks.require_usable("engine")
        return full_state_dict(self.module, self.schedule)
