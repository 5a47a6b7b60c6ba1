"""Single behaviours of mlpo.deepspeed, each in processes of its own: deepspeed_cases.py has them."""

from __future__ import annotations

import pathlib
import sys
from typing import Iterator

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (pip install mlpo[deepspeed])")

from deepspeed_runs import launch  # noqa: E402
from running_daemon import SMALL_BLOCKS, Daemon  # noqa: E402


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), SMALL_BLOCKS) as running:
        yield running


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "case",
    [
        "nonfinite", "nonfinite_in_backward", "fragments", "vectorized", "gathered", "refresh", "one_more_backward",
        "dropped", "l2_decay",
    ],
)  # fmt: skip
def test_case(case: str, ranks: int, daemon: Daemon) -> None:
    check(case, ranks, daemon)


@pytest.mark.parametrize("case", ["errors", "stock_when_disabled"])
def test_case_of_one_rank(case: str, daemon: Daemon) -> None:
    check(case, 1, daemon)


def check(case: str, ranks: int, daemon: Daemon) -> None:
    environment = {"MLPO_SOCKET": daemon.socket, "MLPO_JOB": f"{case}-{ranks}"}
    ended = launch("deepspeed_cases.py", case, ranks, environment)
    tails = "\n".join(f"rank {rank}: {code}\n{text[-4000:]}" for rank, (code, text) in enumerate(ended))
    assert all(code == 0 for code, _ in ended), tails
