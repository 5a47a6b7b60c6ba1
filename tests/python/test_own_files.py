"""Files of parts that this process makes by itself (mlpo._own_files), by the rules of proto/FORMAT.md, "In a directory
of checkpoints", and what of a directory is taken when it is read. What is in the files is written here, byte by byte.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pathlib
import shutil
import struct
import threading
import uuid
import warnings
from types import SimpleNamespace
from typing import Any, Callable, Iterator, Optional

import mlpo
import pytest
import xxhash
from mlpo import _own_files, _parts, _rests, _saving
from mlpo._own_files import PartFiles, is_complete
from mlpo.checkpoints import Checkpoint, CheckpointError, find
from saved_files import loose_files

JOB = "job"


def page(attempt: bytes, rank: int, world_size: int, step: int, started: int, job: str, tag: str) -> bytes:
    text = struct.pack(
        "<8sII16sIIQIIq136s136s", b"MLPOPART", 1, 4096, attempt, rank, world_size, step, 0, os.geteuid(), started,
        job.encode(), tag.encode(),
    )  # fmt: skip
    text += bytes(4088 - len(text))
    return text + struct.pack("<Q", xxhash.xxh3_64_intdigest(text))


class Save:
    """One rank's part of a save, as a client and its daemon of another user make it."""

    started = 1_000

    def __init__(
        self,
        place: pathlib.Path,
        attempt: bytes,
        rank: int = 0,
        world_size: int = 1,
        *,
        tag: str = "tag",
        job: str = JOB,
        step: int = 1,
        overwrite: bool = False,
        started: Optional[int] = None,
    ) -> None:
        self.attempt = attempt
        self.files = PartFiles(str(place), tag, rank, job, overwrite)
        Save.started += 1
        started = Save.started if started is None else started
        data, manifest = self.files.descriptors
        os.pwrite(data, page(attempt, rank, world_size, step, started, job, tag), 0)
        name = f"data-{attempt.hex()}-0"
        body = json.dumps(
            {"block_hash": "xxh3-64k", "files": [{"name": name, "bytes": 4096, "kind": "part"}], "subgroups": []}
        ).encode()
        head = json.dumps(
            {
                "format": "mlpo-part", "version": 1, "job": job, "tag": tag, "step": step, "world_size": world_size,
                "rank": rank, "attempt": attempt.hex(), "started_unix_ns": started, "body_bytes": len(body),
                "body_xxh3": f"{xxhash.xxh3_64_intdigest(body):016x}",
            }  # fmt: skip
        ).encode()
        os.pwrite(manifest, head + b"\n" + body + b"\n", 0)

    def commit(self) -> bool:
        return self.files.commit(self.attempt)

    def die_between_the_names(self) -> None:
        """kill -9 when the data file has its name and the manifest has not."""
        self.files._files[0].give(f"data-{self.attempt.hex()}-0")
        for fd in self.files.descriptors:
            os.close(fd)
        self.files._files = []
        self.files._stands = True
        self.files.close()


@pytest.fixture
def new() -> Callable[[], bytes]:
    return lambda: uuid.uuid4().bytes


New = Callable[[], bytes]


