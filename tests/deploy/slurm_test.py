"""Jobs of a real Slurm, on a one-node cluster of this test's own, train through daemons that its prolog started.

    slurm_test.py BUILD_FOLDER

munged, slurmctld and slurmd run in a throw-away node: own key, own state, ports on a loopback interface of its own.
"""

from __future__ import annotations

import json
import os
import pathlib
import pwd
import shutil
import sys

import node

UID = 4321
JOBS = pathlib.Path("/run/mlpo/.jobs")
FOLDER = pathlib.Path(f"/run/mlpo/{UID}")
PATH = pathlib.Path("/disk/path")
CONFIG = """
[memory]
pool = "6MiB"
block = "64Ki"
arenas = "256MiB"
[[path]]
directory = "/disk/path"
"""
SLURM = """
ClusterName=mlpo
SlurmctldHost=mlpo-node(10.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
KillWait=1
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
PrologFlags=Alloc
Prolog=/usr/share/mlpo/slurm/prolog
Epilog=/usr/share/mlpo/slurm/epilog
TaskProlog=/usr/share/mlpo/slurm/task_prolog
SlurmdParameters=config_overrides
NodeName=mlpo-node NodeAddr=10.0.0.1 CPUs=4
PartitionName=all Nodes=mlpo-node Default=YES MaxTime=10 State=UP
"""
TRAIN = 'exec mlpo-bench train --params 300K --ranks 2 --steps {steps} --json --socket "$MLPO_SOCKET"'


