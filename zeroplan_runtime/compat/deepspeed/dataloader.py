"""``deepspeed.runtime.dataloader``: loaders that give each rank its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


class DeepSpeedDataLoader:
    """Batches of this rank's part of a dataset; each pass over it makes workers anew.

    Args:
        dataset: with a length, or iterable: then every rank gets all of it, as with DeepSpeed.
        batch_size: samples in a batch.
        ranks, rank: the number of ranks, and this one.
        shuffle: shuffle the samples.
        pin_memory: copy batches to pinned memory.
        data_sampler: chooses the samples instead.
        collate_fn: makes a batch of samples.
        num_local_io_workers: processes that load.
        drop_last: leave out a last batch that is smaller.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        ranks: int,
        rank: int,
        shuffle: bool = True,
        pin_memory: bool = False,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int = 0,
        drop_last: bool = False,
    ) -> None:
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(dataset, ranks, rank, shuffle=shuffle)
        self.dataset, self.data_sampler, self.batch_size = dataset, data_sampler, batch_size
        self.collate_fn, self.pin_memory, self.drop_last = collate_fn, pin_memory, drop_last
        self.num_local_io_workers = num_local_io_workers
        self._batches: Iterator[Any] = iter(())

    def __len__(self) -> int:
        sized: Any = self.data_sampler if self.data_sampler is not None else self.dataset
        samples = len(sized)
        return samples // self.batch_size if self.drop_last else math.ceil(samples / self.batch_size)

    def __iter__(self) -> DeepSpeedDataLoader:
        self._batches = iter(
            DataLoader(
                self.dataset,
                self.batch_size,
                sampler=self.data_sampler,
                pin_memory=self.pin_memory,
                collate_fn=self.collate_fn,
                num_workers=self.num_local_io_workers,
                drop_last=self.drop_last,
            )
        )
        return self

    def __next__(self) -> Any:
        return next(self._batches)


class RepeatingLoader:
    """Goes through `loader` again and again."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)
