"""mlpo.cuda: without the CUDA side its errors, with it its logic on the stand-in for the CUDA runtime."""

from __future__ import annotations

import errno
import os
import pathlib
import subprocess
import sys

import mlpo
import mlpo.cuda
import pytest
from running_daemon import Daemon, Layout, program

HERE = pathlib.Path(__file__).resolve().parent


def test_without_the_cuda_side_everything_says_so(client: mlpo.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlpo.cuda, "_native", None)
    monkeypatch.setattr(mlpo.cuda, "_reason", "")
    monkeypatch.setitem(sys.modules, "mlpo._cuda_native", None)  # as if it had not been built
    assert not mlpo.cuda.available()
    assert "toolkit" in mlpo.cuda.why_not()
    for call in (lambda: mlpo.cuda.attach(client), lambda: mlpo.cuda.pack([], None), lambda: mlpo.cuda.norm([], 0, 0)):
        with pytest.raises(mlpo.NotOfferedError, match="toolkit") as raised:
            call()
        assert raised.value.errno == errno.EOPNOTSUPP


def test_a_missing_runtime_is_named_where_torch_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        raise ImportError("libcudart.so.13: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(mlpo.cuda, "_native", None)
    monkeypatch.setattr(mlpo.cuda, "_reason", "")
    monkeypatch.setattr(mlpo.cuda.importlib, "import_module", absent)
    assert not mlpo.cuda.available()
    assert "libcudart.so.13: cannot open" in mlpo.cuda.why_not()


def run_on_stand_in(script: str, *arguments: str) -> None:
    """Runs a script of this folder with the stand-in for the CUDA runtime; skips where there is none."""
    if not mlpo.cuda.available():
        pytest.skip(mlpo.cuda.why_not())
    runtimes = sorted((program().parents[1] / "tests" / "fake_cuda").glob("libcudart.so.*"))
    if not runtimes:
        pytest.skip("the stand-in for the CUDA runtime was not built")
    environment = {**os.environ, "LD_PRELOAD": str(runtimes[0])}
    command = [sys.executable, str(HERE / script), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and ended.stdout == "passed\n", ended.stdout + ended.stderr


def test_on_the_stand_in_for_the_cuda_runtime(daemon_of) -> None:
    """Copies in stream order, waits, failures, closing and collecting, in a process without torch."""
    run_on_stand_in("cuda_process.py", daemon_of(Layout()).socket)


def test_an_optimizers_copies_on_the_stand_in(tmp_path: pathlib.Path) -> None:
    """Gradients on one stream, parameters on another, nothing waited for; updates that fail, a daemon that dies."""
    daemon = Daemon(tmp_path, Layout())
    try:
        run_on_stand_in("device_process.py", daemon.socket, str(daemon.process.pid))
    finally:
        daemon.kill()
