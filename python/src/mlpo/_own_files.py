"""Parts of checkpoints in files that this process opens itself: for a daemon of another user, which opens nothing for
us and writes what it is passed, and for an import. Folders, names, what makes them durable and what of earlier saves
goes are ours; proto/FORMAT.md ("In a directory of checkpoints") has the rules."""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import pathlib
import re
import secrets
import stat
import threading
import time
import warnings
from typing import Callable, Optional, Union

from . import _parts
from ._errors import MlpoError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = re.compile(r"\.(data|manifest)-[0-9a-f]{32}\.new")  # where the file system has no nameless files
_PART_FILE = re.compile(r"(data|manifest)-([0-9a-f]{32})(-(0|[1-9][0-9]{0,9})|\.new)?")
_PART_FOLDER = re.compile(r"part-(0|[1-9][0-9]{0,9})")
# How long ranks that begin together, and look at and remove each other's parts, may be in each other's way: a look is
# short, and so is a removal as a rule.
_RANKS_MEET_S = 1.0
_LOOK_AGAIN_S = 0.05
_TRIES = 16  # folders and names that somebody else takes away in the same moment


def _error(code: int, text: str) -> MlpoError:
    return MlpoError(-code, text)


def as_mlpo_error(error: OSError) -> MlpoError:
    """Of a call of the operating system, which names the file."""
    return _error(error.errno or errno.EIO, str(error))


class _Lock(enum.Enum):
    TAKEN = 1
    HELD = 2  # by somebody else
    UNKNOWN = 3  # the file system has no locks: as if it were free


def _lock(fd: int, how: int) -> _Lock:
    """Takes a lock if it is free."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return _Lock.HELD
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            raise
        return _Lock.UNKNOWN
    return _Lock.TAKEN


def _unlock(fd: int) -> None:
    """Not by closing: the daemon has a copy of the descriptor."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError:
        pass  # there are none, or the file system is gone


def _is_named(folder: int, name: str, fd: int) -> bool:
    """Whether the name is that file's."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _removed(folder: int, name: str) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _folder(parent: int, name: str, shown: pathlib.Path) -> int:
    """A descriptor of a folder of ours below another one, made if it is not there; never through a link."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
        os.fsync(parent)
    except FileExistsError:
        pass
    fd = os.open(name, _FOLDER, dir_fd=parent)
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        os.close(fd)
        raise _error(errno.EPERM, f"{shown} is another user's, or others can write to it: save elsewhere")
    return fd


class _NewFile:
    """An empty file in a folder, locked, which has no name that counts until it is given one."""

    def __init__(self, folder: int, kind: str) -> None:
        self._folder = folder
        self._aside: Optional[str] = None
        self.name: Optional[str] = None  # once it has been given
        try:
            self.fd = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=folder)
            _lock(self.fd, fcntl.LOCK_EX)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
        for _ in range(_TRIES):
            self._aside = f".{kind}-{secrets.token_hex(16)}.new"
            self.fd = os.open(self._aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=folder)
            if _lock(self.fd, fcntl.LOCK_EX) is not _Lock.HELD and _is_named(folder, self._aside, self.fd):
                return
            os.close(self.fd)  # somebody has taken it, before it was locked, for one that was left
        raise _error(errno.EAGAIN, "files that are made are removed at once by somebody else; try again")

    def move_to(self, folder: int) -> None:
        """Of one that has no name at all."""
        self._folder = folder

    def give(self, name: str) -> None:
        """Fails if the name is taken. Repeated, if it was interrupted, it goes on."""
        try:
            if self._aside is None:
                os.link(f"/proc/self/fd/{self.fd}", name, dst_dir_fd=self._folder, follow_symlinks=True)
            else:
                os.link(
                    self._aside, name, src_dir_fd=self._folder, dst_dir_fd=self._folder, follow_symlinks=False
                )
        except FileExistsError:
            if not _is_named(self._folder, name, self.fd):
                raise
        self.name = name
        if self._aside is not None:
            _removed(self._folder, self._aside)
            self._aside = None

    def take_back(self) -> None:
        """The name it was given, unless it is another file's by now."""
        if self.name is not None and _is_named(self._folder, self.name, self.fd):
            _removed(self._folder, self.name)
        self.name = None

    def close(self) -> None:
        if self._aside is not None:
            with contextlib.suppress(OSError):  # it is left: the next save removes it
                _removed(self._folder, self._aside)
            self._aside = None
        if self.fd >= 0:
            _unlock(self.fd)
            os.close(self.fd)
        self.fd = -1


