"""One rank on a node of its own: python node_shares_process.py PATH, started by test_node_shares.py with RANK, WORLD_SIZE and the
node's MLPO_SOCKET set. Makes steps until the nodes have exchanged figures, then prints the daemon's view of PATH."""

from __future__ import annotations

import json
import sys
import time
import warnings

import torch
import torch.distributed as dist
from mlpo.torch import OffloadAdamW
from mlpo.torch._nodes import EVERY

if __name__ == "__main__":
    warnings.filterwarnings("error", message="what this node sees")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    param = torch.nn.Parameter(torch.randn(100_000))
    optimizer = OffloadAdamW([param], lr=1e-3, replicas=True)
    for step in range(4 * EVERY):
        param.grad = torch.randn(100_000)
        optimizer.step()
        dist.barrier()
        if step >= EVERY:
            time.sleep(0.05)  # an exchange is not waited for
    assert optimizer.client is not None
    (path,) = [path for path in optimizer.client.status()["paths"] if path["name"] == sys.argv[1]]
    assert torch.isfinite(param).all()
    print(json.dumps(path["node_share"]))
    dist.barrier()
    optimizer.close()
    dist.destroy_process_group()
