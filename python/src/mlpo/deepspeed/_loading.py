"""load_checkpoint() of an engine whose optimizer state is in the daemon: of our own checkpoints, of DeepSpeed's ZeRO-3
with its FP32 state in files, and of universal ones; saved by any number of ranks."""

from __future__ import annotations

import contextlib
import glob
import pathlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Optional, Sequence

import torch
from deepspeed import comm
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, LOSS_SCALER
from deepspeed.runtime.utils import is_optimized_parameter

from .. import checkpoints
from .._errors import not_offered
from .._saving import begin_restore
from ..torch._checkpoint import Together
from . import _commit, _config, _layout, _references, _sources
from ._references import CheckpointFileError, Mark

if TYPE_CHECKING:
    from ._optimizer import MlpoZeroOptimizer_Stage3


@dataclass(frozen=True)
class _Found:
    """The checkpoint that rank 0 has found, and all load."""

    tag: str
    universal: bool
    mark: Optional[Mark] = None  # of one of our own
    ranks: int = 0  # that have each a part of a parameter; 0 of a universal one


def load_checkpoint(
    engine: Any,
    stock: Callable[..., Any],
    load_dir: str,
    tag: Optional[str] = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
) -> tuple[Optional[str], Any]:
    """DeepSpeedEngine.load_checkpoint: the same arguments and results. `stock` is DeepSpeed's own, which loads what is
    not the optimizer's.

    Collective: all ranks load what rank 0 has found, and if the state cannot be loaded on one, all raise. What was
    saved by another number of ranks is taken, too. Without load_optimizer_states, or with load_module_only, masters get
    the saved FP32 weights (with zero_optimization.load_from_fp32_weights = false their rounding), and moments and steps
    stay. A gradient that awaits its step is forgotten.

    Raises CheckpointFileError naming the file, and what to do; MlpoError as Client.restore() does, ECANCELED naming
    another rank that has failed. Then there is no state: load again.
    """
    optimizer: MlpoZeroOptimizer_Stage3 = engine.optimizer
    together = Together(optimizer.client, None)

    def find() -> Optional[_Found]:
        together.check(optimizer.client)
        optimizer.drop_gradients()
        optimizer.wait()
        return _find(engine, pathlib.Path(load_dir), tag) if together.rank == 0 else None

    found = together.all(find)[0]
    options = {
        "load_module_strict": load_module_strict,
        "load_lr_scheduler_states": load_lr_scheduler_states,
        "load_module_only": load_module_only,
        "custom_load_fn": custom_load_fn,
    }
    if found is None:  # DeepSpeed says so in its way
        return stock(load_dir, tag, load_optimizer_states=load_optimizer_states, **options)
    loading = _Loading(engine, together, pathlib.Path(load_dir) / found.tag, found)
    loading.weights_only = load_module_only or not load_optimizer_states
    with loading.in_place_of_stock():
        # Without optimizer states DeepSpeed would put together all FP32 weights in each rank's memory.
        path, client_state = stock(load_dir, found.tag, load_optimizer_states=True, **options)
    if client_state is not None:
        client_state.pop(_references.KEY, None)
    return path, client_state


def _find(engine: Any, directory: pathlib.Path, tag: Optional[str]) -> Optional[_Found]:
    """None: there is no tag, and nothing that names one."""
    universal = bool(engine.load_universal_checkpoint())
    if tag is None:
        try:
            tag = _layout.latest(directory, universal)
        except CheckpointFileError:
            return None
    folder = directory / str(tag)
    if universal:
        return _Found(str(tag), True)
    mark = _commit.saved_mark(folder)
    return _Found(str(tag), False, mark, len(_layout.optimizer_files(folder, engine.checkpoint_mp_rank)))