@pytest.fixture(params=["nameless", "named"], autouse=True)
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With files that have no name until they are given one, and as on file systems that have none (NFS)."""
    if request.param == "named":
        really = os.open

        def without(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return really(path, flags, *arguments, **options)

        monkeypatch.setattr(_own_files.os, "open", without)
    yield request.param


def attempts(place: pathlib.Path, tag: str = "tag") -> dict[str, list[str]]:
    """By part, those that it has any file of under a name that counts."""
    return {
        folder.name: sorted({name.split("-")[1] for name in os.listdir(folder) if name[0] != "."})
        for folder in place.glob(f"{tag}/part-*")
    }


def code(call: Callable[[], Any]) -> Optional[int]:
    with pytest.raises(mlpo.MlpoError) as raised:
        call()
    return raised.value.errno


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_checkpoint_of_two_ranks_is_complete_with_the_last(tmp_path: pathlib.Path, new: New) -> None:
    one = new()
    first, second = Save(tmp_path, one, 0, 2), Save(tmp_path, one, 1, 2)
    assert not first.commit() and not is_complete(str(tmp_path), "tag", one, 2)
    assert second.commit() and second.commit() and not first.commit()
    assert is_complete(str(tmp_path), "tag", one, 2)
    assert not loose_files(tmp_path)
    assert code(lambda: Save(tmp_path, new())) == errno.EEXIST
    assert attempts(tmp_path) == {"part-0": [one.hex()], "part-1": [one.hex()]}


@pytest.mark.parametrize("who_is_first", ["the old save", "the new save"])
def test_a_live_save_keeps_its_files(tmp_path: pathlib.Path, new: New, who_is_first: str) -> None:
    """A save goes on though its job was started anew, which saves under the same tag: whoever is done first, nothing of
    the other's is taken away before it has ended, and in the end the new one counts."""
    good, old, newer = new(), new(), new()
    assert Save(tmp_path, good).commit()
    zombie = Save(tmp_path, old, overwrite=True)
    requeued = Save(tmp_path, newer, overwrite=True)
    if who_is_first == "the old save":
        assert zombie.commit()  # it was complete, until the new one
        assert [each.attempt for each in find(tmp_path)] == [old.hex()]
        with Checkpoint(tmp_path) as checkpoint:
            checkpoint.verify()
        assert requeued.commit()
    else:
        assert requeued.commit()
        with pytest.warns(RuntimeWarning, match="clock"):
            assert not zombie.commit()  # complete, and not the one that counts
    assert Checkpoint(tmp_path).attempt == newer.hex()
    assert not loose_files(tmp_path)


def test_what_was_given_up_is_no_part(tmp_path: pathlib.Path, new: New) -> None:
    save = Save(tmp_path, new())
    save.files.close()
    assert code(save.commit) == errno.ECANCELED
    assert not list(tmp_path.iterdir())


def test_a_save_in_the_making_is_not_removed_by_one_that_begins(tmp_path: pathlib.Path, new: New) -> None:
    """It has its data file's name, and no manifest yet: what tells it from one that was killed is its lock."""
    one = new()
    live = Save(tmp_path, one)
    live.files._files[0].give(f"data-{one.hex()}-0")
    other = Save(tmp_path, new())
    assert attempts(tmp_path) == {"part-0": [one.hex()]}
    assert code(lambda: PartFiles(str(tmp_path), "tag", 0, JOB, False, one)) == errno.EEXIST  # twice the same attempt
    assert live.commit()
    assert other.commit()


def test_a_committed_part_stays_while_another_rank_saves_its_own(tmp_path: pathlib.Path, new: New) -> None:
    """Under a tag that is saved over and over: the next save may begin on one rank, and be given up, before the last
    one has ended on all. When its last saver is dead the part goes."""
    one, two = new(), new()
    first, second = Save(tmp_path, one, 0, 2), Save(tmp_path, one, 1, 2)
    assert not first.commit()
    second.files._files[0].give(f"data-{one.hex()}-0")
    Save(tmp_path, new(), 0, 2, overwrite=True).files.close()
    assert attempts(tmp_path)["part-0"] == [one.hex()]
    assert second.commit()
    assert [(each.attempt, each.complete) for each in find(tmp_path)] == [(one.hex(), True)]

    first, second = Save(tmp_path, two, 0, 2, overwrite=True), Save(tmp_path, two, 1, 2, overwrite=True)
    assert not first.commit()
    second.die_between_the_names()
    Save(tmp_path, new(), 0, 2, overwrite=True).files.close()
    assert attempts(tmp_path) == {"part-0": [one.hex()], "part-1": sorted([one.hex(), two.hex()])}


def test_ranks_that_begin_together_all_remove_what_was_cut(tmp_path: pathlib.Path, new: New) -> None:
    """Each has the lock of its own part of the cut save then, to remove it."""
    cut = new()
    for rank in range(2):
        assert not Save(tmp_path, cut, rank, 3).commit()
    removing = os.open(tmp_path / "tag" / "part-1" / f"data-{cut.hex()}-0", os.O_RDWR)
    fcntl.flock(removing, fcntl.LOCK_EX)
    Save(tmp_path, new(), 0, 3).files.close()
    os.close(removing)
    assert attempts(tmp_path) == {"part-1": [cut.hex()]}


