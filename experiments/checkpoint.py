"""Checkpoints of a run: written in the background, verified when read, the newest good one wins.

Orbax writes them, each into a folder that gets its name when it is complete. The last file to be
written is a seal, the digests of all other files. They are compared before Orbax reads anything:
a file that was lost, cut short or changed on the disk is noticed, and the checkpoint before it is
taken. By hand: ``cd checkpoints/100/about && sha256sum -c seal``.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from experiments.processes import are_several

T = TypeVar("T")


class NotSavedError(Exception):
    """A checkpoint could not be written; those before it are as they were."""


class Checkpoints:
    """The checkpoints in a folder, of which one process at a time is the owner.

    What an earlier owner left half-written is removed.

    Args:
      folder: made by the owner if it is missing.
      keep: how many to keep, the newest. Those that `restore` could not use do not count, and stay
        until their step is saved again.
      owner: False for a process that only restores, whatever the owner is doing.
    """

    def __init__(self, folder: Path, keep: int, *, owner: bool = True) -> None:
        self._folder = folder.absolute()
        self._unusable: set[int] = set()
        self._keep = _Newest(keep, self._unusable)
        self._writing: int | None = None
        self._owner = owner
        self._manager = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Waits until all is written.

        Raises:
          NotSavedError: if the last checkpoint could not be written. An exception that is already
            on its way goes on instead, with a note.
        """
        if isinstance(error, NotSavedError) and are_several():
            return  # to wait would be to wait for processes that wait for this one
        try:
            self._settle()
        except NotSavedError as failure:
            if error is None:
                raise
            error.add_note(str(failure))
        finally:
            self._manager.close()

    def save(self, step: int, state: Any, notes: dict[str, Any]) -> None:
        """Saves a pytree of arrays, unless that step is there; returns before all is written.

        A checkpoint that `restore` could not use is replaced.

        Args:
          step: its number, by which checkpoints are ordered.
          state: the arrays. Their memory may be reused as soon as this returns.
          notes: saved with them; JSON must give it back as it is.

        Raises:
          NotSavedError: if the checkpoint before this one, or already this one, could not be
            written. Calling again tries again.
          ValueError: if `notes` would come back different, as tuples and NaN do.
        """
        self._settle()
        if json.loads(json.dumps(notes)) != notes:
            raise ValueError(f"notes must come back from JSON as they are, got {notes}")
        if step in self._manager.all_steps() and step not in self._unusable:
            return
        # Copies: the next training step takes the memory of its state while this is being written.
        arrays = {name: jnp.copy(array) for name, array in _plain(state).items()}
        about = {"notes": notes, "arrays": _kinds(state)}
        try:
            # Said before Orbax begins, whose threads would each print what they could not write.
            _refuse_lack_of_room(self._folder, sum(array.nbytes for array in arrays.values()))
            if step in self._unusable:
                self._manager.delete(step)
                self._unusable.remove(step)
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(arrays), about=ocp.args.JsonSave(about)
                ),
            )
        except Exception as error:
            raise self._not_saved(step, error) from error
        self._writing = step

    def restore(self, like: T, warn: Callable[[str], None]) -> tuple[int, T, dict[str, Any]] | None:
        """The step, state and notes of the newest checkpoint of use, or None if there is none.

        Args:
          like: a state of the same structure, shapes and dtypes.
          warn: told of each checkpoint that is damaged or of another state, and why.

        Raises:
          NotSavedError: if the checkpoint being written at the time could not be.
        """
        self._settle()
        for step in self._newest_first():
            try:
                _refuse_damage(self._folder / str(step) / "about")
                about = json.loads((self._folder / str(step) / "about" / "about.json").read_text())
                _refuse_another(about["arrays"], _kinds(like))
            # An OSError: the disk may be broken in one place only.
            except (OSError, _UnusableError) as error:
                warn(f"checkpoint {step} cannot be used ({error}); trying the one before it")
                self._unusable.add(step)
            else:
                return step, self._read(step, like), about["notes"]
        return None

    def _read(self, step: int, like: T) -> T:
        wanted = {name: _shape(array) for name, array in _plain(like).items()}
        args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        read = self._manager.restore(step, args=args).state
        leaves, structure = jax.tree.flatten(like)
        return jax.tree.unflatten(
            structure,
            [
                jax.random.wrap_key_data(read[name], impl=jax.random.key_impl(leaf))
                if _is_key(leaf)
                else read[name]
                for leaf, name in zip(leaves, wanted, strict=True)
            ],
        )

    def _open(self) -> ocp.CheckpointManager:
        if self._owner:
            for leftover in ocp.utils.tmp_checkpoints(self._folder):
                # What resists is no checkpoint yet, and tried again where its step is saved.
                shutil.rmtree(leftover.get(), ignore_errors=True)
        # Orbax finishes them in this order: the seal when the state's files are what they will be.
        registry = ocp.handlers.create_default_handler_registry(
            state=ocp.StandardCheckpointHandler()
        )
        registry.add("about", ocp.args.JsonSave, _Sealing("about.json"))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._keep,
            # Orbax's own notes of a checkpoint are not needed, and may be what is damaged.
            lightweight_initialize=True,
            read_only=not self._owner,
            async_options=ocp.AsyncOptions(
                # Otherwise, where no folder can be made, threads wait minutes for it.
                create_directories_asynchronously=False,
                # Of several processes, those that have written wait so long for one that cannot.
                timeout_secs=120,
            ),
        )
        return ocp.CheckpointManager(self._folder, options=options, handler_registry=registry)

    def _settle(self) -> None:
        """Waits for what is being written."""
        if self._writing is not None:
            try:
                self._manager.wait_until_finished()
            except Exception as error:
                raise self._not_saved(self._writing, error) from error
            self._writing = None

    def _not_saved(self, step: int, error: Exception) -> NotSavedError:
        self._writing = None
        if are_several():  # the others do not know, and wait where they cannot be met
            return NotSavedError(
                f"checkpoint {step} could not be written to {self._folder} ({_one_line(error)})"
            )
        # Orbax counts the one that failed, and no longer those that it was to make room for. A new
        # manager counts what is there.
        _join_writers()
        with contextlib.suppress(Exception):  # the same one again
            self._manager.close()
        self._manager = self._open()
        good = next((s for s in self._newest_first() if self._is_whole(s)), None)
        rest = "there is none before it" if good is None else f"the newest good one is {good}"
        return NotSavedError(
            f"checkpoint {step} could not be written to {self._folder} ({_one_line(error)}); {rest}"
        )

    def _is_whole(self, step: int) -> bool:
        try:
            _refuse_damage(self._folder / str(step) / "about")
        except (OSError, _UnusableError):
            return False
        return True

    def _newest_first(self) -> list[int]:
        return sorted(self._manager.all_steps(), reverse=True)


