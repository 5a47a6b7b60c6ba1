"""safe_get_* and safe_set_* (deepspeed.utils.tensor_fragment): state and gradients of single parameters.

State is read and written in the daemon, of this parameter's blocks alone; gradients are in the slots between backward
pass and step. A parameter without gradient has None where stock gives what an earlier step has left. Methods without
"local" are collective, as in stock: partitions are gathered over the parameter's process group.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from .._errors import not_offered
from ._pieces import part_of

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as _Base
else:
    _Base = object

_KEYS = {None: "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


class Fragments(_Base):
    """For MlpoZeroOptimizer_Stage3: overrides what would look for tensors that do not exist."""

    # ---- State

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: Optional[str] = None
    ) -> tuple[torch.Tensor, int]:
        """This rank's partition of the master, or of a moment, FP32 on the host; its padding is 0."""
        part = _state_key(optim_state_key)
        self.wait_for([param])
        self._window.refuse_updated("the state of a parameter is asked for")
        values = torch.zeros(param.partition_numel(), dtype=torch.float32)
        for pack, piece in self.pieces_of(param):
            state: Any = pack.subgroup.read_state(piece.index)
            part_of(values, piece).copy_(torch.from_numpy(state[part]))
        return values, self.grad_position[self.get_param_id(param)][0]

    def set_full_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: Optional[str] = None) -> None:
        if not param.requires_grad:
            return
        if value.numel() != param.ds_numel:
            raise ValueError(f"the value has {value.numel()} elements, the parameter {param.ds_numel}")
        self._write_state(param, self._partition_of(value, param), optim_state_key)

    def set_local_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: Optional[str] = None) -> None:
        if not param.requires_grad:
            return
        _check_local(value, param)
        self._write_state(param, value.flatten(), optim_state_key)

    def _write_state(self, param: Any, partition: torch.Tensor, key: Optional[str]) -> None:
        part = _state_key(key)
        self.wait_for([param])
        self._window.refuse_updated("the state of a parameter is set")
        host = partition.detach().to("cpu", torch.float32)
        for pack, piece in self.pieces_of(param):
            written: Any = {part: part_of(host, piece).numpy()}
            pack.subgroup.write_state(tensor=piece.index, **written)

    def get_hp_param_device(self, param: Any, optim_state_key: Optional[str] = None) -> Optional[torch.device]:
        return torch.device("cpu") if param.requires_grad else None

    # ---- Gradients

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[torch.Tensor, int]:
        """This rank's partition of the gradient, FP32 on the host; 0 where there is none."""
        values = torch.zeros(param.partition_numel(), dtype=torch.float32)
        for pack, piece in self.pieces_of(param):
            self._window.read(piece, pack, part_of(values, piece))
        return values, self.grad_position[self.get_param_id(param)][0]

    def get_fp32_grad_for_param(self, param: Any) -> Optional[torch.Tensor]:
        found: Optional[torch.Tensor] = super().get_fp32_grad_for_param(param) if self._has_gradient(param) else None
        return found

    def get_local_fp32_grad_for_param(self, param: Any) -> Optional[torch.Tensor]:
        if not self._has_gradient(param):
            return None
        return self._get_fp32_grad_state_partition(param, True)[0].to(get_accelerator().current_device_name())

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        if param.requires_grad:
            if value.numel() != param.ds_numel:
                raise ValueError(f"the value has {value.numel()} elements, the parameter {param.ds_numel}")
            self._window.replace(param, self._partition_of(value, param), self.pieces_of(param))

    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        if param.requires_grad:
            _check_local(value, param)
            self._window.replace(param, value.flatten(), self.pieces_of(param))

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[torch.Tensor, Any], torch.Tensor], param_list: Sequence[Any]
    ) -> None:
        """Parameters without a gradient are left out."""
        for param in param_list:
            gradient = self.get_fp32_grad_for_param(param)
            if gradient is not None:
                self.set_fp32_grad_for_param(update_func(gradient, param), param)

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        """By sub-group and index in it; copies."""
        found: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        for group in self.fp16_groups:
            for index, param in enumerate(group):
                partition, sub_group_id = self._get_fp32_grad_state_partition(param, True)
                found[sub_group_id][index] = partition
        return found

    def _has_gradient(self, param: Any) -> bool:
        return bool(param.requires_grad) and self._window.has(param)

    def _partition_of(self, value: torch.Tensor, param: Any) -> torch.Tensor:
        """This rank's partition of a whole parameter's values, without padding."""
        size = param.partition_numel()
        begin = min(size * self._get_param_partition_rank(param), param.ds_numel)
        return value.detach().flatten().narrow(0, begin, min(size, param.ds_numel - begin))

    # ---- States that other code would move between devices

    def offload_states(self, include: Any = None, device: Any = None, pin_memory: bool = True,
                       non_blocking: bool = False) -> None:  # fmt: skip
        raise not_offered("engine.offload_states() with mlpo", "the optimizer's state is in the daemon already")

    def reload_states(self, non_blocking: bool = False) -> None:
        logger.debug("mlpo: engine.reload_states() has nothing to do, since offload_states() is not offered")


def _state_key(key: Optional[str]) -> str:
    if key not in _KEYS:
        offered = ", ".join(repr(name) for name in _KEYS if name)
        raise ValueError(f"there is no optimizer state {key!r}; offered are {offered}")
    return _KEYS[key]


def _check_local(value: torch.Tensor, param: Any) -> None:
    if value.numel() != param.partition_numel():
        raise ValueError(f"the value has {value.numel()} elements, this rank's partition {param.partition_numel()}")
