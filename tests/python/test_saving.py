"""Checkpoints by a real daemon: what is restored is what was saved, to the bit, with other ranks, packing, blocks and
paths, and what was cut is never restored. Values are compared with those of a run that never stopped, and with what
mlpo.checkpoints reads of the parts by itself."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import threading
import time
from types import SimpleNamespace
from typing import Any, Callable, Iterator, Sequence

import mlpo
import numpy as np
import pytest
import torch
from conftest import new_job
from mlpo import _client, _own_files, _saving
from mlpo._native import lib
from mlpo.checkpoints import Checkpoint, _main, find
from running_daemon import SMALL_BLOCKS, THREE_BUFFERS, Daemon, Layout, program
from saved_files import loose_files

STATES = ("master", "exp_avg", "exp_avg_sq")
NUMEL = 100_003

Connect = Callable[..., mlpo.Client]


def values(numel: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32)


def shard(rank: int, ranks: int) -> tuple[int, int]:
    """(first, count) of a rank's elements of "w"."""
    first = NUMEL * rank // ranks
    return first, NUMEL * (rank + 1) // ranks - first


class Run:
    """All ranks of a job that trains one flat tensor "w", and a small whole one "b" on rank 0."""

    def __init__(self, connect: Connect, daemon: Daemon, ranks: int, initial: bool, job: str | None = None) -> None:
        self.ranks = ranks
        job = job or new_job()
        self.clients = [connect(daemon, job=job, rank=rank, world_size=ranks) for rank in range(ranks)]
        self.subgroups: list[list[mlpo.Subgroup]] = []
        for rank, client in enumerate(self.clients):
            first, count = shard(rank, ranks)
            start = values(NUMEL, 1)[first : first + count] if initial else None
            spec = mlpo.TensorSpec("w", (NUMEL,), flat_range=(first, count))
            mine = [client.subgroup(f"pack-{rank}", tensors=[spec], dtype="bfloat16", initial=start)]
            if rank == 0:
                mine.append(client.subgroup("b", 100, initial=values(100, 2) if initial else None))
            self.subgroups.append(mine)

    def step(self, number: int) -> None:
        """With the global gradients of that step, whatever the ranks."""
        whole = torch.from_numpy(values(NUMEL, 1000 + number)).to(torch.bfloat16)
        requests = []
        for rank, mine in enumerate(self.subgroups):
            first, count = shard(rank, self.ranks)
            mine[0].grad.torch().copy_(whole[first : first + count])
            if rank == 0:
                mine[1].grad[:] = values(100, 2000 + number)
            for subgroup in mine:
                assert subgroup.submit_grad().result(60).all_finite
                requests.append(subgroup.submit_update(lr=1e-2 / number, weight_decay=0.01))
        for request in requests:
            request.result(60)

    def state(self) -> dict[str, np.ndarray]:
        """Unsharded."""
        parts = [[subgroup.read_state() for subgroup in mine] for mine in self.subgroups]
        whole = {f"w.{name}": np.concatenate([mine[0][name] for mine in parts]) for name in STATES}
        whole |= {f"b.{name}": parts[0][1][name] for name in STATES}
        whole |= {"w.step": np.array([mine[0]["step"] for mine in parts]).max(keepdims=True)}
        return whole

    def save(self, directory: pathlib.Path, tag: str, step: int, **options: Any) -> list[mlpo.Saved]:
        return [client.checkpoint(str(directory), tag, step, **options) for client in self.clients]

    def restore(self, directory: pathlib.Path, tag: str | None = None) -> None:
        for client in self.clients:
            client.restore(str(directory), tag, timeout=60)

    def close(self) -> None:
        for client in self.clients:
            client.close()


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[key].tobytes() == b[key].tobytes() for key in a)


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    yield directory


