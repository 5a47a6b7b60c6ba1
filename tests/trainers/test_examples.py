"""Every example of python/examples runs by the commands of its page, and learns."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import sys

import pytest
from launching import run
from running_daemon import REPO, program

FOLDER = REPO / "python" / "examples"
PAGE = (FOLDER / "README.md").read_text()
COMMANDS = re.findall(r"^    (mlpo-ctl run .*)$", PAGE, re.M)
NEEDS = {
    "train_accelerate.py": "accelerate",
    "train_deepspeed.py": "deepspeed",
    "train_hf_trainer.py": "transformers",
    "train_lightning.py": "pytorch_lightning",
}


def script_of(command: str) -> str:
    return re.findall(r"python/examples/(\w+\.py)", command)[0]


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([0-9.]+)$", output, re.M)]


def environment(*folders: pathlib.Path) -> dict[str, str]:
    """This shell's, with programs in these folders first."""
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_every_example_is_on_the_page() -> None:
    scripts = {path.name for path in FOLDER.glob("*.py")} - {"tiny_lm.py"}
    assert {script_of(command) for command in COMMANDS} == scripts
    for script in scripts:
        text = " ".join((FOLDER / script).read_text().replace("\\\\\n", " ").split())
        for command in COMMANDS:
            if script_of(command) == script:
                assert command in text, f"{script} does not have its command {command}"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: re.sub(r"\W+", "-", command.split(" -- ")[1]))
def test_runs_as_the_page_says(command: str, tmp_path: pathlib.Path) -> None:
    needed = NEEDS.get(script_of(command))
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"skipped: {needed} is not installed (tests/run --trainers says why)")
    (tmp_path / "paths").mkdir()
    # Its own directory instead of /var/tmp, and else as it is.
    here = command.replace("--path /var/tmp", f"--path {tmp_path / 'paths'}")
    assert here != command
    output = run(here, environment(pathlib.Path(sys.executable).parent, program().parent), directory=REPO)
    found = losses(output)
    assert len(found) >= 6 and found[0] > 2.5 and min(found[-2:]) < found[0] - 0.8, output
    if script_of(command) == "train_fsdp2.py":
        assert "complete: True" in output, output
        saved = float(found[-1])  # of the state in the middle of the run, which load() has brought back
        assert found[0] > saved > min(found) - 0.05, output
    if script_of(command) == "resume_dcp.py":
        assert "ends at the same loss: True" in output, output
    if script_of(command) == "train_ddp.py":
        held = [int(count) for count in re.findall(r"keeps the state of (\d+) parameters", output)]
        assert len(held) == 2 and all(held) and max(held) < 0.9 * sum(held), output


@pytest.mark.skipif("MLPO_LONG" not in os.environ, reason="skipped: installs torch anew; tests/run --trainers --long")
def test_a_clean_environment(tmp_path: pathlib.Path) -> None:
    """The page's installation, but for the build, in an environment that has nothing; then all examples."""
    (lines,) = re.findall(r"From a checkout:\n\n((?:    .*\n)+)", PAGE)
    steps = [line.strip() for line in lines.splitlines() if "quickstart" not in line]
    steps = [step.replace("venv", str(tmp_path / "venv")) if "venv" in step else step for step in steps]
    assert any(step.startswith("pip install") for step in steps)
    clean = {key: os.environ[key] for key in ("HOME", "LANG", "TMPDIR") if key in os.environ}
    clean |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    clean |= {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_", "REQUESTS_"))}
    steps = [step.replace("$PWD/build/bin", str(program().parent)) for step in steps]
    steps[0] = steps[0].replace(f"-m {tmp_path / 'venv'}", "-m venv")
    run("\n".join(["set -e", *steps, *COMMANDS]), clean, timeout_s=3600, directory=REPO)
