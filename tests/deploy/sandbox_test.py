"""The units' user, limits, mounts and filters: the daemon starts in them, uses io_uring, and trains.

    sandbox_test.py BUILD_FOLDER

What systemd itself says about the units is asked first. Then each runs in sandbox.py, of whose walls some are touched,
so that a sandbox that holds nothing would be seen. Last the daemon runs under the seccomp profile for Kubernetes.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import subprocess
import sys

import node
import sandbox

UNITS = pathlib.Path("/usr/lib/systemd/system")
HERE = pathlib.Path(__file__).parent
EXPOSURE = 20  # of 100, as systemd-analyze counts
CONFIG = """
[memory]
pool = "6MiB"
block = "64Ki"
arenas = "256MiB"
[[path]]
directory = "/var/lib/mlpo"
"""

LIMITS = """
import resource
if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY: print("memory cannot be locked")
if resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 65536: print("RLIMIT_NOFILE is not the unit's")
"""
# Inside: the walls. One line for each that is not there.
PROBE = """
import ctypes, errno, mmap, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
def refused(what, call, *errors):
    try:
        call()
    except OSError as error:
        if error.errno not in errors: print(what, "ends with", error)
    else:
        print(what, "is possible")
def system_call(number, *arguments):
    if libc.syscall(number, *arguments) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
