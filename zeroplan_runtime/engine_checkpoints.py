"""The engine's calls that write and read files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan_runtime.engine_parameters import EngineParameters


class EngineCheckpoints(EngineParameters):
    """Checkpoints and exports. What they do is in :mod:`zeroplan_runtime.checkpoint`, which is slow to import."""

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """See :func:`zeroplan_runtime.checkpoint.save.save_checkpoint`."""
        from zeroplan_runtime.checkpoint.save import save_checkpoint

        self.checks.require_usable("engine.save_checkpoint")
        if not isinstance(save_dir, str | os.PathLike) or not str(save_dir):
            raise BadInput(f"{save_dir!r} is no folder", where="engine.save_checkpoint", remedy="give the path of one")
        self.checks.require_no_gradients(self.schedule.grads.has_grads)
        if self.optimizer_step is not None:
            self.optimizer_step.require_common_masters("engine.save_checkpoint")
        self.checks.require_no_new_parameters(self.module)
        return save_checkpoint(
            self,
            save_dir,
            tag,
            client_state,
            latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, **options: bool
    ) -> tuple[str | None, dict[str, Any]]:
        """See :func:`zeroplan_runtime.checkpoint.load.load_checkpoint`."""
        from zeroplan_runtime.checkpoint.load import load_checkpoint

        self.checks.require_usable("engine.load_checkpoint", allow_failed_step=True)
        return load_checkpoint(self, load_dir, tag, **options)

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "model.safetensors") -> None:
        """See :func:`zeroplan_runtime.checkpoint.export.save_16bit_model`."""
        from zeroplan_runtime.checkpoint.export import save_16bit_model

        self.checks.require_usable("engine.save_16bit_model")
        if self.optimizer_step is not None:
            self.optimizer_step.require_common_masters("engine.save_16bit_model")
        save_16bit_model(self, save_dir, save_filename)
