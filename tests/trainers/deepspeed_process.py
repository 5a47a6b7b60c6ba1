"""One rank of a training run with DeepSpeed ZeRO-3, stock or with mlpo; started by deepspeed_runs.train().

Takes a Run as JSON; rank 0 writes what deepspeed_runs.Result has, by seed, to `out`.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from typing import Any, Iterator

import deepspeed
import mlpo.deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed_model import Net, batch, loss_of

torch.set_num_threads(1)


def made(run: dict[str, Any], seed: int) -> Any:
    config = json.loads(json.dumps(run["config"]))
    torch.manual_seed(seed)
    with deepspeed.zero.Init(config_dict_or_path=config) if run["zero_init"] else contextlib.nullcontext():
        model = Net()
    if run["zero_init"]:  # as without: weights are drawn before they are rounded
        torch.manual_seed(seed)
        drawn = dict(Net().named_parameters())
        for name, param in model.named_parameters():
            with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
                param.data.copy_(drawn[name])
    start = deepspeed.initialize
    if run["mlpo"] is not None:
        config["mlpo"] = {"name": f"seed{seed}", **run["mlpo"]}
        start = mlpo.deepspeed.initialize
    return start(model=model, model_parameters=model.parameters(), config=config)[0]


def passes(run: dict[str, Any], seed: int, step: int, rank: int, dtype: torch.dtype) -> Iterator[Any]:
    for number in range(run["passes"]):
        x, y = batch(seed, step, number, rank)
        yield x.to(dtype), y


def spoil(engine: Any) -> None:
    """Nothing may be read from a slot that nobody has written since the step."""
    engine.optimizer.wait()
    for pack in engine.optimizer.packs:
        pack.subgroup.grad.torch().fill_(float("nan"))
        pack.subgroup.param.torch().fill_(float("nan"))


def swap_small_partitions() -> None:
    """DeepSpeed would keep partitions of less than a MiB in memory."""
    from deepspeed.runtime.swap_tensor import partitioned_param_swapper

    partitioned_param_swapper.MIN_AIO_BYTES = 1


@contextlib.contextmanager
def copies_by_streams() -> Iterator[None]:
    """Slots behave as those on a GPU do."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))
    from host_streams import HostSlot, on_streams

    ours = mlpo.deepspeed.MlpoZeroOptimizer_Stage3
    with on_streams() as streams:
        ours._attach = lambda optimizer, pack: setattr(pack, "device", HostSlot(pack.subgroup, streams))
        yield
        assert streams.submitted > 0


def train(run: dict[str, Any], seed: int) -> dict[str, Any]:
    engine = made(run, seed)
    rank = torch.distributed.get_rank()
    dtype = next(iter(engine.module.parameters())).dtype
    losses, sent, updated, skipped = [], [], [], []
    for step in range(run["steps"]):
        total = torch.zeros(())
        for x, y in passes(run, seed, step, rank, dtype):
            loss = loss_of(engine(x), y)
            engine.backward(loss)
            if not run["unmanaged"]:
                engine.step()
            total += loss.detach() / run["passes"]
        if run["unmanaged"]:
            engine.step()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / torch.distributed.get_world_size())
        skipped.append(engine.skipped_steps)
        if run["mlpo"] is not None:
            sent.append(engine.optimizer.sent_in_backward)
            updated.append(engine.optimizer.updated_in_backward)
            if run["spoil"]:
                spoil(engine)
    params = dict(engine.module.named_parameters())
    masters = {name: safe_get_full_fp32_param(param).clone() for name, param in params.items()}
    moments = {
        name: [safe_get_full_optimizer_state(param, key).clone() for key in ("exp_avg", "exp_avg_sq")]
        for name, param in params.items()
        if run["mlpo"] is not None or "unused" not in name
    }
    with deepspeed.zero.GatheredParameters(list(params.values())):
        weights = {name: param.detach().clone() for name, param in params.items()}
    engine.destroy()
    return {
        "losses": losses, "masters": masters, "moments": moments, "weights": weights, "sent": sent,
        "updated": updated, "skipped": skipped,
    }  # fmt: skip


def main() -> None:
    run = json.loads(sys.argv[1])
    if run["config"]["zero_optimization"].get("offload_param", {}).get("device") == "nvme":
        swap_small_partitions()
    deepspeed.init_distributed("gloo")
    with copies_by_streams() if run["streams"] else contextlib.nullcontext():
        results = {seed: train(run, seed) for seed in run["seeds"]}
    if torch.distributed.get_rank() == 0:
        torch.save(results, run["out"])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
