"""A corpus of tokens: held-out blocks for validation, windows by number for training."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from experiments import arrays, sources, tokens
from experiments.documents import DataError

__all__ = ["Corpus", "DataError", "TrainingWindows", "load", "split"]

# Every 16th block of 64Ki tokens is held out: interleaved, since the tail of a corpus is seldom
# like the rest of it, and in blocks, since a single held-out window is too like its neighbours.
BLOCK = 64 * 1024
EVERY = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens, split in blocks for training and for validation.

    Attributes:
      name: what the text is, for a reader.
      tokens: [N], all of them, in the smallest unsigned type that fits.
      sha256: tells this corpus from others, in hexadecimal: of the text's bytes; with a tokenizer,
        of that digest and the tokenizer file's; or of the tokens that were given, `arrays.sha256`.
      window: tokens in one sample: the sequence length and one more, for the last target.
      block: tokens in a block, all or none of which is held out.
      vocab_size: all tokens are below it.
      bytes_per_target: of the text, on average; None where the text is not known.
    """

    name: str
    tokens: np.ndarray
    sha256: str
    window: int
    block: int
    vocab_size: int
    bytes_per_target: float | None

    counted: ClassVar[str] = "tokens"

    @property
    def size(self) -> int:
        """Tokens in the corpus."""
        return len(self.tokens)

    @property
    def fits(self) -> dict[str, int]:
        """The fields of a model's configuration that follow from the data.

        A vocabulary in whole blocks of 64, since the head is a product as wide as it is.
        """
        return {"vocab_size": -(-self.vocab_size // 64) * 64}

    @property
    def nbytes(self) -> int:
        """Bytes of the text, or of the array where the text is not known."""
        known = self.bytes_per_target
        return self.tokens.nbytes if known is None else round(known * self.size)

    @property
    def unit(self) -> str:
        """What one target of training is."""
        return "byte" if self.vocab_size == 256 and self.bytes_per_target == 1 else "token"

    @property
    def targets(self) -> int:
        """Targets in a record."""
        return self.window - 1

    @functools.cached_property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """The (training, held-out) ranges of the tokens, each int64 [n, 2] of start and end."""
        return split(self.size, self.block)

    @functools.cached_property
    def training(self) -> "TrainingWindows":
        """The windows to train on."""
        stride = self.window - 1
        starts = [np.arange(start, end - stride, stride) for start, end in self.parts[0]]
        return TrainingWindows(self.tokens, np.concatenate(starts), self.window)

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
        places = starts[np.arange(count) * len(starts) // count, None] + np.arange(self.window)
        return self.tokens[places].astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingWindows:
    """A source of records for Grain: the windows to train on, by their number.

    A window begins with the last token of the one before it in the same range: that token was its
    last target and is the first input here. So each token is a target once, but for the first of
    a range, and those at its end that do not fill a window.

    Attributes:
      tokens: [N], of the whole corpus.
      starts: int64 [n], where the windows begin.
      window: tokens in each.
    """

    tokens: np.ndarray
    starts: np.ndarray
    window: int

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> np.ndarray:
        """The window of that number, int32 [window].

        Raises:
          IndexError: there are not so many.
        """
        start = self.starts[index]
        return self.tokens[start : start + self.window].astype(np.int32)


def load(paths: Sequence[str], sequence: int, tokenizer: Path | None = None) -> Corpus:
    """Reads a corpus for training on sequences of `sequence` tokens.

    Args:
      paths: text as `sources.read` takes it, or `.npy` files of tokens and globs of them.
      sequence: tokens that are predicted in one sample.
      tokenizer: a file as `tokens.load` takes it; without one, tokens are bytes.

    Raises:
      DataError: the data or the tokenizer cannot be read, or the corpus is too short for the
        sequence length.
    """
    if arrays.named(paths):
        if tokenizer is not None:
            raise DataError(
                f"{paths[0]} has tokens already, and takes no tokenizer ('{tokenizer}')"
            )
        corpus = _given(paths, sequence + 1)
    else:
        corpus = _encoded(sources.read(paths), sequence + 1, tokenizer)
    if corpus.window > BLOCK:
        raise DataError(f"a sequence length of {sequence} is too long; at most {BLOCK - 1}")
    if corpus.block < corpus.window:
        raise DataError(
            f"{corpus.name} is too short: {corpus.size} tokens, where a sequence length of "
            f"{sequence} needs at least {EVERY * corpus.window}, one block in {EVERY} being held "
            "out for validation"
        )
    return corpus


def split(size: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts `size` tokens into (training, held-out) ranges, each int64 [n, 2] of start and end."""
    held_out = np.arange(EVERY // 2, size // block, EVERY) * block
    edges = np.stack([held_out, held_out + block], axis=1)
    training = np.concatenate([[0], edges.reshape(-1), [size]]).reshape(-1, 2)
    return training, edges


def _encoded(text: sources.Text, window: int, tokenizer: Path | None) -> Corpus:
    vocabulary = tokens.load(tokenizer)
    name, sha256 = text.name, text.sha256
    if tokenizer is not None:
        name = f"{name}, tokenized by {tokenizer.name}"
        both = sha256 + hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        sha256 = hashlib.sha256(both.encode()).hexdigest()
    encoded = vocabulary.encode(text.documents)
    return Corpus(
        name=name,
        tokens=encoded,
        sha256=sha256,
        window=window,
        block=_block(len(encoded)),
        vocab_size=vocabulary.vocab_size,
        bytes_per_target=text.size / max(len(encoded), 1),
    )


def _given(paths: Sequence[str], window: int) -> Corpus:
    name, given = arrays.read(paths)
    return Corpus(
        name=name,
        tokens=given,
        sha256=arrays.sha256(given),
        window=window,
        block=_block(len(given)),
        vocab_size=int(given.max()) + 1,
        bytes_per_target=None,
    )


def _block(size: int) -> int:
    return min(BLOCK, size // EVERY)
