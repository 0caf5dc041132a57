"""Tokens that were made elsewhere: NumPy files of integers, one after the other."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments import sources
from experiments.documents import DataError

ENDING = ".npy"
LARGEST = np.iinfo(np.int32).max  # batches are int32
CHUNK = 1 << 20  # tokens that are digested at once


def named(paths: Sequence[str]) -> bool:
    """Whether the paths and globs are of token arrays, which their ending tells.

    Raises:
      DataError: some are and others are not.
    """
    text = [path for path in paths if not path.lower().endswith(ENDING)]
    if text and len(text) < len(paths):
        raise DataError(f"tokens in {ENDING} files do not mix with other data; got '{text[0]}'")
    return bool(paths) and not text


def read(paths: Sequence[str]) -> tuple[str, np.ndarray]:
    """Reads the arrays that `paths` name, sorted by path and concatenated.

    One array that has the smallest type already is not read but mapped into memory.

    Returns:
      What to call them, and unsigned integers [N] of the smallest type that holds them all.

    Raises:
      DataError: a file is missing, is no NumPy file, or holds other than a vector of integers from
        0 to 2^31 - 1.
    """
    found = sorted({file.resolve() for path in paths for file in sources.find(path)})
    arrays = [_read_array(file) for file in found]
    tokens = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return sources.described(paths, len(found)), tokens


def sha256(tokens: np.ndarray) -> str:
    """Of the tokens as little-endian 32-bit words, so that the type they are kept in is no part."""
    digest = hashlib.sha256()
    for start in range(0, len(tokens), CHUNK):
        digest.update(tokens[start : start + CHUNK].astype("<u4").tobytes())
    return digest.hexdigest()


def _read_array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"cannot read '{path}' as a NumPy array: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"'{path}' holds {array.dtype} of shape {array.shape}; tokens are integers in one "
            "dimension"
        )
    if not array.size:
        raise DataError(f"'{path}' is empty")
    smallest, largest = int(array.min()), int(array.max())
    if smallest < 0 or largest > LARGEST:
        raise DataError(
            f"'{path}' holds tokens from {smallest} to {largest}; allowed: 0 to {LARGEST}"
        )
    return np.asarray(array).astype(np.min_scalar_type(largest), copy=False)
