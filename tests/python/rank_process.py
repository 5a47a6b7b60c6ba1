"""Ranks: python rank_process.py JOB:RANK...

Trains a model for each, one after another, 30 steps, and prints a digest of its state. See test_configurations.py.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import mlpo  # noqa: E402
import torch  # noqa: E402
from mlpo.torch import OffloadAdamW  # noqa: E402
from models import build, groups, record  # noqa: E402
from test_configurations import digest  # noqa: E402

torch.set_num_threads(1)
print("ready", flush=True)
sys.stdin.readline()
for argument in sys.argv[1:]:
    job, rank = argument.split(":")
    model = build(int(rank), width=129)
    with mlpo.connect(job=job, rank=int(rank), world_size=4) as client:
        optimizer = OffloadAdamW(groups(model), client=client, subgroup_elements=5000)
        record(30, model, optimizer)
        print(digest(optimizer), flush=True)
