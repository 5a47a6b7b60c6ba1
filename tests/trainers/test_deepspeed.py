"""DeepSpeed ZeRO-3 with mlpo against stock DeepSpeed and an FP64 run, and against itself."""

from __future__ import annotations

import pathlib
import statistics
import sys
from typing import Any, Callable, Iterator

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))

deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (pip install mlpo[deepspeed])")

from deepspeed_model import Net, reference  # noqa: E402
from deepspeed_runs import (  # noqa: E402
    OPTIMIZER,
    Result,
    Run,
    differing,
    distance,
    ds_config,
    is_used,
    train,
)
from running_daemon import Daemon, Layout  # noqa: E402

SEEDS = (1, 2, 3, 4, 5)
STEPS = 50
# Partitions of more than this are cut, too, and a pool smaller than the state makes the daemon use its paths.
CUT = {"subgroup_elements": 500}
FEW_BUFFERS = Layout(block=1024, pool="60KiB")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), FEW_BUFFERS) as running:
        yield running


Train = Callable[..., dict[int, Result]]


@pytest.fixture
def ours(daemon: Daemon, tmp_path: pathlib.Path) -> Train:
    """ours(ranks, job, ...): a run with mlpo; `block` is its "mlpo" block."""

    def call(ranks: int, job: str, block: Any = None, **options: Any) -> dict[int, Result]:
        run = Run(mlpo=CUT if block is None else block, **options)
        return train(run, ranks, tmp_path, daemon, f"{tmp_path.name}-{job}")

    return call


@pytest.fixture
def stock(tmp_path: pathlib.Path) -> Train:
    def call(ranks: int, **options: Any) -> dict[int, Result]:
        return train(Run(**options), ranks, tmp_path, job="stock")

    return call


def check_distance(
    ours: dict[int, Result], stock: dict[int, Result], ranks: int, clip: float = 1.0, passes: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """The median over the seeds of what is away from an FP64 run is at most 1.5 times stock's."""
    parameters, losses = [], []
    for seed in ours:
        steps = len(ours[seed]["losses"])
        exact = reference(seed, steps, ranks, dtype, OPTIMIZER, clip, passes)
        away = [distance(run[seed]["masters"], exact["masters"]) for run in (ours, stock)]
        assert away[1] > 0
        parameters.append(away[0] / away[1])
        wanted = torch.tensor(exact["losses"], dtype=torch.float64)
        off = [float((torch.tensor(run[seed]["losses"], dtype=torch.float64) - wanted).norm()) for run in (ours, stock)]
        losses.append(off[0] / off[1])
        assert sum(ours[seed]["losses"][-5:]) < sum(ours[seed]["losses"][:5])  # it learns something
    assert statistics.median(parameters) <= 1.5, parameters
    assert statistics.median(losses) <= 1.5, losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_fifty_steps_are_as_near_to_fp64_as_stock_s(ranks: int, ours: Train, stock: Train) -> None:
    mine = ours(ranks, "a", seeds=SEEDS, steps=STEPS, spoil=True)
    theirs = stock(ranks, seeds=SEEDS, steps=STEPS)
    check_distance(mine, theirs, ranks)
    for seed in SEEDS:
        for name, master in mine[seed]["masters"].items():
            assert torch.equal(mine[seed]["weights"][name], master.bfloat16()), name
        torch.manual_seed(seed)
        start = dict(Net().bfloat16().named_parameters())
        for name in filter(lambda name: not is_used(name), start):  # without gradients nothing moves
            assert torch.equal(mine[seed]["masters"][name], start[name].detach().float()), name
    again = ours(ranks, "b", seeds=SEEDS[:1], steps=STEPS)  # and without what fills the slots
    assert differing(mine[SEEDS[0]], again[SEEDS[0]]) == []


CONFIGURATIONS = {
    "offload_param-cpu": {"zero_optimization": {"offload_param": {"device": "cpu"}}},
    "overlap_comm-off": {"zero_optimization": {"overlap_comm": False}},
    "nvme-without-its-path": {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}}},
    "all-gathered": {"zero_optimization": {"stage3_param_persistence_threshold": 10_000}},
    "none-gathered": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    "whole-buckets": {"zero_optimization": {"reduce_scatter": False}},
    "one-sub-group": {"zero_optimization": {"sub_group_size": 1_000_000_000}},
    "hpz": {"zero_optimization": {"zero_hpz_partition_size": 2}},
}


