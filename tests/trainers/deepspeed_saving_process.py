"""One rank of a DeepSpeed job: python deepspeed_saving_process.py SPEC, with RANK, WORLD_SIZE and the like set.

SPEC is a JSON file: {"stock": whether DeepSpeed keeps its state itself, "seed": of the weights, "width": of the layer
that is not used, "groups": param groups, "config": what is added to the configuration, "actions": [[name, argument...],
...]}. Each action is a function of Process here. What they return goes to SPEC.RANK, a JSON list.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import os
import pathlib
import shutil
import signal
import sys
import tracemalloc
from typing import Any, Callable, Iterator, Optional

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

ROWS = 8  # of a step, on all ranks together
STATES = ("master", "exp_avg", "exp_avg_sq")


class Model(torch.nn.Module):
    """Parameters whose sizes no number of ranks divides, one of a single element, a layer that is not used, one that
    is not trained, and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(13, 7)
        self.frozen = torch.nn.Linear(7, 7).requires_grad_(False)
        self.last = torch.nn.Linear(7, 3)
        self.scale = torch.nn.Parameter(torch.rand(1) + 0.5)
        self.table = torch.nn.Parameter(torch.randn(17, 3))
        self.unused = torch.nn.Linear(width, width)
        self.register_buffer("mark", torch.rand(5))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        return self.last(hidden) * self.scale + self.table[rows]


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's rows of a step's."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(ROWS, 13, generator=generator)
    rows = torch.randint(0, 17, (ROWS,), generator=generator)
    y = torch.randn(ROWS, 3, generator=generator)
    own = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    return x[own], rows[own], y[own]


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in more.items():
        out[key] = merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return out


def pieces_of_ours(engine: Any) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for pack in engine.optimizer.packs:
        for piece in pack.members:
            yield engine.optimizer.param_names[piece.owner], piece.first, pack.subgroup.read_state(piece.index)


def pieces_of_stock(engine: Any) -> Iterator[tuple[str, int, dict[str, Any]]]:
    optimizer = engine.optimizer
    for params, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat):
        state = optimizer.optimizer.state.get(flat, {})
        at = 0
        for param in params:
            held = param.partition_numel()
            first = min(held * dist.get_rank(), param.ds_numel)
            count = min(held, param.ds_numel - first)
            zeros = torch.zeros_like(flat)
            arrays = {"master": flat.detach(), **{name: state.get(name, zeros) for name in STATES[1:]}}
            found = {name: array[at : at + count].numpy().copy() for name, array in arrays.items()}
            yield optimizer.param_names[param], first, {**found, "step": int(state.get("step", 0))}
            at += held