@dataclasses.dataclass(frozen=True)
class _Newest(ocp.checkpoint_managers.PreservationPolicy):
    """Keeps the newest ones, not counting the unusable, or good ones would go to make room."""

    number: int
    unusable: set[int]

    def should_preserve(
        self,
        checkpoints: Sequence[ocp.checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: ocp.checkpoint_managers.PreservationContext,
    ) -> list[bool]:
        """Of each checkpoint, whether it stays."""
        steps = [info.step for info in checkpoints]
        old = [step for step in steps if step not in self.unusable][: -self.number]
        return [step not in old for step in steps]


class _UnusableError(Exception):
    """A checkpoint is damaged, or of another state."""


class _Sealing(ocp.JsonCheckpointHandler):
    """Writes JSON and, when all else is written and before the checkpoint gets its name, the seal.

    It lies beside the JSON file and has the format of sha256sum.
    """

    def finalize(self, directory: Any) -> None:
        """Called by Orbax in the thread that writes."""
        if not (directory.parent / "state").is_dir():
            raise RuntimeError("Orbax was to finish the state before its seal")
        lines = [f"{digest}  {name}\n" for name, digest in _digests(Path(directory)).items()]
        (directory / "seal").write_text("".join(lines))


def _join_writers() -> None:
    """Waits for all threads of Orbax, which gives up on them when the first one fails.

    They might write into the folder of the next attempt.
    """
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax.") or thread.name == "async_save":
            threading.Thread.join(thread)  # Orbax's own raises what the thread has raised


def _refuse_lack_of_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"it takes {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free")


def _refuse_damage(about: Path) -> None:
    """Compares a checkpoint's files with the seal.

    Raises:
      _UnusableError: if they are not those that were written.
      OSError: if they cannot be read.
    """
    if not (about / "seal").is_file():
        raise _UnusableError("it has no seal")
    # A damaged seal may be no text any more.
    lines = (about / "seal").read_text(errors="replace").splitlines()
    sealed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    _refuse_difference(sealed, _digests(about), lambda name, *_: f"{name} is not what was written")


def _refuse_another(saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raises _UnusableError if a checkpoint's arrays are not those wanted."""

    def say(name: str, there: str | None, here: str | None) -> str:
        return f"{name} is {there or 'missing'} there and {here or 'missing'} here"

    _refuse_difference(saved, wanted, say)


def _refuse_difference(
    there: Mapping[str, str],
    here: Mapping[str, str],
    say: Callable[[str, str | None, str | None], str],
) -> None:
    names = [n for n in sorted(there.keys() | here.keys()) if there.get(n) != here.get(n)]
    if names:
        more = f", and {len(names) - 1} more" if names[1:] else ""
        raise _UnusableError(say(names[0], there.get(names[0]), here.get(names[0])) + more)


def _digests(about: Path) -> dict[str, str]:
    """Of all that is sealed, by path from the seal."""
    state = about.parent / "state"
    files = [about / "about.json", *sorted(path for path in state.rglob("*") if path.is_file())]
    return {os.path.relpath(path, about): _digest(path) for path in files if path.exists()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain(state: Any) -> dict[str, Any]:
    """The leaves by path, in order, random keys as the integers that they are."""
    return {
        name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in _leaves(state)
    }


def _kinds(state: Any) -> dict[str, str]:
    """Dtype and shape of the leaves by path, such as float32[3,4]."""
    return {
        name: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for name, leaf in _leaves(state)
    }


def _leaves(state: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _one_line(error: Exception) -> str:
    """The start and the end of a long message: TensorStore says the reason last."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:60]} ... {text[-130:]}"
