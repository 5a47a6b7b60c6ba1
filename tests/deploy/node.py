"""A throw-away node: this machine's files, changes kept in memory; its own processes, mounts, network and name.

    node.enter()  # at the start of a test: it goes on as root of such a node, and everything goes with it

Where that is not possible the test ends with exit code 77 and the reason.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import pathlib
import pwd
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Iterator, NoReturn

_INSIDE = "MLPO_TEST_NODE"
_upper = -1
ADDRESS = "10.0.0.1"

Command = list[str | os.PathLike[str]]


def skip(reason: str) -> NoReturn:
    print(f"skipped: {reason}")
    sys.exit(77)


def fail(reason: str) -> NoReturn:
    sys.exit(f"FAILED: {reason}")


def run(*command: str | os.PathLike[str], code: int = 0, timeout: float = 60, **more: Any) -> str:
    """Standard output of a command that must end with `code`."""
    done: subprocess.CompletedProcess[str]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **more)
    if done.returncode != code:
        shown = " ".join(map(str, command))[:200]
        fail(f"{shown}: exit code {done.returncode}, not {code}\n{done.stdout}{done.stderr}")
    return done.stdout


def wait_until(what: str, holds: Callable[[], object], timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > deadline:
            fail(f"after {timeout} s: not {what}")
        time.sleep(0.05)


def enter() -> None:
    folder = os.environ.get(_INSIDE)
    if folder is None:
        _start()
    assert folder is not None
    _build(pathlib.Path(folder))


def _start() -> NoReturn:
    """Runs this program again inside, and ends as it ends."""
    if os.geteuid() != 0:
        skip("needs root, for mounts and users of its own")
    if not shutil.which("unshare"):
        skip("needs unshare (package util-linux)")
    spaces = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
    if subprocess.run([*spaces, "true"], capture_output=True).returncode != 0:
        skip("needs namespaces of its own, which this machine does not give")
    # On a disk: paths in it are to be as real ones.
    folder = tempfile.mkdtemp(prefix="mlpo-node.", dir=os.environ.get("TMPDIR", "/var/tmp"))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MLPO_")}
    try:
        inside = [*spaces, sys.executable, "-B", *sys.argv]
        code = subprocess.run(inside, env={**clean, _INSIDE: folder, "LC_ALL": "C"}).returncode
    finally:
        shutil.rmtree(folder)
    sys.exit(code)


def _mount(*arguments: str | os.PathLike[str]) -> None:
    run("mount", *arguments)


def _build(folder: pathlib.Path) -> None:
    global _upper
    disk = folder / "disk"
    memory, root = folder / "memory", folder / "memory" / "root"
    disk.mkdir(mode=0o755)
    memory.mkdir()
    _mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", memory)
    for name in ("upper", "work", "root"):
        (memory / name).mkdir(mode=0o755)
    layers = f"lowerdir=/,upperdir={memory}/upper,workdir={memory}/work"
    overlay = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, root], capture_output=True, text=True)
    if overlay.returncode != 0:
        skip(f"needs overlayfs: {overlay.stderr.strip()}")
    _upper = os.open(memory / "upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _mount("-t", "proc", "proc", root / "proc")
    for name in ("dev", "sys"):
        _mount("--rbind", f"/{name}", root / name)
    for name in ("run", "tmp"):
        _mount("-t", "tmpfs", "-o", "mode=1777" if name == "tmp" else "mode=0755", "tmpfs", root / name)
    # What the test reads may lie on another file system than /.
    for argument in map(pathlib.Path, [__file__, *sys.argv[1:]]):
        place = argument if argument.is_dir() else argument.parent
        if argument.is_absolute() and place.stat().st_dev != os.stat("/").st_dev:
            (root / place.relative_to("/")).mkdir(parents=True, exist_ok=True)
            _mount("--rbind", place, root / place.relative_to("/"))
    (root / "disk").mkdir()
    _mount("--bind", disk, root / "disk")
    os.chroot(root)
    os.chdir("/")
    os.umask(0o022)
    socket.sethostname("mlpo-node")
    # The loopback interface, up (IFF_UP, IFF_LOOPBACK, IFF_RUNNING), with an address that resolvers take for one.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x49))  # SIOCSIFFLAGS
        address = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(ADDRESS))
        fcntl.ioctl(any_socket, 0x8916, struct.pack("16s16s", b"lo:1", address))  # SIOCSIFADDR


def changes() -> Iterator[str]:
    """Every file and folder of / that has been made or changed in this node, but not those that were removed again."""
    for folder, folders, files, descriptor in os.fwalk(".", dir_fd=_upper):
        for name in (*folders, *files):
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if status.st_rdev != 0 or (status.st_mode & 0o170000) != 0o020000:  # a whiteout is the device 0, 0
                yield os.path.normpath(os.path.join("/", folder, name))


def install(build: str) -> None:
    """The build's programs and files as `make install` puts them into /usr, with users and folders."""
    run("cmake", "--install", build, "--prefix", "/usr", timeout=120)
    run("ldconfig")
    run("systemd-sysusers")
    run("systemd-tmpfiles", "--create", "mlpo.conf")


