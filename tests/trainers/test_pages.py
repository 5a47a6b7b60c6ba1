"""What the pages of python/docs say of DeepSpeed's configuration is what mlpo.deepspeed takes. (tests/unit/pages_test.py
has what needs no framework.)"""

from __future__ import annotations

import json
import re

import pytest
from running_daemon import REPO

pytest.importorskip("deepspeed", reason="skipped: DeepSpeed is not installed (tests/run --trainers says why)")

from mlpo.deepspeed import _config  # noqa: E402

PAGE = (REPO / "python" / "docs" / "deepspeed.md").read_text()


def test_the_block_is_accepted() -> None:
    (block,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.M | re.S)
    config = json.loads(block)
    assert _config.settings(config).subgroup_elements == config["mlpo"]["subgroup_elements"]


def test_its_keys_are_there() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.M)
    assert rows == ["update_in_backward", "step_waits"]
    _config.settings({"mlpo": dict.fromkeys(rows, True)})
