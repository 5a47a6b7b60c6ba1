"""Runs a command as systemd runs a unit's: user, limits, mounts, and filters of system calls, without systemd.

    python3 sandbox.py UNIT_FILE INSTANCE COMMAND...     as root; INSTANCE takes the place of %i

Only what bears on what the command can do. A setting that is not known here is an error, so that none is left untried.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pathlib
import pwd
import resource
import stat
import subprocess
import sys

_libc = ctypes.CDLL(None, use_errno=True)

# What systemd does with the process from outside.
_FROM_OUTSIDE = {
    "Type", "ExecStart", "NotifyAccess", "WatchdogSec", "TimeoutStartSec", "TimeoutStopSec", "Restart", "RestartSec",
    "RestartPreventExitStatus", "OOMScoreAdjust", "RuntimeDirectoryPreserve", "EnvironmentFile",
}  # fmt: skip
# What the filter of system calls, which allows only what it lists, forbids already, and no capability is left for.
_IN_FILTER = {
    "ProtectClock", "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules", "LockPersonality",
    "RestrictRealtime", "SystemCallArchitectures",
}  # fmt: skip


def parse(text: str, instance: str) -> dict[str, list[str]]:
    """Settings of [Service], each with its values in order."""
    settings: dict[str, list[str]] = {}
    section = ""
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("["):
            section = line
        elif line and line[0] not in "#;" and section == "[Service]":
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value.replace("%i", instance))
    return settings


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


# ---- Filters of system calls, through libseccomp ----

ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
NE, MASKED_EQ = 1, 7


class _Compare(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


def refuse(error: int) -> int:
    return _ERRNO | error


class Filter:
    def __init__(self, default: int) -> None:
        self._lib = ctypes.CDLL("libseccomp.so.2")
        self._lib.seccomp_init.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._lib.seccomp_init(ctypes.c_uint32(default)))
        if not self._context:
            raise OSError(errno.EINVAL, "seccomp_init")

    def add(self, action: int, name: str, *compare: tuple[int, int, int, int]) -> None:
        number = self._lib.seccomp_syscall_resolve_name(name.encode())
        if number == -1:
            raise ValueError(f"no system call {name}")
        if number < 0:
            return  # of another architecture
        compares = (_Compare * max(1, len(compare)))(*[_Compare(*each) for each in compare])
        add = self._lib.seccomp_rule_add_array
        result = add(self._context, ctypes.c_uint32(action), number, len(compare), compares)
        if result != 0:
            raise OSError(-result, f"seccomp_rule_add {name}")

    def load(self) -> None:
        result = self._lib.seccomp_load(self._context)
        if result != 0:
            raise OSError(-result, "seccomp_load")


def _calls(names: str) -> set[str]:
    """Of "@set name ...", with sets in sets."""
    found: set[str] = set()
    for name in names.split():
        if not name.startswith("@"):
            found.add(name)
            continue
        listed = subprocess.run(["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True)
        lines = [line.strip() for line in listed.stdout.splitlines()[1:]]
        found |= _calls(" ".join(line for line in lines if line and not line.startswith("#")))
    return found


def _known(lib: ctypes.CDLL, name: str) -> bool:
    return int(lib.seccomp_syscall_resolve_name(name.encode())) != -1


def filters(settings: dict[str, list[str]]) -> list[Filter]:
    made = []
    if settings.get("RestrictAddressFamilies") == ["AF_UNIX"]:
        families = Filter(ALLOW)
        families.add(refuse(errno.EAFNOSUPPORT), "socket", (0, NE, 1, 0))
        made.append(families)
    if settings.get("MemoryDenyWriteExecute") == ["yes"]:
        executable = Filter(ALLOW)
        executable.add(refuse(errno.EPERM), "mmap", (2, MASKED_EQ, 6, 6))
        executable.add(refuse(errno.EPERM), "mprotect", (2, MASKED_EQ, 4, 4))
        executable.add(refuse(errno.EPERM), "pkey_mprotect", (2, MASKED_EQ, 4, 4))
        made.append(executable)
    if settings.get("RestrictNamespaces") == ["yes"]:
        spaces = Filter(ALLOW)
        spaces.add(refuse(errno.ENOSYS), "clone3")
        for name in ("unshare", "setns"):
            spaces.add(refuse(errno.EPERM), name)
        for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
            spaces.add(refuse(errno.EPERM), "clone", (0, MASKED_EQ, flag, flag))
        made.append(spaces)
    if settings.get("RestrictSUIDSGID") == ["yes"]:
        modes = Filter(ALLOW)
        modes.add(refuse(errno.ENOSYS), "openat2")
        for bit in (stat.S_ISUID, stat.S_ISGID):
            for name, argument in (("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("mkdir", 1), ("mkdirat", 2)):
                modes.add(refuse(errno.EPERM), name, (argument, MASKED_EQ, bit, bit))
        made.append(modes)
    # Last: it does not allow that more are loaded.
    lib = ctypes.CDLL("libseccomp.so.2")
    allowed: set[str] = set()
    for value in settings.get("SystemCallFilter", []):
        allowed = allowed - _calls(value[1:]) if value.startswith("~") else allowed | _calls(value)
    if allowed:
        error = getattr(errno, settings["SystemCallErrorNumber"][-1])
        calls = Filter(refuse(error))
        for name in sorted(allowed):
            if _known(lib, name):  # systemd knows newer kernels than libseccomp
                calls.add(ALLOW, name)
        made.append(calls)
    return made


# ---- Mounts ----


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _enter_mounts(settings: dict[str, list[str]]) -> None:
    clone_newns, clone_newipc, clone_newnet = 0x00020000, 0x08000000, 0x40000000
    _check(_libc.unshare(clone_newns | clone_newipc | clone_newnet), "unshare")
    _mount("--make-rprivate", "/")
    writable = [path for value in settings.get("ReadWritePaths", []) for path in value.split()]
    writable = [path.lstrip("-") for path in writable if not path.startswith("-") or os.path.exists(path[1:])]
    writable += [f"/run/{folder}" for folder in settings.get("RuntimeDirectory", [])]
    for path in writable:
        _mount("--bind", path, path)
    for path in ("/tmp", "/var/tmp"):
        _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", path)
    with open("/proc/self/mountinfo") as lines:
        points = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    for point in points:
        if point in writable or point in ("/tmp", "/var/tmp") or point.split("/")[1] in ("dev", "proc"):
            continue
        _mount("-o", "remount,bind,ro", point)
    _mount("-t", "proc", "-o", "hidepid=invisible", "proc", "/proc")
    _mount("--bind", "-o", "ro", "/proc/sys", "/proc/sys")
    os.makedirs("/tmp/devices")
    for name in ("null", "zero", "full", "random", "urandom"):
        (pathlib.Path("/tmp/devices") / name).touch()
        _mount("--bind", f"/dev/{name}", f"/tmp/devices/{name}")
    _mount("--rbind", "/tmp/devices", "/dev")


# ---- All of it ----


def may_raise_limits() -> bool:
    """Root of a container may lack the capability, whose number is 24."""
    status = pathlib.Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> 24 & 1)


def enter(settings: dict[str, list[str]]) -> None:
    """In this process, for good."""
    handled = {
        "User", "Group", "Environment", "RuntimeDirectory", "RuntimeDirectoryMode", "ReadWritePaths", "LimitMEMLOCK",
        "LimitNOFILE", "UMask", "SystemCallFilter", "SystemCallErrorNumber",
    }  # fmt: skip
    only = {
        "ProtectSystem": "strict", "ProtectHome": "read-only", "PrivateTmp": "yes", "PrivateDevices": "yes",
        "PrivateNetwork": "yes", "PrivateIPC": "yes", "ProtectKernelTunables": "yes", "ProtectControlGroups": "yes",
        "ProtectProc": "invisible", "NoNewPrivileges": "yes", "CapabilityBoundingSet": "",
        "RestrictAddressFamilies": "AF_UNIX", "RestrictNamespaces": "yes", "RestrictSUIDSGID": "yes",
        "MemoryDenyWriteExecute": "yes",
    }  # fmt: skip
    for name, values in settings.items():
        if name in only and values != [only[name]]:
            raise ValueError(f"{name}={values}: this sandbox does only {only[name]}")
        if name not in handled | only.keys() | _FROM_OUTSIDE | _IN_FILTER:
            raise ValueError(f"{name}= is not known here: what does it change for the daemon?")
    absent = (only.keys() | {"User", "SystemCallFilter", "LimitMEMLOCK"}) - settings.keys()
    if absent:
        raise ValueError(f"the unit has no {sorted(absent)}")

    user = settings["User"][-1]
    entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    for folder in settings.get("RuntimeDirectory", []):
        path = pathlib.Path("/run") / folder
        path.mkdir(parents=True, exist_ok=True)
        os.chmod(path, int(settings["RuntimeDirectoryMode"][-1], 8))
        os.chown(path, entry.pw_uid, entry.pw_gid)
    _enter_mounts(settings)
    unlimited = resource.RLIM_INFINITY
    for limit, name in ((resource.RLIMIT_MEMLOCK, "LimitMEMLOCK"), (resource.RLIMIT_NOFILE, "LimitNOFILE")):
        value = settings[name][-1]
        number = unlimited if value == "infinity" else int(value)
        if may_raise_limits():
            resource.setrlimit(limit, (number, number))
        else:
            resource.setrlimit(limit, (resource.getrlimit(limit)[1],) * 2)
    os.umask(int(settings["UMask"][-1], 8))
    loaded = filters(settings)  # before anything is dropped: it runs programs
    for assignment in settings.get("Environment", []):
        name, _, value = assignment.partition("=")
        os.environ[name] = value
    os.environ.update(HOME=entry.pw_dir, USER=entry.pw_name)
    pr_capbset_drop, pr_set_no_new_privs = 24, 38
    for capability in range(int(pathlib.Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
        _check(_libc.prctl(pr_capbset_drop, capability, 0, 0, 0), "PR_CAPBSET_DROP")
    os.setgroups(os.getgrouplist(entry.pw_name, entry.pw_gid))
    os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
    os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
    _check(_libc.prctl(pr_set_no_new_privs, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    for each in loaded:
        each.load()


if __name__ == "__main__":
    enter(parse(pathlib.Path(sys.argv[1]).read_text(), sys.argv[2]))
    os.chdir("/")
    os.execvp(sys.argv[3], sys.argv[3:])
