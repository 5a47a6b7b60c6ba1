"""The errors of this package, and how codes of the C API become them."""

from __future__ import annotations

import builtins
from typing import Any

from ._native import ffi, lib


class MlpoError(OSError):
    """A failure that the client library or the daemon reports.

    ``errno`` is an errno, ``strerror`` says what, where and what to do, ``code`` is the code of the C API: a negated
    errno or one of ``MLPO_ERR_*``.
    """

    code: int

    def __init__(self, code: int, text: str = "", os_errno: int = 0) -> None:
        super().__init__(os_errno or lib.mlpo_errno(code), text or _describe(code))
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.code, self.strerror, self.errno))


class TimeoutError(MlpoError, builtins.TimeoutError):  # noqa: A001 - named as what it is a kind of
    """A deadline passed. The request goes on and can be waited for again."""


class NonFiniteGradientError(MlpoError):
    """A gradient holds inf or NaN. ``parameters`` names those it belongs to, where known.

    Nothing was updated, but for the subgroups with the keys in ``updated`` (OffloadAdamW's update_in_backward=True).
    """

    parameters: tuple[str, ...]
    updated: tuple[str, ...]

    def __init__(
        self,
        code: int,
        text: str = "",
        os_errno: int = 0,
        parameters: tuple[str, ...] = (),
        updated: tuple[str, ...] = (),
    ) -> None:
        super().__init__(code, text, os_errno)
        self.parameters, self.updated = parameters, updated

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.code, self.strerror, self.errno, self.parameters, self.updated))


class NotOfferedError(MlpoError, NotImplementedError):
    """This version does not offer what was asked for; the text names what to use instead (errno EOPNOTSUPP)."""

    def __init__(self, code: int, text: str = "", os_errno: int = 0) -> None:
        super().__init__(code, text, os_errno)


def not_offered(what: str, instead: str) -> NotOfferedError:
    import errno

    return NotOfferedError(-errno.EOPNOTSUPP, f"{what} is not offered by this version; {instead}")


def error_of(code: int, text: str = "", os_errno: int = 0) -> MlpoError:
    """The exception for a negative code."""
    import errno

    kind: type[MlpoError] = MlpoError
    if code == -errno.ETIMEDOUT:
        kind = TimeoutError
    elif code == lib.MLPO_ERR_NOT_FINITE:
        kind = NonFiniteGradientError
    elif code in (-errno.EOPNOTSUPP, -errno.ENOSYS):
        kind = NotOfferedError
    return kind(code, text, os_errno)


def last_error() -> str:
    """The text of the calling thread's last failed call."""
    return str(ffi.string(lib.mlpo_last_error()).decode("utf-8", "replace"))


def check(code: int) -> int:
    """Returns a code that is not negative, raises the error of one that is. In the thread that made the call."""
    if code < 0:
        raise error_of(code, last_error())
    return code


def _describe(code: int) -> str:
    return str(ffi.string(lib.mlpo_strerror(code)).decode("utf-8", "replace"))