@pytest.mark.parametrize("layout", [SMALL_BLOCKS, THREE_BUFFERS, Layout()], ids=str)
def test_c17_a_new_daemon_goes_on_with_the_same_bits(
    layout: Layout, tmp_path: pathlib.Path, place: pathlib.Path, connect_to: Connect
) -> None:
    """20 steps straight, against 10, a save, kill -9 of the daemon under a live session, 10 more on other paths and
    blocks. With the client killed, too: tests/stress/kills."""
    straight: list[dict[str, np.ndarray]] = []
    first = tmp_path / "first"
    first.mkdir()
    daemon = Daemon(first, layout)
    try:
        run = Run(connect_to, daemon, 1, initial=True)
        for number in range(1, 21):
            run.step(number)
            if number == 10:
                (saved,) = run.save(place, "ten", 10)
                saved_state = run.state()
            straight.append(run.state())
        assert saved.result(60)
        assert saved.snapshot.result(60) > 0
    finally:
        daemon.kill()
    with pytest.raises(mlpo.MlpoError):
        run.subgroups[0][0].read_state()
    second = tmp_path / "second"
    second.mkdir()
    with Daemon(second, Layout(paths=3, block=2048, pool="512KiB")) as daemon:
        run = Run(connect_to, daemon, 1, initial=False)
        run.restore(place)
        assert same(run.state(), saved_state)
        rounded = torch.from_numpy(saved_state["w.master"]).to(torch.bfloat16)
        assert torch.equal(run.subgroups[0][0].param.torch(), rounded)
        for number in range(11, 21):
            run.step(number)
            assert same(run.state(), straight[number - 1])
        run.close()


@pytest.mark.parametrize(("saving", "restoring"), [(4, 1), (1, 4), (4, 3), (8, 5)])
def test_c21_another_number_of_ranks(
    saving: int, restoring: int, place: pathlib.Path, daemon_of: Callable[[Layout], Daemon], connect_to: Connect
) -> None:
    daemon = daemon_of(Layout(block=4096, pool="8MiB"))
    run = Run(connect_to, daemon, saving, initial=True)
    for number in range(1, 4):
        run.step(number)
    saves = run.save(place, "three", 3)
    at_save = run.state()
    for number in range(4, 14):
        run.step(number)
    expected = run.state()
    assert any([saved.result(60) for saved in saves])
    run.close()
    other = Run(connect_to, daemon, restoring, initial=False)
    other.restore(place, "three")
    assert same(other.state(), at_save)
    for number in range(4, 14):
        other.step(number)
    assert same(other.state(), expected)
    other.close()


def test_parts_are_what_another_reader_finds(
    place: pathlib.Path, daemon_of: Callable[[Layout], Daemon], connect_to: Connect
) -> None:
    """Read by mlpo.checkpoints, hashes compared, while training has gone on."""
    run = Run(connect_to, daemon_of(SMALL_BLOCKS), 3, initial=True)
    run.step(1)
    saves = run.save(place, "one", 1)
    state = run.state()
    for number in range(2, 5):
        run.step(number)
    assert any([saved.result(60) for saved in saves])
    with Checkpoint(place) as checkpoint:
        checkpoint.verify()
        assert (checkpoint.tag, checkpoint.step, checkpoint.world_size) == ("one", 1, 3)
        assert checkpoint.attempt == saves[0].attempt.hex()
        for name in ("w", "b"):
            assert checkpoint.tensors[name].step == 1
            for each in STATES:
                assert checkpoint.read(name, each).tobytes() == state[f"{name}.{each}"].tobytes()
    run.close()


@pytest.mark.parametrize("ranks", [3, 8])
def test_c19_a_save_without_a_rank_is_never_restored(
    ranks: int, place: pathlib.Path, daemon_of: Callable[[Layout], Daemon], connect_to: Connect
) -> None:
    """And the same tag again, by a job that was started anew, is not refused."""
    daemon, job = daemon_of(SMALL_BLOCKS), new_job()
    run = Run(connect_to, daemon, ranks, initial=True, job=job)
    run.step(1)
    for client in run.clients[:-1]:  # the last one dies
        assert not client.checkpoint(str(place), "one", 1).result(60)
    run.close()
    assert [found.complete for found in find(place)] == [False]
    again = Run(connect_to, daemon, ranks, initial=True, job=job)
    with pytest.raises(mlpo.MlpoError) as raised:
        again.restore(place)
    assert raised.value.errno == errno.ENOENT
    again.step(1)
    again.step(2)
    assert any([saved.result(60) for saved in again.save(place, "one", 2)])
    assert [(found.step, found.complete) for found in find(place)] == [(2, True)]
    with pytest.raises(mlpo.MlpoError) as raised:
        again.save(place, "one", 3)
    assert raised.value.errno == errno.EEXIST
    assert any([saved.result(60) for saved in again.save(place, "one", 4, overwrite=True)])
    assert [(found.step, found.complete) for found in find(place)] == [(4, True)]
    again.close()


