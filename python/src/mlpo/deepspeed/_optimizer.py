"""ZeRO-3 whose optimizer state is kept by mlpo-daemon: what DeepSpeed's engine makes in place of its own optimizer.

What saving and loading (_saving.py) build on; `optimizer` is a MlpoZeroOptimizer_Stage3:

  optimizer.client       mlpo.Client of this rank, open. optimizer.settings: the "mlpo" block (_config.Settings).
  optimizer.packs        list[ShardPack], in order of registration: a subgroup of the daemon each. A ShardPack is a
                         mlpo.torch._binding.Pack with .subgroup (mlpo.Subgroup), .members (list[Piece], in the order
                         of the subgroup's tensors), .sub_group_id (index into stock's fp16_groups). A pack never
                         crosses a stock sub-group.
  Piece (a Member)       .owner: the model's parameter; .first: where the piece begins in the row-major whole of
                         owner.ds_shape; .numel: its elements, all of them real (ZeRO's padding is in no piece);
                         .index: of its tensor in the subgroup; .offset: where it begins in stock's flat sub-group
                         partition (fp16_partitioned_groups_flat[sub_group_id], padding counted); .name: of its tensor.
                         Its TensorSpec: name, shape = owner.ds_shape, flat_range = (first, numel). A partition of
                         more than subgroup_elements is several pieces, in several packs, with one name.
  optimizer.pieces_of(param)    tuple of (pack, piece) in order of .first; () where this rank holds only padding.
  optimizer.tensor_name(param)  the name on all ranks that share the parameter: param_names[param], with "#mpN" or
                         "#epN" behind it where tensor- or expert-parallel ranks have other values under that name, and
                         "NAME/" before it with "mlpo": {"name": NAME}.
  optimizer.param_group_of(pack)  of the basic optimizer's (self.optimizer.param_groups).
  optimizer.wait()       every partition has its newest value; no update is under way. Gradients stay where they are.
  optimizer.check_closed(what)  raises if a window is open (gradients since the last step) so that `what` would be of
                         neither state; drop_gradients() forgets such gradients instead.
  optimizer.take_values()       after Client.restore(), which leaves rounded parameters in the slots: copies them into
                         the partitions (memory or NVMe) of all packs.
  pack.store({piece: values})   writes values (1-d, piece.numel elements of optimizer.dtype) into the partitions.
  pack.load(piece)       the partition's values as a 1-d tensor on the host, in memory or read from NVMe; read-only.
  optimizer.reload_masters(params=None)  makes masters follow the partitions, where their rounding differs.
  State itself: pack.subgroup.read_state(piece.index, first, count) and write_state(tensor=piece.index, ...).

swap_optimizer is False whatever the configuration says, so that DeepSpeed's engine saves and loads by state_dict()
and load_state_dict(), which _saving.py and _loading.py answer, and copies no swap files. Before either it calls
checkpoint_event_prologue(), which ends in wait(), all parameters partitioned.

A step: gradients go into slots and on to the daemon during the backward pass (_window.py). step() lets all ranks agree
on whether there is one, and submits the updates with loss scale and clipping as their grad_scale. It does not wait for
them: who gathers a parameter (DeepSpeed's pre-fetch, GatheredParameters) waits for that one first (_gathering.py).
"""

from __future__ import annotations

import contextlib
import errno
import threading
from typing import Any, Iterable, Optional, Sequence

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import pg_utils
from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm, is_model_parallel_parameter
from deepspeed.runtime.zero.stage3 import OPTIMIZER_STEP_TIMER
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3
from deepspeed.runtime.zero.utils import get_norm_dtype
from deepspeed.utils import groups

from .._client import Client, connect
from .._device import DeviceCopies
from .._errors import MlpoError, NonFiniteGradientError
from ..torch import _default_client
from ..torch._checkpoint import Together
from ..torch._checks import Hyper
from ..torch._steps import Part, Step, not_finite, updated_text
from . import _config, _pieces
from ._fragments import Fragments
from ._gathering import Gathering
from ._pieces import Piece, ShardPack
from ._window import Window

# What becomes of a step; the largest number of all ranks counts.
_UPDATE, _NOT_FINITE, _FAILED = range(3)
_ARENA = "if it is shared memory that lacks: leave \"mlpo.arena\" out or raise it, or [memory] arenas of the daemon"


