"""The Debian package: made, installed, its daemon started by hand as the unit has it, trained with, removed, purged.

    package_test.py BUILD_FOLDER

In a throw-away node, so that the machine's own packages stay as they are; what is left after the purge is seen as the
files that the node has and the machine has not.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys

import node
import sandbox

# What dpkg, ldconfig and useradd write for themselves.
OTHERS = re.compile(
    r"/(var/lib/dpkg|var/log|var/cache|var/lib/systemd|usr/share/mime)(/|$)"
    r"|/etc/(passwd|group|shadow|gshadow|subuid|subgid)-?$"
    r"|/etc/(ld\.so\.cache|\.pwd\.lock)$"
)


def control(package: pathlib.Path) -> dict[str, str]:
    fields = node.run("dpkg-deb", "--field", package)
    return dict(re.findall(r"^(\S+?): (.*)$", fields, re.M))


def check_contents(package: pathlib.Path) -> None:
    fields = control(package)
    needed = node.run("readelf", "-d", "/usr/bin/mlpo-daemon")
    for library in re.findall(r"NEEDED.*\[(lib(?:uring|numa|hwloc|spdlog|fmt)\S*?)\.so", needed):
        if library not in fields["Depends"]:
            node.fail(f"Depends lacks {library}: {fields['Depends']}")
    if "libc6" not in fields["Depends"] or "systemd" not in fields["Depends"]:
        node.fail(f"Depends: {fields['Depends']}")
    listed = node.run("dpkg-query", "--listfiles", "mlpo-daemon").split()
    for file in (
        "/usr/bin/mlpo-daemon", "/usr/bin/mlpo-ctl", "/usr/bin/mlpo-bench", "/usr/include/mlpo/client.h",
        "/usr/lib/systemd/system/mlpo-daemon.service", "/usr/lib/systemd/system/mlpo-daemon@.service",
        "/usr/lib/sysusers.d/mlpo.conf", "/usr/lib/tmpfiles.d/mlpo.conf", "/usr/libexec/mlpo/mlpo-job",
        "/usr/share/man/man8/mlpo-daemon.8", "/usr/share/bash-completion/completions/mlpo-ctl",
        "/usr/share/mlpo/slurm/prolog", "/usr/share/mlpo/pbs/mlpo_hook.py", "/usr/share/mlpo/grafana/mlpo.json",
        "/usr/share/mlpo/k8s/mlpo-seccomp.json", "/usr/share/mlpo/prometheus/mlpo.rules.yml",
        "/usr/share/mlpo/RUNBOOK.md", "/etc/mlpo/mlpo.toml",
    ):  # fmt: skip
        if file not in listed:
            node.fail(f"the package lacks {file}")
    for file in listed:
        status = os.lstat(file)
        if status.st_uid != 0 or status.st_gid != 0 or (status.st_mode & 0o022 and not os.path.islink(file)):
            node.fail(f"{file}: owner {status.st_uid}, mode {status.st_mode:o}")
        # Nothing names the place where it was built.
        if os.path.isfile(file) and not file.startswith("/usr/bin") and b"@" in pathlib.Path(file).read_bytes():
            text = pathlib.Path(file).read_text(errors="replace")
            if re.search(r"@(bindir|prefix|sysconfdir|sharedir|libexecdir|common)@", text):
                node.fail(f"{file} has a name that was to be filled in")
    if "/etc/mlpo/mlpo.toml" not in node.run("dpkg-query", "--show", "--showformat", "${Conffiles}", "mlpo-daemon"):
        node.fail("the configuration is no conffile")


def train_by_hand() -> None:
    settings = sandbox.parse(pathlib.Path("/usr/lib/systemd/system/mlpo-daemon.service").read_text(), "")
    user, group = settings["User"][-1], settings["Group"][-1]
    as_user = ["setpriv", f"--reuid={user}", f"--regid={group}", "--init-groups"]
    environment = dict(assignment.split("=", 1) for assignment in settings["Environment"])
    # The package's own configuration; less memory than a quarter of this machine's.
    environment.update(MLPO_MEMORY__POOL="36MiB", MLPO_MEMORY__ARENAS="256MiB")
    daemon = node.Service([*as_user, *settings["ExecStart"][-1].split()], environment=environment, cwd="/")
    daemon.wait_for("READY=1")
    node.train("/run/mlpo/mlpo.sock", "trainer")
    daemon.stop()
    if not any(pathlib.Path("/var/lib/mlpo/mlpo").iterdir()):
        node.fail("the daemon's path was not below /var/lib/mlpo")


def main() -> None:
    node.enter()
    before = set(node.changes())
    node.run("cpack", "-G", "DEB", "-B", "/tmp/package", "--config", f"{sys.argv[1]}/CPackConfig.cmake", timeout=240)
    (package,) = pathlib.Path("/tmp/package").glob("*.deb")
    built = set(node.changes())
    if node.processes("mlpo-daemon"):
        node.fail("there is a daemon before")
    # What the package depends on is here, or the daemon would not have been built; systemd may be another flavour.
    node.run("dpkg", "--install", package)
    node.run("useradd", "--uid", "4321", "--groups", "mlpo-users", "--no-create-home", "trainer")
    if node.processes("mlpo-daemon"):
        node.fail("installing has started a daemon")
    check_contents(package)
    train_by_hand()

    config = pathlib.Path("/etc/mlpo/mlpo.toml")
    config.write_text(config.read_text() + "# the administrator's\n")
    node.run("dpkg", "--install", package)  # again, as an upgrade does
    if "# the administrator's" not in config.read_text():
        node.fail("an upgrade has replaced the configuration")
    node.run("userdel", "trainer")
    node.run("dpkg", "--remove", "mlpo-daemon")
    if not config.exists() or os.path.exists("/usr/bin/mlpo-daemon"):
        node.fail("removing has removed the configuration, or not the program")
    node.run("dpkg", "--purge", "mlpo-daemon")
    left = sorted(path for path in set(node.changes()) - built - before if not OTHERS.match(path))
    left = [path for path in left if not os.path.isdir(path) or "mlpo" in path]  # folders that lost files only
    users = [line for line in (*open("/etc/passwd"), *open("/etc/group")) if "mlpo" in line]
    if left or users or list(pathlib.Path("/run").glob("mlpo*")):
        node.fail(f"left after the purge: {left} {users} {list(pathlib.Path('/run').glob('mlpo*'))}")
    print(f"{package.name}: installed, trained with, purged")


if __name__ == "__main__":
    main()