@pytest.mark.parametrize("whose", [0, 1])
def test_who_finds_a_lock_as_it_begins_looks_again(tmp_path: pathlib.Path, new: New, whose: int) -> None:
    """Another rank's part without its manifest is on its way out; or another rank, which looks, has our part's lock."""
    cut = new()
    assert not Save(tmp_path, cut, 0, 2).commit()
    Save(tmp_path, cut, 1, 2).die_between_the_names()
    locked = os.open(tmp_path / "tag" / f"part-{whose}" / f"data-{cut.hex()}-0", os.O_RDWR)
    fcntl.flock(locked, fcntl.LOCK_SH if whose == 0 else fcntl.LOCK_EX)
    soon = threading.Timer(0.2, os.close, [locked])
    soon.start()
    Save(tmp_path, new(), 0, 2).files.close()
    soon.join()
    assert attempts(tmp_path) == {"part-1": [cut.hex()]}


def test_what_a_killed_save_has_left_goes(tmp_path: pathlib.Path, new: New) -> None:
    """A data file of full size without a manifest: with the next save of the rank under the tag, and of all ranks once
    that is complete, also of those that there are no more."""
    for rank in range(3):
        Save(tmp_path, new(), rank, 3).die_between_the_names()
    assert len(loose_files_that_count(tmp_path)) == 3
    again = new()
    first, second = Save(tmp_path, again, 0, 2), Save(tmp_path, again, 1, 2)
    assert len(loose_files_that_count(tmp_path)) == 1
    assert not first.commit() and second.commit()
    assert not loose_files(tmp_path)
    assert attempts(tmp_path) == {"part-0": [again.hex()], "part-1": [again.hex()]}


def test_what_a_killed_client_has_left_under_other_tags_goes(
    tmp_path: pathlib.Path, new: New, file_system: str
) -> None:
    """Tags that are used once: what its rank's next session finds, and of ranks that there are no more. What is saved
    by somebody, what has a manifest, another job's and other files stay."""
    half, live, cut = new(), new(), new()
    Save(tmp_path, half, 0, 3, tag="step-1").die_between_the_names()
    Save(tmp_path, half, 2, 3, tag="step-1").die_between_the_names()
    early = Save(tmp_path, new(), 0, 3, tag="step-2")
    for fd in early.files.descriptors:
        os.close(fd)  # killed before
    saving = Save(tmp_path, live, 0, 3, tag="step-3")
    saving.files._files[0].give(f"data-{live.hex()}-0")
    assert not Save(tmp_path, cut, 0, 3, tag="step-4").commit()
    (tmp_path / "step-4" / "part-0" / "notes").write_text("mine")
    unnamed = [*tmp_path.glob("step-[12]/part-*/.*.new")]
    assert len(unnamed) == (4 if file_system == "named" else 0)

    theirs = new()
    Save(tmp_path, theirs, 0, 3, tag="step-5", job="other").die_between_the_names()
    unnamed += tmp_path.glob("step-5/part-*/.*.new")

    assert sum(_rests.remove_uncommitted(str(tmp_path), JOB, lambda rank: rank % 2 == 0)) == 2 + len(unnamed)
    assert attempts(tmp_path, "step-1") == {}
    assert not (tmp_path / "step-1").exists()
    assert not [*tmp_path.glob("step-2/part-0/*")]
    assert attempts(tmp_path, "step-3") == {"part-0": [live.hex()]}
    assert (tmp_path / "step-4" / "part-0" / f"manifest-{cut.hex()}").exists()
    assert (tmp_path / "step-4" / "part-0" / "notes").exists()
    assert attempts(tmp_path, "step-5") == {"part-0": [theirs.hex()]}
    assert not saving.commit()
    assert sum(_rests.remove_uncommitted(str(tmp_path))) == 1  # of any job
    assert not (tmp_path / "step-5").exists()


