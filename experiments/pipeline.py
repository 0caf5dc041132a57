"""Batches with Grain: shuffled, divided among processes, with a position for a checkpoint."""

from typing import Any

import grain

SEEDS = 2**32

# One thread reads ahead, and holds two batches ready: records are slices of memory, so more
# threads would only take turns; one is enough to hide the reading of a mapped file.
READ_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)


def batches(
    source: grain.sources.RandomAccessDataSource[Any],
    *,
    seed: int,
    size: int,
    rows: slice = slice(None),
) -> grain.DatasetIterator[Any]:
    """An endless iterator over batches of a source's records, in another order each epoch.

    Every epoch has each record once, and a batch may span two epochs.

    The order is a function of seed, length of the source and version of Grain, whose own shuffle it
    is. `get_state` gives the position, a dictionary for JSON that counts batches and so is the same
    whatever rows of them are read; `set_state` goes there.

    Args:
      source: records by number, arrays or tuples of them.
      seed: of the order, from 0 to 2^32 - 1.
      size: records in a batch.
      rows: those of every batch to read, where other processes read the others.

    Returns:
      Its `next` gives the records stacked along a new first axis. `close` ends its thread, as does
      dropping it.

    Raises:
      ValueError: an argument is outside its range, or the source is empty.
    """
    if size <= 0:
        raise ValueError(f"size must be above zero, not {size}")
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed must be from 0 to {SEEDS - 1}, not {seed}")
    if not len(source):
        raise ValueError("source has no records")
    mine = range(size)[rows]
    if not mine:
        raise ValueError(f"rows must be some of a batch of {size}, not {rows}")
    shuffled = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    if len(mine) < size:
        shuffled = grain.MapDataset.source(_Rows(shuffled, size, mine))
    return iter(shuffled.batch(len(mine), drop_remainder=True).to_iter_dataset(READ_AHEAD))


class _Rows:
    """The records of an endless dataset that are certain rows of its batches."""

    def __init__(self, records: grain.MapDataset[Any], size: int, rows: range) -> None:
        self._records, self._size, self._rows = records, size, rows

    def __len__(self) -> int:
        return len(self._records) // self._size * len(self._rows)

    def __getitem__(self, index: int) -> Any:
        batch, row = divmod(index, len(self._rows))
        return self._records[batch * self._size + self._rows[row]]