def test_what_cannot_be_saved_or_restored_says_why(
    place: pathlib.Path, daemon_of: Callable[[Layout], Daemon], connect_to: Connect
) -> None:
    daemon = daemon_of(SMALL_BLOCKS)
    client = connect_to(daemon)
    subgroup = client.subgroup("w", 5000, initial=values(5000, 1))

    def code(call: Callable[[], Any]) -> int | None:
        with pytest.raises(mlpo.MlpoError) as raised:
            call()
        return raised.value.errno

    assert code(lambda: client.checkpoint(str(place / "absent"), "t", 1)) == errno.ENOENT
    assert code(lambda: client.checkpoint(str(place), "../t", 1)) == errno.EINVAL
    subgroup.grad[:] = 1
    subgroup.submit_grad().result(60)
    saved = client.checkpoint(str(place), "open", 1)
    with pytest.raises(mlpo.MlpoError, match="window"):
        saved.result(60)
    assert not list(place.iterdir())
    client.discard("user")
    assert client.checkpoint(str(place), "good", 1).result(60)
    other = connect_to(daemon)
    other.subgroup("w", 5001)
    with pytest.raises(mlpo.MlpoError, match="5000"):
        other.restore(str(place))
    third = connect_to(daemon)
    third.subgroup("stranger", 5000)
    with pytest.raises(mlpo.MlpoError, match="stranger"):
        third.restore(str(place))


def test_a_flipped_bit_never_reaches_a_trainer(
    place: pathlib.Path, daemon_of: Callable[[Layout], Daemon], connect_to: Connect
) -> None:
    daemon = daemon_of(SMALL_BLOCKS)
    run = Run(connect_to, daemon, 1, initial=True)
    run.step(1)
    assert run.save(place, "one", 1)[0].result(60)
    state = run.state()
    (file,) = (place / "one" / "part-0").glob("data-*")
    good = file.read_bytes()
    damaged = []
    for at in (4096, int(np.random.default_rng(1).integers(4096, len(good))), len(good) - 1):
        file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(mlpo.MlpoError, match="hash"):
            run.restore(place)
        for name, subgroup in zip("wb", run.subgroups[0]):
            try:
                found = subgroup.read_state()
            except mlpo.MlpoError as error:
                assert error.code == -4100
                damaged.append((at, name))
            else:
                assert all(found[each].tobytes() == state[f"{name}.{each}"].tobytes() for each in STATES)
        file.write_bytes(good)
        run.restore(place)
        assert same(run.state(), state)
    # Each time the one that it was in has no state, and the other one is restored.
    assert len({at for at, _ in damaged}) == len(damaged) == 3 and {name for _, name in damaged} == {"w", "b"}
    run.close()


def test_a_restore_that_one_subgroup_cannot_have_changes_none(
    place: pathlib.Path, daemon_of: Callable[[Layout], Daemon], connect_to: Connect
) -> None:
    """Whoever goes on after the error must not go on with some of the checkpoint and some of what was there."""
    client = connect_to(daemon_of(SMALL_BLOCKS))
    keys = ("one", "two", "three")
    subgroups = [client.subgroup(key, 5000, initial=values(5000, seed)) for seed, key in enumerate(keys)]

    def masters() -> list[bytes]:
        return [subgroup.read_state()["master"].tobytes() for subgroup in subgroups]

    at_save = masters()
    assert client.checkpoint(str(place), "t", 0).result(60)
    for subgroup in subgroups:
        subgroup.grad[:] = 1
        subgroup.submit_grad().result(60)
        subgroup.submit_update().result(60)
    later = masters()
    for busy in subgroups:  # whichever is filled first
        busy.grad[:] = 1
        busy.submit_grad().result(60)
        with pytest.raises(mlpo.MlpoError, match="open window") as raised:
            client.restore(str(place))
        assert raised.value.code == lib.MLPO_ERR_SLOT_BUSY and busy.key in str(raised.value)
        busy.discard()
        assert masters() == later
    client.restore(str(place))
    assert masters() == at_save


