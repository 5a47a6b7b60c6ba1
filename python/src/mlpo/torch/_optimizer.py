"""OffloadAdamW: torch.optim.AdamW with its FP32 state in mlpo-daemon."""

from __future__ import annotations

import contextlib
import errno
import math
import uuid
import warnings
from typing import Any, Callable, ContextManager, Iterable, NoReturn, Optional, Sequence, Union

import torch
from torch.optim.optimizer import ParamsT

from .._blocking import Deadline
from .._client import Client
from .._errors import MlpoError, NonFiniteGradientError, not_offered
from .._saving import Restored, Restoring, Saved, begin_restore, begin_save, remove_rests, settle_last
from .._subgroup import Subgroup
from . import _checkpoint, _checks, _ddp, _default_client, _loading, _nodes, _norm, _scaler, _shards, _state
from ._binding import Member, Pack, fit_name
from ._forward import ForwardWaits, StaleUses, check_model
from ._overlap import Overlap
from ._owners import Owners
from ._packing import Named, packs
from ._steps import Part, Step, not_finite, updated_text
from ._windows import is_taken

_DEFAULT_SUBGROUP_ELEMENTS = 16 << 20
_WARN_AFTER_SKIPS = 3
# What becomes of a step; the largest number of all ranks that hold shards counts.
_UPDATE, _SCALER_SKIPS, _NOT_FINITE, _FAILED = range(4)
_MOVED = (
    "parameter {} was moved to a param group with other hyper-parameters than its subgroup's: "
    "make a new optimizer and load_state_dict(state_dict())"
)


_LOWEST_PRIORITY = 2**32 - 1
_NO_SCALING = "use overlap=True: loss scaling decides after the backward pass whether there is a step"

# Optimizers with updates of step(wait=False) under way: a forward pass waits for them though nobody else holds them.
_unwaited: set[torch.optim.Optimizer] = set()


