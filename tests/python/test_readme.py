"""The Python programs in README.md run, and come out as the arithmetic says."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import Callable

import numpy as np
import pytest
from running_daemon import REPO, Daemon, Layout

BLOCKS = re.findall(r"^```python\n(.*?)^```$", (REPO / "README.md").read_text(), re.M | re.S)

OWN_LOOP_AFTERWARDS = """
np.savez(sys.argv[1], masters=masters, parameters=parameters, scale=scale, **state)
"""


def run(daemon: Daemon, program: str, *arguments: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLPO_")}
    environment |= {"MLPO_SOCKET": daemon.socket, "MLPO_JOB": f"readme-{os.getpid()}"}
    done = subprocess.run(
        [sys.executable, "-", *arguments], input=program, env=environment, timeout=240, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def block_with(text: str) -> str:
    found = [block for block in BLOCKS if text in block]
    assert len(found) == 1, f"README.md has {len(found)} Python blocks with {text}"
    return found[0]


def test_every_block_is_tested() -> None:
    assert len(BLOCKS) == 4


def test_training_with_torch_learns(daemon_of: Callable[[Layout], Daemon]) -> None:
    pytest.importorskip("torch")
    program = block_with("OffloadAdamW").replace("for step in range(10):\n", "losses = []\nfor step in range(10):\n")
    program = "import torch\ntorch.manual_seed(1)\n" + program.replace(
        "    loss.backward()\n", "    losses.append(loss.item())\n    loss.backward()\n"
    )
    run(
        daemon_of(Layout()),
        program + "assert losses[-1] < losses[0], losses\n"
        "assert len(state['state']) == 4 and all('master' in entry for entry in state['state'].values())\n",
    )


def test_own_loop_takes_one_clipped_step(daemon_of: Callable[[Layout], Daemon], tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out.npz"
    run(daemon_of(Layout()), "import sys\n" + block_with("submit_grad") + OWN_LOOP_AFTERWARDS, str(out))
    got = np.load(out)
    # g = 0.5 everywhere, so its norm is 0.5 * sqrt(n), and the clipped gradient is 1 / sqrt(n).
    g = 1 / np.sqrt(1_000_003)
    assert got["scale"] == pytest.approx(2 * g, rel=1e-6)
    assert got["step"] == 1
    np.testing.assert_allclose(got["exp_avg"], 0.1 * g, rtol=1e-5)
    np.testing.assert_allclose(got["exp_avg_sq"], 0.001 * g * g, rtol=1e-5)
    # The first step of AdamW: decay, then lr * g / (|g| + eps).
    expected = got["masters"].astype(np.float64) * (1 - 1e-3 * 0.01) - 1e-3 * g / (g + 1e-8)
    np.testing.assert_allclose(got["parameters"], expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(got["parameters"], got["master"])


def test_objects_are_shared(daemon_of: Callable[[Layout], Daemon]) -> None:
    run(
        daemon_of(Layout()),
        block_with("client.flush") + "assert size == 2 * 512 * 1024 and (out == 1).all()\n"
        "assert (np.frombuffer(row, np.float16) == 1).all()\n",
    )


def test_a_checkpoint_is_saved_and_loaded(daemon_of: Callable[[Layout], Daemon], tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    run(
        daemon_of(Layout()),
        "import torch\nfrom mlpo.torch import OffloadAdamW\n"
        "w = torch.nn.Parameter(torch.ones(1000))\noptimizer = OffloadAdamW([w])\n"
        "w.grad = torch.ones(1000)\noptimizer.step()\nbefore = w.detach().clone()\n"
        + block_with("optimizer.save").replace("/lustre/run1", str(tmp_path))
        + "assert saved.result() and saved.tag == 'step-1' and torch.equal(w, before)\n",
    )