def test_what_cut_saves_have_left_goes_when_a_later_one_is_complete(tmp_path: pathlib.Path, new: New) -> None:
    """Whole parts of it, under a tag that is used once; never of another job, of what may yet be complete, or of what
    began later."""
    cut, live, later, theirs = new(), new(), new(), new()
    for rank in range(2):
        assert not Save(tmp_path, cut, rank, 3, tag="step-1").commit()
    assert not Save(tmp_path, theirs, 0, 2, tag="step-1", job="other").commit()
    first, second = (Save(tmp_path, live, rank, 2, tag="step-2") for rank in range(2))
    assert not first.commit()
    second.files._files[0].give(f"data-{live.hex()}-0")
    assert sum(_rests.remove_cut(str(tmp_path), JOB)) == 0  # the newest there is
    assert Save(tmp_path, new(), tag="step-3").commit()
    assert not Save(tmp_path, later, 0, 2, tag="step-4").commit()

    assert sum(_rests.remove_cut(str(tmp_path), JOB)) == 4
    assert attempts(tmp_path, "step-1") == {"part-0": [theirs.hex()]}
    assert attempts(tmp_path, "step-2") == {"part-0": [live.hex()], "part-1": [live.hex()]}
    assert attempts(tmp_path, "step-4") == {"part-0": [later.hex()]}
    assert second.commit()
    assert sum(_rests.remove_cut(str(tmp_path))) == 0
    assert [each.tag for each in find(tmp_path) if each.complete] == ["step-2", "step-3"]


def test_a_look_for_rests_opens_what_is_its_own_and_locks_nothing_that_is_a_part(
    tmp_path: pathlib.Path, new: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks look, each at all tags. Who finds a part locked takes it for one that is not durable yet."""
    one, half = new(), new()
    for rank in range(3):
        Save(tmp_path, one, rank, 3).commit()
        Save(tmp_path, half, rank, 3, tag="cut").die_between_the_names()
    opened, locked = [], []
    really_open, really_lock = os.open, _own_files._lock

    def logged_open(path: Any, *arguments: Any, **options: Any) -> int:
        opened.append(os.fspath(path))
        return really_open(path, *arguments, **options)

    def logged_lock(fd: int, how: int) -> Any:
        locked.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        return really_lock(fd, how)

    monkeypatch.setattr(_own_files.os, "open", logged_open)
    monkeypatch.setattr(_own_files, "_lock", logged_lock)
    assert sum(_rests.remove_uncommitted(str(tmp_path), JOB, lambda rank: rank == 1)) > 0
    assert [name for name in opened if name.startswith("part-")] == ["part-1", "part-1"]
    assert [name for name in locked if name.startswith("data-")] == [f"data-{half.hex()}-0"]
    assert attempts(tmp_path, "cut") == {"part-0": [half.hex()], "part-2": [half.hex()]}


def test_a_tag_that_goes_meanwhile_is_passed_over(
    tmp_path: pathlib.Path, new: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tag in ("step-1", "step-2", "step-3"):
        assert not Save(tmp_path, new(), 0, 2, tag=tag).commit()
    assert Save(tmp_path, new(), tag="step-4").commit()
    really = _parts.attempts

    def removing(tag: pathlib.Path) -> list[_parts.Attempt]:
        if tag.name == "step-2" and tag.exists():
            shutil.rmtree(tag)
        return really(tag)

    monkeypatch.setattr(_parts, "attempts", removing)
    assert sum(_rests.remove_cut(str(tmp_path), JOB)) == 4
    assert [tag.name for tag in tmp_path.iterdir()] == ["step-4"]


def test_a_save_looks_for_rests_for_some_seconds_and_the_next_one_goes_on(
    tmp_path: pathlib.Path, new: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks of a job wait for it."""
    tags = [f"step-{step}" for step in range(5)]
    for tag in tags:
        Save(tmp_path, new(), tag=tag).die_between_the_names()
    client = SimpleNamespace(job=JOB, rank=0, world_size=1, _tidying={})
    monkeypatch.setattr(_saving, "_TIDY_S", 0.0)
    for looks in range(1, 6):
        _saving.remove_rests(client, str(tmp_path), of_all=True)  # type: ignore[arg-type]
        assert sorted(tag.name for tag in tmp_path.iterdir()) == tags[looks:]
    late = new()
    Save(tmp_path, late, tag="late").die_between_the_names()
    _saving.remove_rests(client, str(tmp_path), of_all=True)  # type: ignore[arg-type]
    assert attempts(tmp_path, "late") == {"part-0": [late.hex()]}  # once in a run
    monkeypatch.setattr(_saving, "_TIDY_S", 60.0)
    client._tidying = {}
    _saving.remove_rests(client, str(tmp_path))  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]


