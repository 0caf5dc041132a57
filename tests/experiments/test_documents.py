"""The documents in a file: each kind as it should be, and each way in which it may be broken."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments import documents
from experiments.documents import DataError, NotTextError

# Line separators of Unicode are no ends of lines, and a carriage return is part of the text.
TEXTS = ["plain", "two\nlines\r\nand\rmore", "né — 汉字 🙂", "\u2028 \u0085 \x1c", " \t"]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def encoded(texts: list[str]) -> list[bytes]:
    return [text.encode() for text in texts]


def lines(texts: list[str], end: str = "\n", ascii_only: bool = False) -> bytes:
    objects = ({"id": i, "text": text} for i, text in enumerate(texts))
    return "".join(json.dumps(o, ensure_ascii=ascii_only) + end for o in objects).encode()


# Plain text


@pytest.mark.parametrize("name", ["a.txt", "README", "a.py", "jsonl", "a.jsonl.txt", "a.json"])
def test_any_other_file_is_one_document_as_it_is(tmp_path, name):
    content = b'\xef\xbb\xbf{"text": 1}\r\n\xff\n\n'
    assert documents.read(write(tmp_path / name, content)) == [content]


def test_an_empty_file_has_no_documents(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        assert documents.read(write(tmp_path / name, b"")) == []


def test_zero_bytes_are_not_text(tmp_path):
    with pytest.raises(NotTextError, match=r"'.*a\.bin' is not a text file: it has zero bytes"):
        documents.read(write(tmp_path / "a.bin", b"text\0"))


def test_a_missing_file_is_named(tmp_path):
    for name in ("a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"):
        with pytest.raises(DataError, match=rf"cannot read '.*{name}': .*No such file"):
            documents.read(tmp_path / name)


# JSON lines


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\n \t\r\n"])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "B.JSONL"])
def test_json_lines(tmp_path, name, end, ascii_only):
    content = lines(TEXTS, end, ascii_only)
    assert documents.read(write(tmp_path / name, content)) == encoded(TEXTS)
    # The last line need not end.
    assert documents.read(write(tmp_path / name, content.rstrip())) == encoded(TEXTS)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.ndjson.gz", "a.JsonL.GZ"])
def test_compressed_json_lines(tmp_path, name):
    path = write(tmp_path / name, gzip.compress(lines(TEXTS)))
    assert documents.read(path) == encoded(TEXTS)


def test_empty_documents_are_left_out(tmp_path):
    texts = ["", "a", "", "b", ""]
    assert documents.read(write(tmp_path / "a.jsonl", lines(texts))) == [b"a", b"b"]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    assert documents.read(tmp_path / "a.parquet") == [b"a", b"b"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"{'text': 'quotes'}", "this is no JSON"),
        (b'{"text": "cut', "this is no JSON"),
        (b'{"text": "\xff"}', "this is no JSON"),
        (b'{"text": "a"} {"text": "b"}', "this is no JSON"),
        (b"[1, 2]", "this is a list"),
        (b'"text"', "this is a string"),
        (b"null", "this is null"),
        (b"3.5", "this is a number"),
        (b"true", "this is a truth value"),
        (b"{}", "it has no fields"),
        (b'{"Text": "a", "body": "b"}', "it has the fields 'Text', 'body'"),
        (b'{"text": null}', "it holds null"),
        (b'{"text": 7}', "it holds a number"),
        (b'{"text": ["a"]}', "it holds a list"),
        (b'{"text": {}}', "it holds an object"),
        (b'{"text": "\\ud83d"}', "no valid Unicode"),
    ],
)
def test_a_line_without_text_is_refused_by_its_number(tmp_path, line, found):
    path = write(tmp_path / "a.jsonl", b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n')
    with pytest.raises(DataError, match=rf"'.*a\.jsonl', line 3: .*{found}"):
        documents.read(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-9],
        lambda content: content[:12] + b"\xff\xff" + content[14:],
        lambda content: b"not gzip",
        lambda content: content[:-8] + bytes(8),
    ],
)
def test_a_damaged_archive_is_refused(tmp_path, damage):
    content = gzip.compress(lines(["some text"] * 99))
    with pytest.raises(DataError, match=r"cannot read '.*a\.jsonl\.gz'"):
        documents.read(write(tmp_path / "a.jsonl.gz", damage(content)))


# Parquet


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet(tmp_path, kind):
    texts = TEXTS * 3
    columns = {"id": list(range(len(texts))), "text": pa.array(texts).cast(kind)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=4)
    assert documents.read(tmp_path / "a.parquet") == encoded(texts)


def test_parquet_without_the_column_names_those_there_are(tmp_path):
    pq.write_table(pa.table({"id": [1], "Body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no column 'text' .* the columns 'id', 'Body'"):
        documents.read(tmp_path / "a.parquet")


def test_parquet_of_other_types_and_nulls_are_refused(tmp_path):
    pq.write_table(pa.table({"text": [[1], [2]]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"holds list<.*int64>; strings are needed"):
        documents.read(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["a", "", None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet', row 2: 'text' is null"):
        documents.read(tmp_path / "a.parquet")


def test_what_is_no_parquet_is_refused(tmp_path):
    pq.write_table(pa.table({"text": ["a" * 99]}), tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    for content in (b"", b"text", whole[:-20]):
        with pytest.raises(DataError, match=r"cannot read '.*a\.parquet'"):
            documents.read(write(tmp_path / "a.parquet", content))


# Joining


@pytest.mark.parametrize("parts", [[], [b"a"], [b"a", b"", b"b\n"], [b"", b""]])
def test_separated_documents_are_the_joined_text(parts):
    pieces = list(documents.separated(parts))
    assert b"".join(pieces) == b"\n\n".join(parts)
    assert len(pieces) == len(parts)
