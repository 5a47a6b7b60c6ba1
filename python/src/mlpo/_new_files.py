"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import pathlib
import secrets
from types import TracebackType
from typing import Any, Optional, Union


class NewFile:
    """A file under a name of its own until everything is in it, durably. Replaces what has the name."""

    def __init__(self, name: Union[str, os.PathLike[str]]) -> None:
        self._name = pathlib.Path(name)
        self._aside = self._name.with_name(f".{self._name.name}.{secrets.token_hex(4)}")

    def __enter__(self) -> Any:
        self._stream = open(self._aside, "xb")
        return self._stream

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        try:
            if kind is None:
                self._stream.flush()
                os.fsync(self._stream.fileno())
            self._stream.close()
            if kind is None:
                os.rename(self._aside, self._name)
                sync(self._name.parent)
        finally:
            if self._aside.exists():
                self._aside.unlink()


def sync(name: Union[str, os.PathLike[str]]) -> None:
    """Makes a file's bytes, or a folder's names, durable."""
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