def test_without_locks_nobody_is_dead_for_sure(
    tmp_path: pathlib.Path, new: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = new()
    Save(tmp_path, half).die_between_the_names()

    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(_own_files.fcntl, "flock", none)
    assert sum(_rests.remove_uncommitted(str(tmp_path))) == 0
    assert attempts(tmp_path) == {"part-0": [half.hex()]}


def loose_files_that_count(place: pathlib.Path) -> list[str]:
    """Not those of live saves that have no name that counts yet."""
    return [name for name in loose_files(place) if "/." not in name]


def test_another_jobs_parts_go_only_with_overwrite(tmp_path: pathlib.Path, new: New) -> None:
    theirs, ours, last = new(), new(), new()
    cut = Save(tmp_path, theirs, 0, 2, job="other")
    assert not cut.commit()
    assert Save(tmp_path, ours).commit()
    assert attempts(tmp_path) == {"part-0": sorted([theirs.hex(), ours.hex()])}
    assert Save(tmp_path, last, overwrite=True).commit()
    assert attempts(tmp_path) == {"part-0": [last.hex()]}


@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1)], ids=str)
def test_one_that_is_saved_over_while_it_is_looked_at_is_not_complete(
    tmp_path: pathlib.Path, new: New, monkeypatch: pytest.MonkeyPatch, lost: tuple[int, ...]
) -> None:
    """Another job's save ends between the two looks at the directory; it has taken the parts of these ranks so far."""
    good, ours = new(), new()
    assert not Save(tmp_path, good, 0, 2).commit() and Save(tmp_path, good, 1, 2).commit()
    first, last = Save(tmp_path, ours, 0, 2, overwrite=True), Save(tmp_path, ours, 1, 2, overwrite=True)
    assert not first.commit()
    really = _own_files._is_settled

    def settled(*arguments: Any) -> bool:
        found = really(*arguments)
        for rank in lost:
            (tmp_path / "tag" / f"part-{rank}" / f"manifest-{ours.hex()}").unlink()
        return found

    monkeypatch.setattr(_own_files, "_is_settled", settled)
    assert not last.commit() and not last.commit()
    # What is not complete removes nothing.
    assert [each.attempt for each in find(tmp_path) if each.complete] == [good.hex()]


def test_a_save_whose_data_was_removed_is_no_part(tmp_path: pathlib.Path, new: New) -> None:
    """By hand, or on a file system without locks: there is never a manifest of a file that is not there."""
    one = new()
    save = Save(tmp_path, one)
    save.files._files[0].give(f"data-{one.hex()}-0")
    file = tmp_path / "tag" / "part-0" / f"data-{one.hex()}-0"
    file.rename(tmp_path / "aside")
    file.write_bytes(b"another file")
    assert code(save.commit) == errno.EEXIST
    assert code(save.commit) == errno.EEXIST
    assert [name for name in os.listdir(file.parent) if name[0] != "."] == [file.name]
    assert file.read_bytes() == b"another file"
    file.unlink()
    save = Save(tmp_path, one)
    really = os.fsync

    def removing(fd: int) -> None:
        really(fd)
        file.unlink(missing_ok=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_own_files.os, "fsync", removing)
        assert code(save.commit) == errno.ESTALE
    assert not find(tmp_path) and not loose_files(tmp_path)