class MlpoZeroOptimizer_Stage3(Fragments, Stage3):
    """DeepSpeedZeroOptimizer_Stage3 with masters, moments and Adam in the node's mlpo-daemon.

    Made by DeepSpeed's engine (mlpo.deepspeed.initialize), with its arguments. Threads: as its base, for the one that
    trains; autograd's threads call the hooks. Errors of the daemon are mlpo.MlpoError. After one in step(), or in a
    forward pass that waits for parameters, the next call goes on with the same step.
    """

    def __init__(self, module: Any, init_optimizer: Any, param_names: Any, timers: Any, ds_config: Any,
                 *arguments: Any, **options: Any) -> None:  # fmt: skip
        self.settings = _config.settings(ds_config)
        _config.check_optimizer(init_optimizer)
        self.client: Client
        self.packs: list[ShardPack] = []
        self._owns_client = False
        self._places: dict[int, tuple[tuple[ShardPack, Piece], ...]] = {}
        self._under_way: Optional[Step] = None
        self._waiting = threading.RLock()  # autograd may run hooks in several threads
        self._window = Window(self.hyper_of, self._settle, self.settings.update_in_backward)
        self._gathering = Gathering(self)
        try:
            super().__init__(module, init_optimizer, param_names, timers, ds_config, *arguments, **options)
        except BaseException:
            self._release()
            raise

    # ---- Construction

    def _configure_offloading(self, offload_optimizer_config: Any, offload_param_config: Any) -> None:
        super()._configure_offloading(offload_optimizer_config, offload_param_config)
        self.swap_optimizer = False
        self.offload_optimizer_pin_memory = False

    def _setup_for_real_optimizer(self) -> None:
        """In place of FP32 partitions, optimizer states and gradient buffers: subgroups of the daemon."""
        Together(None, None).all(self._register)
        self._places = _pieces.find(self.packs)
        # Nothing of stock's may take these for tensors with elements.
        self.fp32_partitioned_groups_flat = [torch.empty(0) for _ in self.fp16_groups]
        self.next_swappable_fp32_partitioned_groups = [None for _ in self.fp16_groups]
        self.grad_partitions_flat_buffer = None
        # Gradients are in slots; what still asked stock's map would find nothing rather than parameters.
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition: dict[int, torch.Tensor] = {}
        for param_group in self.optimizer.param_groups:
            param_group["params"] = []
        if self.contiguous_gradients:
            for dtype, bucket in self.ipg_buckets.items():
                device = get_accelerator().current_device_name()
                bucket.buffer = torch.empty(self.reduce_bucket_size, dtype=dtype, device=device)

    def _register(self) -> None:
        self._connect()
        most, prefix = self.settings.subgroup_elements, self.settings.name or "zero3"
        for sub_group_id, params in enumerate(self.fp16_groups):
            slices = _pieces.slices_of(params, self._get_param_partition_rank, self.tensor_name, most)
            for (early, _), chosen in _pieces.packs_of(slices, self._kind_of, most):
                key = _pieces.key_of(prefix, chosen, len(self.packs))
                try:
                    pack = ShardPack(self.client, key, chosen, self.gradient_accumulation_dtype)
                except MlpoError as error:
                    if error.errno in (errno.EDQUOT, errno.ENOMEM):
                        error.strerror = f"{error.strerror}; {_ARENA}"
                    raise
                pack.sub_group_id, pack.number, pack.early = sub_group_id, len(self.packs), early
                self.packs.append(pack)
        for pack in self.packs:
            self._attach(pack)

    def _attach(self, pack: ShardPack) -> None:
        """Lets streams copy between a slot and the GPU, wherever the partitions are: gradients come from there."""
        device = torch.device(get_accelerator().current_device_name())
        if device.type == "cuda":
            copies = DeviceCopies.of(self.client, device.index)
            pack.device = None if copies is None else copies.slot(pack.subgroup)

    def _connect(self) -> None:
        settings = self.settings
        if settings.shares_client:
            self.client = _default_client.acquire(self)
        else:
            ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
            self.client = connect(settings.socket, settings.job, arena=settings.arena, **ranks)
            self._owns_client = True

    def _kind_of(self, param: Any) -> tuple[bool, bool]:
        """Pieces of one kind share subgroups: those wanted first, and those that count in this rank's norm."""
        return bool(param.ds_persist), self._is_counted(param)

    def _is_counted(self, param: Any) -> bool:
        group = self._get_param_partition_group(param)
        everywhere = self._grad_norm_counts_every_rank([param], group)
        return bool(everywhere or is_model_parallel_parameter(param) or self.model_parallel_rank == 0)

    def tensor_name(self, param: Any) -> str:
        """What the daemon, and a checkpoint, knows a parameter by."""
        name = str(self.param_names[param])
        if getattr(param, "ds_zero_placement_family", "replicated") == "autoep_expert":
            name += f"#ep{groups._get_expert_parallel_rank(param.ds_zero_partition_group_name)}"
        elif pg_utils.is_parallel(self.model_parallel_group) and not self._grad_norm_counts_every_rank(
            [param], self._get_param_partition_group(param)
        ):
            name += f"#mp{self.model_parallel_rank}"
        return _pieces.fitting(f"{self.settings.name}/{name}" if self.settings.name else name)

    def _link_all_hp_params(self) -> None:
        super()._link_all_hp_params()
        self._gathering.hook(self.module.parameters())

    def destroy(self) -> None:
        """Parameters get their newest values; the daemon drops the state."""
        with contextlib.ExitStack() as last:
            last.callback(self._release)
            last.callback(self._gathering.unhook)
            last.callback(super().destroy)
            self.wait()

    def _release(self) -> None:
        client = getattr(self, "client", None)
        for pack in self.packs:
            if pack.device is not None:
                pack.device.close()
        self._window = Window(self.hyper_of, self._settle, False)
        self.packs, self._places, self._under_way = [], {}, None
        if client is None:
            return
        del self.client
        if self._owns_client:
            client.close()
        else:
            _default_client.release(self, client)

    # ---- What others ask

    def pieces_of(self, param: Any) -> tuple[tuple[ShardPack, Piece], ...]:
        """Where this rank's real elements of a parameter are; () if it has none."""
        return self._places.get(param.ds_id, ())

    def hyper_of(self, pack: ShardPack) -> Hyper:
        """The hyper-parameters of a subgroup's param group at this moment."""
        return _config.hyper(self.optimizer, self.param_group_of(pack))

    def param_group_of(self, pack: ShardPack) -> dict[str, Any]:
        """The basic optimizer's param group that a subgroup belongs to."""
        group: dict[str, Any] = self.optimizer.param_groups[self.sub_group_to_group_id[pack.sub_group_id]]
        return group

    @property
    def sent_in_backward(self) -> int:
        """Subgroups whose gradients had all gone out when the last backward passes ended."""
        return self._window.sent_in_backward

    @property
    def updated_in_backward(self) -> int:
        """Of these, those whose update was submitted, too: 0 without mlpo.update_in_backward."""
        return self._window.updated_in_backward

    def check_closed(self, what: str) -> None:
        """Raises MlpoError (EBUSY) if there are gradients that await their step."""
        if self._window.is_open:
            raise MlpoError(
                -errno.EBUSY, f"{what} between a backward pass and its step: call engine.step() or zero_grad() first"
            )

    def drop_gradients(self) -> None:
        """Forgets gradients that await their step."""
        self._window.drop()

    def take_values(self) -> None:
        """Copies the rounded parameters from all slots into the partitions."""
        for pack in self.packs:
            pack.write_back(pack.members)
        self._copies_ended()

    @torch.no_grad()
    def reload_masters(self, params: Optional[Iterable[Any]] = None) -> None:
        """Makes the masters of parameters, by default of all, follow their partitions where their rounding differs."""
        self._window.refuse_updated("parameters are written to")
        if params is None:
            self.wait()
            chosen = [(pack, piece) for pack in self.packs for piece in pack.members]
        else:
            listed = list(params)
            self.wait_for(listed)
            chosen = [pair for param in listed for pair in self.pieces_of(param)]
        for pack, piece in chosen:
            pack.reload_masters(piece, force=True)

    def _restore_from_bit16_weights(self) -> None:
        self.reload_masters()

    # refresh_fp32_params() is stock's: it calls the above.

    # ---- Gradients

    def backward_prologue(self) -> None:
        self._window.begin_pass()
        super().backward_prologue()

    def partition_grads(self, params_to_release: Sequence[Any], grad_partitions: Sequence[torch.Tensor]) -> list[Any]:
        """Gradients were reduced: puts this rank's partitions into the slots; nothing else is kept of them."""
        self._window.take(
            [(param, part, self.pieces_of(param)) for param, part in zip(params_to_release, grad_partitions)],
            self.is_gradient_accumulation_boundary(),
        )
        for param in params_to_release:
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        return []

    def independent_gradient_partition_epilogue(self) -> None:
        super().independent_gradient_partition_epilogue()
        self._window.arrived()

    def _finalize_offload_gradient_accumulation(self) -> None:
        """Unmanaged accumulation: the step has begun, so that all passes were made."""
        self._window.send_written()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients. (Stock would still apply those of a last pass at step().)"""
        self._window.refuse_updated("zero_grad()")
        super().zero_grad(set_to_none)
        self._window.drop()

    # ---- The step

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One optimizer step; closures are not supported, as in stock. On return updates are under way, unless
        mlpo.step_waits. A gradient that is not finite on any rank makes all ranks leave the step out, as in stock; with
        update_in_backward they raise mlpo.NonFiniteGradientError."""
        self._pre_step()
        self._partition_all_parameters()
        self.overflow = False
        step = self._agreed_step()
        norm = None
        if not self.overflow:
            norm = combine_grad_norm_groups(self._get_norm_groups())
            self.overflow = is_invalid_grad_norm(norm)
        if self.overflow:
            self._leave_out(step)
        if self._loss_scale_update_and_overflow_cleanup():
            return
        assert norm is not None
        self._global_grad_norm = norm / self.loss_scale
        self.timers(OPTIMIZER_STEP_TIMER).start()
        try:
            self._update(step, self._grad_scale(float(norm)))
        finally:
            self.timers(OPTIMIZER_STEP_TIMER).stop()
        self._post_step({OPTIMIZER_STEP_TIMER})

    def _agreed_step(self) -> Step:
        """Closes the window, and lets all ranks agree on what becomes of the step. Collective: if a rank fails here,
        all raise, and nothing is updated."""
        failure: Optional[Exception] = None
        step, fate = Step([], {}), _FAILED
        try:
            self.client.check_alive()
            self.wait()
            parts, finite = self._window.close()
            step, fate = Step(parts, {}), _UPDATE if finite else _NOT_FINITE
        except Exception as error:  # told to the others first
            failure = error
        fate = self._worst(fate)
        if fate == _FAILED:
            updated = self._forget(step)
            if failure is not None:
                raise failure
            text = f"another rank failed before this step's update; {updated or 'nothing was updated'}"
            raise MlpoError(-errno.ECANCELED, text)
        self.overflow = fate == _NOT_FINITE
        return step

    def _forget(self, step: Step) -> str:
        """Gives up a step before its update, and says what of it was updated in the backward pass, and stays so."""
        parts = step.parts or self._window.updated()
        for part in parts:
            part.early = part.is_applied()
        updated = updated_text(parts)
        with contextlib.suppress(MlpoError):  # what has failed before is what is raised
            self._window.drop()
        self._keep_updated(parts)
        return updated

    def _keep_updated(self, parts: Sequence[Part]) -> None:
        """What was updated in the backward pass is finished although its step is not made; so is the step before."""
        before = [] if self._under_way is None else [part for part in self._under_way.parts if not part.ended]
        kept = Step(before + [part for part in parts if part.early], {})
        kept.decided = True
        self._under_way = kept if kept.parts else None

    def _leave_out(self, step: Step) -> None:
        """A gradient is not finite somewhere: no rank makes the step."""
        for part in step.parts:
            part.early = part.is_applied()
        arguments = not_finite(step.parts)
        step.forget(overflow=True)
        self._window.done()
        if not self.settings.update_in_backward:
            return
        self._loss_scale_update_and_overflow_cleanup()
        self._keep_updated(step.parts)
        raise NonFiniteGradientError(*arguments)

    def _update(self, step: Step, grad_scale: float) -> None:
        """Submits the updates, those of parameters that stay gathered first, and waits for what is to be waited for."""
        for part in step.parts:
            pack = self._pack(part)
            if part.early:
                continue
            part.grad_scale = grad_scale
            if not self._waits_for_all:  # the order of the next forward pass; else the daemon's
                part.priority = 1 if pack.early else 2 + pack.number
        step.parts.sort(key=lambda part: part.priority)
        step.decided = True
        self._under_way = step
        self._window.done()
        failure: Optional[Exception] = step.submit_updates(step.parts, False)
        if self._waits_for_all:
            try:
                self.wait()
            except MlpoError as error:
                failure = failure or error
            if self._worst(_UPDATE if failure is None else _FAILED) == _FAILED and failure is None:
                raise MlpoError(-errno.ECANCELED, "another rank's update failed; this rank's has been made")
        if failure is not None:
            raise failure

    @property
    def _waits_for_all(self) -> bool:
        # DeepSpeed reads partitions ahead from NVMe without asking for the parameter.
        return self.settings.step_waits or self.params_in_nvme_and_cpu

    def _grad_scale(self, norm: float) -> float:
        """What gradients are multiplied by: `norm` is theirs, with the loss scale in it."""
        scale = float(self.loss_scale)
        if self.clip_grad > 0.0:
            scale *= max(1.0, (norm / scale + 1e-6) / self.clip_grad)
        return 1.0 / scale

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Whether a gradient is not finite on any rank. Collective."""
        if not partition_gradients:
            return bool(super().has_overflow(False))
        return self._worst(_UPDATE if self._window.all_finite() else _NOT_FINITE) != _UPDATE

    def _worst(self, fate: int) -> int:
        """The largest of all ranks' numbers. Collective."""
        tensor = torch.tensor([fate], dtype=torch.int32, device=get_accelerator().current_device_name())
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=tensor, op=dist.ReduceOp.MAX)
        return int(tensor.item())

    def _get_norm_groups(self) -> list[torch.Tensor]:
        """Norms of the gradients over all ranks that hold parts, one for each way of being spread. Collective."""
        local = [0.0] * len(self.fp16_groups)
        for pack in self.packs:  # in one order, whatever the gradients came in
            if pack in self._window.sums and self._is_counted(pack.members[0].owner):
                local[pack.sub_group_id] += self._window.sums[pack]
        spread: dict[Any, list[Any]] = {}
        for sub_group_id, params in enumerate(self.fp16_groups):
            group = self._get_sub_group_process_group(sub_group_id)
            everywhere = self._grad_norm_counts_every_rank(params, group)
            experts = self._autoep_expert_parallel_group(params)
            entry = spread.setdefault((id(group), everywhere, id(experts)), [group, everywhere, experts, 0.0])
            entry[3] += local[sub_group_id]
        norms = []
        for group, everywhere, experts, total in spread.values():
            device = get_accelerator().current_device_name()
            tensor = torch.tensor([total], dtype=get_norm_dtype(), device=device)
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
            if not everywhere:
                self._model_parallel_all_reduce(tensor=tensor, op=dist.ReduceOp.SUM)
            if pg_utils.is_parallel(experts):
                dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=experts)
            norms.append(tensor[0].sqrt().cpu())
        return norms

    # ---- Parameters on their way back

    @torch.no_grad()
    def wait(self) -> None:
        """Returns when every partition has its newest value."""
        with self._waiting:
            step = self._under_way
            if step is not None:
                self._finish(step.parts)
            self._copies_ended()

    @torch.no_grad()
    def wait_for(self, params: Iterable[Any], surely: bool = True) -> None:
        """Gives the partitions of these parameters their newest values, on a device for what the current stream does
        from here on. surely=False: there it is that stream, not this thread, which waits for updates. One that fails is
        then found by who needs the slot, for a gradient or for its state, or by the next step."""
        if self._under_way is None and all(pack.device is None for pack in self.packs[:1]):
            return
        packs = {pack for param in params for pack, _ in self.pieces_of(param)}
        with self._waiting:
            step = self._under_way
            if step is not None and packs:
                self._finish([part for part in step.parts if self._pack(part) in packs], surely)
            for pack in packs:  # DeepSpeed gathers on a stream of its own, which waits for no other
                pack.let_stream_wait()

    def _finish(self, parts: Sequence[Part], surely: bool = True) -> None:
        """surely: as of wait_for()."""
        step = self._under_way
        assert step is not None
        pending = [part for part in parts if not part.ended]
        if surely:
            step.finish_parts(pending, False)
        else:
            step.make_ready(pending, False)
        if all(part.ended for part in step.parts):
            self._under_way = None

    def _settle(self, pack: ShardPack) -> None:
        """The slot is about to be written: its parameters are copied before."""
        with self._waiting:
            part = None if self._under_way is None else self._under_way.part_of(pack)
            if part is not None and not part.ended:
                self._finish([part])

    def _copies_ended(self) -> None:
        for pack in self.packs:
            if pack.device is not None:
                pack.device.synchronize()
            if pack.copied is not None:
                pack.copied.synchronize()
                pack.copied = None

    @staticmethod
    def _pack(part: Part) -> ShardPack:
        assert isinstance(part.pack, ShardPack)
        return part.pack

    # ---- Checkpoints

    def checkpoint_event_prologue(self) -> None:
        super().checkpoint_event_prologue()
        self.wait()

    def state_dict(self) -> dict[str, Any]:
        from . import _saving

        return _saving.state_dict(self)

    def load_state_dict(self, *arguments: Any, **options: Any) -> None:
        from . import _loading

        _loading.load_state_dict(self, *arguments, **options)