def tensors_of(model: Sequence[tuple[str, int]]) -> list[mlpo.TensorSpec]:
    return [mlpo.TensorSpec(name, (numel,)) for name, numel in model]


def test_another_packing(place: pathlib.Path, daemon_of: Callable[[Layout], Daemon], connect_to: Connect) -> None:
    daemon = daemon_of(SMALL_BLOCKS)
    model = [(f"t{i}", 700 * i + 1) for i in range(6)]
    client = connect_to(daemon)
    whole = client.subgroup("all", tensors=tensors_of(model), initial=values(sum(n for _, n in model), 3))
    assert client.checkpoint(str(place), "t", 0).result(60)
    other = connect_to(daemon)
    for i in (5, 2, 0, 4, 1, 3):
        other.subgroup(f"own-{i}", tensors=tensors_of(model[i : i + 1]))
    found = other.restore(str(place))
    assert (found.tag, found.step, found.world_size) == ("t", 0, 1)
    for subgroup in list(other._subgroups):
        name = subgroup.tensors[0].name
        assert subgroup.read_state()["master"].tobytes() == whole.read_state(tensor=name)["master"].tobytes()


def test_a_daemon_of_another_user_gets_descriptors_and_opens_nothing(
    place: pathlib.Path, daemon_of: Callable[[Layout], Daemon], connect_to: Connect
) -> None:
    """The client is made to believe that it is another user's: what it passes is good, and names are its own affair."""
    daemon = daemon_of(SMALL_BLOCKS)
    run = Run(connect_to, daemon, 3, initial=True)
    for client in run.clients:
        client.daemon_uid += 1
    run.step(1)
    saves = run.save(place, "one", 1)
    state = run.state()
    run.step(2)
    for saved in saves[:2]:
        assert not saved.result(60) and not saved.is_complete()
    assert [found.complete for found in find(place)] == [False]
    run.clients[2].close()  # waits for its own
    assert all(saved.is_complete() for saved in saves)
    assert [(found.step, found.complete) for found in find(place)] == [(1, True)]
    assert sorted(file.name for file in (place / "one" / "part-0").iterdir()) == [
        f"data-{saves[0].attempt.hex()}-0",
        f"manifest-{saves[0].attempt.hex()}",
    ]
    with Checkpoint(place) as checkpoint:
        checkpoint.verify()
    run.close()
    other = Run(connect_to, daemon, 2, initial=False)
    for client in other.clients:
        client.daemon_uid += 1
    other.restore(place)
    assert same(other.state(), state)
    with pytest.raises(mlpo.MlpoError) as raised:
        other.save(place, "one", 2)
    assert raised.value.errno == errno.EEXIST
    assert any([saved.result(60) for saved in other.save(place, "one", 3, overwrite=True)])
    assert [(found.step, found.complete) for found in find(place)] == [(3, True)]
    # What is given up, or ends with its session, has no name.
    (given_up, _) = other.save(place, "two", 4)
    given_up.abandon()
    with pytest.raises(mlpo.MlpoError):
        given_up.result(60)
    other.close()
    assert not any(found.complete for found in find(place) if found.tag == "two")
    assert not (place / "two" / "part-0").exists()