refused("writing in /usr", lambda: open("/usr/x", "w"), errno.EROFS, errno.EACCES)
refused("writing in /etc/mlpo", lambda: open("/etc/mlpo/x", "w"), errno.EROFS, errno.EACCES)
refused("internet", lambda: socket.socket(socket.AF_INET), errno.EAFNOSUPPORT)
refused("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW), errno.EAFNOSUPPORT)
refused("keyctl", lambda: system_call(250, 0, 0, 0), errno.EPERM)
refused("process_vm_readv", lambda: system_call(310, os.getpid(), 0, 0, 0, 0, 0), errno.EPERM)
refused("mount", lambda: system_call(165, 0, 0, 0, 0, 0), errno.EPERM)
refused("a user namespace", lambda: system_call(272, 0x10000000), errno.EPERM)
refused("code that is written", lambda: mmap.mmap(-1, 4096, prot=7), errno.EPERM)
refused("a block device", lambda: os.mknod("/tmp/x", 0o60600, 0x100), errno.EPERM)
refused("setuid", lambda: os.setuid(0), errno.EPERM)
refused("a file with setgid", lambda: os.chmod("/tmp", 0o2777), errno.EPERM)
if os.path.exists("/dev/kmsg") or os.path.exists("/dev/shm"): print("/dev has", os.listdir("/dev"))
if os.path.exists("/proc/1/stat"): print("processes of others are seen")
status = open("/proc/self/status").read()
for line in ("NoNewPrivs:\\t1", "CapBnd:\\t0000000000000000", "CapEff:\\t0000000000000000"):
    if line not in status: print("no", line)
"""


def check_units() -> None:
    """systemd's own look at them. Man pages are not looked for."""
    for unit in ("mlpo-daemon.service", "mlpo-daemon@1000.service"):
        complaints = _verify(unit)
        if complaints:
            node.fail(f"systemd-analyze verify {unit}: {complaints}")
        name = unit.replace("@1000", "@")
        node.run("systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE}", UNITS / name)
    for kind in ("sysusers.d", "tmpfiles.d"):
        if not (pathlib.Path("/usr/lib") / kind / "mlpo.conf").exists():
            node.fail(f"no {kind}/mlpo.conf was installed")


def _verify(unit: str) -> str:
    done = subprocess.run(
        ["systemd-analyze", "--man=no", "verify", unit], capture_output=True, text=True, timeout=60, cwd="/"
    )
    # Others' units may have faults of their own.
    return "\n".join(line for line in (done.stdout + done.stderr).splitlines() if "mlpo" in line)


def try_unit(unit: str, instance: str, socket: str, trainer: str) -> None:
    file = UNITS / unit
    settings = sandbox.parse(file.read_text(), instance)
    command = settings["ExecStart"][-1].split()
    sandboxed = [sys.executable, "-B", str(HERE / "sandbox.py"), str(file), instance]
    walls = node.run(*sandboxed, "/usr/bin/python3", "-c", PROBE + (LIMITS if sandbox.may_raise_limits() else ""))
    if walls:
        node.fail(f"{unit}: the sandbox does not hold:\n{walls}")

    daemon = node.Service([*sandboxed, *command], environment={"WATCHDOG_USEC": "30000000"})
    daemon.wait_for("READY=1")
    daemon.wait_for("WATCHDOG=1")
    # What such a trainer has fits the pool; this writes and reads.
    node.run("mlpo-ctl", "bench", "--seconds", "0.05", "--socket", socket)
    node.train(socket, trainer)
    status = json.loads(node.run("mlpo-ctl", "status", "--json", "--socket", socket))
    for path in status["paths"]:
        if path["engine"] != "io_uring" or path["model"]["from"] != "calibrated":
            node.fail(f"{unit}: not measured through io_uring: {path}")
    if not status["pool"]["locked"]:
        node.fail(f"{unit}: the pool is not locked: {daemon.log()}")
    daemon.stop()
    left = [str(path) for path in pathlib.Path("/var/lib/mlpo").rglob("state")]
    if left or os.path.exists(socket):
        node.fail(f"{unit} left {left or socket}")


def try_seccomp_profile(source: pathlib.Path) -> None:
    """The container runtime's part, by the same library that runtimes use."""
    profile = json.loads(source.read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO" and profile["architectures"] == ["SCMP_ARCH_X86_64"]
    rules = sandbox.Filter(sandbox.refuse(profile["defaultErrnoRet"]))
    names = set()
    for entry in profile["syscalls"]:
        action = {"SCMP_ACT_ALLOW": sandbox.ALLOW, "SCMP_ACT_ERRNO": sandbox.refuse(entry.get("errnoRet", errno.EPERM))}
        operators = {"SCMP_CMP_MASKED_EQ": sandbox.MASKED_EQ}
        compares = [(a["index"], operators[a["op"]], a["value"], a["valueTwo"]) for a in entry.get("args", [])]
        for name in entry["names"]:
            names.add(name)
            rules.add(action[entry["action"]], name, *compares)
    assert {"io_uring_setup", "io_uring_enter", "io_uring_register", "mbind", "mlock", "memfd_create"} <= names
    assert not {"mount", "bpf", "ptrace", "keyctl", "unshare", "setns", "kexec_load"} & names

    def enter() -> None:
        sandbox._libc.prctl(38, 1, 0, 0, 0)
        rules.load()

    as_mlpo = ["setpriv", "--reuid=mlpo", "--regid=mlpo", "--init-groups"]
    command = ["mlpo-daemon", "--config", "/etc/mlpo/mlpo.toml", "--socket", "/run/mlpo/mlpo.sock"]
    daemon = node.Service([*as_mlpo, *command], preexec_fn=enter)
    daemon.wait_for("READY=1")
    if "Seccomp:\t2" not in pathlib.Path(f"/proc/{daemon.process.pid}/status").read_text():
        node.fail("the seccomp profile was not applied")
    node.train("/run/mlpo/mlpo.sock", "mlpo")
    (path,) = json.loads(node.run("mlpo-ctl", "paths", "--json"))["paths"]
    if path["engine"] != "io_uring":
        node.fail(f"under the seccomp profile not through io_uring: {path}")
    daemon.stop()


def main() -> None:
    node.enter()
    node.install(sys.argv[1])
    node.run("useradd", "--uid", "4321", "--groups", "mlpo-users", "--create-home", "trainer")
    pathlib.Path("/etc/mlpo/mlpo.toml").write_text(CONFIG)
    node.run("mount", "--bind", "/disk", "/var/lib/mlpo")
    node.run("systemd-tmpfiles", "--create", "mlpo.conf")
    check_units()
    try_unit("mlpo-daemon.service", "", "/run/mlpo/mlpo.sock", "trainer")
    try_unit("mlpo-daemon@.service", "4321", "/run/mlpo/4321/mlpo.sock", "trainer")
    try_seccomp_profile(pathlib.Path("/usr/share/mlpo/k8s/mlpo-seccomp.json"))
    if not sandbox.may_raise_limits():
        print("skipped in part: the units' limits: root lacks CAP_SYS_RESOURCE here; its own limits were taken")
    print("the units' sandbox and the seccomp profile hold, and the daemon trains in them")


if __name__ == "__main__":
    main()
