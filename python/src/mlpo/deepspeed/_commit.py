"""When a save counts.

Its files of DeepSpeed's are first in a folder of their own, DIR/TAG/.mlpo-ATTEMPT/. When they are durable there, the
daemons save their parts in DIR/TAG/mlpo. From the moment when all parts are there, the save counts: only then do the
files go to their places, and those of an earlier save under the tag go. What is cut before leaves the earlier save as
it was; what is cut after is finished by whoever loads next, or saves under the tag.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
from typing import Iterable, Optional

from .. import _parts
from .._new_files import sync
from ._layout import rank_files
from ._references import TAG, CheckpointFileError, Mark, load, mark_of

_ASIDE = re.compile(r"\.mlpo-([0-9a-f]{32})")


def aside(attempt: str) -> str:
    """The folder's name in which a save's files are until it counts."""
    return f".mlpo-{attempt}"


def begin(folder: pathlib.Path, attempt: str) -> None:
    """Makes the folders of a save, durably. On one rank, before any writes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / aside(attempt)).mkdir()
    sync(folder)
    sync(folder.parent)


def forget(folder: pathlib.Path, attempt: str, rank: int) -> None:
    """Of a save that has failed, or was given up, if this rank has no part of it. With that it may yet count, once the
    others' have been saved: then its files stay."""
    if not (folder / TAG / f"part-{rank}" / f"manifest-{attempt}").exists():
        shutil.rmtree(folder / aside(attempt), ignore_errors=True)


def finish(folder: pathlib.Path, attempt: str, names: Iterable[str] = ()) -> None:
    """Of a save that counts: its files go to their places, and files that DeepSpeed's ranks have left there before go.
    On one rank of a job; another job may do the same. `names`: what is in its folder, whether it can be seen yet or not
    (NFS)."""
    beside = folder / aside(attempt)
    moved = {file.name for file in beside.iterdir()}.union(names)
    for name in sorted(moved):
        try:
            os.replace(beside / name, folder / name)
        except FileNotFoundError:
            if not (folder / name).exists():
                raise
    for file in rank_files(folder):
        if file.path.name not in moved and not _is_of(file.path, attempt):
            file.path.unlink(missing_ok=True)
    sync(folder)
    with contextlib.suppress(FileNotFoundError):
        beside.rmdir()


def remove_others(folder: pathlib.Path, attempt: str) -> None:
    """Of a save that counts: the files of those that were cut before it."""
    for rest in folder.iterdir():
        if _ASIDE.fullmatch(rest.name) and rest.name != aside(attempt):
            shutil.rmtree(rest, ignore_errors=True)


def finish_last(folder: pathlib.Path) -> None:
    """Finishes the last save under a tag that counts, if it was cut after that."""
    for attempt in _complete(folder)[-1:]:
        if (folder / aside(attempt)).is_dir():
            finish(folder, attempt)


def _complete(folder: pathlib.Path) -> list[str]:
    """Saves of which all parts are there, the last one at the end."""
    parts = folder / TAG
    return [each.id for each in _parts.attempts(parts) if each.complete] if parts.is_dir() else []


def _is_of(file: pathlib.Path, attempt: str) -> bool:
    try:
        mark = mark_of(load(file), file)
    except CheckpointFileError:  # somebody else's save that was cut
        return False
    return mark is not None and mark.attempt == attempt


def saved_mark(folder: pathlib.Path) -> Optional[Mark]:
    """The save that DIR/TAG holds; None: DeepSpeed has saved it without us.

    On one rank: it finishes what counts. Raises CheckpointFileError for what is not all there, or is of several saves.
    """
    if not folder.is_dir():
        raise CheckpointFileError(f"there is no checkpoint {folder}: no such folder")
    finish_last(folder)
    files = rank_files(folder)
    if not files:
        rest = next((entry.name for entry in folder.iterdir() if _ASIDE.fullmatch(entry.name)), None)
        cut = f": {rest} in it is of a save that was cut, and never complete; load an earlier tag" if rest else ""
        raise CheckpointFileError(f"{folder} has no files of ZeRO-3{cut}")
    marks = {file.path: mark_of(load(file.path), file.path) for file in files}
    first = files[0].path
    for path, mark in marks.items():
        if mark != marks[first]:
            raise CheckpointFileError(
                f"{path} and {first} are of different saves: one of them was copied there, or DeepSpeed was killed "
                "while it saved over the other. There is no state of one moment: load another tag"
            )
    mark = marks[first]
    if mark is None:
        return None
    for kind in ("model", "optim"):
        count = sum(file.kind == kind for file in files)
        if count != mark.ranks:
            raise CheckpointFileError(f"{folder} was saved by {mark.ranks} ranks, and has {count} {kind}_states.pt")
    if mark.attempt not in _complete(folder):
        raise CheckpointFileError(
            f"{folder / TAG} has not the parts of all {mark.ranks} ranks of the save that DeepSpeed's files beside it "
            f"are of ({mark.attempt}): they were removed, copied in part, or replaced. Load another tag"
        )
    return mark