class OffloadAdamW(torch.optim.Optimizer):
    """AdamW whose master parameters and moments live in the node's mlpo-daemon, in FP32.

    Same arithmetic, param_groups, schedulers, closures and state_dict as torch.optim.AdamW. Parameters may be float32,
    float16 or bfloat16, of any strides, on any device; 16-bit ones have FP32 masters in the daemon. Gradients are taken
    from `.grad` at step(), so whatever is done to them before (clipping, accumulation) counts; a parameter whose
    gradient is None is left as it is. Parameters are registered at the first step() or load_state_dict().
    With overlap=True gradients are taken while the backward pass computes them, and .grad is released.

    Arguments beyond torch's:
      client: an mlpo.Client; default: one for the process, made by mlpo.connect() at the first step.
      name: beginning of the subgroups' keys; optimizers on one client need different ones.
      subgroup_elements: parameters of one group and type are packed up to this many elements; a larger one is alone.
      grad_dtype: of the slots' gradients; default as the parameter. torch.float32 takes FP32 gradients of 16-bit ones.
      nonfinite: "raise": step() with an inf or NaN gradient changes nothing and raises mlpo.NonFiniteGradientError;
        "apply": it is applied, as torch does.
      shard_group: a process group of torch.distributed whose ranks hold the same parameters and gradients (those of
        DDP): each subgroup has one owner among them that keeps its state, updates it and broadcasts the new values.
        step(), clip_grad_norm_(), load() and consolidate_state_dict() are then collective.
      replicas: says that each rank is to keep a whole copy of the state; without it, and without shard_group, a warning
        tells how many copies there are.
      overlap: gradients are taken in the backward pass, by hooks, and sent to the daemon as soon as a subgroup has all
        of its own (with DDP: attach_ddp()); .grad is then a tensor without memory that raises when it is used, until
        zero_grad(). Gradients of several passes are added in the slot, in grad_dtype. The first step sends all of them
        at step().
      update_in_backward: with overlap, which it implies: a subgroup is updated as soon as its gradient is there, with
        the param_groups of that moment. Parameters still get their new values at step(), which every such backward pass
        needs: zero_grad() and state_dict() raise before it. Not offered where all gradients must be known before the
        first update: clip_grad_norm_(), GradScaler, FP16, DTensors without nonfinite="apply". A gradient that is not
        finite makes step() raise with the keys of the subgroups that were updated already; another gradient after the
        update makes the backward pass raise.
      gradient_accumulation_steps: backward passes a step, for overlap: a subgroup of which they use the parameters
        unequally often is sent at step(). Alternatively all passes but the last are made under no_sync().
    foreach, fused and capturable are accepted and have no effect. amsgrad, maximize and differentiable are refused.

    Threads: as torch's optimizers, for one thread at a time. Errors of the daemon are mlpo.MlpoError. An interrupted or
    failed step() is finished by the next call, with the same gradients and hyper-parameters, or raises again.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Union[float, torch.Tensor] = 1e-3,
        betas: tuple[Union[float, torch.Tensor], Union[float, torch.Tensor]] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        client: Optional[Client] = None,
        name: str = "default",
        subgroup_elements: int = _DEFAULT_SUBGROUP_ELEMENTS,
        grad_dtype: Optional[torch.dtype] = None,
        nonfinite: str = "raise",
        replicas: bool = False,
        overlap: bool = False,
        update_in_backward: bool = False,
        gradient_accumulation_steps: int = 1,
        shard_group: Any = None,
        foreach: Optional[bool] = None,
        fused: Optional[bool] = None,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
    ) -> None:
        if nonfinite not in ("raise", "apply"):
            raise ValueError(f'nonfinite is {nonfinite!r}; it is "raise" or "apply"')
        if subgroup_elements < 1:
            raise ValueError(f"subgroup_elements is {subgroup_elements}; it must be positive")
        if shard_group is not None and update_in_backward:
            raise not_offered(
                "shard_group= with update_in_backward=True",
                "use overlap=True: a gradient that is not finite on one rank would find other ranks' subgroups updated",
            )
        if gradient_accumulation_steps < 1:
            raise ValueError(f"gradient_accumulation_steps is {gradient_accumulation_steps}; it must be positive")
        if grad_dtype is not None and grad_dtype not in _checks.DTYPES:
            raise TypeError(f"grad_dtype is {grad_dtype}; offered are float32, float16 and bfloat16")
        self._client = client
        self._owns_client = client is None
        self._name = name
        self._subgroup_elements = subgroup_elements
        self._grad_dtype = grad_dtype
        self._apply_nonfinite = nonfinite == "apply"
        self._counts_copies = not replicas
        self._owners = None if shard_group is None else Owners(shard_group, subgroup_elements)
        self._packs: list[Pack] = []
        self._keys: set[str] = set()  # asked for: that of a registration which was broken off may be taken
        self._places: dict[torch.Tensor, tuple[Pack, int]] = {}
        self._under_way: Optional[Step] = None
        self._skips_in_a_row = 0
        self._clip_factor = 1.0  # of clip_grad_norm_, for the next step
        self._closed = False
        self._forwards: list[ForwardWaits] = []
        self._stale_uses = StaleUses(self)
        overlap = overlap or update_in_backward
        self._updates_in_backward = update_in_backward
        self._overlap = Overlap(self, gradient_accumulation_steps, update_in_backward) if overlap else None
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "foreach": foreach, "maximize": maximize, "capturable": capturable, "differentiable": differentiable,
            "fused": fused, "decoupled_weight_decay": True,
        }  # fmt: skip
        _checks.group_flags(defaults)
        _checks.hyper(defaults)
        try:
            super().__init__(params, defaults)
            if update_in_backward and grad_dtype == torch.float16:
                raise not_offered("update_in_backward=True with grad_dtype=torch.float16", _NO_SCALING)
        except BaseException:
            if self._overlap is not None:
                self._overlap.close()  # the parameters may go to another optimizer
            raise

    # GradScaler leaves unscaling and skipping to step(): see _scaler.py.
    _step_supports_amp_scaling = True

    @property
    def subgroups(self) -> tuple[Subgroup, ...]:
        """The registered subgroups, in order of registration."""
        return tuple(pack.subgroup for pack in self._packs)

    @property
    def client(self) -> Optional[Client]:
        """The client in use; None before the first step if none was given."""
        return self._client

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, as torch does; its parameters are registered at the next step."""
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            _checks.group_flags(group)
            _checks.hyper(group)
            for item in self._named(len(self.param_groups) - 1):
                self._check_parameter(item)
            _checks.overlaps((item.param, item.name) for item in self._all_named())
        except BaseException:
            self.param_groups.pop()
            raise
        if self._overlap is not None:
            self._overlap.watch()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, those that overlap=True has taken too, and what clip_grad_norm_() found in them.

        With overlap=True a step that failed is finished before, as by other calls.
        """
        self._clip_factor = 1.0
        if self._overlap is not None:
            if not self._awaits():
                with torch.no_grad():
                    self._finish_step()
            self._overlap.drop(set_to_none)
            self._overlap.watch()
        super().zero_grad(set_to_none)

    def no_sync(self) -> ContextManager[None]:
        """For all backward passes of a step but the last: with overlap=True nothing is sent to the daemon inside.

        Without overlap it does nothing.
        """
        return contextlib.nullcontext() if self._overlap is None else self._overlap.no_sync()

    @property
    def sent_in_backward(self) -> int:
        """Subgroups whose gradients went out during the backward pass of the last step; 0 without overlap=True."""
        return 0 if self._overlap is None else self._overlap.sent_in_backward

    @property
    def updated_in_backward(self) -> int:
        """Subgroups that were updated during the backward pass of the last step; 0 without update_in_backward=True."""
        return 0 if self._overlap is None else self._overlap.updated_in_backward

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None, *, wait: bool = True) -> Any:
        """One optimizer step; returns the closure's loss. On return every parameter has its new value.

        With wait=False, which needs attach_forward(), it returns when the updates are under way. Each parameter of an
        attached model gets its new value when a module that has it is about to use it; the next step(), state_dict()
        and wait() wait for all. Call wait() before parameters are read or written in any other way. On a GPU it is the
        stream that waits, no thread; an update that fails is then raised by the next call that needs to know, at the
        latest by the backward pass when it has the subgroup's next gradient.
        """
        try:
            return self._step(closure, wait)
        except BaseException:
            _scaler.drop(self)
            raise

    def _step(self, closure: Optional[Callable[[], Any]], wait: bool) -> Any:
        if not wait and not self._forwards:
            raise ValueError("step(wait=False) needs attach_forward(model), so that forward passes wait for parameters")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ranks = _shards.Ranks(item.param for item in self._all_named())
        try:
            self._check_open()
            self._finish_step()
            scaled = self._scaling()
            step = self._under_way = self._next_step()
            fate = _SCALER_SKIPS if scaled.overflow else self._prepare(step, scaled.factor)
        except Exception:
            ranks.worst(_FAILED)
            if self._owners is not None:
                self._owners.worst(_FAILED, None)
            raise
        fate = ranks.worst(fate)
        if self._owners is not None:
            fate = self._owners.worst(fate, [item.name for item in self._all_named() if item.param in step.counts])
        self._clip_factor = 1.0
        if fate != _UPDATE:
            self._skip(step, fate)
            return loss
        self._skips_in_a_row = 0
        step.closing = True
        if self._overlap is not None:  # first: interrupted in it, the step is forgotten, and taken gradients raise
            self._overlap.used([member for part in step.parts for member in part.members])
        step.decided = True
        if wait:
            self._finish_step()
        else:
            self._leave_step(step)
        if self._client is not None:
            _nodes.stepped(self._client)
        return loss

    def attach_forward(self, model: torch.nn.Module) -> None:
        """Lets the forward passes of a model wait for parameters, for step(wait=False); several models may be attached.

        Each module waits for its own parameters, and for those that it was seen to use in the first forward pass, which
        waits for all, as passes without gradients do. Parameters of no attached model are waited for by step(). The
        model's state_dict() and load_state_dict() wait for all. Raises mlpo.NotOfferedError for a model of DTensors or
        DataParallel.
        """
        check_model(model)
        if self._owners is not None:
            raise not_offered("attach_forward() with shard_group=", "use step() without wait=False, which broadcasts")
        self._check_open()
        mine = {item.param for item in self._all_named()}
        if mine.isdisjoint(model.parameters()):
            raise ValueError("the model has no parameter of this optimizer")
        self._forwards.append(ForwardWaits(self, model))

    def attach_ddp(
        self, model: torch.nn.Module, *, comm_hook: Optional[_ddp.CommHook] = None, comm_state: Any = None
    ) -> None:
        """With overlap=True and DistributedDataParallel: takes each gradient when DDP has reduced its bucket. Call it
        before the first backward pass; without overlap it changes nothing.

        comm_hook, comm_state: what register_comm_hook(comm_state, comm_hook) would be called with, since DDP has only
          one hook; default the mean of all ranks, as DDP computes it.

        Several optimizers may be attached to one model. Accumulate under model.no_sync() and leave
        gradient_accumulation_steps at 1: that counts the passes that DDP reduces. With find_unused_parameters=True a
        subgroup leaves at step() where this rank did not use all of its parameters. DDP writes .grad once more before
        it is released; gradient_as_bucket_view=True saves that memory. Raises TypeError for another kind of model,
        ValueError for one that has no parameter of this optimizer or another hook, mlpo.NotOfferedError for one with
        mixed_precision=.
        """
        self._check_open()
        params = _ddp.reduced_parameters(model)
        if {item.param for item in self._all_named()}.isdisjoint(params):
            raise ValueError("the model reduces no parameter of this optimizer")
        if self._overlap is not None:
            _ddp.attach(self._overlap, model, comm_hook, comm_state)
        elif comm_hook is not None:
            model.register_comm_hook(comm_state, comm_hook)  # type: ignore[operator]

    @torch.no_grad()
    def wait(self) -> None:
        """Returns when every parameter has its new value, after step(wait=False)."""
        self._check_open()
        self._finish_step()

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        process_group: Any = None,
    ) -> torch.Tensor:
        """Clips the gradients of all parameters together at the next step, and returns their norm before that.

        The gradients themselves stay as they are: the next step() multiplies by min(1, max_norm / (norm + 1e-6)), and
        zero_grad() forgets it. The norm is taken over this optimizer's parameters, all shards of DTensors included, and
        over the ranks of `process_group`, which must hold different parameters (stages of a pipeline, shards cut by
        hand). With shard_group each rank adds what it owns. A gradient that is not finite is left to step(), unless
        error_if_nonfinite raises RuntimeError. With overlap=True norm_type is 2. Collective where there are shards or a
        group.

        With a GradScaler whose unscale_() was not called the norm is of scaled gradients: pass
        max_norm * scaler.get_scale().
        """
        limit = float(max_norm)
        if not limit >= 0:
            raise ValueError(f"max_norm is {limit}; it must not be negative")
        if self._updates_in_backward:
            raise not_offered(
                "clip_grad_norm_() with update_in_backward=True",
                "use overlap=True: the norm of all gradients must be known before the first update",
            )
        self._check_open()
        self._finish_step()
        if self._owners is not None:
            self._bind()
        norm = _norm.Norm(float(norm_type), (item.param for item in self._all_named()))
        device = torch.device("cpu")
        if self._overlap is None:
            for item in self._all_named():
                if item.param.grad is not None and not self._is_elsewhere(item.param):
                    _checks.gradient(item.param, item.name, None)
                    gradient = _shards.local_gradient(item.param)
                    norm.add(_shards.sharding(item.param), gradient)
                    device = gradient.device
        else:
            if norm_type != 2:
                raise not_offered(f"clip_grad_norm_(norm_type={norm_type}) with overlap=True", "use norm_type=2")
            step = self._next_step()
            self._send(step)
            for part in step.parts:
                assert part.gradient is not None
                found = part.gradient.result()
                layouts = {_shards.sharding(member.param) for member in part.members}
                if len(layouts) == 1:
                    norm.add_sum_of_squares(layouts.pop(), found.sum_of_squares)
                else:
                    for member in part.members:
                        norm.add(_shards.sharding(member.param), member.grad)
        shared = None if self._owners is None else self._owners.group
        total = norm.total(shared, process_group) * self._clip_factor
        if not math.isfinite(total) and error_if_nonfinite:
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To leave that to step(), set `error_if_nonfinite=False`"
            )
        self._clip_factor *= _norm.clip_factor(total, limit, self._apply_nonfinite)
        return torch.tensor(total, dtype=torch.float32, device=device)

    @torch.no_grad()
    def reload_masters(self) -> None:
        """Makes the FP32 masters follow the parameters' present values.

        step() notices by itself when parameters were replaced; this does it at once, whatever the signs. Elements whose
        master rounds to the parameter's value keep it.
        """
        self._check_open()
        self._finish_step()
        self._refuse_updated("masters cannot be reloaded")
        self._bind()
        for pack, index in self._places.values():
            pack.reload_masters(pack.members[index], force=True)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """State in torch.optim.AdamW's form, with FP32 tensors on the CPU; 16-bit parameters have a third, "master"."""
        self._check_open()
        self._finish_step()
        self._refuse_updated("there is no state of one step")
        light = dict(self.state)
        try:
            for param, state in light.items():
                place = self._places.get(param)
                if place is not None:
                    self.state[param] = self._read_state(param)
                elif self._owners is not None and self._owners.elsewhere(param):
                    self.state[param] = self._owners.gathered(param, self._name_of(param))
                else:
                    self.state[param] = {**state, **_state.empty_moments(param)}
            return super().state_dict()
        finally:
            self.state.clear()
            self.state.update(light)

    def _read_state(self, param: torch.Tensor) -> dict[str, Any]:
        pack, index = self._places[param]
        pack.reload_masters(pack.members[index])
        return _state.read(pack, index)

    @torch.no_grad()
    def consolidate_state_dict(self, to: int = 0) -> None:
        """With shard_group= brings the whole state to the rank `to` of that group, in host memory, so that state_dict()
        can be called there until the next step. Collective. Without shard_group it does nothing: every rank can."""
        self._check_open()
        self._finish_step()
        if self._owners is not None:
            self._bind()
            self._owners.gather(self._read_state, self.state.keys(), to)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the state of torch.optim.AdamW or of this class. Checks all of it before it changes anything.

        Never writes a parameter. Where a 16-bit parameter is not what its "master" rounds to, the parameter counts.
        """
        self._check_open()
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            if changed is not None:
                state_dict = changed
        groups = _loading.merged_groups(self.param_groups, self.defaults, state_dict["param_groups"])
        states = _loading.states_of(self.param_groups, state_dict)
        for item in self._all_named():
            _checks.parameter(item.param, item.name)
            _state.check(item.param, item.name, states.get(item.param, {}))
        self._end_step()
        if self._overlap is not None:
            self._overlap.abandon()
        self.param_groups = groups
        if self._owners is not None:
            self._owners.forget()
        # Trainers load an empty state before they replace parameters by shards (Accelerate): nothing to write.
        if self._packs or any(states.values()):
            self._bind()
        self.state.clear()
        for param, state in states.items():
            if state:
                self.state[param] = _state.outline(param, _state.step_tensor(int(state["step"])))
        for param, (pack, index) in self._places.items():
            _state.write(pack, index, states.get(param, {}))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @torch.no_grad()
    def save(
        self,
        directory: str,
        tag: Optional[str] = None,
        *,
        step: Optional[int] = None,
        attempt: Optional[bytes] = None,
        overwrite: bool = False,
        process_group: Any = None,
    ) -> Saved:
        """Saves masters, moments and step counts by the daemon, beside the steps that follow. Call it after step() or
        zero_grad(). It returns when the state of this moment is sure to be what is saved; `result()` of what it returns
        waits until this rank's part is durable.

        directory: is there already; all ranks see the same one.
        tag: the checkpoint's name in it; default "step-N", of `step`.
        step: default the number of steps made.
        attempt: 16 bytes, new for each save and the same on all ranks. Only several ranks on several nodes without
          torch.distributed need it.
        overwrite: replaces a complete checkpoint under the tag, which goes when the new one is complete.
        process_group: has all ranks of the job; default all ranks of torch.distributed.

        With torch.distributed a collective: all ranks begin, or all raise. A checkpoint is complete, and only then ever
        loaded, when all ranks have their parts. Where result() raises on one rank (no room left on storage), those of
        the others stay until the tag is saved again, or the first saves of a later run find a complete one that began
        after them, or ``mlpo-ctl checkpoint remove DIRECTORY TAG``; no load() takes them. It needs a block of memory.
        It has all that the client has registered; param_groups and schedulers are not in it: save them with the model's
        own state. Raises as Client.checkpoint() does.
        """
        together = _checkpoint.Together(self._client, process_group)

        def prepare() -> _checkpoint.Plan:
            self._check_open()
            self._finish_step()
            self._refuse_updated("there is no state of one step")
            self._bind()
            for pack, index in self._places.values():
                pack.reload_masters(pack.members[index])
            client = self._connected()
            together.check(client)
            _checkpoint.check_names(client)
            settle_last(client)
            if together.rank == 0 and (client.world_size == 1 or not together.alone):
                remove_rests(client, directory, of_all=True)
            made = max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)
            return _checkpoint.Plan(tag, step, attempt, overwrite, made, uuid.uuid4().bytes)

        chosen = _checkpoint.agreed(together.all(prepare))
        begun: list[Saved] = []

        def begin() -> None:
            begun.append(begin_save(self._connected(), directory, *chosen, overwrite, take=False))

        try:
            together.all(begin)
            begun[0]._take()
        except BaseException:
            for saved in begun:  # parts of some ranks are of no use
                with contextlib.suppress(MlpoError):
                    saved.abandon()
            raise
        return begun[0]

    @torch.no_grad()
    def load(
        self,
        directory: str,
        tag: Optional[str] = None,
        *,
        attempt: Optional[bytes] = None,
        timeout: Optional[float] = None,
        process_group: Any = None,
    ) -> Restored:
        """Takes masters, moments and step counts from a checkpoint of save(), and gives each parameter the value that
        its master rounds to. param_groups stay as they are.

        tag: default the newest complete checkpoint: that of the highest step.
        attempt: of several saves under the tag this one (Restored.attempt). Several ranks without torch.distributed
          must pass tag and attempt of what the first one has loaded: another checkpoint may become complete between
          two calls.
        timeout: seconds; None waits while the daemon lives.
        process_group: as for save().

        With torch.distributed a collective: rank 0 chooses the checkpoint, all load that one, and if it fails on one
        rank all raise. Parameters are found by their names and whole shapes, whatever number of ranks saved them and
        however they were packed or sharded. One that fails leaves no state: call it, or load_state_dict(), again.

        Raises mlpo.MlpoError: ENOENT if there is no such checkpoint, EINVAL naming a parameter that is not in it as it
        is here, ECANCELED naming another rank that has failed.
        """
        together = _checkpoint.Together(self._client, process_group)
        deadline = Deadline(timeout)
        begun: list[Restoring] = []

        def choose() -> tuple[Optional[str], Optional[bytes], Optional[Restored]]:
            self._check_open()
            self._end_step()
            if self._overlap is not None:
                self._overlap.abandon()
            self._bind()
            client = self._connected()
            together.check(client)
            if together.alone and client.world_size > 1 and attempt is None:
                warnings.warn(
                    f"{client.world_size} ranks load each by itself, without torch.distributed: they may "
                    "find different checkpoints; pass tag= and attempt= of what the first one has loaded",
                    RuntimeWarning,
                    stacklevel=4,
                )
            if together.rank != 0:
                return tag, attempt, None
            begun.append(begin_restore(client, directory, tag, attempt, deadline.remaining()))
            return tag, attempt, begun[0].found

        def take(chosen: Restored) -> tuple[Restored, int]:
            if not begun:
                begun.append(
                    begin_restore(self._connected(), directory, chosen.tag, chosen.attempt, deadline.remaining())
                )
            found = begun[0].fill(self.subgroups, deadline.remaining())
            newest = 0
            for pack in self._packs:
                for member in pack.members:
                    if self._places.get(member.param) != (pack, member.index):
                        continue  # replaced in the param groups
                    pack.write_back([member])
                    made = int(pack.subgroup.read_state(member.index, 0, 0)["step"])
                    newest = max(newest, made)
                    self._made_steps(member.param, made)
            return found, newest

        try:
            chosen = _checkpoint.the_same(together.all(choose))
            taken = together.all(lambda: take(chosen))
        finally:
            for restoring in begun:  # of which another rank's failure has kept it
                with contextlib.suppress(MlpoError):
                    restoring.end()
        for rank, (found, _) in enumerate(taken):
            if found != chosen:
                raise MlpoError(-errno.ESTALE, f"rank {rank} has loaded {found}, rank 0 {chosen}: call load() again")
        self._share_loaded()
        for item in self._all_named():
            if item.param not in self._places and not self._is_elsewhere(item.param):  # without elements
                self._made_steps(item.param, max(newest for _, newest in taken))  # as many as the others
        return chosen

    def _share_loaded(self) -> None:
        """Gives other ranks of shard_group the values and step counts of what this one owns."""
        if self._owners is None:
            return
        params = [item.param for item in self._all_named()]
        made = {
            index: int(self.state[param]["step"])
            for index, param in enumerate(params)
            if param in self._places and param in self.state
        }
        for index, step in self._owners.steps(made).items():
            self._made_steps(params[index], step)
        self._owners.publish(set(params))

    def _made_steps(self, param: torch.Tensor, steps: int) -> None:
        if steps > 0:
            self.state[param] = _state.outline(param, _state.step_tensor(steps))
        else:
            self.state.pop(param, None)

    def close(self) -> None:
        """Ends the use of the daemon. A client that was passed in stays open.

        The state is dropped when the client's session ends; until then its memory, its storage and its keys stay taken.
        The default client is closed with the last optimizer that uses it; where the last ones were dropped without
        close(), when the next one needs it.
        """
        if self._closed:
            return
        try:
            if self._awaits():
                self.wait()
        finally:
            self._close()

    def _close(self) -> None:
        self._closed = True
        _unwaited.discard(self)
        if self._overlap is not None:
            self._overlap.close()
        self._stale_uses.close()
        for forward in self._forwards:
            forward.close()
        packs, self._packs, self._places = self._packs, [], {}
        with contextlib.ExitStack() as last:
            if self._owns_client and self._client is not None:
                last.callback(_default_client.release, self, self._client)
            for pack in packs:
                if pack.device is not None:
                    last.callback(pack.device.close)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("an OffloadAdamW cannot be copied: its state is in the daemon; use state_dict()")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an OffloadAdamW cannot be pickled: its state is in the daemon; use state_dict()")

    # ---- Parameters

    def _named(self, group_index: int) -> list[Named]:
        group = self.param_groups[group_index]
        names = group.get("param_names")
        before = sum(len(other["params"]) for other in self.param_groups[:group_index])
        return [
            Named(param, names[index] if names and index < len(names) else str(before + index))
            for index, param in enumerate(group["params"])
        ]

    def _all_named(self) -> list[Named]:
        return [item for index in range(len(self.param_groups)) for item in self._named(index)]

    def _name_of(self, param: torch.Tensor) -> str:
        return next((item.name for item in self._all_named() if item.param is param), "?")

    def _place_of(self, param: torch.Tensor) -> tuple[Pack, Member]:
        """Where a parameter with elements is; registers those that are not yet."""
        if param not in self._places:
            self._check_open()
            self._bind()
        pack, index = self._places[param]
        return pack, pack.members[index]

    def _bind(self) -> None:
        """Registers parameters that are not yet, and forgets those that were replaced in the param groups."""
        groups = [self._named(index) for index in range(len(self.param_groups))]
        current = {item.param for items in groups for item in items}
        for param in [param for param in self._places if param not in current]:
            del self._places[param]
            self.state.pop(param, None)
        if self._owners is not None:
            for param in [param for param in self.state if param not in current]:
                del self.state[param]
            current = {param for param in current if not self._owners.elsewhere(param)}
        if current.issubset(self._places):
            return
        _checks.overlaps((item.param, item.name) for items in groups for item in items)
        for named in groups:
            new = [item for item in named if item.param not in self._places]
            for item in new:
                self._check_parameter(item)
            if self._owners is not None:
                new = self._owners.mine(new)
            for items in packs(new, self._subgroup_elements):
                pack = self._registered(items)
                self._packs.append(pack)
                for member in pack.members:
                    self._places[member.param] = (pack, member.index)

    def _is_elsewhere(self, param: torch.Tensor) -> bool:
        """Whether another rank of shard_group keeps the state of this parameter."""
        return self._owners is not None and self._owners.elsewhere(param)

    def _check_parameter(self, item: Named) -> None:
        _checks.parameter(item.param, item.name)
        if self._owners is not None and _shards.is_dtensor(item.param):
            raise not_offered(
                f"shard_group= with parameter {item.name}, which is a DTensor",
                "leave it out: each rank keeps the state of its own shards",
            )
        if self._updates_in_backward:
            if item.param.dtype == torch.float16:
                raise not_offered(f"update_in_backward=True with parameter {item.name}, which is FP16", _NO_SCALING)
            if _shards.is_dtensor(item.param) and not self._apply_nonfinite:
                raise not_offered(
                    f'update_in_backward=True without nonfinite="apply" for parameter {item.name}, which is a DTensor',
                    "use overlap=True, or apply what torch does: a gradient that is not finite on one rank would find "
                    "other ranks' shards updated",
                )

    def _registered(self, items: Sequence[Named]) -> Pack:
        client, number = self._connected(), len(self._keys)
        key = fit_name(items[0].name, f"#{number}", f"{self._name}/")
        while key in self._keys:  # also of a parameter that was replaced
            key, number = f"{self._name}/#{number}", number + 1
        self._keys.add(key)
        try:
            pack = Pack(client, key, items, self._grad_dtype)
        except MlpoError as error:
            if error.errno == errno.EEXIST:
                self._keys.remove(key)  # another optimizer's: a repeated call is refused alike
            raise
        pack.attach_device(client)
        return pack

    def _connected(self) -> Client:
        if self._client is None:
            self._client = _default_client.acquire(self)
        if self._counts_copies:
            self._counts_copies = False
            _warn_of_copies([item.param for item in self._all_named()], self._owners)
        return self._client

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the optimizer was closed")
        if self._client is not None:
            self._client.check_alive()

    # ---- Steps

    def _next_step(self) -> Step:
        """The step that the gradients and param_groups of this moment ask for. Registers new parameters.

        Everything that step() refuses is refused here, before anything was changed.
        """
        hypers = []
        for index, group in enumerate(self.param_groups):
            _checks.group_flags(group)
            hypers.append(_checks.hyper(group))
            for item in self._named(index):
                if item.param.grad is not None and not is_taken(item.param.grad):
                    _checks.gradient(item.param, item.name, self._grad_dtype or item.param.dtype)
        self._bind()
        updated = {} if self._overlap is None else self._overlap.updated()
        parts: dict[int, Part] = {}
        counts: dict[torch.Tensor, torch.Tensor] = {}
        for group, hyper in zip(self.param_groups, hypers):
            for param in group["params"]:
                if not self._has_gradient(param):
                    continue
                if param in counts:
                    raise ValueError(f"parameter {self._name_of(param)} is in the param groups twice")
                known = self.state[param].get("step") if param in self.state else None
                counts[param] = _state.step_tensor(1) if known is None else known + 1
                if param in self._places:
                    pack, index = self._places[param]
                    part = parts.setdefault(id(pack), Part(pack, hyper))
                    if part.hyper != hyper:
                        raise ValueError(_MOVED.format(pack.members[index].name))
                    part.members.append(pack.members[index])
        for key, early in updated.items():
            assert self._overlap is not None
            final = self._overlap.as_updated(early, parts.get(key))
            if final is not None:
                parts[key] = final
        return Step(list(parts.values()), counts)

    def _early_part(self, pack: Pack, taken: Sequence[Member]) -> Part:
        """The part of the next step that is an update in the backward pass."""
        mine = {member.param for member in taken}
        hypers = [_checks.hyper(g) for g in self.param_groups if not mine.isdisjoint(g["params"])]
        if any(hyper != hypers[0] for hyper in hypers):
            raise ValueError(_MOVED.format(taken[0].name))
        part = Part(pack, hypers[0], list(taken), early=True, epoch=pack.subgroup.epoch)
        part.priority = self._priority(part)
        return part

    def _priority(self, part: Part) -> int:
        """Of the part's update: the first forward pass that wants one of its parameters; 0 without attach_forward()."""
        orders = [forward.order(member.param) for member in part.members for forward in self._forwards]
        return min(min(orders) + 1, _LOWEST_PRIORITY) if orders else 0

    def _refuse_unreduced(self, param: torch.Tensor) -> None:
        """A hook of overlap=True has seen a gradient: refused where that is not reduced over the ranks yet.

        DTensors' on all ranks (FSDP2) are, and attach_ddp() takes those of its model otherwise.
        """
        ranks = _ranks()
        laid = None if ranks == 1 else _shards.sharding(param)
        if ranks > 1 and (laid is None or laid.mesh.size() < ranks):
            raise not_offered(
                f"overlap=True with {ranks} ranks of torch.distributed and parameter {self._name_of(param)}, which is "
                "neither sharded over all of them nor in a model of attach_ddp()",
                "call optimizer.attach_ddp(model) with the DistributedDataParallel model before the first backward "
                "pass, shard with fully_shard, or use overlap=False: this hook sees gradients before they are reduced",
            )

    def _refuse_updated(self, what: str) -> None:
        if self._overlap is not None:
            self._overlap.refuse_updated(what)

    def _scaling(self) -> _scaler.Scaling:
        """What torch's GradScaler asks of this step."""
        asked = _scaler.scaling(self)
        if asked is not None and self._overlap is not None:
            raise not_offered(
                "overlap=True with an enabled GradScaler",
                "use overlap=False: the scaler must see gradients that overlap=True has released",
            )
        return asked or _scaler.Scaling()

    def _send(self, step: Step) -> None:
        """Sends the gradients of a step; with overlap=True those that did not go before."""
        if self._overlap is not None:
            self._overlap.begin([part.pack for part in step.parts])
        step.send_gradients(Pack.submit_gradient if self._overlap is None else self._overlap.submit)

    def _prepare(self, step: Step, factor: float) -> int:
        """Does everything before an update is submitted, and says what this rank thinks of the step."""
        parts = [part for part in step.parts if not part.early]
        for part in parts:
            part.grad_scale = factor * self._clip_factor
        self._send(step)
        # Digests are taken here while the daemon reads the gradients.
        for part in parts:
            for member in part.members:
                part.pack.reload_masters(member)
        return _UPDATE if step.gradients_are_finite() or self._apply_nonfinite else _NOT_FINITE

    def _has_gradient(self, param: torch.Tensor) -> bool:
        return param.grad is not None if self._overlap is None else self._overlap.has_gradient(param)

    def _settle(self, pack: Pack) -> None:
        """Ends a step under way as far as its slot is concerned."""
        step = self._under_way
        if step is None:
            return
        if step.decided:
            step.finish_parts([part for part in step.parts if part.pack is pack], self._apply_nonfinite)
        else:
            self._finish_step()

    def _leave_step(self, step: Step) -> None:
        """Submits the updates in the order in which forward passes want them, and waits for those that none wants."""
        if self._overlap is None:
            self._stale_uses.watch(item.param for item in self._all_named())
        for part in step.parts:
            part.priority = self._priority(part)
        step.parts.sort(key=lambda part: part.priority)
        _unwaited.add(self)
        step.go_on(self._apply_nonfinite)
        covered = frozenset().union(*(forward.params for forward in self._forwards))
        self._wait_for([member.param for part in step.parts for member in part.members if member.param not in covered])

    @torch.no_grad()
    def _wait_for(self, params: Iterable[torch.Tensor], surely: bool = False) -> None:
        """Gives these parameters their new values, after step(wait=False); `surely`: or raises now if there are none,
        where a stream would bring them and a later call raise."""
        step = self._under_way
        if step is None or not step.left:
            return
        packs = {id(self._places[param][0]): self._places[param][0] for param in params if param in self._places}
        parts = [part for part in map(step.part_of, packs.values()) if part is not None and not part.ended]
        if parts and surely:
            step.finish_parts(parts, self._apply_nonfinite)
        elif parts:
            step.make_ready(parts, self._apply_nonfinite)
            step.end_arrived()
        if all(part.ended for part in step.parts):
            self._finish_step()

    def _awaits(self) -> bool:
        """Whether there are updates of step(wait=False) that were not waited for."""
        return self._under_way is not None and self._under_way.left

    def _refuse_stale(self, param: torch.Tensor) -> None:
        """A gradient has arrived: of the parameter's newest value, or it is a mistake."""
        step = self._under_way
        if step is None or not step.left or param not in step.counts or param not in self._places:
            return
        part = step.part_of(self._places[param][0])
        if part is not None and not part.ended and not part.handed_over:
            raise RuntimeError(
                f"parameter {self._name_of(param)} has a gradient although its update by step(wait=False) was not "
                "waited for, so its old value was used: call optimizer.wait() before parameters are used outside of "
                "their modules' forward()"
            )

    def _forget(self, step: Step, overflow: bool = False) -> None:
        step.forget(overflow)
        if self._overlap is not None:
            self._overlap.forgotten([part.pack for part in step.parts if not part.early])

    def _skip(self, step: Step, fate: int) -> None:
        """Forgets a step; raises why, unless the scaler skips it."""
        for part in step.parts:
            part.early = part.is_applied()  # what the daemon has refused is forgotten like the others
        self._forget(step, overflow=fate != _FAILED)
        error = NonFiniteGradientError(*not_finite(step.parts)) if fate == _NOT_FINITE else None
        updated = updated_text(step.parts)
        self._keep_updated(step)
        if fate == _SCALER_SKIPS:
            return
        if fate == _FAILED:
            text = f"another rank failed before this step's update; {updated or 'nothing was updated'}"
            raise MlpoError(-errno.ECANCELED, text)
        self._skips_in_a_row += 1
        if self._skips_in_a_row == _WARN_AFTER_SKIPS:
            warnings.warn(f"{_WARN_AFTER_SKIPS} steps in a row had gradients that are not finite", stacklevel=4)
        assert error is not None
        raise error

    def _keep_updated(self, step: Step) -> None:
        """Of a step that was forgotten what was updated in the backward pass stays, and is finished."""
        step.closing = True  # interrupted in here, the next call does the same again
        done = step.updated_early()
        if self._overlap is not None:
            self._overlap.applied(done.parts)
        self._under_way = done
        self._finish_step()

    def _finish_step(self) -> None:
        """Ends a step: at the end of step(), and in the next call if that was interrupted or failed."""
        step = self._under_way
        if step is None:
            return
        if step.decided:
            if self._owners is None:
                step.finish(self._apply_nonfinite, self.state)
            else:
                self._owners.together(
                    lambda: step.finish_parts(step.parts, self._apply_nonfinite),
                    "the next call on all ranks goes on with the step; load_state_dict() gives it up",
                )
                self._owners.publish(step.counts)
                step.count(self.state)
            self._under_way = None
        else:
            self._forget(step)
            if step.closing:
                self._keep_updated(step)
            self._under_way = None
        _unwaited.discard(self)

    def _end_step(self) -> None:
        """As _finish_step, but gives up an update that fails again, since all state is written next."""
        step = self._under_way
        try:
            self._finish_step()
        except MlpoError:
            if step is not None:
                step.abandon()
        self._under_way = None
        _unwaited.discard(self)


def _ranks() -> int:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return int(torch.distributed.get_world_size())


def _warn_of_copies(params: Sequence[torch.Tensor], owners: Optional[Owners]) -> None:
    ranks = _ranks() if owners is None else _ranks() // owners.ranks
    layouts = [_shards.sharding(param) for param in params]
    copies = max((ranks if laid is None else laid.copies for laid in layouts), default=1)
    if copies > 1:
        warnings.warn(
            f"{copies} ranks of torch.distributed keep a whole copy of the optimizer state each, in {copies} times the "
            "memory and storage: pass shard_group= to divide it over the ranks of DDP, or shard the parameters "
            "(fully_shard); replicas=True says that it is meant",
            stacklevel=5,
        )