class PartFiles:
    """The files of this rank's part while it is saved. Thread-safe."""

    def __init__(
        self, directory: str, tag: str, rank: int, job: str, overwrite: bool, attempt: Optional[bytes] = None
    ) -> None:
        """Makes the folders and two empty files in them, and removes what earlier saves of this rank have left there.

        Raises MlpoError: EEXIST if the tag has a complete checkpoint and overwrite is not set, or if the attempt was
        used before; EPERM if a folder is another user's.
        """
        if not _parts.is_tag(tag):
            raise ValueError(f"{tag!r} is no tag: [A-Za-z0-9_][A-Za-z0-9._-]{{0,127}}")
        self._lock = threading.RLock()
        self._directory = pathlib.Path(os.path.abspath(directory))
        self._tag = self._directory / tag
        self._rank, self._job, self._overwrite = rank, job, overwrite
        self._part = self._tag / f"part-{rank}"
        self._outcome: Optional[bool] = None
        self._failure: Optional[MlpoError] = None
        self.after_ns = 0  #: a save that begins now says it began at this time or later, whatever the clock says
        self._stands = False  # the part is durable: whatever happens now, it stays
        self._fds: list[int] = []  # of directory, tag and part
        self._files: list[_NewFile] = []
        for tries_left in reversed(range(_TRIES)):
            try:
                self._open_folders()
                self._make_way(None if attempt is None else attempt.hex())
                for kind in ("data", "manifest"):
                    self._files.append(_NewFile(self._fds[2], kind))
                return
            except FileNotFoundError:
                # A save that ends without a part takes its empty folders away, perhaps the ones that were opened here.
                again = tries_left > 0 and bool(self._fds)
                self.close()
                if not again:
                    raise
            except BaseException:
                self.close()
                raise

    @property
    def descriptors(self) -> tuple[int, int]:
        """The data file and the manifest."""
        return self._files[0].fd, self._files[1].fd

    def _open_folders(self) -> None:
        self._fds.append(os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self._fds.append(_folder(self._fds[0], self._tag.name, self._tag))
        self._fds.append(_folder(self._fds[1], self._part.name, self._part))

    def _close_folders(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _make_way(self, own: Optional[str]) -> None:
        there = _parts.attempts(self._tag)
        self.after_ns = max((each.head.started_unix_ns + 1 for each in there), default=0)
        for found in reversed(_complete(there)):
            if not self._overwrite and _is_whole(found):
                raise _error(
                    errno.EEXIST,
                    f"{self._directory} has a complete checkpoint {self._tag.name!r} of step {found.head.step} and "
                    f"{found.head.world_size} ranks: use another tag, or overwrite it",
                )
        part = self._fds[2]
        _remove_nameless(part)
        until = time.monotonic() + _RANKS_MEET_S
        for attempt in _attempts_in(part):
            if attempt == own:
                raise _error(
                    errno.EEXIST,
                    f"{self._part} has files of the attempt {own} already: an attempt is for one save; "
                    "uuid.uuid4().bytes of rank 0 is a new one",
                )
            while self._remove_cut(attempt) and time.monotonic() < until:
                time.sleep(_LOOK_AGAIN_S)

    def _remove_cut(self, attempt: str) -> bool:
        """This rank's part of an attempt, if that is not complete. Whether it stays because somebody has a lock."""
        saved_by_others = False

        def goes(job: Optional[str], _: Optional[int]) -> bool:
            nonlocal saved_by_others
            if job not in (None, self._job):
                return False
            # With our part committed it may become complete, until nobody saves any other. In this order: whoever is
            # not seen to save has its manifest by then, or never will.
            committed = os.path.lexists(self._part / f"manifest-{attempt}")
            saved_by_others = committed and _is_live(self._fds[1], attempt, self._part.name)
            if saved_by_others:
                return False
            return attempt not in [each.id for each in _complete(_parts.attempts(self._tag))]

        return _remove_part(self._fds[2], self._part, self._rank, attempt, goes) is None or saved_by_others

    def commit(self, attempt: bytes) -> bool:
        """The daemon has written both, durably: now they are the part. Whether those of all ranks are there, and no
        later save under the tag. Repeated it says the same, and goes on if it was interrupted."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._outcome is None:
                if not self._files:
                    raise _error(errno.ECANCELED, f"{self._part} was given up")
                try:
                    self._outcome = self._committed(attempt.hex())
                except MlpoError as error:
                    self._failure = error
                    raise
                except OSError as error:
                    self._failure = as_mlpo_error(error)
                    raise self._failure from error
                finally:
                    if self._outcome is not None or self._failure is not None:
                        self.close()
            return self._outcome

    def _committed(self, attempt: str) -> bool:
        directory, tag, part = self._fds
        data, manifest = self._files
        if not self._stands:
            try:
                try:
                    data.give(f"data-{attempt}-0")
                except FileNotFoundError:  # the folder looked empty, and somebody has taken it away
                    self._close_folders()
                    self._open_folders()
                    directory, tag, part = self._fds
                    data.move_to(part)
                    manifest.move_to(part)
                    data.give(f"data-{attempt}-0")
                os.fsync(part)
                if not _is_named(part, f"data-{attempt}-0", data.fd):
                    raise _error(
                        errno.ESTALE,
                        f"{self._part}/data-{attempt}-0 was removed or replaced while it was being saved, by another "
                        "save under this tag or by hand: save again",
                    )
                manifest.give(f"manifest-{attempt}")
            except FileExistsError as error:
                text = f"{self._part} has files of the attempt {attempt} already: an attempt is for one save"
                raise _error(errno.EEXIST, text) from error
            os.fsync(part)
            self._stands = True
        _unlock(data.fd)
        os.fsync(tag)
        os.fsync(directory)
        try:
            return self._complete(attempt)
        except (OSError, _parts.CheckpointError) as error:  # the part stands, whatever the others look like
            _warn(f"whether checkpoint {self._tag} is complete is not known: {error}")
            return False

    def _complete(self, attempt: str) -> bool:
        """Once it is complete what came before it under the tag goes."""
        world_size = _parts.read_head(self._part / f"manifest-{attempt}").world_size
        if not _is_settled(self._fds[0], self._fds[1], self._tag, attempt, world_size):
            return False
        found = _parts.attempts(self._tag)
        own = next((each for each in found if each.id == attempt), None)
        if own is None or not own.complete:
            return False  # another job has saved over it since: it was complete, and is gone
        later = [each for each in _complete(found) if each.order > own.order]
        if later:
            _warn(
                f"checkpoint {self._tag} of step {own.head.step} is complete, but not the one that counts: that of "
                f"step {later[-1].head.step} says that it was begun later. Is the clock of this node right?"
            )
            return False
        if len(_complete(found)) > 1:
            _parts.check_files(own)  # before a good one goes
        orders = {each.id: each.order for each in found}
        for name in sorted(os.listdir(self._fds[1])):
            shown = self._tag / name
            if not _PART_FOLDER.fullmatch(name):
                continue
            try:
                folder = os.open(name, _FOLDER, dir_fd=self._fds[1])
            except FileNotFoundError:
                continue
            try:
                _remove_nameless(folder)
                for other in _attempts_in(folder):

                    def goes(job: Optional[str], started: Optional[int], other: str = other) -> bool:
                        order = orders.get(other, (started or 0, other))
                        return order < own.order and (job in (None, self._job) or self._overwrite)

                    if other != attempt:
                        _remove_part(folder, shown, int(name[5:]), other, goes)
            except OSError as error:
                _warn(f"an earlier checkpoint under the tag stays in {shown}: {error}")
            finally:
                os.close(folder)
            _remove_empty(self._fds[1], name)
        return True

    def close(self) -> None:
        """What has not been committed has no name that counts; folders with nothing in them go."""
        with self._lock:
            for file in reversed(self._files):  # the manifest first: no half of a part ever looks whole
                if file.name is None or self._stands:
                    continue
                try:
                    file.take_back()
                    os.fsync(self._fds[2])
                except OSError as error:
                    _warn(f"files of a part that was given up stay in {self._part}: {error}")
            for file in self._files:
                file.close()
            if len(self._fds) == 3 and not self._stands:
                _remove_empty(self._fds[1], self._part.name)
                _remove_empty(self._fds[0], self._tag.name)
            self._files = []
            self._close_folders()


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _complete(found: list[_parts.Attempt]) -> list[_parts.Attempt]:
    return [each for each in found if each.complete]


def _is_whole(attempt: _parts.Attempt) -> bool:
    """Of a complete one. One that has lost a file is none, whatever its manifests say."""
    try:
        _parts.check_files(attempt)
    except (_parts.CheckpointError, FileNotFoundError):
        return False
    return True


def is_complete(directory: str, tag: str, attempt: bytes, world_size: int) -> bool:
    """Whether the parts of all ranks of one save are there, durably."""
    folder = pathlib.Path(os.path.abspath(directory)) / tag
    fds: list[int] = []
    try:
        fds.append(os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        fds.append(os.open(tag, _FOLDER, dir_fd=fds[0]))
        return _is_settled(fds[0], fds[1], folder, attempt.hex(), world_size)
    except FileNotFoundError:
        return False
    finally:
        for fd in fds:
            os.close(fd)


def _is_settled(directory: int, tag: int, shown: pathlib.Path, attempt: str, world_size: int) -> bool:
    """As is_complete. Files are asked for by their names: what another node has just made may be missing in a list that
    this one remembers (NFS)."""
    for rank in range(world_size):
        fds: list[int] = []
        try:
            fds.append(os.open(f"part-{rank}", _FOLDER, dir_fd=tag))
            os.stat(f"manifest-{attempt}", dir_fd=fds[0], follow_symlinks=False)
            fds.append(os.open(f"data-{attempt}-0", os.O_RDONLY | _FILE, dir_fd=fds[0]))
            if _lock(fds[1], fcntl.LOCK_SH) is _Lock.HELD:
                return False  # not durable yet, or on its way out
            os.fsync(fds[0])
        except FileNotFoundError:
            return False
        finally:
            for fd in fds:
                os.close(fd)
    os.fsync(tag)
    os.fsync(directory)
    whose = _parts.believed(shown.parent)
    heads = {}
    for rank in range(world_size):
        try:
            heads[rank] = _parts.read_head(shown / f"part-{rank}" / f"manifest-{attempt}", whose)
        except (FileNotFoundError, _parts.CheckpointError):
            return False
    return _parts.Attempt(shown, attempt, heads).complete


# ---- What others have left ----


def _attempts_in(folder: int) -> list[str]:
    """Those that a part's folder has any file of."""
    matches = (_PART_FILE.fullmatch(name) for name in os.listdir(folder))
    return sorted({match[2] for match in matches if match is not None})


def _is_live(tag: int, attempt: str, but: str) -> bool:
    """Whether any part of an attempt, but that in one folder, is being saved or removed. What cannot be seen may be.
    Not one with its manifest: whoever has its lock is done with saving it, or looks whether it goes."""
    for name in os.listdir(tag):
        if name == but or not _PART_FOLDER.fullmatch(name):
            continue
        fds: list[int] = []
        try:
            fds.append(os.open(name, _FOLDER, dir_fd=tag))
            with contextlib.suppress(FileNotFoundError):
                os.stat(f"manifest-{attempt}", dir_fd=fds[0], follow_symlinks=False)
                continue
            fds.append(os.open(f"data-{attempt}-0", os.O_RDONLY | _FILE, dir_fd=fds[0]))
            if _lock(fds[1], fcntl.LOCK_SH) is _Lock.HELD:
                return True
        except FileNotFoundError:
            continue
        except OSError:
            return True
        finally:
            for fd in fds:
                os.close(fd)
    return False


def _remove_nameless(folder: int) -> int:
    """Files that have not been given their names yet, if whoever made them is dead for sure. How many went."""
    gone = 0
    for name in os.listdir(folder):
        if not _NEW.fullmatch(name) or not _is_own(folder, name):
            continue
        try:
            fd = os.open(name, os.O_RDWR | _FILE, dir_fd=folder)
        except FileNotFoundError:
            continue
        try:
            if _lock(fd, fcntl.LOCK_EX) is _Lock.TAKEN:
                gone += _removed(folder, name)
        finally:
            os.close(fd)
    return gone


def _remove_part(
    folder: int,
    shown: pathlib.Path,
    rank: int,
    attempt: str,
    goes: Callable[[Optional[str], Optional[int]], bool],
    only_if_dead: bool = False,
) -> Optional[int]:
    """Removes an attempt's part of a rank; how many files went. None: somebody else has its lock, who saves or removes
    it, or looks. `goes` decides by its job and when it began (None: not known), while nobody can save or remove it.
    `only_if_dead`: not if, for want of locks, nobody knows. The manifest goes first, durably, so that no half of it
    ever looks whole; the first data file last, since it has the lock. Somebody else's files, and what has another
    header than its name, stay, with a warning."""
    first_name = f"data-{attempt}-0"
    try:
        first = os.open(first_name, os.O_RDWR | _FILE, dir_fd=folder)
    except FileNotFoundError:
        first = -1  # nobody saves it
    except OSError as error:
        _warn(f"{shown / first_name} stays: {error.strerror}")
        return 0
    try:
        lock = _lock(first, fcntl.LOCK_EX) if first >= 0 else _Lock.UNKNOWN
        if lock is _Lock.HELD or (first >= 0 and not _is_named(folder, first_name, first)):
            return None
        if only_if_dead and first >= 0 and lock is _Lock.UNKNOWN:
            return 0
        if first >= 0 and not _is_own(folder, first_name):
            _warn(f"{shown / first_name} stays: it is another user's, or no file")
            return 0
        head: Optional[_parts.Head] = None
        try:
            head = _parts.read_head(shown / f"manifest-{attempt}")
        except (OSError, _parts.CheckpointError):
            pass
        pages, strange = _pages(folder, shown, attempt)
        page = pages.get(first_name)
        if head is not None:
            job, started = head.job, head.started_unix_ns
        elif isinstance(page, _parts.PartHeader):
            job, started = page.job, page.started_unix_ns
        else:
            job, started = next((each.job for each in pages.values() if each is not None), None), None
        if not goes(job, started):
            return 0
        gone = 0
        for name in (f"manifest-{attempt}", f"manifest-{attempt}.new"):
            if _is_own(folder, name):
                gone += _removed(folder, name)
        os.fsync(folder)
        for what in strange:
            _warn(f"{what}: it stays")
        for name in sorted(pages, key=lambda name: name == first_name):
            # Without a header it was cut before it had one, unless somebody is about to write it.
            bare = pages[name] is None and lock is _Lock.TAKEN
            if bare or _fits(pages[name], name, rank, attempt):
                gone += _removed(folder, name)
            else:
                _warn(f"{shown / name} stays: it has not the header of its name")
        return gone
    finally:
        if first >= 0:
            os.close(first)


def _is_own(folder: int, name: str) -> bool:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


_Page = Union[_parts.PartHeader, _parts.Origin, None]


def _pages(folder: int, shown: pathlib.Path, attempt: str) -> tuple[dict[str, _Page], list[str]]:
    """Our data files of an attempt and their headers; and what is wrong with those that have none."""
    pages: dict[str, _Page] = {}
    strange = []
    for name in os.listdir(folder):
        match = _PART_FILE.fullmatch(name)
        if match is None or match[1] != "data" or match[2] != attempt or not match[4] or not _is_own(folder, name):
            continue
        try:
            fd = os.open(name, os.O_RDONLY | _FILE, dir_fd=folder)
        except FileNotFoundError:
            continue
        try:
            pages[name] = _parts.read_page(fd, str(shown / name))
        except _parts.CheckpointError as error:
            strange.append(str(error))
        finally:
            os.close(fd)
    return pages, strange


def _fits(page: _Page, name: str, rank: int, attempt: str) -> bool:
    if isinstance(page, _parts.PartHeader):
        return (page.attempt, page.rank, f"data-{page.attempt}-{page.index}") == (attempt, rank, name)
    return page is not None and not name.endswith("-0") and page.daemon_uid == os.geteuid() and page.rank == rank


def _remove_empty(parent: int, name: str) -> None:
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError:
        pass  # somebody's part is in it


# ---- For restoring ----


def open_checkpoint(attempt: _parts.Attempt) -> list[int]:
    """Descriptors of all manifests in the order of ranks, then of the data files that they name, in their order. They
    are the caller's to close."""
    fds: list[int] = []
    whose = _parts.believed(attempt.folder.parent)

    def add(file: pathlib.Path) -> None:
        with _parts.open_regular(file, whose) as stream:
            fds.append(os.dup(stream.fileno()))

    try:
        parts = []
        for rank in range(attempt.head.world_size):
            folder = attempt.folder / f"part-{rank}"
            parts.append(_parts.read_part(folder, attempt.id))
            add(folder / f"manifest-{attempt.id}")
        for part in parts:
            for file in part.files:
                add(part.folder / file.name)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds
