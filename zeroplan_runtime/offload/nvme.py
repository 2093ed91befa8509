"""Offload to NVMe: one rank's swap files, their folders, the I/O engine and the two swappers."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from zeroplan.core.arena.layout import ArenaLayout
from zeroplan.core.buffers import Place
from zeroplan.core.zero_config import ZeroConfig
from zeroplan_runtime.offload.chunks import block_sizes, optimizer_chunks, param_chunks
from zeroplan_runtime.offload.io import IoEngine
from zeroplan_runtime.offload.optimizer_swapper import OptimizerSwapper, states_in_files
from zeroplan_runtime.offload.param_swapper import ParamSwapper
from zeroplan_runtime.offload.swap_file import SwapFile
from zeroplan_runtime.offload.swap_folder import SwapFolder

logger = logging.getLogger("zeroplan_runtime")

_count = itertools.count()
_FP32_BYTES = 4


class NvmeOffload:
    """The swap files of one rank.

    Args:
        layout: the units and their sizes.
        zero: the folders of the files and the options of the I/O engine.
        buffers: the pinned memory of the layout's rows named ``swap.buffer``, by the rows' units.
        rank: this rank.
        device: the device that parameters are copied to.
        in_memory: accept a folder on a file system in host memory.

    Attributes:
        optimizer_swapper: updates what the optimizer has in files; None where it has nothing there.
        param_swapper: the parameters in files; None where they are in memory.

    Raises:
        BadInput: when a folder is not usable or its disk is too small. No file is left behind then.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        zero: ZeroConfig,
        buffers: Mapping[str, torch.Tensor],
        *,
        rank: int,
        device: torch.device,
        in_memory: bool = False,
    ) -> None:
        self.engine = IoEngine(zero.aio)
        if self.engine.why:
            logger.info("file I/O uses the backend %s: %s", self.engine.backend, self.engine.why)
        self.folders: dict[str, SwapFolder] = {}
        self.optimizer_swapper: OptimizerSwapper | None = None
        self.param_swapper: ParamSwapper | None = None
        self._zero, self._rank, self._in_memory = zero, rank, in_memory
        self._job = f"{os.getpid()}-{next(_count)}"
        try:
            if layout.param_buffer:
                file = self._params_file(layout, buffers["parameters"].dtype)
                self.param_swapper = ParamSwapper(layout, buffers["parameters"], file, device)
            if layout.swapped_tensors:
                states = self._states_file(layout) if layout.states_in_files else None
                self.optimizer_swapper = OptimizerSwapper(layout, buffers["optimizer"], states, self.param_swapper)
        except BaseException:
            self.close()
            raise

    def _states_file(self, layout: ArenaLayout) -> SwapFile:
        chunks = optimizer_chunks(layout)
        inside = [unit.shape.name for unit in layout.units if unit.trainable is not None and unit.place is Place.NVME]
        pairs = [(buffer, chunk) for name in inside for chunk in chunks[name] for buffer in states_in_files(layout)]
        return self._folder(self._zero.offload_optimizer.nvme_path).file("states", block_sizes(pairs, _FP32_BYTES))

    def _params_file(self, layout: ArenaLayout, dtype: torch.dtype) -> SwapFile:
        chunks = [pair for pairs in param_chunks(layout).values() for pair in pairs]
        return self._folder(self._zero.offload_param.nvme_path).file("params", block_sizes(chunks, dtype.itemsize))

    def _folder(self, path: str | None) -> SwapFolder:
        assert path is not None
        real = os.path.realpath(path)
        if real not in self.folders:
            self.folders[real] = SwapFolder(Path(path), self._job, self._rank, self.engine, allow_memory=self._in_memory)
        return self.folders[real]

    def close(self) -> None:
        """Waits for transfers and removes the files. No update may be under way."""
        if self.optimizer_swapper is not None:
            self.optimizer_swapper.drop_prefetch()
        if self.param_swapper is not None:
            self.param_swapper.drop_prefetch()
        for folder in self.folders.values():
            folder.close()
        self.engine.close()