def start_cluster() -> None:
    munge = pwd.getpwnam("munge")
    key = pathlib.Path("/etc/munge/munge.key")
    key.write_bytes(os.urandom(1024))
    folders = [pathlib.Path(path) for path in ("/etc/munge", "/run/munge", "/var/log/munge", "/var/lib/munge")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    for path in (key, *folders):
        os.chown(path, munge.pw_uid, munge.pw_gid)
    key.chmod(0o400)
    node.run("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged")
    with open("/etc/hosts", "a") as hosts:
        hosts.write(f"{node.ADDRESS} mlpo-node\n")
    pathlib.Path("/etc/slurm/slurm.conf").write_text(SLURM)
    for daemon in ("slurmctld", "slurmd"):
        pathlib.Path("/var/spool", daemon).mkdir(exist_ok=True)
        node.run(daemon, timeout=60)
    node.wait_until("the node idle", lambda: node.run("sinfo", "-h", "-o", "%T") == "idle\n")


def as_trainer(*command: str, timeout: float = 120) -> str:
    user = ["setpriv", "--reuid=trainer", "--regid=trainer", "--init-groups"]
    return node.run(*user, *command, cwd="/home/trainer", timeout=timeout)


def submit(script: str) -> str:
    return as_trainer("sbatch", "--parsable", "--output=/home/trainer/%j.out", "--wrap", script).strip()


def output(job: str) -> str:
    """Of a job, when it has ended. (sbatch --wait looks every ten seconds.)"""
    node.wait_until(f"job {job} at its end", lambda: job not in node.run("squeue", "-h", "-o", "%A").split(), 120)
    return pathlib.Path(f"/home/trainer/{job}.out").read_text()


def scratch() -> list[pathlib.Path]:
    """Files on the path but for the daemons' locks, which stay so that two never hold one."""
    return [path for path in PATH.rglob("*") if path.is_file() and path.name != "lock"]


def what_is_left() -> list[str]:
    left = [f"process {pid}" for pid in node.processes("mlpo-daemon") + node.processes("mlpo-bench")]
    left += map(str, [*JOBS.glob("**/*"), *(path for path in (JOBS, FOLDER) if path.exists()), *scratch()])
    return left


def expect_nothing_left(when: str) -> None:
    deadline_s = 30
    try:
        node.wait_until("", lambda: not what_is_left(), deadline_s)
    except SystemExit:
        node.fail(f"{when}: left after {deadline_s} s: {what_is_left()}\n{slurm_log()}")
    mounts = [line for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines() if "mlpo/" in line]
    if mounts:
        node.fail(f"{when}: mounts left: {mounts}")
    node.wait_until("the node idle", lambda: node.run("sinfo", "-h", "-o", "%T") == "idle\n")


def slurm_log() -> str:
    return pathlib.Path("/var/log/slurmd.log").read_text()[-3000:]


def check_job_trains() -> None:
    result = json.loads(as_trainer("srun", "bash", "-c", TRAIN.format(steps=3)))
    if result["check"] != "ok":
        node.fail(f"srun: {result}")
    expect_nothing_left("srun")
    job = submit("srun bash -c '" + TRAIN.format(steps=3) + "'")
    said = output(job)
    if json.loads(said)["check"] != "ok":
        node.fail(f"sbatch: {said}")
    expect_nothing_left("sbatch")


def check_cancelled_job() -> None:
    job = submit("srun bash -c '" + TRAIN.format(steps=1000000) + "'")
    node.wait_until("training", scratch)
    (daemon,) = node.processes("mlpo-daemon")
    if os.stat(f"/proc/{daemon}").st_uid != UID:
        node.fail("the daemon is not the user's")
    node.run("scancel", job)
    expect_nothing_left("scancel")


def check_two_jobs() -> None:
    long_job = submit("sleep 600")
    node.wait_until("a daemon", lambda: (FOLDER / "mlpo.sock").exists() and node.processes("mlpo-daemon"))
    daemon = node.processes("mlpo-daemon")
    short_job = submit(TRAIN.format(steps=3))
    said = output(short_job)
    if json.loads(said)["check"] != "ok":
        node.fail(f"the second job: {said}")
    node.wait_until("the second job's epilog", lambda: len(list(JOBS.glob("*/job.*"))) == 1)
    if node.processes("mlpo-daemon") != daemon:
        node.fail("the end of one of two jobs has ended their daemon")
    node.run("scancel", long_job)
    expect_nothing_left("two jobs")


def check_killed_daemon() -> None:
    """Nothing but its scratch is left of a daemon that is killed; the next one removes that."""
    job = submit("srun bash -c '" + TRAIN.format(steps=1000000) + "'")
    node.wait_until("training", scratch)
    node.run("kill", "-KILL", str(node.processes("mlpo-daemon")[0]))
    said = output(job)
    node.wait_until("the epilog at its end", lambda: not FOLDER.exists())
    if "check" in said or not scratch():
        node.fail(f"a killed daemon: {said}")
    as_trainer("srun", "bash", "-c", TRAIN.format(steps=3))
    expect_nothing_left("killed daemon")


def check_broken_configuration() -> None:
    """A job that needs no daemon is not held up, and its node stays in service."""
    file = pathlib.Path("/etc/mlpo/mlpo.toml")
    file.write_text("[memory]\npoool = 1\n")
    answer = as_trainer("srun", "bash", "-c", 'mlpo-ctl status 2>&1; echo "code $?"')
    if "code 69" not in answer or "/run/mlpo" not in answer:
        node.fail(f"without a daemon: {answer}")
    file.write_text(CONFIG)
    expect_nothing_left("broken configuration")


def main() -> None:
    for program in ("slurmctld", "slurmd", "srun", "munged"):
        if not shutil.which(program):
            node.skip(f"needs {program} (packages slurm-wlm, munge)")
    node.enter()
    node.install(sys.argv[1])
    node.run("useradd", "--uid", str(UID), "--create-home", "trainer")
    pathlib.Path("/etc/mlpo/mlpo.toml").write_text(CONFIG)
    PATH.mkdir()
    PATH.chmod(0o1777)
    start_cluster()
    check_job_trains()
    check_cancelled_job()
    check_two_jobs()
    check_killed_daemon()
    check_broken_configuration()
    print("jobs of a one-node Slurm train through daemons of its prolog, and its epilog leaves nothing")


if __name__ == "__main__":
    main()
