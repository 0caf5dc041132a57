"""Text to token ids and back: by bytes, or by a Hugging Face tokenizer."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from experiments.documents import DataError, separated

GROUP = 1024  # documents that are encoded at once, and whose alignments are in memory


class Tokens(Protocol):
    """A way to write text as ids from 0 to `vocab_size` - 1."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """The ids of the documents joined by two newlines, unsigned integers [N]."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text that the ids stand for.

        Raises:
          ValueError: an id is not in the vocabulary.
        """


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Each byte is its own id."""

    vocab_size: int = dataclasses.field(default=256, init=False)

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """The bytes themselves, uint8 [N]."""
        return np.frombuffer(b"".join(separated(documents)), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """The text, with U+FFFD where the bytes are no UTF-8: a sample may end within a letter."""
        return bytes(_checked(ids, self.vocab_size)).decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The ids of a tokenizer, without special tokens at the ends of documents.

    Attributes:
      tokenizer: neither truncates nor pads.
      vocab_size: one more than its largest id.
    """

    tokenizer: tokenizers.Tokenizer
    vocab_size: int

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """The documents' ids; the newlines between two are encoded with the first of them.

        Returns:
          uint8, uint16 or uint32 [N], as the vocabulary needs.

        Raises:
          DataError: a document is not UTF-8, or the tokenizer has no tokens for it.
        """
        ids = itertools.chain.from_iterable(self._encode(documents))
        return np.fromiter(ids, np.min_scalar_type(self.vocab_size - 1))

    def _encode(self, documents: Sequence[bytes]) -> Iterator[list[int]]:
        texts = (_decoded(i, piece) for i, piece in enumerate(separated(documents)))
        while group := list(itertools.islice(texts, GROUP)):
            try:
                encodings = self.tokenizer.encode_batch(group, add_special_tokens=False)
            except Exception as error:  # as where a word is unknown and there is no token for that
                raise DataError(f"the tokenizer cannot encode the text: {error}") from error
            for encoding in encodings:
                yield encoding.ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text, special tokens included."""
        return self.tokenizer.decode(_checked(ids, self.vocab_size), skip_special_tokens=False)


def load(path: Path | None) -> Tokens:
    """The tokens of the tokenizer in a file that Hugging Face's `tokenizers` wrote; or bytes.

    Raises:
      DataError: the file cannot be read, or is no such file.
    """
    if path is None:
        return Bytes()
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read the tokenizer '{path}': {error.strerror}") from error
    except Exception as error:  # the library has no type of its own for what it refuses
        raise DataError(
            f"'{path}' is no tokenizer; a JSON file as the package tokenizers writes it is needed: "
            f"{error}"
        ) from error
    # The file may ask for either, for the sake of a model of one length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Pieces(tokenizer, vocab_size=max(tokenizer.get_vocab().values(), default=-1) + 1)


def _decoded(index: int, document: bytes) -> str:
    try:
        return document.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"a tokenizer needs UTF-8, which document {index} is not at its byte {error.start}; it "
            f"begins {document[:40]!r}"
        ) from error


def _checked(ids: Iterable[int], vocab_size: int) -> list[int]:
    ids = [int(i) for i in ids]
    for i in ids:
        if not 0 <= i < vocab_size:
            raise ValueError(f"the id {i} is not in the vocabulary, 0 to {vocab_size - 1}")
    return ids
