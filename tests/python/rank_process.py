"""One rank: trains a model of its own for 30 steps and prints a digest of its state. See test_configurations.py."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import torch  # noqa: E402
from mlpo.torch import OffloadAdamW  # noqa: E402
from models import build, groups, record  # noqa: E402
from test_configurations import digest  # noqa: E402

torch.set_num_threads(1)
model = build(int(os.environ["RANK"]), width=129)
optimizer = OffloadAdamW(groups(model), subgroup_elements=5000)
record(30, model, optimizer)
print(digest(optimizer))
optimizer.close()
