"""The documents in a file: plain text, JSON lines or Parquet, as its ending tells."""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
PARQUET = (".parquet",)
FIELD = "text"  # of a JSON object, and the column of a Parquet file

SEPARATOR = b"\n\n"


class DataError(ValueError):
    """The data asked for cannot be used; the message says what was given and what is allowed."""


class NotTextError(DataError):
    """The file holds something other than text."""


def read(path: Path) -> list[bytes]:
    """The documents in the file at `path`, in its order, without empty ones.

    JSON lines (`.jsonl`, `.ndjson`, either also with `.gz`) have an object on each line that is
    not blank, with the document in its field `text`. Parquet files (`.parquet`) have one in each
    row of the column `text`. Any other file is one document.

    Returns:
      Each document's bytes, in UTF-8 where the file is not plain text.

    Raises:
      NotTextError: a file with neither ending has zero bytes in it.
      DataError: the file cannot be read, or a line or a row has no text.
    """
    name = path.name.lower()
    try:
        if name.endswith(JSON_LINES):
            found = list(_json_lines(path))
        elif name.endswith(PARQUET):
            found = list(_parquet(path))
        else:
            found = [_plain(path)]
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror or error}") from error
    return [document for document in found if document]


def separated(documents: Sequence[bytes]) -> Iterator[bytes]:
    """The documents, each but the last followed by the two newlines that part it from the next."""
    for document in documents[:-1]:
        yield document + SEPARATOR
    yield from documents[-1:]


def _plain(path: Path) -> bytes:
    content = path.read_bytes()
    if b"\0" in content:
        raise NotTextError(f"'{path}' is not a text file: it has zero bytes in it")
    return content


# JSON lines


def _json_lines(path: Path) -> Iterator[bytes]:
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        try:
            # Read as bytes, which break at newlines alone: a string may hold U+2028 as it is.
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text_of_line(line, f"'{path}', line {number}")
        except (EOFError, zlib.error) as error:  # unlike other damage, no OSError
            raise DataError(f"cannot read '{path}': {error}") from error


def _text_of_line(line: bytes, where: str) -> bytes:
    wanted = f"a JSON object with a string in its field '{FIELD}' is needed"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {wanted}, but this is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: {wanted}, but this is {_KINDS[type(value)]}")
    if FIELD not in value:
        raise DataError(f"{where}: {wanted}, but it has {_listed('fields', list(value))}")
    if not isinstance(value[FIELD], str):
        raise DataError(f"{where}: {wanted}, but it holds {_KINDS[type(value[FIELD])]}")
    try:
        return value[FIELD].encode()
    except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair
        raise DataError(f"{where}: the text is no valid Unicode ({error})") from error


_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a truth value",
    type(None): "null",
}


# Parquet


def _parquet(path: Path) -> Iterator[bytes]:
    try:
        with pq.ParquetFile(path) as file:
            _check_column(file.schema_arrow, path)
            row = 0
            for batch in file.iter_batches(columns=[FIELD]):
                for text in batch.column(0).to_pylist():
                    if text is None:
                        raise DataError(f"'{path}', row {row}: '{FIELD}' is null, not a string")
                    yield text.encode()
                    row += 1
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"cannot read '{path}' as Parquet: {error}") from error


def _check_column(schema: pa.Schema, path: Path) -> None:
    if FIELD not in schema.names:
        raise DataError(
            f"'{path}' has no column '{FIELD}' to read; it has {_listed('columns', schema.names)}"
        )
    kind = schema.field(FIELD).type
    strings = kind.value_type if pa.types.is_dictionary(kind) else kind
    if strings not in (pa.string(), pa.large_string(), pa.string_view()):
        raise DataError(f"the column '{FIELD}' of '{path}' holds {kind}; strings are needed")


def _listed(what: str, names: Sequence[str]) -> str:
    return f"the {what} {', '.join(map(repr, names))}" if names else f"no {what}"
