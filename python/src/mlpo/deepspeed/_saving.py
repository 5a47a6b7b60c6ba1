"""save_checkpoint() of an engine whose optimizer state is in the daemon. DeepSpeed writes its files itself, with
references (_references.py) in place of FP32 tensors; the daemon saves those beside them; _commit.py: when it counts."""

from __future__ import annotations

import contextlib
import contextvars
import errno
import pathlib
import uuid
from typing import TYPE_CHECKING, Any, Callable, Iterator, NamedTuple, Optional

from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    PARTITION_COUNT,
    ZERO_STAGE,
)
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.zero.config import ZeroStageEnum

from .._errors import MlpoError, not_offered
from .._new_files import NewFile, sync
from .._saving import Saved, begin_save, remove_rests, settle_last
from ..torch._checkpoint import Together
from . import _commit
from ._layout import is_rank_file
from ._references import KEY, TAG, Mark, Piece, Reference

if TYPE_CHECKING:
    from ._optimizer import MlpoZeroOptimizer_Stage3

_saving: contextvars.ContextVar[bool] = contextvars.ContextVar("saving", default=False)


class _Plan(NamedTuple):
    """What a rank wants to save, as save_checkpoint() was called there."""

    tag: str
    step: int
    attempt: bytes


def save_checkpoint(
    engine: Any,
    stock: Callable[..., Any],
    save_dir: str,
    tag: Optional[str] = None,
    client_state: Any = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """DeepSpeedEngine.save_checkpoint: the same arguments. `stock` is DeepSpeed's own, which writes its files.

    Collective. Returns when the checkpoint is complete, durably; one under the same tag before stays until then. If it
    fails on one rank, all ranks raise. Needs room in save_dir for the FP32 state, unless the daemon's paths are
    persistent and on the same file system, and on the paths as Client.checkpoint() says.

    Raises MlpoError: as Client.checkpoint() does; ECANCELED naming another rank that has failed; EBUSY between backward
    and step, when there is no state of one moment.
    """
    if not save_dir:
        raise ValueError(f"save_dir is {save_dir!r}: it names a folder")
    optimizer: MlpoZeroOptimizer_Stage3 = engine.optimizer
    client = optimizer.client
    together = Together(client, None)

    def prepare() -> _Plan:
        _refuse_what_is_not_offered(engine)
        together.check(client)
        optimizer.check_closed("a checkpoint")
        optimizer.wait()
        settle_last(client)
        chosen = f"global_step{engine.global_steps}" if tag is None else str(tag)
        return _Plan(chosen, int(engine.global_steps), uuid.uuid4().bytes)

    plans = together.all(prepare)
    plan = plans[0]
    for rank, other in enumerate(plans):
        if (other.tag, other.step) != (plan.tag, plan.step):
            raise ValueError(
                f"rank {rank} saves tag {other.tag!r} of step {other.step}, rank 0 tag {plan.tag!r} of step "
                f"{plan.step}: they must be the same on all ranks"
            )
    mark = Mark(plan.attempt.hex(), together.ranks)
    folder = pathlib.Path(save_dir) / plan.tag
    beside = folder / _commit.aside(mark.attempt)
    begun: list[Saved] = []
    try:
        together.all(lambda: _on_rank_0(together, lambda: _make_room(optimizer, folder, mark)))
        with _recorded(engine.checkpoint_engine, mark) as files:
            stock(
                save_dir,
                tag=f"{plan.tag}/{beside.name}",
                client_state={} if client_state is None else client_state,
                save_latest=False,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )
        written = together.all(files.made_durable)
        together.all(lambda: _on_rank_0(together, lambda: sync(beside)))
        together.all(lambda: begun.append(_begin(optimizer, folder, plan)))
        begun[0]._take()
        together.all(begun[0].result)
        together.all(lambda: _on_rank_0(together, lambda: _check_complete(begun[0], folder)))
    except BaseException:
        for saved in begun:
            with contextlib.suppress(MlpoError):  # parts of some ranks are of no use
                saved.abandon()
        if together.rank == 0:
            _commit.forget(folder, mark.attempt, client.rank)
        raise

    def finish() -> None:
        _commit.finish(folder, mark.attempt, [name for names in written for name in names])
        _commit.remove_others(folder, mark.attempt)
        if save_latest:
            with NewFile(pathlib.Path(save_dir) / "latest") as out:
                out.write(plan.tag.encode())

    together.all(lambda: _on_rank_0(together, finish))
    return True


def _refuse_what_is_not_offered(engine: Any) -> None:
    if engine.use_node_local_storage():
        raise not_offered(
            "checkpoint.use_node_local_storage = true",
            "a checkpoint's parts are in one folder that all ranks see: save to shared storage",
        )
    if not isinstance(engine.checkpoint_engine, (TorchCheckpointEngine, FastCheckpointEngine)):
        raise not_offered(
            f"saving with DeepSpeed's {type(engine.checkpoint_engine).__name__}",
            "leave out checkpoint.writer and datastates_ckpt: what is large is saved by the daemon",
        )


def _on_rank_0(together: Together, call: Callable[[], None]) -> None:
    if together.rank == 0:
        call()


def _make_room(optimizer: MlpoZeroOptimizer_Stage3, folder: pathlib.Path, mark: Mark) -> None:
    _commit.begin(folder, mark.attempt)
    remove_rests(optimizer.client, str(folder), of_all=True)


def _begin(optimizer: MlpoZeroOptimizer_Stage3, folder: pathlib.Path, plan: _Plan) -> Saved:
    return begin_save(optimizer.client, str(folder), TAG, plan.step, plan.attempt, overwrite=True, take=False)


def _check_complete(saved: Saved, folder: pathlib.Path) -> None:
    if not saved.is_complete():
        raise MlpoError(
            -errno.ESTALE,
            f"{folder / TAG} has not the parts of all ranks, though they have been saved: something else removes or "
            "saves there at the same time. Save again, to a folder of this job's own",
        )


# ---- DeepSpeed's files ----


class _Files:
    """What DeepSpeed has written on this rank."""

    def __init__(self) -> None:
        self.paths: list[pathlib.Path] = []
        self.failed: Optional[Exception] = None

    def made_durable(self) -> list[str]:
        """The names. Raises what writing has failed with."""
        if self.failed is not None:
            raise self.failed
        for path in self.paths:
            sync(path)
        for folder in {path.parent for path in self.paths}:
            sync(folder)
        return [path.name for path in self.paths]


@contextlib.contextmanager
def _recorded(checkpoint_engine: Any, mark: Mark) -> Iterator[_Files]:
    """Within, what DeepSpeed writes has the save's mark. What fails is told afterwards, to all ranks: DeepSpeed's wait
    for each other after writing, and one that has raised would never come."""
    files = _Files()
    write = checkpoint_engine.save

    def save(state_dict: Any, path: str) -> None:
        file = pathlib.Path(path)
        try:
            if is_rank_file(file.name):
                state_dict = {**state_dict, KEY: mark.entry()}
            write(state_dict, path)
            if file.exists():  # not every rank's writer writes
                files.paths.append(file)
        except Exception as error:  # noqa: BLE001 - raised by made_durable()
            files.failed = files.failed or error

    token = _saving.set(True)
    checkpoint_engine.save = save
    try:
        yield files
    finally:
        del checkpoint_engine.save
        _saving.reset(token)


def state_dict(optimizer: MlpoZeroOptimizer_Stage3) -> dict[str, Any]:
    """What DeepSpeed saves of the optimizer, in its own format, with references to what the daemon saves."""
    if not _saving.get():
        raise not_offered(
            "state_dict() of a ZeRO-3 optimizer whose state is in the daemon",
            "engine.save_checkpoint() saves it, and deepspeed.utils.safe_get_full_fp32_param() and its like read it",
        )
    subgroups = [_pieces(optimizer, group) for group in optimizer.fp16_groups]
    groups = []
    for index, group in enumerate(optimizer.optimizer.param_groups):
        own = [i for i in range(len(subgroups)) if optimizer.sub_group_to_group_id[i] == index]
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": own})
    moments = {
        index: {name: Reference(name, pieces) for name in ("step", "exp_avg", "exp_avg_sq")}
        for index, pieces in enumerate(subgroups)
    }
    placement = optimizer._zero3_partition_group_metadata()  # of experts, or None
    return {
        ZERO_STAGE: ZeroStageEnum.weights,
        LOSS_SCALER: optimizer.loss_scaler,
        "dynamic_loss_scale": optimizer.dynamic_loss_scale,
        "overflow": optimizer.overflow,
        PARTITION_COUNT: optimizer.partition_count,
        **({} if placement is None else {"ds_zero_partition_groups": placement}),
        OPTIMIZER_STATE_DICT: {"state": moments, "param_groups": groups},
        FP32_FLAT_GROUPS: [Reference("master", pieces) for pieces in subgroups],
    }


def _pieces(optimizer: MlpoZeroOptimizer_Stage3, group: Any) -> tuple[Piece, ...]:
    """What this rank's flat partition of a sub-group of DeepSpeed's is made of, one parameter after another."""
    pieces = []
    for param in group:
        held = int(param.partition_numel())
        first = min(optimizer._get_param_partition_rank(param) * held, int(param.ds_numel))
        count = min(held, int(param.ds_numel) - first)
        pieces.append(Piece(optimizer.tensor_name(param), first, count, held - count))
    return tuple(pieces)
