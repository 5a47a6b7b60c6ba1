"""What killed clients and cut saves have left in a directory of checkpoints, under tags that nobody saves again. Each
part goes by the rules of proto/FORMAT.md for removing; where the file system has no locks nobody knows who is dead, and
all of it stays."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import time
from typing import Callable, Iterator, Optional

from . import _parts
from ._own_files import (
    _FOLDER,
    _PART_FOLDER,
    _attempts_in,
    _is_live,
    _remove_empty,
    _remove_nameless,
    _remove_part,
)


# Nothing goes for what is not seen to be there, unless it has been there for longer than a node remembers of a folder
# (NFS: a minute), whatever the nodes' clocks are apart.
_REMEMBERED_NS = 300_000_000_000


def _is_old(began_unix_ns: int) -> bool:
    return time.time_ns() - began_unix_ns > _REMEMBERED_NS


def remove_uncommitted(
    directory: str, job: Optional[str] = None, mine: Callable[[int], bool] = lambda rank: True
) -> Iterator[int]:
    """Files of parts that have no manifest and are not being saved, of ranks that are `mine`: they never become parts.
    Of one job, or of any; what does not say whose it is goes with either. Tag by tag, with nothing open in between: how
    many went."""
    for tag in _tags(directory):
        gone = 0
        with contextlib.suppress(FileNotFoundError):  # somebody removes it
            for rank, _, folder in _part_folders(tag, mine):
                gone += _remove_nameless(folder)
                for attempt in _attempts_in(folder):
                    uncommitted = functools.partial(_is_missing, tag / f"part-{rank}" / f"manifest-{attempt}")
                    if uncommitted():  # else its lock is let alone, too: others would take us for who saves it
                        gone += _remove_dead(folder, tag, rank, attempt, job, uncommitted)
        yield gone


def remove_cut(directory: str, job: Optional[str] = None) -> Iterator[int]:
    """All parts of saves that are not complete, that nobody is saving, and that began before the last complete
    checkpoint of their job that is some minutes old; of one job, or of any. Looks at all tags, then removes tag by tag,
    with nothing open in between: how many files went.

    Files that clients make cannot be seen while they are saved: no client of the job may be saving.
    """
    last: dict[str, tuple[int, str]] = {}
    unfinished: list[_parts.Attempt] = []
    for tag in _tags(directory):
        with contextlib.suppress(FileNotFoundError):  # somebody removes it
            for each in _parts.attempts(tag):
                if not each.complete:
                    unfinished.append(each)
                # Each rank began it after it had ended the ones before: all of these ranks' parts are as old.
                elif all(_is_old(head.started_unix_ns) for head in each.heads.values()):
                    last[each.head.job] = max(each.order, last.get(each.head.job, each.order))
        yield 0
    cut: dict[pathlib.Path, set[str]] = {}
    for each in unfinished:
        if job in (None, each.head.job) and each.head.job in last and each.order < last[each.head.job]:
            cut.setdefault(each.folder, set()).add(each.id)
    for tag, ids in cut.items():
        gone = 0
        with contextlib.suppress(FileNotFoundError):
            for rank, tag_fd, folder in _part_folders(tag):
                for attempt in ids.intersection(_attempts_in(folder)):
                    cut_yet = functools.partial(_is_cut, tag, tag_fd, rank, attempt)
                    gone += _remove_dead(folder, tag, rank, attempt, job, cut_yet)
        yield gone


def _is_missing(file: pathlib.Path) -> bool:
    return not os.path.lexists(file)


def _is_cut(tag: pathlib.Path, tag_fd: int, rank: int, attempt: str) -> bool:
    # In this order: whoever is not seen to save has its manifest by then, or never will.
    live = _is_live(tag_fd, attempt, f"part-{rank}")
    return not live and not any(each.complete and each.id == attempt for each in _parts.attempts(tag))


def _remove_dead(
    folder: int, tag: pathlib.Path, rank: int, attempt: str, job: Optional[str], goes: Callable[[], bool]
) -> int:
    def may_go(of: Optional[str], began: Optional[int]) -> bool:
        return (job is None or of in (None, job)) and (began is None or _is_old(began)) and goes()

    return _remove_part(folder, tag / f"part-{rank}", rank, attempt, may_go, only_if_dead=True) or 0


def _tags(directory: str) -> list[pathlib.Path]:
    place = pathlib.Path(os.path.abspath(directory))
    return sorted(each for each in place.iterdir() if _parts.is_tag(each.name) and each.is_dir())


def _part_folders(
    tag: pathlib.Path, mine: Callable[[int], bool] = lambda rank: True
) -> Iterator[tuple[int, int, int]]:
    """(rank, descriptors of the tag's and of the part's folder) of our own that are `mine`, each open until the next is
    asked for; those that have become empty meanwhile go."""
    with contextlib.ExitStack() as of_tag:
        root = _opened(of_tag, os.fspath(tag.parent), None)
        try:
            tag_fd = _opened(of_tag, tag.name, root)
            names = sorted(os.listdir(tag_fd))
        except OSError:  # a link, closed to us, or just removed
            return
        emptied = False
        for name in names:
            match = _PART_FOLDER.fullmatch(name)
            if match is None or not mine(int(match[1])):
                continue
            with contextlib.ExitStack() as of_part:
                try:
                    folder = _opened(of_part, name, tag_fd)
                    had = os.fstat(folder).st_uid == os.geteuid() and bool(os.listdir(folder))
                except OSError:
                    continue
                if not had:
                    continue
                yield int(match[1]), tag_fd, folder
                if not os.listdir(folder):
                    _remove_empty(tag_fd, name)
                    emptied = True
        if emptied:
            _remove_empty(root, tag.name)


def _opened(stack: contextlib.ExitStack, name: str, parent: Optional[int]) -> int:
    """Below a folder never through a link."""
    flags = _FOLDER if parent is not None else _FOLDER & ~os.O_NOFOLLOW
    fd = os.open(name, flags, dir_fd=parent)
    stack.callback(os.close, fd)
    return fd