def test_an_interrupted_commit_goes_on_and_a_failed_one_leaves_nothing(tmp_path: pathlib.Path, new: New) -> None:
    """Whichever of its calls it is; a second call says the same as the first."""
    really = os.fsync
    for error in (KeyboardInterrupt(), OSError(errno.EIO, "broken")):
        for failing in range(4):
            tag = f"{type(error).__name__}-{failing}"
            save = Save(tmp_path, new(), tag=tag)
            left = [failing]

            def fsync(fd: int, left: list[int] = left, error: BaseException = error) -> None:
                left[0] -= 1
                if left[0] == -1:
                    raise error
                really(fd)

            with pytest.MonkeyPatch.context() as patch, pytest.raises((KeyboardInterrupt, mlpo.MlpoError)):
                patch.setattr(_own_files.os, "fsync", fsync)
                save.commit()
            found = [each.complete for each in find(tmp_path) if each.tag == tag]
            if isinstance(error, KeyboardInterrupt):
                assert save.commit() and save.commit()
                assert [each.complete for each in find(tmp_path) if each.tag == tag] == [True]
            else:  # the part's folder has been synced twice: from then on it stands
                assert code(save.commit) == errno.EIO
                assert found == ([True] if failing >= 2 else [])
    assert not loose_files(tmp_path)


