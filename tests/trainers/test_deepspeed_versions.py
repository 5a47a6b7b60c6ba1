"""mlpo.deepspeed refuses a DeepSpeed that it was not written for, when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (pip install mlpo[deepspeed])")


def imported(before: str) -> str:
    """What importing mlpo.deepspeed says after `before`; "" if it works."""
    program = textwrap.dedent(before) + textwrap.dedent(
        """
        try:
            import mlpo.deepspeed
        except ImportError as error:
            print("refused:", error)
        else:
            print("imported")
        """
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, text=True, capture_output=True, timeout=300, check=True
    )
    last = done.stdout.strip().splitlines()[-1]
    assert last == "imported" or last.startswith("refused: "), done.stdout + done.stderr
    return "" if last == "imported" else last


def test_the_one_that_is_installed_is_taken() -> None:
    assert imported("") == ""


@pytest.mark.parametrize("version", ["0.19.7", "0.20.0", "0.18.5+abc", "1.0"])
def test_versions_outside_the_range_are_named(version: str) -> None:
    said = imported(f"import deepspeed\ndeepspeed.__version__ = {version!r}\n")
    assert version in said and "pip install" in said, said


@pytest.mark.parametrize(
    "change",
    [
        "cls.partition_grads = lambda self, params, partitions: None",
        "cls.step = lambda self, closure=None, more=None: None",
        "del cls._get_norm_groups",
    ],
)
def test_another_signature_is_named(change: str) -> None:
    said = imported(
        f"""
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as cls
        {change}
        """
    )
    name = change.split("cls.")[1].split(" ")[0]
    assert f"DeepSpeedZeroOptimizer_Stage3.{name}" in said and "pip install" in said, said