def test_the_first_save_of_a_session_removes_what_killed_clients_have_left(
    place: pathlib.Path, daemon_of: Callable[[Layout], Daemon], connect_to: Connect
) -> None:
    """Under tags that nobody saves again, where only the client may unlink. A second one does not look again."""
    job = new_job()

    def leave(tag: str) -> pathlib.Path:
        files = _own_files.PartFiles(str(place), tag, 0, job, False)
        files._files[0].give(f"data-{bytes(range(16)).hex()}-0")
        for fd in files.descriptors:
            os.close(fd)
        return place / tag

    client = connect_to(daemon_of(SMALL_BLOCKS), job=job)
    client.daemon_uid += 1
    client.subgroup("w", 5000, initial=values(5000, 1))
    first = leave("step-1")
    assert client.checkpoint(str(place), "step-2", 2).result(60)
    assert not first.exists()
    second = leave("step-3")
    assert client.checkpoint(str(place), "step-4", 4).result(60)
    assert second.exists()
    assert _main(["gc", str(place)]) == 0
    assert sorted(folder.name for folder in place.iterdir()) == ["step-2", "step-4"]


def test_closing_ends_although_a_save_does_not(
    place: pathlib.Path, daemon_of: Callable[[Layout], Daemon], connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a daemon of another user closing waits for what is being saved: not if its files cannot get their names, and
    not for ever. The user is told, and nothing of it stays."""
    daemon = daemon_of(SMALL_BLOCKS)
    client = connect_to(daemon)
    client.daemon_uid += 1
    client.subgroup("w", 5000, initial=values(5000, 1))
    saved = client.checkpoint(str(place), "taken", 1)
    taken = place / "taken" / "part-0" / f"data-{saved.attempt.hex()}-0"
    taken.write_bytes(b"somebody's")
    with pytest.warns(RuntimeWarning, match="'taken' was not saved"):
        client.close()
    with pytest.raises(mlpo.MlpoError):
        client.check_alive()
    assert [file.name for file in taken.parent.iterdir()] == [taken.name]
    assert taken.read_bytes() == b"somebody's"

    client = connect_to(daemon)
    client.daemon_uid += 1
    client.subgroup("w", 5000, initial=values(5000, 1))
    monkeypatch.setattr(_client, "_GIVE_UP_S", 0.2)

    def take(*arguments: Any) -> int:
        daemon.pause()  # from here on, as one whose storage hangs
        return int(lib.mlpo_checkpoint_take(*arguments))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(_saving, "lib", Library("mlpo_checkpoint_take", take))
            client.checkpoint(str(place), "hangs", 1)
        began = time.monotonic()
        with pytest.warns(RuntimeWarning, match="'hangs' was not saved"):
            client.close(timeout=0.2)
        assert time.monotonic() - began < 10
    finally:
        daemon.resume()
    assert not (place / "hangs").exists()


def test_closing_waits_as_long_as_a_save_comes_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the daemon's status says of it."""
    said = iter([[("copying", 1)], [("copying", 2)], [("committing", 3)], [("committing", 3)]])
    waits = []

    class Slow(mlpo.Saved):
        def __init__(self) -> None:
            self._end = SimpleNamespace(done=lambda: False)

        def result(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            raise mlpo.TimeoutError(-errno.ETIMEDOUT, "it goes on")

        def _progress(self) -> Any:
            return next(said)

    with pytest.raises(mlpo.TimeoutError):
        Slow()._wait_while_it_moves()
    assert len(waits) == 4 and None not in waits


@pytest.mark.parametrize("another_user", [False, True], ids=["own", "another user's"])
def test_all_ranks_restore_what_the_first_one_has_found(
    place: pathlib.Path, daemon_of: Callable[[Layout], Daemon], connect_to: Connect, another_user: bool
) -> None:
    """Though another checkpoint becomes complete between two ranks' calls; one that has gone is not made up for."""
    daemon = daemon_of(SMALL_BLOCKS)
    run = Run(connect_to, daemon, 2, initial=True)
    run.step(1)
    assert any([saved.result(60) for saved in run.save(place, "one", 1)])
    state = run.state()
    run.step(2)
    assert any([saved.result(60) for saved in run.save(place, "two", 2)])
    later = run.state()
    hidden = place.with_name("hidden")
    (place / "two").rename(hidden)
    other = Run(connect_to, daemon, 2, initial=False)
    for client in other.clients:
        client.daemon_uid += another_user
    first = other.clients[0].restore(str(place), timeout=60)
    assert (first.tag, first.step, first.world_size) == ("one", 1, 2)
    hidden.rename(place / "two")
    assert other.clients[1].restore(str(place), first.tag, attempt=first.attempt, timeout=60) == first
    assert same(other.state(), state)
    other.restore(place)
    assert same(other.state(), later)
    run.step(3)
    assert any([saved.result(60) for saved in run.save(place, "one", 3, overwrite=True)])
    for attempt in (first.attempt, bytes(range(16))):
        with pytest.raises(mlpo.MlpoError) as raised:
            other.clients[0].restore(str(place), "one", attempt=attempt)
        assert raised.value.errno == errno.ENOENT
    with pytest.raises(ValueError, match="tag"):
        other.clients[0].restore(str(place), attempt=first.attempt)
    with pytest.raises(ValueError, match="16"):
        other.clients[0].restore(str(place), "one", attempt=b"short")
    run.close()
    other.close()


class Library:
    """The C library as mlpo._saving sees it, but for one function."""

    def __init__(self, name: str, function: Callable[..., int]) -> None:
        self._name, self._function = name, function

    def __getattr__(self, name: str) -> Any:
        return self._function if name == self._name else getattr(lib, name)


def left(name: str) -> Library:
    """A call of the function whose caller goes, by Ctrl-C, when its work has been done and before it returns."""

    def call(*arguments: Any) -> int:
        code = int(getattr(lib, name)(*arguments))
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.1)
        return code

    return Library(name, call)


def eventually(call: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not call():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def not_busy(call: Callable[[], Any]) -> Any:
    """What it returns once it is not refused as busy any more."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return call()
        except mlpo.MlpoError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def any_loose(place: pathlib.Path) -> bool:
    """While something goes on there, too."""
    try:
        return bool(loose_files(place))
    except FileNotFoundError:
        return True


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where a shell has started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("another_user", [False, True], ids=["own", "another user's"])
def test_ctrl_c_while_it_begins_leaves_nothing_begun(
    place: pathlib.Path,
    daemon_of: Callable[[Layout], Daemon],
    connect_to: Connect,
    monkeypatch: pytest.MonkeyPatch,
    interruptible: None,
    another_user: bool,
) -> None:
    """The next checkpoint or restore is not refused as busy, and the one that nobody has leaves no half of it."""
    run = Run(connect_to, daemon_of(SMALL_BLOCKS), 1, initial=True)
    (client,) = run.clients
    client.daemon_uid += another_user
    run.step(1)
    state = run.state()
    for function in ("mlpo_checkpoint_begin", "mlpo_checkpoint_take", "mlpo_checkpoint_saved"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(_saving, "lib", left(function))
            client.checkpoint(str(place), f"left-{function}", 1)
        assert not_busy(lambda name=function: client.checkpoint(str(place), name, 1)).result(60)
    eventually(lambda: not list(place.glob("left-mlpo_checkpoint_begin/*/*")))
    eventually(lambda: not any_loose(place))
    for _ in range(5):  # more than a session may have begun
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(_saving, "lib", left("mlpo_restore_begin_files" if another_user else "mlpo_restore_begin"))
            client.restore(str(place), function)
        time.sleep(0.2)
    not_busy(lambda: client.restore(str(place), function))
    assert same(run.state(), state)
    run.close()


@pytest.mark.parametrize("another_user", [False, True], ids=["own", "another user's"])
def test_one_that_cannot_be_taken_is_given_up(
    place: pathlib.Path,
    daemon_of: Callable[[Layout], Daemon],
    connect_to: Connect,
    monkeypatch: pytest.MonkeyPatch,
    another_user: bool,
) -> None:
    """The submission that takes the state fails on the client's side: the daemon does not go on waiting for it."""
    run = Run(connect_to, daemon_of(SMALL_BLOCKS), 1, initial=True)
    (client,) = run.clients
    client.daemon_uid += another_user
    for function in ("mlpo_checkpoint_take", "mlpo_checkpoint_saved"):
        with monkeypatch.context() as patch, pytest.raises(mlpo.MlpoError):
            patch.setattr(_saving, "lib", Library(function, lambda *_: -errno.ENOMEM))
            client.checkpoint(str(place), "refused", 1)
        assert not_busy(lambda name=function: client.checkpoint(str(place), name, 1)).result(60)
    eventually(lambda: not any_loose(place))
    run.close()


def test_a_checkpoint_is_asked_for(
    place: pathlib.Path, daemon_of: Callable[[Layout], Daemon], connect_to: Connect
) -> None:
    daemon = daemon_of(SMALL_BLOCKS)
    client = connect_to(daemon)
    client.subgroup("w", 100)
    assert not client.checkpoint_requested()
    ctl = subprocess.run(
        [program().parent / "mlpo-ctl", "checkpoint", "request", "--job", client.job, "--socket", daemon.socket],
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert ctl.returncode == 0, ctl.stderr
    assert client.checkpoint_requested()
    assert client.checkpoint_requested()  # until it is met
    assert client.checkpoint(str(place), "asked", 0).result(60)
    assert not client.checkpoint_requested()


PERSISTENT = Layout(block=1024, pool="256KiB", persistent=True)
FICLONE = 0x40049409


def clones(directory: pathlib.Path) -> bool:
    """Whether files of its file system can share their blocks."""
    source, target = directory / "source", directory / "target"
    source.write_bytes(bytes(4096))
    try:
        with source.open("rb") as of, target.open("wb") as to:
            fcntl.ioctl(to, FICLONE, of.fileno())
        return True
    except OSError:
        return False
    finally:
        source.unlink()
        target.unlink()


def place_that(clones_or_not: bool, otherwise: pathlib.Path) -> tempfile.TemporaryDirectory[str]:
    """A folder on a file system that can clone, or on one that cannot: of $MLPO_TEST_DIRS, names of directories with
    colons between, or where the tests are anyway. Skips the test if there is none."""
    for base in (otherwise, *map(pathlib.Path, filter(None, os.environ.get("MLPO_TEST_DIRS", "").split(":")))):
        folder = tempfile.TemporaryDirectory(dir=base)
        if clones(pathlib.Path(folder.name)) == clones_or_not:
            return folder
        folder.cleanup()
    what = "clones" if clones_or_not else "does not clone"
    pytest.skip(f"skipped: no directory on a file system that {what}; name one in MLPO_TEST_DIRS")


@pytest.mark.parametrize("way", ["cloned", "handed over"])
def test_c20_a_persistent_path_of_the_same_file_system_is_not_copied(
    way: str, tmp_path: pathlib.Path, connect_to: Connect
) -> None:
    """Cloned or handed over, as the file system can: nothing is copied, and training changes none of it."""
    with place_that(way == "cloned", tmp_path) as name:
        folder = pathlib.Path(name)
        place = folder / "checkpoints"
        place.mkdir()
        with Daemon(folder, PERSISTENT) as daemon:
            nothing_is_copied(way, place, daemon, connect_to)


def nothing_is_copied(way: str, place: pathlib.Path, daemon: Daemon, connect_to: Connect) -> None:
    run = Run(connect_to, daemon, 1, initial=True)
    states = []
    for tag in range(1, 4):
        run.step(2 * tag - 1)
        (saved,) = run.save(place, f"t{tag}", tag)
        states.append(run.state())
        assert saved.result(60)
        run.step(2 * tag)
    assert daemon.status()["checkpoints"]["copied_bytes"] == 0
    for tag in range(1, 4):
        (manifest,) = place.glob(f"t{tag}/part-0/manifest-*")
        kinds = {file["kind"] for file in json.loads(manifest.read_bytes().split(b"\n")[1])["files"]}
        assert kinds == ({"part", "working"} if way == "handed over" else {"part"})
    for tag, state in enumerate(states, 1):
        with Checkpoint(place, f"t{tag}") as checkpoint:
            checkpoint.verify()
            for each in STATES:
                assert checkpoint.read("w", each).tobytes() == state[f"w.{each}"].tobytes()
    last = run.state()
    run.restore(place, "t1")
    assert same(run.state(), states[0])
    run.restore(place, "t3")
    run.step(6)
    assert same(run.state(), last)
    run.close()