def test_all_parts_are_durable_before_the_earlier_checkpoint_goes(
    tmp_path: pathlib.Path, new: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other ranks, too, whose own calls may still be under way; and what is not is not complete."""
    good, one = new(), new()
    for rank in range(3):
        Save(tmp_path, good, rank, 3).commit()
    saves = [Save(tmp_path, one, rank, 3, overwrite=True) for rank in range(3)]
    assert not saves[0].commit() and not saves[1].commit()
    undone = os.open(tmp_path / "tag" / "part-1" / f"data-{one.hex()}-0", os.O_RDWR)
    fcntl.flock(undone, fcntl.LOCK_EX)  # rank 1 has its manifest, and has not synced its folder
    assert not saves[2].commit()
    assert [(each.attempt, each.complete) for each in find(tmp_path)] == [(good.hex(), True), (one.hex(), True)]
    assert not is_complete(str(tmp_path), "tag", one, 3)
    os.close(undone)
    assert is_complete(str(tmp_path), "tag", one, 3)

    two = new()
    saves = [Save(tmp_path, two, rank, 3, overwrite=True) for rank in range(3)]
    saves[0].commit()
    saves[1].commit()
    log: list[tuple[str, str]] = []
    sync, unlink = os.fsync, os.unlink

    def logged_sync(fd: int) -> None:
        log.append(("sync", os.readlink(f"/proc/self/fd/{fd}")))
        sync(fd)

    def logged_unlink(name: Any, *arguments: Any, **options: Any) -> None:
        log.append(("unlink", str(name)))
        unlink(name, *arguments, **options)

    monkeypatch.setattr(_own_files.os, "fsync", logged_sync)
    monkeypatch.setattr(_own_files.os, "unlink", logged_unlink)
    assert saves[2].commit()
    removed = [i for i, (what, name) in enumerate(log) if what == "unlink" and not name.endswith(".new")]
    before = [name for what, name in log[: removed[0]] if what == "sync"]
    folders = [str(tmp_path / "tag" / f"part-{rank}") for rank in range(3)]
    assert {*folders, str(tmp_path / "tag"), str(tmp_path)} <= set(before)
    names = [log[i][1] for i in removed]
    for earlier in (good, one):  # of each part the manifest before its data
        mine = [name for name in names if earlier.hex() in name]
        assert [name.startswith("manifest") for name in mine] == [True, False] * 3
    assert attempts(tmp_path) == {f"part-{rank}": [two.hex()] for rank in range(3)}


def test_the_one_that_began_last_counts_and_others_do_not_call_themselves_complete(
    tmp_path: pathlib.Path, new: New
) -> None:
    """A node whose clock is behind saves over a later checkpoint: that stays, and result() is False, with a warning."""
    good, behind = new(), new()
    assert Save(tmp_path, good, step=1).commit()
    save = Save(tmp_path, behind, step=9, overwrite=True, started=5)
    with pytest.warns(RuntimeWarning, match="clock"):
        assert not save.commit()
    chosen = Checkpoint(tmp_path, "tag")
    assert (chosen.attempt, chosen.step) == (good.hex(), 1)
    assert Checkpoint(tmp_path).attempt == good.hex()  # also without a tag, whatever the other's step
    assert Checkpoint(tmp_path, "tag", attempt=behind.hex()).step == 9
    with pytest.raises(CheckpointError, match="attempt"):
        Checkpoint(tmp_path, "tag", attempt=new().hex())
    # A save that goes back to an earlier step counts, since it began later.
    assert Save(tmp_path, new(), step=0, overwrite=True).commit()
    assert [each.step for each in find(tmp_path)] == [0]


def test_a_checkpoint_that_has_lost_a_file_is_not_in_the_way(tmp_path: pathlib.Path, new: New) -> None:
    one, two = new(), new()
    assert Save(tmp_path, one).commit()
    file = tmp_path / "tag" / "part-0" / f"data-{one.hex()}-0"
    whole = file.read_bytes()
    file.write_bytes(page(new(), 0, 1, 1, 1, JOB, "tag"))  # another save's
    Save(tmp_path, two).files.close()
    file.write_bytes(whole[:-1])
    Save(tmp_path, two).files.close()
    file.unlink()
    assert Save(tmp_path, two).commit()
    assert attempts(tmp_path) == {"part-0": [two.hex()]}


def test_a_folder_that_was_taken_away_is_made_anew(tmp_path: pathlib.Path, new: New, file_system: str) -> None:
    """It looks empty to a save that ends without a part."""
    if file_system == "named":
        return
    one = new()
    save = Save(tmp_path, one)
    Save(tmp_path, new()).files.close()
    assert not (tmp_path / "tag").exists()
    assert save.commit()
    assert not loose_files(tmp_path) and find(tmp_path)[0].complete


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
def test_a_file_without_a_header_goes_if_nobody_makes_it(
    tmp_path: pathlib.Path, new: New, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """Where the file system has no locks, nobody knows: it stays. All else is done as if they were free."""

    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not locks:
        monkeypatch.setattr(_own_files.fcntl, "flock", none)
    cut, one, two = new(), new(), new()
    folder = tmp_path / "tag" / "part-0"
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    bare = folder / f"data-{cut.hex()}-0"
    bare.write_bytes(bytes(4096))  # a power cut: its size, and not its content
    for attempt in (one, two):
        with warnings.catch_warnings():
            warnings.simplefilter("error" if locks else "ignore")
            assert Save(tmp_path, attempt, overwrite=True).commit()
    assert bare.exists() != locks
    assert [each.attempt for each in find(tmp_path)] == [two.hex()]


def test_the_newest_is_that_of_the_own_job(tmp_path: pathlib.Path, new: New) -> None:
    assert Save(tmp_path, new(), tag="ours", step=3).commit()
    assert Save(tmp_path, new(), tag="theirs", step=7, job="other").commit()
    assert _parts.choose(tmp_path, None, job=JOB).head.tag == "ours"
    assert _parts.choose(tmp_path, None, job="other").head.tag == "theirs"
    assert _parts.choose(tmp_path, "theirs", job=JOB).head.tag == "theirs"  # it was asked for
    assert _parts.choose(tmp_path, None).head.tag == "theirs"
    with pytest.warns(RuntimeWarning, match="no complete checkpoint of job 'third'"):
        assert _parts.choose(tmp_path, None, job="third").head.tag == "theirs"


@pytest.mark.skipif(os.geteuid() != 0, reason="skipped: only root makes files of another user")
@pytest.mark.parametrize("what", ["tag", "tag/part-0", "tag/part-0/manifest-{}", "tag/part-0/data-{}-0"])
def test_what_a_stranger_has_put_there_is_not_taken(tmp_path: pathlib.Path, new: New, what: str) -> None:
    """In a directory that others can write to; what its owner has there is taken."""
    one = new()
    assert Save(tmp_path, new(), tag="good").commit()
    assert Save(tmp_path, one, step=9).commit()
    os.chown(tmp_path / what.format(one.hex()), 12345, -1)
    if what.startswith("tag/part-0/data"):
        with Checkpoint(tmp_path) as checkpoint:
            assert checkpoint.tag == "tag"
            with pytest.raises(CheckpointError, match="another user"):
                checkpoint.verify()
        with pytest.raises(CheckpointError, match="another user"):
            _own_files.open_checkpoint(_parts.choose(tmp_path, "tag"))
    else:
        assert Checkpoint(tmp_path).tag == "good"
        with pytest.raises(CheckpointError):
            Checkpoint(tmp_path, "tag")
    os.chown(tmp_path, 12345, -1)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tag == "tag"
        checkpoint.verify()
