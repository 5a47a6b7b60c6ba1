"""mlpo-job, Slurm's task prolog and the PBS hook: what they do, and what they do not let happen.

    jobs_test.py BUILD_FOLDER
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import node

UID = 4321
JOB = "/usr/libexec/mlpo/mlpo-job"
RUN = pathlib.Path("/run/mlpo")
FOLDER, JOBS, STATE = RUN / str(UID), RUN / ".jobs", RUN / ".jobs" / str(UID)
SOCKET = FOLDER / "mlpo.sock"
SETTINGS = pathlib.Path("/etc/mlpo/jobs.conf")
CONFIG = pathlib.Path("/etc/mlpo/mlpo.toml")
GOOD_CONFIG = '[memory]\npool = "6MiB"\nblock = "64Ki"\narenas = "256MiB"\n[[path]]\ndirectory = "/disk"\n'


def job(action: str, name: str, code: int = 0, uid: object = UID) -> str:
    """What it says. As Slurm starts it: no PATH, an environment of the job."""
    done = subprocess.run(
        [JOB, action, str(uid), name], env={"SLURM_JOB_ID": name}, capture_output=True, text=True, timeout=120
    )
    if done.returncode != code:
        node.fail(f"mlpo-job {action} {uid} {name}: exit code {done.returncode}, not {code}: {done.stderr}")
    return done.stderr


def expect(what: str, holds: object) -> None:
    if not holds:
        node.fail(what)


def nothing_left() -> bool:
    return not (node.processes("mlpo-daemon") or FOLDER.exists() or JOBS.exists())


def check_daemon_is_the_users() -> None:
    job("begin", "1")
    (pid,) = node.processes("mlpo-daemon")
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    for line in (f"Uid:\t{UID}\t{UID}\t{UID}\t{UID}", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1"):
        expect(f"the daemon's status has no {line}", line in status)
    environment = pathlib.Path(f"/proc/{pid}/environ").read_text()
    expect(f"the daemon has the job's environment: {environment}", "SLURM" not in environment)
    expect("the daemon has the variable of its file", "MLPO_DAEMON__LOG_LEVEL=debug" in environment)
    files = {fd: os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    log = str(STATE / "log")
    expect(f"the daemon holds {files}", [files["0"], files["1"], files["2"]] == ["/dev/null", log, log])
    expect(f"the daemon holds mlpo-job's lock: {files}", str(STATE) not in files.values())
    expect("the daemon is in the prolog's session", os.getsid(pid) == pid)
    job("begin", "1")
    job("begin", "2")
    expect("another daemon", node.processes("mlpo-daemon") == [pid])
    job("end", "1")
    job("end", "1")
    expect("the daemon of job 2 has gone", node.processes("mlpo-daemon") == [pid])
    job("end", "2")
    expect(f"something is left: {node.processes('mlpo-daemon')} {list(RUN.rglob('*'))}", nothing_left())
    job("end", "2")


def check_many_at_once() -> None:
    for action, daemons in (("begin", 1), ("end", 0)):
        running = [
            subprocess.Popen([JOB, action, str(UID), str(i)], env={}, stderr=subprocess.PIPE, text=True)
            for i in range(6)
        ]
        said = [each.communicate(timeout=120)[1] for each in running]
        # In a container root may not be able to.
        said = [line for text in said for line in text.splitlines() if "cannot be raised" not in line]
        expect(f"{action}: {said}", all(each.returncode == 0 for each in running) and not said)
        expect(f"daemons after {action}", len(node.processes("mlpo-daemon")) == daemons)
    expect("something is left", nothing_left())


def check_hung_daemon() -> None:
    """It is killed by a deadline, and what is left is removed."""
    SETTINGS.write_text("drain_timeout=1 stop_timeout=1\n")
    job("begin", "1")
    os.kill(node.processes("mlpo-daemon")[0], signal.SIGSTOP)
    started = time.monotonic()
    said = job("end", "1")
    expect(f"it took {time.monotonic() - started} s", time.monotonic() - started < 30)
    expect(f"said: {said}", "is killed" in said)
    expect("something is left", nothing_left())
    SETTINGS.unlink()


def check_hung_daemon_of_others() -> None:
    """A second job leaves the daemon alone that the first one's state is in."""
    SETTINGS.write_text("answer_timeout=1\n")
    job("begin", "1")
    daemon = node.processes("mlpo-daemon")[0]
    os.kill(daemon, signal.SIGSTOP)
    expect("the second job says", "left alone: 1 2" in job("begin", "2"))
    os.kill(daemon, signal.SIGCONT)
    expect("the daemon was ended", node.processes("mlpo-daemon") == [daemon])
    SETTINGS.unlink()
    job("end", "1")
    job("end", "2")
    expect("something is left", nothing_left())


def check_dead_daemon() -> None:
    job("begin", "1")
    os.kill(node.processes("mlpo-daemon")[0], signal.SIGKILL)
    node.wait_until("dead", lambda: not node.processes("mlpo-daemon"))
    job("begin", "2")
    expect("no new daemon", len(node.processes("mlpo-daemon")) == 1 and SOCKET.exists())
    job("end", "1")
    job("end", "2")
    expect("something is left", nothing_left())


def check_number_used_again() -> None:
    """The process that now has the daemon's number is not taken for it."""
    job("begin", "1")
    job_folder = (STATE / "pid").read_text()
    os.kill(int(job_folder.split()[0]), signal.SIGKILL)
    other = subprocess.Popen(["sleep", "600"])
    (STATE / "pid").write_text(f"{other.pid} {job_folder.split()[1]}\n")
    expect("its log is shown", "event=ready" in job("end", "1"))
    expect("a stranger was ended", other.poll() is None)
    other.kill()
    expect("something is left", nothing_left())


def check_refusals() -> None:
    wrong = ("begin", "../x", UID), ("end", "", UID), ("begin", "1", "root"), ("begin", "1", "-1"), ("x", "1", 0)
    for action, name, uid in wrong:
        job(action, name, code=64, uid=uid)
    expect("an unknown user", "no user" in job("begin", "1", uid=99999))
    job("end", "1", uid=99999)
    # A link in the place of the user's folder, which only an intruder could have put there.
    target = pathlib.Path("/disk/target")
    target.mkdir()
    FOLDER.symlink_to(target)
    expect("a link was followed", "remove it" in job("begin", "1") and target.stat().st_uid == 0)
    FOLDER.unlink()
    job("end", "1")
    JOBS.mkdir()
    os.chown(JOBS, UID, UID)
    expect("a folder of the user's was trusted", "not root's" in job("begin", "1"))
    node.run("rm", "-r", str(JOBS))
    expect("something is left", nothing_left())


def check_no_daemon() -> None:
    CONFIG.write_text("[memory]\npoool = 1\n")
    said = job("begin", "1")
    expect(f"what is wrong is not said: {said}", "poool" in said and "without a daemon" in said)
    job("end", "1")
    SETTINGS.write_text("drain_node=yes\n")
    job("begin", "1", code=1)
    job("end", "1")
    SETTINGS.write_text('wants_daemon() { [[ $1 != 4321 || $SLURM_JOB_ID != "$2" ]]; }\ndrain_node=yes\n')
    job("begin", "1")
    expect("a daemon for a job that does not want one", nothing_left())
    SETTINGS.write_text("if\n")
    job("begin", "1", code=64)
    SETTINGS.unlink()
    CONFIG.write_text(GOOD_CONFIG)
    expect("something is left", nothing_left())


def check_task_prolog() -> None:
    script = "/usr/share/mlpo/slurm/task_prolog"
    as_user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", script]
    expect("no daemon, no variable", node.run(*as_user, env={}) == "")
    job("begin", "1")
    expect("the variable", node.run(*as_user, env={}) == f"export MLPO_SOCKET={SOCKET}\n")
    expect("the job's own socket", node.run(*as_user, env={"MLPO_SOCKET": "/x"}) == "")
    job("end", "1")