class _Loading:
    """One call of load_checkpoint(), on this rank."""

    def __init__(self, engine: Any, together: Together, folder: pathlib.Path, found: _Found) -> None:
        self._engine, self._together, self._folder, self._found = engine, together, folder, found
        self._optimizer: MlpoZeroOptimizer_Stage3 = engine.optimizer
        self._mp_rank = int(engine.checkpoint_mp_rank)
        # The ranks that saved are others, and their files are not those of ours.
        self._resized = not found.universal and found.ranks != self._optimizer.partition_count
        self.weights_only = False

    @contextlib.contextmanager
    def in_place_of_stock(self) -> Iterator[None]:
        """Within, DeepSpeed's load_checkpoint() leaves the optimizer's state to us."""
        self._load_module_state_dict = self._engine.load_module_state_dict
        of_engine: dict[str, Callable[..., Any]] = {
            "_load_zero_checkpoint": self._load_state,
            "load_module_state_dict": self._load_module_state,
        }
        if self._resized:
            of_engine["_get_all_ckpt_names"] = self._files_of_first_rank
        # What it calls where only weights are to be loaded: before it has any, and at the end.
        of_optimizer = {"refresh_fp32_params": lambda: None, "_restore_from_bit16_weights": self._load_state}
        with _replaced(self._engine, of_engine), _replaced(self._optimizer, of_optimizer):
            yield

    def _files_of_first_rank(self, directory: str, tag: str) -> list[str]:
        """What is not of the optimizer comes from the first rank's files, as with universal checkpoints."""
        pattern = self._engine._get_ckpt_name(directory, tag, mp_placeholder="*", pp_placeholder="0")
        return sorted(glob.glob(pattern))

    def _load_module_state(self, checkpoint: Mapping[str, Any], **options: Any) -> None:
        fragments = checkpoint.get(FROZEN_PARAM_FRAGMENTS)
        if self._resized and fragments:
            checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: self._cut_anew(fragments)}
        self._load_module_state_dict(checkpoint=checkpoint, **options)

    def _cut_anew(self, fragments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's parts of parameters that are not trained, from those of all ranks that saved."""
        files = _layout.model_files(self._folder, self._mp_rank)
        saved = [_references.load(file)[FROZEN_PARAM_FRAGMENTS] for file in files]
        cut = dict(fragments)
        for param in self._engine.module.parameters():
            name = self._engine.param_names.get(param)
            if is_optimized_parameter(param) or not hasattr(param, "ds_id") or name not in cut:
                continue
            held, numel = int(param.partition_numel()), int(param.ds_numel)
            first = min(self._optimizer._get_param_partition_rank(param) * held, numel)
            own = torch.zeros(held, dtype=fragments[name].dtype)
            part = _sources.partition(numel, len(saved))
            for rank, inside, to, count in _sources.spans(first, min(held, numel - first), part):
                own[to : to + count] = saved[rank][name].reshape(-1)[inside : inside + count]
            cut[name] = own
        return cut

    def _load_state(self, *_: Any, **__: Any) -> bool:
        """What DeepSpeed's _load_zero_checkpoint() does, on all ranks or none."""
        self._together.all(self._fill)
        persistent = self._optimizer.persistent_parameters
        if persistent:  # those that were whole are of before; checkpoint_event_epilogue() gathers them again
            persistent[0].partition(persistent)
        return True

    def _fill(self) -> None:
        optimizer, mark = self._optimizer, self._found.mark
        if mark is not None and not self.weights_only:
            rank = 0 if self._resized else comm.get_rank(group=optimizer.dp_process_group)
            file = _layout.optimizer_files(self._folder, self._mp_rank)[rank]
            settings, groups = _sources.own_settings(file, mark)
            _check_groups(optimizer, groups, file)
            attempt = bytes.fromhex(mark.attempt)
            restoring = begin_restore(optimizer.client, str(self._folder), _references.TAG, attempt, None)
            restoring.fill([pack.subgroup for pack in optimizer.packs], None)
            optimizer.take_values()
            _take_settings(optimizer, settings, groups)
            return
        if mark is not None:
            with contextlib.closing(_sources.Own(self._folder, mark, self._mp_rank)) as source:
                self._fill_from(source, optimizer.tensor_name)
            return
        of_stock = _sources.Universal(self._folder) if self._found.universal else self._stock()
        self._fill_from(of_stock, lambda param: str(optimizer.param_names[param]))

    def _stock(self) -> _sources.Stock:
        for group in self._optimizer.fp16_groups:
            for param in group:
                if self._optimizer._get_param_partition_world_size(param) != self._optimizer.partition_count:
                    raise not_offered(
                        f"loading DeepSpeed's own checkpoint of experts ({self._optimizer.param_names[param]}), which "
                        "are partitioned over groups of ranks of their own,",
                        "one that mlpo.deepspeed has saved is loaded",
                    )
        return _sources.Stock(self._folder, self._mp_rank)

    def _fill_from(self, source: _sources.Source, name_of: Callable[[Any], str]) -> None:
        optimizer = self._optimizer
        if not self.weights_only:
            _check_groups(optimizer, source.groups, self._folder)
        pieces = [(name_of(piece.owner), pack, piece) for pack in optimizer.packs for piece in pack.members]
        for name, _, piece in pieces:
            if source.numel(name) != int(piece.owner.ds_numel):
                raise CheckpointFileError(
                    f"{self._folder}: parameter {name} has {source.numel(name)} elements, the model's "
                    f"{int(piece.owner.ds_numel)}"
                )
        for name, pack, piece in pieces:
            self._fill_piece(source, name, pack, piece)
        if not self.weights_only:
            _take_settings(optimizer, source.settings, source.groups)

    def _fill_piece(self, source: _sources.Source, name: str, pack: Any, piece: Any) -> None:
        rounded = torch.empty(piece.numel, dtype=self._optimizer.dtype)
        exact = not self.weights_only or self._engine.zero_load_from_fp32_weights()
        states = ("master",) if self.weights_only else checkpoints.STATES
        for first in range(0, piece.numel, checkpoints.PIECE):
            count = min(checkpoints.PIECE, piece.numel - first)
            values = {state: source.read(name, state, piece.first + first, count) for state in states}
            view = rounded[first : first + count]
            view.copy_(torch.from_numpy(values["master"]))
            if not exact:
                values["master"] = view.float().numpy()
            pack.subgroup.write_state(tensor=piece.index, first=first, count=count, **values)
        if not self.weights_only:
            pack.subgroup.write_state(tensor=piece.index, step=source.step(name))
        pack.store({piece: rounded})


def _check_groups(
    optimizer: MlpoZeroOptimizer_Stage3, groups: Sequence[Mapping[str, Any]], file: pathlib.Path
) -> None:
    """Before anything changes."""
    own = optimizer.optimizer.param_groups
    if len(groups) != len(own):
        raise CheckpointFileError(
            f"{file} has {len(groups)} param groups, the optimizer {len(own)}: make it with as many"
        )
    for group, saved in zip(own, groups):
        _config.hyper(optimizer.optimizer, {**group, **_plain(saved)})


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a saved param group. Which kind of Adam it is is the optimizer's, and stays."""
    return {key: value for key, value in group.items() if key not in ("params", "decoupled_weight_decay")}


def _take_settings(
    optimizer: MlpoZeroOptimizer_Stage3, settings: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> None:
    optimizer.loss_scaler = settings.get(LOSS_SCALER, optimizer.loss_scaler)
    optimizer.dynamic_loss_scale = settings.get("dynamic_loss_scale", optimizer.dynamic_loss_scale)
    optimizer.overflow = settings.get("overflow", optimizer.overflow)
    for own, saved in zip(optimizer.optimizer.param_groups, groups):
        own.update(_plain(saved))


def load_state_dict(optimizer: MlpoZeroOptimizer_Stage3, *_: Any, **__: Any) -> None:
    """Of the optimizer itself: its state is nowhere but in a checkpoint."""
    raise not_offered(
        "load_state_dict() of a ZeRO-3 optimizer whose state is in the daemon", "engine.load_checkpoint() loads it"
    )


@contextlib.contextmanager
def _replaced(of: Any, by: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Methods of one object, within."""
    for name, value in by.items():
        setattr(of, name, value)
    try:
        yield
    finally:
        for name in by:
            delattr(of, name)