@pytest.fixture(scope="module")
def plain(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What all configurations that only say where things are must give to the bit. Without clipping, whose norm is
    summed in an order that follows from the subgroups."""
    run = Run(config=ds_config(gradient_clipping=0.0), mlpo=CUT, steps=12)
    return train(run, 2, tmp_path_factory.mktemp("plain"), daemon, "plain")[1]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations_give_the_same_bits(name: str, ours: Train, plain: Result) -> None:
    config = ds_config(gradient_clipping=0.0, **CONFIGURATIONS[name])
    assert differing(plain, ours(2, name, config=config, steps=12)[1]) == []


@pytest.mark.parametrize(
    "block",
    [{}, {"step_waits": True, **CUT}, {"update_in_backward": True, **CUT}, {"update_in_backward": True}],
    ids=["large-subgroups", "step_waits", "update_in_backward", "large-subgroups-in-backward"],
)
def test_settings_give_the_same_bits(block: dict[str, Any], ours: Train, plain: Result) -> None:
    config = ds_config(gradient_clipping=0.0)
    found = ours(2, "settings", block=block, config=config, steps=12)[1]
    assert differing(plain, found) == []
    if block.get("update_in_backward") and "subgroup_elements" in block:
        assert found["updated"][0] == 0 and min(found["updated"][1:]) > 0, found["updated"]
    else:
        assert max(found["updated"]) == 0 or "update_in_backward" in block
    assert min(plain["sent"]) > 0, plain["sent"]


@pytest.mark.parametrize("early", [False, True], ids=["at-step", "in-backward"])
def test_copies_by_streams_give_the_same_bits(early: bool, ours: Train, plain: Result) -> None:
    """With what a GPU's streams do, done late by threads: gradients that are submitted behind their copies, parameters
    that arrive behind their updates."""
    config = ds_config(gradient_clipping=0.0)
    block = {"update_in_backward": early, **CUT}
    found = ours(2, "streams", block=block, config=config, steps=12, streams=True, spoil=True)[1]
    assert differing(plain, found) == []
    assert min(found["sent"]) > 0 and (max(found["updated"]) > 0) == early


def test_copies_by_streams_add_up_passes(ours: Train) -> None:
    options = {"config": ds_config(gradient_accumulation_steps=3), "passes": 3, "steps": 8}
    by_hand = ours(2, "by-hand", **options)[1]
    assert differing(by_hand, ours(2, "added", streams=True, spoil=True, **options)[1]) == []


def test_offload_param_nvme_gives_the_same_bits(ours: Train, plain: Result, tmp_path: pathlib.Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's async_io cannot be built here (libaio-dev is missing)")
    nvme = {
        "device": "nvme", "nvme_path": str(tmp_path), "buffer_size": 10_000, "buffer_count": 12, "max_in_cpu": 600,
    }  # fmt: skip
    aio = {"block_size": 1024, "queue_depth": 4, "thread_count": 1, "single_submit": False, "overlap_events": True}
    config = ds_config(gradient_clipping=0.0, zero_optimization={"offload_param": nvme}, aio=aio)
    assert differing(plain, ours(2, "nvme", config=config, steps=12)[1]) == []


def test_zero_init_gives_the_same_bits(ours: Train, plain: Result) -> None:
    config = ds_config(gradient_clipping=0.0)
    assert differing(plain, ours(2, "init", config=config, steps=12, zero_init=True)[1]) == []


def test_accumulated_gradients(ours: Train, stock: Train) -> None:
    """Managed by DeepSpeed or by the caller: the same bits, as near to FP64 as stock's."""
    config = ds_config(gradient_accumulation_steps=3, zero_optimization={"overlap_comm": False})
    managed = ours(2, "managed", config=config, passes=3, seeds=SEEDS, steps=20, spoil=True)
    unmanaged = {**config, "managed_gradient_accumulation": False}
    own = ours(2, "own", config=unmanaged, passes=3, seeds=SEEDS[:1], steps=20, unmanaged=True)
    assert differing(managed[SEEDS[0]], own[SEEDS[0]]) == []
    check_distance(managed, stock(2, config=config, passes=3, seeds=SEEDS, steps=20), 2, passes=3)


def test_fp32_gradients_of_bf16_parameters(ours: Train, stock: Train) -> None:
    config = ds_config(data_types={"grad_accum_dtype": "fp32"}, gradient_accumulation_steps=2)
    options = {"config": config, "passes": 2, "seeds": SEEDS, "steps": 20}
    check_distance(ours(2, "fp32", spoil=True, **options), stock(2, **options), 2, passes=2)


def test_fp16_with_dynamic_loss_scale(ours: Train, stock: Train) -> None:
    if not getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)():
        pytest.skip("DeepSpeed refuses fp16 on this CPU: it has no FP16 arithmetic")
    # At 2^24 gradients overflow at first, and steps are left out until the scale is low enough.
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 10}
    config = {**ds_config(fp16=fp16), "bf16": {"enabled": False}}
    options = {"config": config, "steps": 40, "seeds": (1,)}
    mine, theirs = ours(2, "fp16", spoil=True, **options)[1], stock(2, **options)[1]
    assert mine["skipped"] == theirs["skipped"] and mine["skipped"][-1] > 0
    apart = distance(mine["masters"], theirs["masters"])
    norm = sum(float((theirs["masters"][name] ** 2).sum()) for name in filter(is_used, theirs["masters"])) ** 0.5
    assert apart <= 0.02 * norm, (apart, norm)
