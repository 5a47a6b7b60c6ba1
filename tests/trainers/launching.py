"""Commands that tests run: with all that they have started, and an end."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import tempfile
from typing import Mapping, Optional, Sequence, Union


def run(
    command: Union[str, Sequence[str]],
    environment: Mapping[str, str],
    timeout_s: float = 300.0,
    directory: Optional[pathlib.Path] = None,
) -> str:
    """What the command (text is for bash) has printed on both outputs. AssertionError with all of it if it ends with
    another code than 0 or not in time. Nothing that it has started is left."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command if not isinstance(command, str) else ["bash", "-c", command],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=dict(environment), cwd=directory,
            start_new_session=True,
        )  # fmt: skip
        why = ""
        try:
            code = process.wait(timeout_s)
            why = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"did not end within {timeout_s:.0f} s"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        output.seek(0)
        text = output.read()
    assert not why, f"{command} {why}:\n{text}"
    return text