def train(socket_path: str, user: str, groups: str = "--init-groups") -> None:
    """Two ranks of `user` train through the daemon there, and their result is right."""
    entry = pwd.getpwnam(user)
    as_user: Command = ["setpriv", "--reuid", str(entry.pw_uid), "--regid", str(entry.pw_gid), groups]
    bench = ["mlpo-bench", "train", "--params", "300K", "--ranks", "2", "--steps", "3", "--json", "--socket"]
    result = json.loads(run(*as_user, *bench, socket_path, cwd="/", timeout=120))
    if result["check"] != "ok" or result["parameters"] != 300_000:
        fail(f"training as {user} at {socket_path}: {result}")


def processes(name: str) -> list[int]:
    """Processes of that name that have not ended."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_text()
        except OSError:
            continue  # it has ended
        named, _, fields = status.partition("(")[2].rpartition(")")
        if named == name[:15] and fields.split()[0] != "Z":
            found.append(int(entry.name))
    return found


class Service:
    """A program started as systemd starts it, with a socket that hears what it says."""

    def __init__(
        self,
        command: Command,
        notify: str = "/run/mlpo-test-notify",
        environment: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        self.heard: list[str] = []
        self._notify = pathlib.Path(notify)
        self._notify.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(notify.replace("@", "\0", 1) if notify.startswith("@") else notify)
        if not notify.startswith("@"):
            os.chmod(notify, 0o777)
        self._log = tempfile.TemporaryFile("w+")
        env = {"PATH": os.environ["PATH"], "NOTIFY_SOCKET": notify, **(environment or {})}
        self.process = subprocess.Popen(command, env=env, stdout=self._log, stderr=self._log, **more)
        atexit.register(self.process.kill)  # if the test ends before it

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def wait_for(self, message: str, timeout: float = 30) -> None:
        """Until it has said this, from now on."""
        deadline = time.monotonic() + timeout
        while True:
            self._socket.settimeout(max(0.01, min(0.2, deadline - time.monotonic())))
            try:
                self.heard.append(self._socket.recv(4096).decode())
                if self.heard[-1].startswith(message):
                    return
                continue
            except TimeoutError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                fail(f"no {message} in {timeout} s; exit code {self.process.poll()}; heard {self.heard}\n{self.log()}")

    def heard_so_far(self) -> list[str]:
        self._socket.setblocking(False)
        try:
            while True:
                self.heard.append(self._socket.recv(4096).decode())
        except BlockingIOError:
            return self.heard

    def quiet_for(self, seconds: float) -> bool:
        """Whether it says nothing more for so long."""
        self.heard_so_far()
        self._socket.settimeout(seconds)
        try:
            self.heard.append(self._socket.recv(4096).decode())
            return False
        except TimeoutError:
            return True

    def stop(self, code: int = 0, timeout: float = 60) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            ended = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            fail(f"SIGTERM has not ended it in {timeout} s\n{self.log()}")
        if ended != code:
            fail(f"exit code {ended} after SIGTERM, not {code}\n{self.log()}")
        self.heard_so_far()
        self._socket.close()
        self._notify.unlink()
