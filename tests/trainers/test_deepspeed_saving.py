"""Checkpoints of DeepSpeed's ZeRO-3 with its state in the daemon: what is loaded goes on with the bits of a run that
never stopped, by any number of ranks; DeepSpeed's own checkpoints are taken, and its tools take ours once exported;
what is cut is never loaded as a mix. Each job is of processes of its own (deepspeed_saving_process.py)."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from typing import Any, Callable, Iterator, Optional

import numpy as np
import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))

torch = pytest.importorskip("torch", reason="torch is not installed")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("skipped: deepspeed is not installed: pip install 'mlpo[deepspeed]'", allow_module_level=True)

from running_daemon import SMALL_BLOCKS, Daemon  # noqa: E402

PROCESS = HERE / "deepspeed_saving_process.py"
STATES = ("master", "exp_avg", "exp_avg_sq")
TIMEOUT_S = 600
KILLED = -9
_numbers = itertools.count()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), SMALL_BLOCKS) as running:
        yield running


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Job:
    """The ranks of a job of deepspeed_saving_process.py, which run at once."""

    def __init__(
        self,
        folder: pathlib.Path,
        daemon: Daemon,
        ranks: int,
        actions: list[list[Any]],
        *,
        stock: bool = False,
        seed: int = 1,
        width: int = 4,
        groups: int = 2,
        config: Optional[dict[str, Any]] = None,
    ) -> None:
        number = next(_numbers)
        self._spec = folder / f"spec-{number}.json"
        spec = {
            "stock": stock, "seed": seed, "width": width, "groups": groups, "config": config or {}, "actions": actions,
        }  # fmt: skip
        self._spec.write_text(json.dumps(spec, default=str))
        common = {key: value for key, value in os.environ.items() if not key.startswith("MLPO_")}
        common |= {
            "DS_ACCELERATOR": "cpu", "MLPO_SOCKET": daemon.socket, "MLPO_JOB": f"saving-{os.getpid()}-{number}",
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        self._logs = [folder / f"log-{number}.{rank}" for rank in range(ranks)]
        self._processes = []
        for rank, log in enumerate(self._logs):
            with log.open("wb") as out:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, PROCESS, self._spec],
                        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        cwd=folder,
                    )
                )

    def wait(self) -> list[int]:
        """Exit codes. Whoever does not end is killed, and the test fails."""
        until = time.monotonic() + TIMEOUT_S
        try:
            return [process.wait(max(0.0, until - time.monotonic())) for process in self._processes]
        finally:
            for process in self._processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()

    def said(self) -> list[list[Any]]:
        """What each action has returned, on each rank; all must have ended well."""
        codes = self.wait()
        assert not any(codes), "\n".join(f"rank {r}: {codes[r]}\n{self.log(r)}" for r in range(len(codes)))
        return [json.loads(pathlib.Path(f"{self._spec}.{rank}").read_text()) for rank in range(len(codes))]

    def log(self, rank: int) -> str:
        return self._logs[rank].read_text(errors="replace")[-8000:]


Run = Callable[..., Any]


@pytest.fixture
def start(tmp_path: pathlib.Path, daemon: Daemon) -> Iterator[Callable[..., Job]]:
    """start(ranks, actions, ...): a Job that goes on."""
    jobs: list[Job] = []

    def begin(ranks: int, actions: list[list[Any]], **options: Any) -> Job:
        jobs.append(Job(tmp_path, daemon, ranks, actions, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        for process in job._processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def run(start: Callable[..., Job]) -> Run:
    """run(ranks, actions, ...): what rank 0 has said to each, once they have all ended well."""
    return lambda ranks, actions, **options: start(ranks, actions, **options).said()[0]


class Straight:
    """A job that has trained 40 steps, and saved at step 20 as "half"; its states then and at the end."""

    def __init__(self, folder: pathlib.Path, daemon: Daemon, ranks: int) -> None:
        self.ranks = ranks
        self.directory = folder / "saved"
        self.half, self.end = folder / "half.pt", folder / "end.pt"
        options = {"client_state": {"mine": [1, 2]}}
        said = Job(
            folder,
            daemon,
            ranks,
            [
                ["train", 0, 20], ["save", str(self.directory), "half", options], ["dump", str(self.half)],
                ["train", 20, 20], ["dump", str(self.end)],
            ],
        ).said()  # fmt: skip
        self.losses = [rank[0] + rank[3] for rank in said]

    def copy(self, to: pathlib.Path) -> pathlib.Path:
        shutil.copytree(self.directory, to)
        return to


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, daemon: Daemon) -> Callable[[int], Straight]:
    """straight(ranks): made at first use."""
    made: dict[int, Straight] = {}

    def get(ranks: int) -> Straight:
        if ranks not in made:
            made[ranks] = Straight(tmp_path_factory.mktemp(f"straight-{ranks}"), daemon, ranks)
        return made[ranks]

    return get


def read(file: pathlib.Path) -> Any:
    return torch.load(file, weights_only=False)


def same_bits(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def check_state(found: Any, wanted: Any, states: tuple[str, ...] = (*STATES, "step")) -> None:
    assert found["state"].keys() == wanted["state"].keys()
    for name, each in wanted["state"].items():
        for key in states:
            assert same_bits(found["state"][name][key], each[key]), (name, key)


def check_weights(found: Any, wanted: Any) -> None:
    for kind in ("weights", "buffers"):
        assert found[kind].keys() == wanted[kind].keys()
        for name, each in wanted[kind].items():
            assert found[kind][name].dtype == each.dtype and torch.equal(found[kind][name], each), name


def distance(a: Any, b: Any) -> float:
    """Of all parameters together, Euclidean."""
    pairs = ((a["state"][name]["master"], each["master"]) for name, each in b["state"].items())
    return float(np.sqrt(sum(np.square(x.astype(np.float64) - y).sum() for x, y in pairs)))


def check_all(found: Any, wanted: Any) -> None:
    check_state(found, wanted)
    check_weights(found, wanted)
    assert found["settings"] == wanted["settings"]


# ---- Going on ----


@pytest.mark.parametrize("ranks", [1, 2])
def test_c17_what_is_loaded_goes_on_with_the_bits_of_a_run_that_never_stopped(
    straight: Callable[[int], Straight], start: Callable[..., Job], tmp_path: pathlib.Path, ranks: int
) -> None:
    before = straight(ranks)
    directory, loaded, end = str(before.directory), tmp_path / "loaded.pt", tmp_path / "end.pt"
    never, never_end = start(ranks, [["train", 0, 40], ["dump", str(tmp_path / "never.pt")]]), tmp_path / "never.pt"
    resumed = start(
        ranks,
        [["load", directory, None], ["dump", str(loaded)], ["train", 20, 20], ["dump", str(end)]],
        seed=99,
    ).said()
    assert [rank[0]["client_state"] for rank in resumed] == [{"mine": [1, 2], "mlpo": None}] * ranks
    assert [rank[2] for rank in resumed] == [losses[20:] for losses in before.losses]
    check_all(read(loaded), read(before.half))
    check_all(read(end), read(before.end))
    assert [rank[0] for rank in never.said()] == before.losses
    check_all(read(never_end), read(before.end))
    half = read(before.half)
    assert half["state"]["first.weight"]["step"] == 20 and half["state"]["unused.weight"]["step"] == 0
    assert half["settings"]["groups"][0]["lr"] != 1e-2 and half["settings"]["steps"] == (20, 160, 0)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 2), (2, 1), (2, 3)])
def test_c21_another_number_of_ranks_has_the_same_unsharded_state(
    straight: Callable[[int], Straight], run: Run, tmp_path: pathlib.Path, saved_by: int, loaded_by: int
) -> None:
    """Other weights before, and other sub-groups, DeepSpeed's and ours. Steps after that are other sums of gradients,
    rounded to 16 bits: the runs stay together, as far as they go."""
    before = straight(saved_by)
    loaded, end = tmp_path / "loaded.pt", tmp_path / "end.pt"
    config = {"zero_optimization": {"sub_group_size": 100}, "mlpo": {"subgroup_elements": 17}}
    rows = {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 3} if loaded_by == 3 else {}
    actions = [["load", str(before.directory), "half"], ["dump", str(loaded)]]
    actions += [["train", 20, 20], ["dump", str(end)]] if loaded_by != 3 else []
    run(loaded_by, actions, seed=99, config={**config, **rows})
    found, wanted = read(loaded), read(before.half)
    check_state(found, wanted)
    check_weights(found, wanted)
    for key in ("loss_scale", "scaler", "groups", "scheduler", "steps"):
        assert found["settings"][key] == wanted["settings"][key], key
    if loaded_by != 3:
        half, found, wanted = wanted, read(end), read(before.end)
        assert {n: s["step"] for n, s in found["state"].items()} == {n: s["step"] for n, s in wanted["state"].items()}
        assert distance(found, wanted) < 0.25 * distance(half, wanted)


def test_fp16_resumes_with_its_loss_scale(run: Run, tmp_path: pathlib.Path) -> None:
    """It begins so high that the first steps overflow, and has come down when it is saved."""
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("skipped: DeepSpeed refuses fp16 on this CPU (is_fp16_supported())")
    fp16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3}
    config = {"bf16": {"enabled": False}, "fp16": fp16}
    saved, end, loaded, resumed = (str(tmp_path / f"{name}.pt") for name in ("saved", "end", "loaded", "resumed"))
    run(1, [
        ["train", 0, 20], ["save", str(tmp_path / "dir"), None], ["dump", saved], ["train", 20, 10], ["dump", end],
    ], config=config)  # fmt: skip
    half = read(pathlib.Path(saved))
    assert half["settings"]["steps"][2] > 0 and half["settings"]["loss_scale"] < 2**24
    run(1, [["load", str(tmp_path / "dir"), None], ["dump", loaded], ["train", 20, 10], ["dump", resumed]],
        config=config, seed=99)  # fmt: skip
    check_all(read(pathlib.Path(loaded)), half)
    check_all(read(pathlib.Path(resumed)), read(pathlib.Path(end)))


def test_weights_alone_leave_moments_and_steps(
    straight: Callable[[int], Straight], run: Run, tmp_path: pathlib.Path
) -> None:
    before = straight(2)
    files = [tmp_path / f"{name}.pt" for name in ("trained", "module", "optimizer", "rounded")]
    directory = str(before.directory)
    run(2, [
        ["train", 100, 3], ["dump", str(files[0])],
        ["load", directory, "half", {"load_module_only": True}], ["dump", str(files[1])],
        ["train", 103, 1],
        ["load", directory, "half", {"load_optimizer_states": False}], ["dump", str(files[2])],
    ], seed=99)  # fmt: skip
    run(2, [["load", directory, "half", {"load_module_only": True}], ["dump", str(files[3])]], seed=99,
        config={"zero_optimization": {"load_from_fp32_weights": False}})  # fmt: skip
    trained, module, optimizer, rounded = map(read, files)
    half = read(before.half)
    for found in (module, optimizer):
        check_state(found, half, ("master",))
        check_weights(found, half)
    check_state(module, trained, ("exp_avg", "exp_avg_sq", "step"))
    assert module["settings"]["steps"] == trained["settings"]["steps"]
    assert optimizer["settings"]["steps"] == half["settings"]["steps"]
    assert optimizer["state"]["first.weight"]["step"] == 4
    check_weights(rounded, half)
    for name, each in half["state"].items():
        values = torch.from_numpy(each["master"]).to(torch.bfloat16).float().numpy()
        assert same_bits(rounded["state"][name]["master"], values), name


def test_a_tag_is_saved_over(run: Run, tmp_path: pathlib.Path) -> None:
    """As with DeepSpeed; also by fewer ranks, whose files then are the only ones, and with somebody else's files beside
    them, which stay."""
    directory, last, found = tmp_path / "saved", tmp_path / "last.pt", tmp_path / "found.pt"
    run(2, [["train", 0, 1], ["save", str(directory), "t"], ["train", 1, 1], ["save", str(directory), "t"]])
    (directory / "t" / "notes.txt").write_text("mine")
    run(1, [["train", 0, 3], ["save", str(directory), "t", {"save_latest": False}], ["dump", str(last)]])
    names = {file.name for file in (directory / "t").iterdir()}
    assert names == {
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt", "mlpo",
        "notes.txt",
    }  # fmt: skip
    assert len(list((directory / "t" / "mlpo").glob("part-*/manifest-*"))) == 1
    run(1, [["load", str(directory), None], ["dump", str(found)]], seed=99)
    check_all(read(found), read(last))


# ---- DeepSpeed's own format ----


def exported(directory: pathlib.Path, *options: str) -> str:
    command = [sys.executable, "-m", "mlpo.deepspeed", "export", directory, *options]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, timeout=TIMEOUT_S, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_deepspeeds_tools_take_an_export(
    straight: Callable[[int], Straight], run: Run, tmp_path: pathlib.Path, ranks: int
) -> None:
    before = straight(ranks)
    directory = before.copy(tmp_path / "copy")
    weights, universal = tmp_path / "weights.pt", tmp_path / "universal.pt"
    told = run(1, [["fails", "weights", str(directory), "half", "-"], ["fails", "universal", str(directory), "half"]])
    assert all("python -m mlpo.deepspeed export DIR" in text for text in told), told
    assert "had no gradient in some steps" in exported(directory)
    assert "was exported before" in exported(directory, "--tag", "half")
    run(1, [
        ["weights", str(directory), "half", str(weights)],
        ["universal", str(directory), "half"], ["gather_universal", str(directory / "half-universal"), str(universal)],
    ])  # fmt: skip
    half, whole = read(before.half), read(universal)
    consolidated = read(weights)
    for name, each in half["state"].items():
        assert same_bits(consolidated[name].numpy(), each["master"]), name
        for key, ours in zip(("fp32", "exp_avg", "exp_avg_sq"), STATES):
            assert same_bits(whole["parameters"][name][key].numpy(), each[ours].reshape(-1)), (name, key)
    assert torch.equal(consolidated["frozen.weight"].float(), half["weights"]["frozen.weight"].float())
    assert whole["step"] == 20

    # DeepSpeed itself goes on from it, and what it has then is what was saved.
    stock, back, own = (tmp_path / f"{name}.pt" for name in ("stock", "back", "own"))
    run(ranks, [["load", str(directory), "half"], ["dump", str(stock)], ["train", 20, 1]], stock=True, seed=99)
    check_state(read(stock), half, STATES)
    check_weights(read(stock), half)
    assert read(stock)["state"]["first.weight"]["step"] == 20
    # We take it back, from the daemon's parts; and the universal one, by another number of ranks.
    run(ranks, [["load", str(directory), "half"], ["dump", str(own)]], seed=99)
    check_all(read(own), half)
    run(3 - ranks, [["load", str(directory), "half-universal"], ["dump", str(back)]], seed=99,
        config={"checkpoint": {"load_universal": True}})  # fmt: skip
    check_state(read(back), half, STATES)
    assert {each["step"] for each in read(back)["state"].values()} == {20}


def test_c20_an_export_needs_memory_for_a_block(run: Run, tmp_path: pathlib.Path) -> None:
    """FP32 state of 48 MiB; a block of the daemon's default size has 12."""
    said = run(1, [
        ["train", 0, 1], ["save", str(tmp_path / "saved"), "t"], ["exported", str(tmp_path / "saved"), "t"],
    ], width=2048, config={"mlpo": {"subgroup_elements": 1 << 22}})  # fmt: skip
    assert (tmp_path / "saved" / "t" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").stat().st_size > 48 << 20
    assert said[2] < 16 << 20


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_deepspeeds_own_checkpoints_are_loaded(
    run: Run, tmp_path: pathlib.Path, saved_by: int, loaded_by: int
) -> None:
    """One of ZeRO-3 with FP32 state in memory, and a universal one; by other numbers of ranks, too."""
    directory, wanted = tmp_path / "saved", tmp_path / "wanted.pt"
    run(saved_by, [["train", 0, 4], ["save", str(directory), None], ["dump", str(wanted)]], stock=True)
    files = [tmp_path / f"{name}.pt" for name in ("loaded", "weights", "universal")]
    module_only = {"load_module_only": True}
    run(loaded_by, [
        ["load", str(directory), None, module_only], ["dump", str(files[1])],
        ["load", str(directory), None], ["dump", str(files[0])], ["train", 4, 1],
    ], seed=99)  # fmt: skip
    run(1, [["universal", str(directory), "global_step4"]], stock=True)
    run(loaded_by, [["load", str(directory), None], ["dump", str(files[2])], ["train", 4, 1]], seed=99,
        config={"checkpoint": {"load_universal": True}})  # fmt: skip
    stock = read(wanted)
    for file in (files[0], files[2]):
        found = read(file)
        check_state(found, stock)
        assert found["settings"]["steps"] == stock["settings"]["steps"]
        for ours, theirs in zip(found["settings"]["groups"], stock["settings"]["groups"]):
            assert {key: ours[key] for key in theirs} == theirs
        for name in stock["state"]:
            assert torch.equal(found["weights"][name], stock["weights"][name]), name
    check_weights(read(files[0]), stock)  # of a universal one DeepSpeed loads nothing but the optimizer's
    weights = read(files[1])
    check_state(weights, stock, ("master",))
    check_weights(weights, stock)
    assert {each["step"] for each in weights["state"].values()} == {0}


def test_both_save_again_what_they_have_loaded_of_each_other(run: Run, tmp_path: pathlib.Path) -> None:
    """There and back: a checkpoint of ours, exported, trained on by DeepSpeed in the same folder, and loaded."""
    directory, wanted, found = tmp_path / "saved", tmp_path / "wanted.pt", tmp_path / "found.pt"
    run(2, [["train", 0, 2], ["save", str(directory), "t"]])
    exported(directory)
    run(2, [["load", str(directory), "t"], ["train", 2, 2], ["save", str(directory), "t"], ["dump", str(wanted)]],
        stock=True, seed=99)  # fmt: skip
    run(1, [["load", str(directory), "t"], ["dump", str(found)]], seed=98)
    check_state(read(found), read(wanted))
    check_weights(read(found), read(wanted))


# ---- What is cut, or wrong ----


def settled(daemon: Daemon) -> None:
    """Waits until no save goes on whose client has died."""
    until = time.monotonic() + 60
    while daemon.status()["checkpoints"]["running"] or daemon.status()["sessions"]:
        assert time.monotonic() < until, daemon.status()
        time.sleep(0.05)


DEATHS = {
    "first-file": (("torch:save", 1), {"old"}),
    "second-file": (("torch:save", 2), {"old"}),
    "before-the-parts": (("mlpo.deepspeed._saving:begin_save", 1), {"old"}),
    "parts-under-way": (("mlpo._saving:Saved.result", 1), {"old", "new"}),  # the daemon goes on without us
    "parts-done": (("mlpo.deepspeed._commit:finish", 1), {"new"}),
    "first-file-in-place": (("os:replace", 2), {"new"}),
    "files-in-place": (("mlpo.deepspeed._commit:remove_others", 1), {"new"}),
}


def test_c19_a_save_that_is_cut_leaves_the_old_one_or_the_new_one(
    start: Callable[..., Job], run: Run, daemon: Daemon, tmp_path: pathlib.Path
) -> None:
    """Killed while it saves over a tag: what is loaded then is all of one of both. And it can be saved again."""
    jobs = {}
    for name, (death, _) in DEATHS.items():
        folder = tmp_path / name
        folder.mkdir()
        jobs[name] = start(1, [
            ["train", 0, 2], ["save", str(folder / "saved"), "t"], ["dump", str(folder / "old.pt")],
            ["train", 2, 2], ["dump", str(folder / "new.pt")], ["dies", *death], ["save", str(folder / "saved"), "t"],
        ])  # fmt: skip
    for name, job in jobs.items():
        assert job.wait() == [KILLED], f"{name}: {job.log(0)}"
    settled(daemon)
    actions: list[list[Any]] = []
    for name in DEATHS:
        folder = tmp_path / name
        actions += [["load", str(folder / "saved"), None], ["dump", str(folder / "found.pt")]]
    for name in DEATHS:
        folder = tmp_path / name
        actions += [["save", str(folder / "saved"), "t"], ["load", str(folder / "saved"), "t"]]
    run(1, [*actions, ["dump", str(tmp_path / "last.pt")]], seed=99)
    for name, (_, right) in DEATHS.items():
        found = read(tmp_path / name / "found.pt")
        which = "old" if found["state"]["first.weight"]["step"] == 2 else "new"
        assert which in right, name
        check_all(found, read(tmp_path / name / f"{which}.pt"))
        assert not [file for file in (tmp_path / name / "saved" / "t").iterdir() if file.name.startswith(".")], name


def test_c19_a_rank_that_dies_while_it_saves(
    start: Callable[..., Job], run: Run, daemon: Daemon, tmp_path: pathlib.Path
) -> None:
    """The other one ends with an error, and what is loaded is one of both saves."""
    old, new, found = (tmp_path / f"{name}.pt" for name in ("old", "new", "found"))
    directory = str(tmp_path / "saved")
    job = start(2, [
        ["train", 0, 2], ["save", directory, "t"], ["dump", str(old)], ["train", 2, 2], ["dump", str(new)],
        ["dies", "mlpo._saving:Saved.result", 1, 1], ["save", directory, "t"],
    ])  # fmt: skip
    codes = job.wait()
    assert codes[1] == KILLED and codes[0] not in (0, KILLED), job.log(0)
    settled(daemon)
    run(1, [["load", directory, "t"], ["dump", str(found)]], seed=99)
    which = old if read(found)["state"]["first.weight"]["step"] == 2 else new
    check_state(read(found), read(which))
    check_weights(read(found), read(which))


def test_a_file_that_cannot_be_written_fails_the_save_on_all_ranks(
    start: Callable[..., Job], run: Run, tmp_path: pathlib.Path
) -> None:
    """DeepSpeed's ranks wait for each other: none may be left waiting."""
    directory, wanted, found = tmp_path / "saved", tmp_path / "wanted.pt", tmp_path / "found.pt"
    said = start(2, [
        ["train", 0, 1], ["save", str(directory), "t"], ["dump", str(wanted)], ["train", 1, 1],
        ["cannot_write", 1], ["fails", "save", str(directory), "t"], ["can_write"],
        ["fails", "save", "", "t"], ["save", str(directory), "u"],
    ]).said()  # fmt: skip
    assert "No space left" in said[1][5] and said[0][5].startswith("MlpoError") and "rank 1 of 2" in said[0][5]
    assert all("save_dir" in rank[7] for rank in said)
    run(2, [["load", str(directory), "t"], ["dump", str(found)]], seed=99)
    check_all(read(found), read(wanted))
    assert (directory / "latest").read_text() == "u"


def test_errors_say_what_to_do(straight: Callable[[int], Straight], run: Run, tmp_path: pathlib.Path) -> None:
    before = straight(2)
    copies = {name: before.copy(tmp_path / name) for name in ("parts", "mixed", "missing", "good")}
    shutil.rmtree(copies["parts"] / "half" / "mlpo")
    other = straight(1).directory / "half" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    shutil.copy(other, copies["mixed"] / "half")
    (copies["missing"] / "half" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    cut = tmp_path / "cut"
    (cut / "half" / (".mlpo-" + "0" * 32)).mkdir(parents=True)
    good, found = str(copies["good"]), tmp_path / "found.pt"
    told = run(1, [
        ["fails", "load", str(tmp_path), "no-tag"],
        ["fails", "load", str(copies["parts"]), "half"],
        ["fails", "load", str(copies["mixed"]), "half"],
        ["fails", "load", str(copies["missing"]), "half"],
        ["fails", "load", str(cut), "half"],
        ["fails", "state_dict"],
        ["backward", 0], ["fails", "save", str(tmp_path / "new"), "t"],
        ["load", good, "half"], ["dump", str(found)],
    ], seed=99)  # fmt: skip
    for text, right in zip(
        told,
        (
            "there is no checkpoint", "has not the parts of all 2 ranks", "are of different saves",
            "has 1 optim_states.pt", "a save that was cut", "engine.save_checkpoint()", "", "a checkpoint",
        ),
    ):  # fmt: skip
        assert right in str(text), (text, right)
    check_state(read(found), read(before.half))
    told = run(1, [["fails", "load", good, "half"], ["fails", "save", good, "half"]], groups=1,
        config={"checkpoint": {"use_node_local_storage": True}})  # fmt: skip
    assert "2 param groups, the optimizer 1:" in told[0]
    assert "checkpoint.use_node_local_storage" in told[1]


def test_deepspeeds_checkpoints_that_have_no_fp32_state_say_so(run: Run, tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "saved"
    run(1, [["train", 0, 1], ["save", str(directory), "t"],
        ["empty", str(directory / "t" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")]], stock=True)  # fmt: skip
    told = run(1, [["fails", "load", str(directory), "t"]])
    assert "offload_optimizer.device = nvme" in told[0]
    told = run(1, [["fails", "load", str(directory), "t"]], config={"checkpoint": {"load_universal": True}})
    assert "ds_to_universal.py" in told[0]


def test_an_export_of_something_else_says_so(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "mlpo.deepspeed", "export", tmp_path]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    for options, right in (([], "no file 'latest'"), (["--tag", "t"], "there is no checkpoint")):
        done = subprocess.run([*command, *options], env=environment, timeout=TIMEOUT_S, text=True, capture_output=True)
        assert done.returncode == 1 and right in done.stderr and "Traceback" not in done.stderr
