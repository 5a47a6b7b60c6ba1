"""Runs one configuration on this machine: testbed, daemon and peer. Everything is gone again at the end."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Callable

from experiments import Configuration

HERE = pathlib.Path(__file__).resolve().parent
TESTBED = HERE / "testbed"
PEER = HERE / "deepspeed_zero3_nvme.py"
COMES_BACK = HERE / "comes_back.py"
SECTOR = 512
SAMPLE_SECONDS = 0.1
RUN_SECONDS = 1800  # at most; the peer compiles its operators in its first run
END_SECONDS = 30
ADAM_KINDS = 3  # of gradient and parameter, in adam_peer.py
MARK = ".mlpo-bench"


class RunError(Exception):
    """One run gave no result; what to do is in the text."""


class MissingError(RunError):
    """This machine or this build lacks what the run needs."""


class Process:
    """A command in a session of its own, so that all of it can be ended, line by line."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        self.command = command
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors,
                                         env=environment, text=True, start_new_session=True)  # fmt: skip

    def lines(self, each: Callable[[str], None], fine: tuple[int, ...] = (0,)) -> str:
        """Each goes to `each` as it comes; the last one is returned. `fine`: its exit codes."""
        assert self._process.stdout
        with self._process.stdout, self._errors:
            return self._lines(each, fine)

    def _lines(self, each: Callable[[str], None], fine: tuple[int, ...]) -> str:
        deadlines = [threading.Timer(RUN_SECONDS, self._signal, [signal.SIGTERM]),
                     threading.Timer(RUN_SECONDS + END_SECONDS, self._signal, [signal.SIGKILL])]  # fmt: skip
        begin = time.monotonic()
        for deadline in deadlines:
            deadline.start()
        last = ""
        try:
            for line in self._process.stdout or ():
                last = line.rstrip("\n")
                each(last)
            self._process.wait(END_SECONDS)
        except BaseException as error:
            self._signal(signal.SIGTERM)
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self._process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RunError(f"{shlex.join(self.command)}\n    does not end") from None
            if isinstance(error, json.JSONDecodeError):
                raise RunError(f"{shlex.join(self.command)}\n    not JSON: {last}") from None
            raise
        finally:
            for deadline in deadlines:
                deadline.cancel()
        if time.monotonic() - begin > RUN_SECONDS:
            raise RunError(f"{shlex.join(self.command)}\n    took more than {RUN_SECONDS} s")
        if self._process.returncode not in fine:
            self._errors.seek(0)
            said = self._errors.read().strip()
            kind = MissingError if "unknown key" in said else RunError
            ended = f"ended with {self._process.returncode}"
            raise kind("\n    ".join([shlex.join(self.command), ended, *said.splitlines()[-4:], last]))
        return last

    def result(self, each: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
        """Its last line, which is JSON."""
        last = self.lines(each)
        try:
            return json.loads(last)
        except json.JSONDecodeError:
            raise RunError(f"{shlex.join(self.command)}\n    not JSON: {last}") from None

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass


class Device:
    """The block device below a folder, by the kernel's own counters."""

    def __init__(self, folder: pathlib.Path) -> None:
        device = os.stat(folder).st_dev
        self._stat = pathlib.Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")

    def moved(self) -> tuple[int, int]:
        """Bytes read and written since it came up; (0, 0) where the folder is on no block device."""
        try:
            fields = self._stat.read_text().split()
        except FileNotFoundError:
            return 0, 0
        return int(fields[2]) * SECTOR, int(fields[6]) * SECTOR


class Sampler:
    """Bytes a second of each path, while it is entered."""

    def __init__(self, folders: dict[str, pathlib.Path]) -> None:
        self._devices = {name: Device(folder) for name, folder in folders.items()}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.samples: dict[str, list[list[float]]] = {name: [] for name in folders}

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        start = before_at = time.monotonic()
        before = {name: device.moved() for name, device in self._devices.items()}
        while not self._end.wait(SAMPLE_SECONDS):
            at = time.monotonic()
            for name, device in self._devices.items():
                now = device.moved()
                read, written = (round((new - old) / (at - before_at)) for new, old in zip(now, before[name]))
                self.samples[name].append([round(at - start, 2), read, written])
                before[name] = now
            before_at = at


class Machine:
    """`folder` is where the testbed and the bare folder are made, `bin_` has the programs, `python` has DeepSpeed."""

    def __init__(self, folder: pathlib.Path, bin_: pathlib.Path, python: str, gib: int) -> None:
        self.folder, self.bin, self.python, self.gib = folder, bin_, python, gib
        self._testbed = folder / "testbed"
        self._plain = folder / "plain"
        self._up: tuple[str, int, int] | None = None  # profile, scale, number of paths
        self._limits: dict[str, tuple[float, float, float]] = {}

    # ---- What there is

    def missing(self) -> list[str]:
        """What no run can do without."""
        missing = [str(self.bin / name) for name in ("mlpo-daemon", "mlpo-bench", "mlpo-ctl")
                   if not os.access(self.bin / name, os.X_OK)]  # fmt: skip
        check = subprocess.run([TESTBED, "check"], stderr=subprocess.PIPE, text=True)
        if check.returncode != 0:
            missing.append(check.stderr.strip())
        return missing

    def missing_peer(self) -> str:
        """Why the peer cannot be run; "": it can."""
        code = "import importlib.util as u, sys; sys.exit(not (u.find_spec('deepspeed') and u.find_spec('torch')))"
        try:
            there = subprocess.run([self.python, "-c", code]).returncode == 0
        except OSError as error:
            return f"{self.python}: {error.strerror}"
        return "" if there else f"{self.python} has no deepspeed and torch; see the top of {PEER.name}, and --python"

    def missing_client(self) -> str:
        """Why nothing can be trained from Python; "": it can."""
        there = subprocess.run([default_python(), "-c", "import mlpo"], stderr=subprocess.DEVNULL).returncode == 0
        return "" if there else f"{default_python()} has no mlpo: deploy/quickstart makes an environment with it"

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    # ---- Testbed

    def prepare(self) -> None:
        """The folder is ours from now on, and nothing of a run before is in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        mark = self.folder / MARK
        if any(self.folder.iterdir()) and not mark.exists():
            raise RunError(f"{self.folder} has something in it, and it is not ours: give another --dir")
        self._mark = mark.open("w")
        try:
            fcntl.flock(self._mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another one measures in {self.folder}") from None
        self._down()  # what a run that was killed left
        shutil.rmtree(self._plain, ignore_errors=True)

    def close(self) -> None:
        self._down()
        shutil.rmtree(self._plain, ignore_errors=True)
        (self.folder / MARK).unlink()
        self._mark.close()
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _down(self) -> None:
        self._up = None
        subprocess.run([TESTBED, "down", "--dir", self._testbed], stderr=subprocess.DEVNULL, check=True)

    def _set_up(self, profile: str, scale: int, paths: int) -> None:
        """Limits are in force afterwards, and known."""
        if self._up == (profile, scale, paths):
            return
        options = ["--dir", str(self._testbed), "--profile", profile, "--scale", str(scale)]
        command = "profile"
        before, self._up = self._up, None  # after a failure nothing is known
        if not before or before[2] != paths:
            self._down()
            command = "up"
            options += ["--paths", str(paths), "--size", str(self.gib if paths == 2 else max(1, self.gib // 2))]
        done = subprocess.run([TESTBED, command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode == 77:
            raise MissingError(done.stderr.strip())
        if done.returncode != 0:
            raise RunError(done.stderr.strip())
        self._up = (profile, scale, paths)
        self._limits = {}
        for line in done.stdout.splitlines():
            directory, *numbers = line.rsplit(" ", 3)
            read, write, duplex = (float(number) for number in numbers)
            self._limits[os.path.basename(directory)] = (read, write, duplex)

    def folders(self, configuration: Configuration, names: list[str]) -> dict[str, pathlib.Path]:
        if configuration["profile"] == "unlimited":
            self._plain.mkdir(exist_ok=True)
            return {name: self._plain for name in names}
        self._set_up(configuration["profile"], configuration["scale"], max(2, len(names)))
        return {name: self._testbed / name for name in names}

    def _limited(self, configuration: Configuration, command: list[str]) -> list[str]:
        if configuration["profile"] == "unlimited":
            return command
        return [str(TESTBED), "run", "--dir", str(self._testbed), *command]

    # ---- Runs

    def run(self, configuration: Configuration) -> dict[str, Any]:
        os.sync()  # nothing of the run before is written in this one
        kinds = {"train": self._train, "peer": self._peer, "adam": self._adam, "scheduler": self._scheduler,
                 "comes back": self._comes_back}  # fmt: skip
        return kinds[configuration["kind"]](configuration)

    def _train(self, configuration: Configuration) -> dict[str, Any]:
        folders = self.folders(configuration, configuration["paths"])
        block_bytes = 12 * configuration["block"]
        command = [str(self.bin / "mlpo-bench"), "train", "--json"]
        for name in ("parameters", "block", "ranks", "steps"):
            command += [f"--{'params' if name == 'parameters' else name}", str(configuration[name])]
        command += ["--pool", str(configuration["pool_blocks"] * block_bytes)]
        for name, folder in folders.items():
            command += ["--path", str(folder)]
            if configuration["profile"] != "unlimited":
                read, write, duplex = self._limits[name]
                command += ["--limit", f"{folder}={read:.0f}/{write:.0f}/{duplex}"]
        for key, value in configuration["set"].items():
            command += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
        for step, (name, factor) in configuration.get("limits_at", {}).items():
            read, write, _ = self._limits[name]
            change = [str(TESTBED), "set", "--dir", str(self._testbed), name, f"{read * factor:.0f}", f"{write * factor:.0f}"]
            command += ["--at-step", f"{step}={shlex.join(change)}"]
        command += configuration.get("extra", [])
        up = self._up
        if "limits_at" in configuration:
            self._up = None  # changed in the run: known again when it was through
        with Sampler(folders if configuration.get("sample") else {}) as sampler:
            result = Process(self._limited(configuration, command)).result()
        self._up = up
        if result["check"] != "ok":
            raise RunError(f"wrong bytes: {result['check']}")
        return self._with(result, configuration, folders, sampler)

    def _comes_back(self, configuration: Configuration) -> dict[str, Any]:
        folders = self.folders(configuration, configuration["paths"])
        target = folders[configuration["paths"][-1]] / "checkpoints"
        command = [default_python(), str(COMES_BACK), "--bin", str(self.bin), "--target", str(target)]
        for folder in folders.values():
            command += ["--path", str(folder)]
        for name in ("parameters", "block"):
            command += [f"--{name}", str(configuration[name])]
        command += ["--pool", str(configuration["pool_blocks"] * 12 * configuration["block"])]
        return Process(self._limited(configuration, command)).result()

    def _peer_environment(self) -> dict[str, str]:
        """It finds ninja, to compile its operators, beside its interpreter."""
        return {**os.environ, "PATH": f"{pathlib.Path(self.python).parent}:{os.environ['PATH']}"}

    def _peer(self, configuration: Configuration) -> dict[str, Any]:
        in_memory = configuration["device"] == "cpu"
        name = "plain" if configuration["profile"] == "unlimited" else "nvme"
        folders = self.folders(configuration, [name])
        device = Device(folders[name])
        command = [self.python, str(PEER), "--dir", str(folders[name] / "peer"), "--device", configuration["device"],
                   "--layers", str(configuration["layers"]), "--hidden", str(configuration["hidden"]), "--sub-group-size", str(configuration["sub_group"]),
                   "--iterations", str(configuration["iterations"])]  # fmt: skip
        moved: list[tuple[int, int]] = []
        iterations: list[dict[str, Any]] = []

        def each(line: str) -> None:
            if line.startswith('{"iteration"'):
                iterations.append(json.loads(line))
                moved.append(device.moved())

        with Sampler(folders if configuration.get("sample") else {}) as sampler:
            result = Process(self._limited(configuration, command), self._peer_environment()).result(each)
        result["iterations"] = iterations
        if not in_memory:
            for i, what in enumerate(("read", "written")):
                result[f"device_{what}_bytes"] = statistics.median(b[i] - a[i] for a, b in zip(moved, moved[1:]))
        return self._with(result, configuration, folders, sampler)

    def _with(self, result: dict[str, Any], configuration: Configuration, folders: dict[str, pathlib.Path],
              sampler: Sampler) -> dict[str, Any]:  # fmt: skip
        if configuration["profile"] != "unlimited":
            result["limits"] = {name: self._limits[name] for name in folders}
        if configuration.get("sample"):
            result["samples"] = sampler.samples
        return result

    def _adam(self, _: Configuration) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = []
        peer = Process([self.python, str(HERE / "adam_peer.py"), "--bin", str(self.bin)], self._peer_environment())
        # 1: its own bound is broken, which is judged from the figures.
        peer.lines(lambda line: kinds.append(json.loads(line)) if line.startswith("{") else None, fine=(0, 1))
        if len(kinds) != ADAM_KINDS:  # it ends with 1 after a traceback, too
            raise RunError(f"adam_peer.py measured {len(kinds)} of {ADAM_KINDS} kinds")
        for kind in kinds:
            if "disagree" in kind["verdict"]:
                raise RunError(f"{kind['grad']} in, {kind['dtype']} out: the two disagree: {kind['differences']}")
        loop = Process([str(self.bin / "mlpo-bench"), "adam", "--json"]).result()
        return {"kinds": kinds, "loop_ratio": loop["ratio"]}

    def _scheduler(self, _: Configuration) -> dict[str, Any]:
        programs = list(self.bin.parent.rglob("scheduler_cost_test"))
        if not programs:
            raise MissingError(f"{self.bin.parent} has no scheduler_cost_test: ninja -C build scheduler_cost_test")
        costs: list[tuple[int, float]] = []

        def each(line: str) -> None:
            if found := re.match(r" *(\d+) blocks.*: ([0-9.]+) us a block", line):
                costs.append((int(found[1]), float(found[2])))

        # 1: its own bound is broken, which is judged from the figures.
        Process([str(programs[0])], {**os.environ, "MLPO_LONG": "1"}).lines(each, fine=(0, 1))
        if not costs:
            raise RunError(f"{programs[0]} printed no cost")
        return {"costs": costs, "us_per_block": max(cost for blocks, cost in costs if blocks == max(costs)[0])}


def default_python() -> str:
    own = HERE.parents[1] / "build" / "venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable
