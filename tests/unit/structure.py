"""Who may include whom, checked in the text of the sources.

    proto            libc; spsc_ring.hpp: the C++ standard library
    client           proto and itself
    daemon/base      proto and itself
    daemon/config    base, proto, types and itself
    daemon/types     base, proto and itself
    daemon/STAGE     base, config, proto, types and itself: stages never include each other
    daemon/*.{h,cc}  connects the stages: all of them
    daemon/doctor    adam and io besides what a stage may include: it asks their probes
    daemon/bench     adam, io and the client besides what a stage may include

Only session, completion and the wiring see the ring; only io/uring_* sees liburing; scheduler and types make no system
calls and know no threads; nothing in the daemon includes the client or CUDA. A project header is named by its place
("daemon/io/path.h"), so that this check, and a reader, can see where it lives. Links in the stages' CMakeLists.txt follow
the same rules.
"""

from __future__ import annotations

import pathlib
import re
from typing import Iterator

STAGES = ("config", "io", "adam", "scheduler", "session", "completion", "checkpoint", "control")
FOLDERS = ("base", "types", "bench", "doctor", *STAGES)
RING = ("proto/ring.h", "proto/spsc_ring.hpp")
SOURCES = (".h", ".hpp", ".c", ".cc")
LIBC = {
    "assert.h", "errno.h", "inttypes.h", "limits.h", "stdalign.h", "stdatomic.h", "stdbool.h", "stddef.h", "stdint.h",
    "string.h",
}  # fmt: skip
THREADS = {
    "atomic", "barrier", "condition_variable", "future", "latch", "mutex", "semaphore", "shared_mutex", "stop_token",
    "thread",
}  # fmt: skip

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include(?:_next)?[ \t]*([<\"])([^>\"\n]*)[>\"]", re.M)
_LINK = re.compile(r"\bmlpo_([a-z_]+)\b")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def _is_standard_cpp(name: str) -> bool:
    """<vector>, not <stdio.h>, <sys/stat.h> or <boost/...>."""
    return "." not in name and "/" not in name


def _may_include(folder: str) -> set[str]:
    """Places ("daemon/io", "proto", "client") that a file in daemon/`folder` may include."""
    own = f"daemon/{folder}"
    if folder == "base":
        return {own, "proto"}
    if folder == "types":
        return {own, "proto", "daemon/base"}
    allowed = {own, "proto", "daemon/base", "daemon/config", "daemon/types"}
    if folder == "doctor":
        allowed |= {"daemon/adam", "daemon/io"}
    if folder == "bench":
        allowed |= {"daemon/adam", "daemon/io", "client"}
    return allowed


def _place(header: str) -> str:
    """Where a project header lives: "proto", "client", "daemon/io", "daemon" for the wiring; "" if it is not ours."""
    parts = header.split("/")
    if parts[0] == "mlpo":
        return "client"
    if parts[0] in ("proto", "client"):
        return parts[0]
    if parts[0] == "daemon":
        return f"daemon/{parts[1]}" if len(parts) > 2 else "daemon"
    return parts[0] if parts[0] in ("tests", "python") else ""


def _in_proto(file: str, quoted: bool, header: str) -> str:
    if quoted:
        return "" if _place(header) == "proto" else "proto includes only proto and libc"
    if file == "proto/spsc_ring.hpp":
        return "" if _is_standard_cpp(header) or header in LIBC else "the ring includes only the standard library"
    return "" if header in LIBC else "proto includes only libc"


def _in_client(header: str) -> str:
    place = _place(header)
    if place and place not in ("proto", "client"):
        return "the client includes only proto and itself"
    return ""


def _in_daemon(file: str, quoted: bool, header: str) -> str:
    parts = file.split("/")
    folder = parts[1] if len(parts) > 2 else ""
    place = _place(header)
    if re.match(r"(cuda|cuda_runtime|cuda_runtime_api|nvtx3/.*)(\.h|\.hpp)?$", header):
        return "the daemon is free of CUDA"
    if header.startswith("liburing") and not (folder == "io" and parts[-1].startswith("uring_")):
        return "only daemon/io/uring_* includes liburing"
    if header in RING and folder not in ("", "session", "completion", "bench"):
        return "only session, completion and the wiring see the ring"
    if folder and place and place not in _may_include(folder):
        return f"daemon/{folder} does not include {place}"
    if not folder and place and place != "proto" and not place.startswith("daemon"):
        return f"the daemon does not include {place}"
    if folder in ("scheduler", "types") and not quoted:
        if header in THREADS:
            return f"daemon/{folder} knows no threads"
        if not _is_standard_cpp(header) and header not in LIBC and not header.startswith("boost/intrusive/"):
            return f"daemon/{folder} makes no system calls"
    return ""


def _wrong(file: str, quoted: bool, header: str) -> str:
    """What is wrong with one include, "" if nothing."""
    parts = header.split("/")
    # The client's public headers are found beside the program that includes them, as by its users.
    if quoted and (".." in parts or not _place(header)):
        return 'a header is named by its place from the top, such as "daemon/io/path.h"'
    if not quoted and _place(header) not in ("", "client"):
        return "headers of the project are included in quotes"
    top = file.split("/")[0]
    if top == "proto":
        return _in_proto(file, quoted, header)
    if top == "client":
        return _in_client(header)
    return _in_daemon(file, quoted, header)


def _files(root: pathlib.Path) -> Iterator[pathlib.Path]:
    for top in ("proto", "client", "daemon"):
        yield from sorted(path for path in (root / top).rglob("*") if path.suffix in SOURCES and path.is_file())


def _violations_of_links(root: pathlib.Path) -> Iterator[str]:
    for folder in ("base", *STAGES):
        path = root / "daemon" / folder / "CMakeLists.txt"
        if not path.exists():
            continue
        allowed = {folder, "base", "config", "library"} if folder != "base" else {"base", "library"}
        text = re.sub(r"#[^\n]*", "", path.read_text())
        for name in sorted(set(_LINK.findall(text)) - allowed):
            yield f"daemon/{folder}/CMakeLists.txt: mlpo_{name}: daemon/{folder} does not link {name}"


def violations(root: pathlib.Path) -> list[str]:
    """Every broken rule in the tree at `root`, as "FILE:LINE: INCLUDE: RULE"."""
    found = []
    for path in _files(root):
        file = path.relative_to(root).as_posix()
        if file.startswith("daemon/") and file.count("/") > 1 and file.split("/")[1] not in FOLDERS:
            found.append(f"{file}:1: unknown folder: add it to {pathlib.Path(__file__).name}")
            continue
        text = path.read_text()
        # Comments go, their lines stay; an include in a comment is none.
        text = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
        for include in _INCLUDE.finditer(text):
            wrong = _wrong(file, include[1] == '"', include[2])
            if wrong:
                line = text.count("\n", 0, include.start(1)) + 1
                found.append(f"{file}:{line}: {include[2]}: {wrong}")
    return found + list(_violations_of_links(root))
