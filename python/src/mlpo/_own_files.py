"""Parts of checkpoints in files that this process opens itself, for a daemon of another user, which opens nothing for
us. It writes what it is passed; folders, names and what makes them durable are ours. daemon/checkpoint/README.md has
the layout."""

from __future__ import annotations

import errno
import os
import pathlib
import re
import secrets
import threading
from typing import Optional

from . import _parts
from ._errors import MlpoError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = re.compile(r"\.(data|manifest)-[0-9a-f]{32}\.new")  # where the file system has no nameless files


def _error(code: int, text: str) -> MlpoError:
    return MlpoError(-code, text)


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
    """An empty file in a folder, which has no name that counts until it is given one."""

    def __init__(self, folder: int, kind: str) -> None:
        self._folder = folder
        self._name: Optional[str] = None
        try:
            self.fd = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
            self._name = f".{kind}-{secrets.token_hex(16)}.new"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self.fd = os.open(self._name, flags, 0o600, dir_fd=folder)

    def give(self, name: str) -> None:
        """Fails if the name is taken."""
        if self._name is None:
            os.link(f"/proc/self/fd/{self.fd}", name, dst_dir_fd=self._folder, follow_symlinks=True)
            return
        os.link(self._name, name, src_dir_fd=self._folder, dst_dir_fd=self._folder, follow_symlinks=False)
        os.unlink(self._name, dir_fd=self._folder)
        self._name = None

    def close(self) -> None:
        if self._name is not None:
            os.unlink(self._name, dir_fd=self._folder)
            self._name = None
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class PartFiles:
    """The files of this rank's part while it is saved. Thread-safe."""

    def __init__(self, directory: str, tag: str, rank: int, overwrite: bool) -> None:
        if not _parts.is_tag(tag):
            raise ValueError(f"{tag!r} is no tag: [A-Za-z0-9_][A-Za-z0-9._-]{{0,127}}")
        self._lock = threading.Lock()
        self._tag = pathlib.Path(os.path.abspath(directory)) / tag
        self._part = self._tag / f"part-{rank}"
        self._complete: Optional[bool] = None
        self._fds: list[int] = []
        self._files: list[_NewFile] = []
        try:
            self._fds.append(os.open(self._tag.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            self._fds.append(_folder(self._fds[0], tag, self._tag))
            self._fds.append(_folder(self._fds[1], self._part.name, self._part))
            complete = [attempt for attempt in _parts.attempts(self._tag) if attempt.complete]
            if complete and not overwrite:
                raise _error(
                    errno.EEXIST,
                    f"{self._tag.parent} has a complete checkpoint {tag!r} of step {complete[-1].head.step}: "
                    "use another tag, or overwrite it",
                )
            for name in os.listdir(self._fds[2]):  # a rank has one process: what an earlier one was writing is nobody's
                if _NEW.fullmatch(name):
                    os.unlink(name, dir_fd=self._fds[2])
            self._files = [_NewFile(self._fds[2], kind) for kind in ("data", "manifest")]
        except BaseException:
            self.close()
            raise

    @property
    def descriptors(self) -> tuple[int, int]:
        """The data file and the manifest."""
        return self._files[0].fd, self._files[1].fd

    def commit(self, attempt: bytes) -> bool:
        """The daemon has written both, durably: now they are the part. Whether those of all ranks are there."""
        with self._lock:
            if self._complete is not None:
                return self._complete
            name = attempt.hex()
            directory, tag, part = self._fds
            self._files[0].give(f"data-{name}-0")
            os.fsync(part)
            self._files[1].give(f"manifest-{name}")
            for fd in (part, tag, directory):
                os.fsync(fd)
            found = {each.id: each for each in _parts.attempts(self._tag)}
            own = found.get(name)
            self._complete = own is not None and own.complete
            if own is not None and self._complete:
                for other in found.values():
                    if (other.head.started_unix_ns, other.id) < (own.head.started_unix_ns, own.id):
                        _remove(other)
            self.close()
            return self._complete

    def close(self) -> None:
        """What has not been committed has never had a name that counts."""
        for file in self._files:
            file.close()
        for fd in self._fds:
            os.close(fd)
        self._files, self._fds = [], []


def _remove(attempt: _parts.Attempt) -> None:
    """An earlier save under the same tag: manifests first, so that no half of it ever looks whole."""
    for rank in sorted(attempt.heads):
        folder = attempt.folder / f"part-{rank}"
        try:
            files = [name for name, _ in _parts.read_part(folder, attempt.id).files]
            fd = os.open(folder, _FOLDER)
        except (OSError, _parts.CheckpointError):
            continue  # another rank removes it, too
        try:
            for name in (f"manifest-{attempt.id}", *files):
                try:
                    os.unlink(name, dir_fd=fd)
                except FileNotFoundError:
                    pass
                if name.startswith("manifest-"):
                    os.fsync(fd)
        except PermissionError:
            continue  # somebody else's: it stays, and never counts without its manifest
        finally:
            os.close(fd)
        try:
            os.rmdir(folder)
        except OSError:
            pass  # the new part is in it


def open_checkpoint(attempt: _parts.Attempt) -> list[int]:
    """Descriptors of all manifests in the order of ranks, then of the data files that they name, in their order. They
    are the caller's to close."""
    fds: list[int] = []
    try:
        parts = []
        for rank in range(attempt.head.world_size):
            folder = attempt.folder / f"part-{rank}"
            parts.append(_parts.read_part(folder, attempt.id))
            fds.append(_open(folder / f"manifest-{attempt.id}"))
        for part in parts:
            fds += [_open(part.folder / name) for name, _ in part.files]
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _open(file: pathlib.Path) -> int:
    return os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
