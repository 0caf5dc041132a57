"""Batches with Grain: shuffled, sharded by host, with a position that a checkpoint can hold."""

from typing import Any

import grain
import jax

SEEDS = 2**32

# One thread reads ahead, and holds two batches ready: records are slices of memory, so more
# threads would only take turns; one is enough to hide the reading of a mapped file.
READ_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)


def batches(
    source: grain.sources.RandomAccessDataSource[Any],
    *,
    seed: int,
    size: int,
    host: int | None = None,
    hosts: int | None = None,
) -> grain.DatasetIterator[Any]:
    """An endless iterator over batches of a source's records, in another order each epoch.

    Every epoch has each record once, and a batch may span two epochs. Of a global batch, the host
    h of H gets records h, h + H, ..., so all hosts together have the same one whatever H is.

    The order is a function of seed, length of the source and version of Grain, whose own shuffle it
    is. `get_state` gives the position, a dictionary for JSON that counts global batches and so is
    the same on every host; `set_state` goes there.

    Args:
      source: records by number, arrays or tuples of them.
      seed: of the order, from 0 to 2^32 - 1.
      size: records in a global batch, a multiple of `hosts`.
      host: which of the hosts this is, from 0; as JAX counts processes, unless given.
      hosts: how many there are; as many as JAX has processes, unless given.

    Returns:
      Its `next` gives the records stacked along a new first axis of size / hosts. `close` ends its
      thread, as does dropping it.

    Raises:
      ValueError: an argument is outside its range, or the source is empty.
    """
    host = jax.process_index() if host is None else host
    hosts = jax.process_count() if hosts is None else hosts
    if not 0 <= host < hosts:
        raise ValueError(f"host must be from 0 to hosts - 1, not {host} of {hosts} hosts")
    if size <= 0 or size % hosts:
        raise ValueError(f"size must be a multiple of the {hosts} hosts above zero, not {size}")
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed must be from 0 to {SEEDS - 1}, not {seed}")
    if not len(source):
        raise ValueError("source has no records")
    shuffled = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    mine = shuffled.slice(slice(host, None, hosts)).batch(size // hosts, drop_remainder=True)
    return iter(mine.to_iter_dataset(READ_AHEAD))