def check_pbs_hook() -> None:
    """With a stand-in for the module that PBS gives to hooks."""
    pbs = types.ModuleType("pbs")
    log: list[str] = []
    vars(pbs).update(EXECJOB_PROLOGUE=1, EXECJOB_LAUNCH=2, EXECJOB_EPILOGUE=4, LOG_WARNING=8)
    vars(pbs).update(logmsg=lambda level, message: log.append(message))
    sys.modules["pbs"] = pbs
    code = compile(pathlib.Path("/usr/share/mlpo/pbs/mlpo_hook.py").read_text(), "mlpo_hook.py", "exec")

    def hook(kind: int, **environment: str) -> tuple[str, dict[str, str]]:
        answers: list[str] = []
        event = types.SimpleNamespace(
            type=kind, env=dict(environment), job=types.SimpleNamespace(id="12[3].server", euser="trainer"),
            accept=lambda: answers.append("accept"), reject=lambda message: answers.append(f"reject {message}"),
        )  # fmt: skip
        vars(pbs).update(event=lambda: event)
        exec(code, {"__name__": "hook"})
        expect(f"one answer: {answers}", len(answers) == 1)
        return answers[0], event.env

    expect("launch before prologue", hook(pbs.EXECJOB_LAUNCH) == ("accept", {}))
    expect("prologue", hook(pbs.EXECJOB_PROLOGUE)[0] == "accept" and len(node.processes("mlpo-daemon")) == 1)
    expect("launch", hook(pbs.EXECJOB_LAUNCH) == ("accept", {"MLPO_SOCKET": str(SOCKET)}))
    expect("the job's own socket", hook(pbs.EXECJOB_LAUNCH, MLPO_SOCKET="/x")[1] == {"MLPO_SOCKET": "/x"})
    expect(f"epilogue: {log}", hook(pbs.EXECJOB_EPILOGUE)[0] == "accept" and nothing_left())
    CONFIG.write_text("[memory]\npoool = 1\n")
    expect("no daemon", hook(pbs.EXECJOB_PROLOGUE)[0] == "accept" and "poool" in "".join(log))
    SETTINGS.write_text("drain_node=yes\n")
    expect("no daemon, drain_node=yes", hook(pbs.EXECJOB_PROLOGUE)[0].startswith("reject"))
    SETTINGS.unlink()
    CONFIG.write_text(GOOD_CONFIG)
    hook(pbs.EXECJOB_EPILOGUE)
    expect("something is left", nothing_left())


def check_under_systemd() -> None:
    """The commands, with a stand-in for systemctl that writes them down."""
    pathlib.Path("/run/systemd/system").mkdir(parents=True)
    said, active = pathlib.Path("/run/said"), pathlib.Path("/run/active")
    systemctl = pathlib.Path("/usr/bin/systemctl")
    systemctl.unlink()
    systemctl.write_text(
        f'#!/bin/bash\necho "$*" >> {said}\ncase $* in\n  *is-active*) [[ -e {active} ]] ;;\n'
        f"  start*) [[ ! -e /run/broken ]] && touch {active} ;;\n  stop*) rm {active} ;;\nesac\n"
    )
    systemctl.chmod(0o755)

    def commands() -> list[str]:
        lines = said.read_text().splitlines() if said.exists() else []
        said.unlink(missing_ok=True)
        return lines

    unit = f"mlpo-daemon@{UID}.service"
    asked = f"--quiet is-active {unit}"
    job("begin", "1")
    expect("the first job", commands() == [asked, f"reset-failed {unit}", f"start {unit}"])
    job("begin", "2")
    expect("the second job", commands() == [asked])
    job("end", "1")
    expect("the end of one of two", commands() == [])
    job("end", "2")
    expect("the end of the last", commands() == [f"stop {unit}"] and not active.exists() and not JOBS.exists())

    active.touch()  # the administrator's
    job("begin", "1")
    job("end", "1")
    expect("a unit that was there before", commands() == [asked] and active.exists() and not JOBS.exists())
    active.unlink()

    pathlib.Path("/run/broken").touch()
    expect("a unit that fails", "journalctl" in job("begin", "1"))
    SETTINGS.write_text("drain_node=yes\n")
    job("begin", "1", code=1)
    SETTINGS.unlink()


def main() -> None:
    node.enter()
    node.install(sys.argv[1])
    node.run("useradd", "--uid", str(UID), "--no-create-home", "trainer")
    CONFIG.write_text(GOOD_CONFIG)
    variables = "# by the unit's rules\nMLPO_DAEMON__LOG_LEVEL=debug\nPATH=/nonsense\n"
    pathlib.Path(f"/etc/mlpo/{UID}.env").write_text(variables)
    os.chmod("/disk", 0o1777)
    check_daemon_is_the_users()
    check_many_at_once()
    check_hung_daemon()
    check_hung_daemon_of_others()
    check_dead_daemon()
    check_number_used_again()
    check_refusals()
    check_no_daemon()
    check_task_prolog()
    check_pbs_hook()
    check_under_systemd()
    print("mlpo-job, the task prolog and the PBS hook do what they say")


if __name__ == "__main__":
    main()
