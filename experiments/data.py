"""Byte-level corpora: held-out blocks for validation, batches as a pure function of the step."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from experiments import sources
from experiments.sources import DataError

__all__ = ["Corpus", "DataError", "load", "split"]

# Every 16th block of 64 KiB is held out: interleaved, since the tail of a corpus is seldom like
# the rest of it, and in blocks, since a single held-out window is too like its neighbours.
BLOCK = 64 * 1024
EVERY = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Text as bytes, split in blocks for training and for validation.

    Attributes:
      name: what the text is, for a reader.
      text: uint8 [N], all of it.
      sha256: of the text's bytes, in hexadecimal.
      window: bytes in one sample: the sequence length and one more, for the last target.
      block: bytes in a block, all or none of which is held out.
    """

    name: str
    text: np.ndarray
    sha256: str
    window: int
    block: int

    @functools.cached_property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """The (training, held-out) ranges of the text, each int64 [n, 2] of start and end."""
        return split(len(self.text), self.block)

    def batch(self, seed: int, step: int, size: int) -> np.ndarray:
        """Training windows for one step, drawn evenly over all places outside held-out blocks.

        A pure function of its arguments: every recipe sees the same batches, and a run that
        resumes at a step sees the ones it would have seen.

        Returns:
          int32 [size, window].
        """
        start, end = self.parts[0].T
        places = np.maximum(end - start - self.window + 1, 0)  # [n], how many windows fit
        upto = np.cumsum(places)
        drawn = _random_words(seed, step, size) % upto[-1].astype(np.uint64)
        drawn = drawn.astype(np.int64)
        part = np.searchsorted(upto, drawn, side="right")
        return self._windows(start[part] + drawn - (upto - places)[part])

    def validation(self, count: int) -> np.ndarray:
        """The same `count` windows each time, spread evenly over the held-out blocks.

        They do not overlap, so there may be fewer of them in a small corpus.

        Returns:
          int32 [at most count, window].
        """
        ranges = [
            np.arange(start, end - self.window + 1, self.window) for start, end in self.parts[1]
        ]
        starts = np.concatenate(ranges)
        count = min(count, len(starts))
        return self._windows(starts[np.arange(count) * len(starts) // count])

    def _windows(self, starts: np.ndarray) -> np.ndarray:
        return self.text[starts[:, None] + np.arange(self.window)].astype(np.int32)


def load(paths: Sequence[str], sequence: int) -> Corpus:
    """Reads a corpus for training on sequences of `sequence` bytes.

    Raises:
      DataError: the text cannot be read, or is too short for the sequence length.
    """
    text = sources.read(paths)
    size, window = len(text.content), sequence + 1
    block = min(BLOCK, size // EVERY)
    if window > BLOCK:
        raise DataError(f"a sequence length of {sequence} is too long; at most {BLOCK - 1}")
    if block < window:
        raise DataError(
            f"{text.name} is too short: {size} bytes, where a sequence length of {sequence} needs "
            f"at least {EVERY * window}, one block in {EVERY} being held out for validation"
        )
    return Corpus(
        name=text.name,
        text=np.frombuffer(text.content, np.uint8),
        sha256=hashlib.sha256(text.content).hexdigest(),
        window=window,
        block=block,
    )


def split(size: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts `size` bytes into (training, held-out) ranges, each int64 [n, 2] of start and end."""
    held_out = np.arange(EVERY // 2, size // block, EVERY) * block
    edges = np.stack([held_out, held_out + block], axis=1)
    training = np.concatenate([[0], edges.reshape(-1), [size]]).reshape(-1, 2)
    return training, edges


def _random_words(seed: int, step: int, count: int) -> np.ndarray:
    # Philox is counter-based: the step sits in the counter's highest word, so the words of two
    # steps never overlap. Raw words, since numpy may change its distributions between versions.
    key, counter = np.array([seed, 0], np.uint64), np.array([0, 0, 0, step], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)
