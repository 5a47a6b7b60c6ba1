"""OffloadAdamW with parameters on a GPU; run by tests/device/check. The judge is the same training with copies by the
calling thread, bit by bit, and torch's AdamW."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import time
from typing import Any, Iterator

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import mlpo  # noqa: E402
import mlpo.cuda  # noqa: E402
import torch  # noqa: E402
from device_results import put  # noqa: E402
from mlpo.torch import OffloadAdamW  # noqa: E402
from mlpo.torch._binding import Pack  # noqa: E402
from running_daemon import Daemon, Layout  # noqa: E402
from word_models import WORDS, Model, assert_same, fresh  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)
if not mlpo.cuda.available():
    pytest.skip(mlpo.cuda.why_not(), allow_module_level=True)

SMALL = Layout(block=1024, pool="256KiB")


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
    words = torch.randint(WORDS, (4, 9), generator=torch.Generator().manual_seed(number)).cuda()
    return torch.nn.functional.cross_entropy(model(words[:, :-1]).float().flatten(0, 1), words[:, 1:].flatten())


def train(model: torch.nn.Module, optimizer: Any, steps: int, passes: int = 1, first: int = 0, **options: Any) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for number in range(passes):
            (loss_of(model, step * passes + number) / passes).backward()
        optimizer.step(**options)


def made(client: mlpo.Client, kind: str, dtype: torch.dtype, name: str, **options: Any) -> tuple[Model, OffloadAdamW]:
    model = fresh(kind, dtype).cuda()
    return model, OffloadAdamW(model.named_parameters(), client=client, name=name, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["plain", "reentrant"])
@pytest.mark.parametrize("passes", [1, 2])
def test_streams_change_no_bit(tmp_path: pathlib.Path, passes: int, kind: str, dtype: torch.dtype) -> None:
    """Gradients taken at step(), in backward, with updates in backward; step() and step(wait=False)."""
    with Daemon(tmp_path, SMALL) as daemon, mlpo.connect(socket=daemon.socket, job="bits") as client:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Pack, "attach_device", lambda pack, client: None)
            plain, reference = made(client, kind, dtype, "plain", subgroup_elements=700)
            train(plain, reference, 5, passes)  # this thread copies its slots, to the end
        for mode in ("at-step", "overlap", "in-backward"):
            for wait in (True, False):
                options: dict[str, Any] = {"subgroup_elements": 700}
                if mode != "at-step":
                    options.update(overlap=True, gradient_accumulation_steps=passes)
                    options.update(update_in_backward=mode == "in-backward")
                model, optimizer = made(client, kind, dtype, f"{mode}-{wait}", **options)
                optimizer.attach_forward(model)
                train(model, optimizer, 5, passes, wait=wait)
                optimizer.wait()
                assert all(pack.can_fetch for pack in optimizer._packs)
                assert_same(model, optimizer, plain, reference)
                optimizer.close()


def test_training_is_torchs(tmp_path: pathlib.Path) -> None:
    """FP32, twenty steps, clipped, against torch's AdamW on the GPU."""
    with Daemon(tmp_path, Layout()) as daemon, mlpo.connect(socket=daemon.socket, job="torch") as client:
        model, optimizer = made(client, "tied", torch.float32, "ours", lr=1e-2, overlap=True)
        plain = fresh("tied").cuda()
        adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for step in range(20):
            for each, by, clip in ((model, optimizer, optimizer.clip_grad_norm_), (plain, adam, None)):
                by.zero_grad()
                loss_of(each, step).backward()
                clip(0.5) if clip else torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
                by.step()
        apart = sum(float((p - q).square().sum()) for p, q in zip(model.parameters(), plain.parameters())) ** 0.5
        norm = sum(float(q.square().sum()) for q in plain.parameters()) ** 0.5
        assert apart <= 1e-4 * norm, (apart, norm)
        optimizer.close()


@contextlib.contextmanager
def stopped_at_updates(daemon: Daemon) -> Iterator[None]:
    """The daemon stops at the first update that is submitted, and nobody lets it go on."""
    original = mlpo.Subgroup.submit_update

    def submit(subgroup: mlpo.Subgroup, *arguments: Any, **options: Any) -> Any:
        daemon.pause()
        return original(subgroup, *arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mlpo.Subgroup, "submit_update", submit)
        yield


def test_no_thread_waits_and_a_dead_daemon_frees_the_gpu(tmp_path: pathlib.Path) -> None:
    """With a stopped daemon step(wait=False) and the next forward pass are put on the GPU at once, which waits. Once
    the daemon is killed it goes on with the values before, and the optimizer says what has happened."""
    daemon = Daemon(tmp_path, SMALL)
    try:
        client = mlpo.connect(socket=daemon.socket, job="dies")
        model, optimizer = made(client, "plain", torch.float32, "w", overlap=True, lr=0.1)
        optimizer.attach_forward(model)
        train(model, optimizer, 3, wait=False)
        loss_of(model, 0)
        optimizer.wait()
        torch.cuda.synchronize()
        before = [p.detach().clone() for p in model.parameters()]
        words = torch.zeros((4, 9), dtype=torch.int64, device="cuda")
        optimizer.zero_grad()
        loss_of(model, 9).backward()
        began = time.monotonic()
        with stopped_at_updates(daemon):
            optimizer.step(wait=False)
        model(words)
        passed = torch.cuda.Event()
        passed.record()
        enqueued = time.monotonic() - began
        time.sleep(0.2)
        assert not passed.query(), "the GPU did not wait for the update"
        assert enqueued < 5
        daemon.kill()
        began = time.monotonic()
        torch.cuda.synchronize()
        released = time.monotonic() - began
        put("optimizer_daemon_death", enqueued_s=round(enqueued, 4), released_after_s=round(released, 3))
        assert released < 5
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))
        with pytest.raises(mlpo.MlpoError) as raised:
            optimizer.wait()
        assert raised.value.code == mlpo.cuda._native.lib.MLPO_ERR_DAEMON_DIED
    finally:
        daemon.kill()


def test_time_of_a_step(tmp_path: pathlib.Path) -> None:
    """What the training thread spends in backward and step(), with and without streams: measured, not judged."""
    layers = [torch.nn.Linear(4096, 4096, bias=False) for _ in range(8)]  # 134 million parameters
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    with Daemon(tmp_path, Layout(pool="2GiB")) as daemon, mlpo.connect(socket=daemon.socket, job="time") as client:
        for streams in (False, True):
            model = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)
            with pytest.MonkeyPatch.context() as patched:
                if not streams:
                    patched.setattr(Pack, "attach_device", lambda pack, client: None)
                optimizer = OffloadAdamW(model.parameters(), client=client, name=str(streams), overlap=True)
                optimizer.attach_forward(model)
                seconds = []
                for _ in range(6):
                    began = time.monotonic()
                    optimizer.zero_grad()
                    model(x).float().square().mean().backward()
                    optimizer.step(wait=False)
                    seconds.append(time.monotonic() - began)
                optimizer.wait()
                torch.cuda.synchronize()
            steps = sorted(seconds[2:])
            put("optimizer_step", streams=streams, parameters=8 * 4096**2, median_s=round(steps[len(steps) // 2], 4))
            optimizer.close()