class Process:
    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._made: Any = None
        self.said: list[Any] = []

    @property
    def engine(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> Any:
        torch.manual_seed(self._spec["seed"])
        model = Model(self._spec["width"])
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        groups: list[dict[str, Any]] = [
            {"params": [param for name, param in trained.items() if "bias" not in name], "weight_decay": 0.1},
            {"params": [param for name, param in trained.items() if "bias" in name], "weight_decay": 0.0, "lr": 3e-3},
        ]
        if self._spec["groups"] == 1:
            groups = [{"params": list(trained.values())}]
        config = {
            "train_batch_size": ROWS,
            "train_micro_batch_size_per_gpu": ROWS // int(os.environ["WORLD_SIZE"]),
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 30}},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # torch's, so that nothing is to be compiled
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "sub_group_size": 60,
                "stage3_param_persistence_threshold": 10,
            },
        }
        config = merged(config, self._spec["config"])
        if not self._spec["stock"]:
            import mlpo.deepspeed

            mlpo.deepspeed.enable()
            config = merged({"mlpo": {"subgroup_elements": 40}}, config)
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return engine

    # ---- Actions ----

    def train(self, first: int, count: int) -> list[float]:
        return [self._step(step) for step in range(first, first + count)]

    def _step(self, step: int) -> float:
        loss = self.backward(step)
        self.engine.step()
        return loss

    def backward(self, step: int) -> float:
        x, rows, y = batch(step, dist.get_rank(), dist.get_world_size())
        kind = next(self.engine.module.parameters()).dtype
        loss = (self.engine(x.to(kind), rows).float() - y).square().mean()
        self.engine.backward(loss)
        return float(loss)

    def save(self, directory: str, tag: Optional[str], options: Optional[dict[str, Any]] = None) -> None:
        assert self.engine.save_checkpoint(directory, tag, **(options or {}))

    def load(self, directory: str, tag: Optional[str], options: Optional[dict[str, Any]] = None) -> Any:
        path, client_state = self.engine.load_checkpoint(directory, tag, **(options or {}))
        mine = None if client_state is None else {key: client_state.get(key) for key in ("mine", "mlpo")}
        return {"path": path, "client_state": mine}

    def dump(self, file: str) -> None:
        """Everything, whole, into a file that torch.load() reads."""
        engine, optimizer = self.engine, self.engine.optimizer
        pieces = list((pieces_of_stock if self._spec["stock"] else pieces_of_ours)(engine))
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, pieces)
        shapes = {name: tuple(param.ds_shape) for name, param in engine.module.named_parameters()}
        state: dict[str, Any] = {}
        for name, shape in shapes.items():
            own = (piece[1:] for rank in of_all for piece in rank if piece[0] == name)
            held = [(first, each) for first, each in own if each["master"].size]
            held.sort(key=lambda pair: pair[0])
            if not held:
                continue
            ends = [first + each["master"].size for first, each in held]
            assert [first for first, _ in held] == [0, *ends[:-1]] and ends[-1] == int(np.prod(shape)), name
            state[name] = {key: np.concatenate([each[key] for _, each in held]).reshape(shape) for key in STATES}
            steps = {int(each["step"]) for _, each in held}
            assert len(steps) == 1, name
            state[name]["step"] = steps.pop()
        weights = {}
        for name, param in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([param]):
                weights[name] = param.detach().clone()
        settings = {
            "loss_scale": optimizer.loss_scale,
            "scaler": {key: value for key, value in vars(optimizer.loss_scaler).items() if not key.startswith("_")},
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            "scheduler": engine.lr_scheduler.state_dict(),
            "steps": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        }
        if dist.get_rank() == 0:
            buffers = {name: value.clone() for name, value in engine.module.named_buffers()}
            torch.save({"state": state, "weights": weights, "settings": settings, "buffers": buffers}, file)
        dist.barrier()

    def fails(self, *action: Any) -> str:
        """What another action raises."""
        try:
            getattr(self, action[0])(*action[1:])
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at its text
            return f"{type(error).__name__}: {error}"
        raise AssertionError(f"{action} has not failed")

    def state_dict(self) -> None:
        self.engine.optimizer.state_dict()

    def dies(self, target: str, number: int, rank: int = 0) -> None:
        """From here on the number-th call of "module:name", on one rank, kills the process. That of torch.save leaves
        half of its file."""
        if int(os.environ["RANK"]) != rank:
            return
        module, _, path = target.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for each in outer:
            owner = getattr(owner, each)
        original: Callable[..., Any] = getattr(owner, name)
        calls = 0

        def dying(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls < number:
                return original(*arguments, **options)
            if target == "torch:save":
                original(*arguments, **options)
                os.truncate(arguments[1], os.path.getsize(arguments[1]) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, dying)

    def cannot_write(self, rank: int) -> None:
        """One rank's file system is full from here on, until can_write()."""

        def full(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self._write = torch.save
        if dist.get_rank() == rank:
            torch.save = full

    def can_write(self) -> None:
        torch.save = self._write

    # ---- DeepSpeed's tools ----

    def weights(self, directory: str, tag: str, file: str) -> None:
        """zero_to_fp32.py's."""
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        torch.save(get_fp32_state_dict_from_zero_checkpoint(directory, tag), file)

    def universal(self, directory: str, tag: str) -> None:
        """ds_to_universal.py: directory/tag becomes directory/tag-universal."""
        from deepspeed.checkpoint.ds_to_universal import main

        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        main(
            argparse.Namespace(
                input_folder=f"{directory}/{tag}", output_folder=f"{directory}/{tag}-universal", num_extract_workers=1,
                num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False,
            )
        )  # fmt: skip

    def gather_universal(self, folder: str, file: str) -> None:
        """What a universal checkpoint has of each parameter, into one file."""
        zero = pathlib.Path(folder) / "zero"
        keys = ("fp32", "exp_avg", "exp_avg_sq")
        found = {
            each.name: {key: torch.load(each / f"{key}.pt", weights_only=False) for key in keys}
            for each in zero.iterdir()
            if each.is_dir()
        }
        step = torch.load(zero / "optimizer_state.pt", weights_only=False)["optimizer_state_dict"]["state"][0]["step"]
        torch.save({"parameters": found, "step": step}, file)

    def empty(self, file: str) -> None:
        """Takes FP32 weights out of DeepSpeed's file, as it is with the optimizer on NVMe."""
        content = torch.load(file, weights_only=False)
        flat = content["optimizer_state_dict"]["fp32_flat_groups"]
        content["optimizer_state_dict"]["fp32_flat_groups"] = [torch.empty(0) for _ in flat]
        torch.save(content, file)

    def exported(self, directory: str, tag: str) -> int:
        """The most memory that Python and numpy have for it, in bytes."""
        from mlpo.deepspeed._export import export

        tracemalloc.start()
        assert export(pathlib.Path(directory), tag) == 1
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    def remove(self, path: str) -> None:
        shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def main(file: str) -> None:
    torch.set_num_threads(1)
    spec = json.loads(pathlib.Path(file).read_text())
    process = Process(spec)
    for name, *arguments in spec["actions"]:
        process.said.append(getattr(process, name)(*arguments))
        print(f"done: {name} {arguments}", flush=True)
    pathlib.Path(f"{file}.{os.environ['RANK']}").write_text(json.dumps(process.said))


if __name__ == "__main__":
    main(sys.argv[1])
