"""Which parts of a model's parameters this rank's subgroups hold.

ZeRO-3 cuts a parameter of ds_numel elements into as many partitions as its process group has ranks, all of
ds_tensor.ds_numel elements: the last ones are filled up, or are nothing but padding. What is registered with the daemon
are the real elements alone, as flat ranges of the whole parameter, so that another number of ranks finds them again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from .._client import Client
from .._subgroup import TensorSpec
from ..torch._binding import Member, Pack, fit_name
from ..torch._packing import Named

_MAX_DIMS = 8


@dataclass(frozen=True)
class Slice(Named):
    """A piece that is to be registered. `param` has its values: a view of the partition, or a copy of one on NVMe."""

    owner: Any  # the model's parameter; DeepSpeed's attributes on it have no types
    first: int  # in the row-major whole parameter
    within: int  # in the partition
    offset: int  # in stock's flat sub-group partition, padding counted
    on_nvme: bool


@dataclass(eq=False)
class Piece(Member):
    """A registered piece of a parameter. `param`: as of Slice; None if the partition is on NVMe."""

    __eq__, __hash__ = object.__eq__, object.__hash__  # itself, not what its tensors hold

    owner: Any = None
    first: int = 0
    within: int = 0
    offset: int = 0
    on_nvme: bool = False

    @property
    def numel(self) -> int:
        return self.grad.numel()

    @property
    def local(self) -> torch.Tensor:
        """The partition's values, one-dimensional; from NVMe a copy on the host."""
        if not self.on_nvme:
            return self.param
        return partition_on_nvme(self.owner).narrow(0, self.within, self.numel)


class ShardPack(Pack):
    """A subgroup of the daemon and the pieces that it holds, all of one stock sub-group."""

    KEY_IS_TAKEN = 'give each engine of a process a "name" of its own in the "mlpo" block'
    members: list[Piece]  # type: ignore[assignment]

    def __init__(self, client: Client, key: str, slices: Sequence[Slice], grad_dtype: torch.dtype) -> None:
        super().__init__(client, key, slices, grad_dtype)
        self.sub_group_id = 0  # DeepSpeed's
        self.number = 0  # in order of registration
        self.early = False  # its parameters are wanted at the end of step(), since they stay gathered (ds_persist)
        self.copied: Any = None  # event after the last copy from the slot to a device
        self._starts = []
        start = 0
        for piece in self.members:
            self._starts.append((start, piece.numel))
            start += piece.numel

    def _member(self, item: Named, index: int, grad: torch.Tensor, value: torch.Tensor) -> Piece:
        assert isinstance(item, Slice)
        param: Any = None if item.on_nvme else item.param
        piece = Piece(param, item.name, index, grad, value)
        piece.owner, piece.first, piece.within = item.owner, item.first, item.within
        piece.offset, piece.on_nvme = item.offset, item.on_nvme
        return piece

    def _spec(self, item: Named, index: int) -> TensorSpec:
        assert isinstance(item, Slice)
        shape = tuple(item.owner.ds_shape)
        if len(shape) > _MAX_DIMS:
            shape = (item.owner.ds_numel,)
        return TensorSpec(item.name, shape, flat_range=(item.first, item.param.numel()))

    def range_of(self, index: int) -> tuple[int, int]:
        """(first element, elements) of a piece in the subgroup."""
        return self._starts[index]

    def _are_on_device(self, members: Sequence[Member]) -> bool:
        pieces = [piece for piece in members if isinstance(piece, Piece)]
        return all(not piece.on_nvme and self._is_on_device(piece.param) for piece in pieces)

    def use_fetched(self, taken: Sequence[Member]) -> None:
        self.let_stream_wait()
        for piece in taken:
            piece.seal = None

    def _copy_back(self, taken: Sequence[Member]) -> None:
        self.store({piece: piece.value for piece in taken if isinstance(piece, Piece)})

    def store(self, values: Mapping[Piece, torch.Tensor]) -> None:
        """Writes values of pieces (1-d, as many elements) into the partitions, in memory or on NVMe."""
        stored: list[tuple[Any, torch.Tensor]] = []
        for piece, tensor in values.items():
            piece.seal = None
            if piece.on_nvme:
                stored.append((piece.owner, _patched(piece, tensor)))
            else:
                piece.param.copy_(tensor.view_as(piece.param), non_blocking=True)
                if piece.param.device.type != "cpu":
                    self.copied = self.copied or get_accelerator().Event()
        if self.copied is not None:
            self.copied.record()
        if stored:
            owners, tensors = [owner for owner, _ in stored], [tensor for _, tensor in stored]
            owners[0].nvme_swapper.swap_out_partitioned_params(dst_fp16_params=owners, src_fp32_params=tensors)

    def load(self, piece: Piece) -> torch.Tensor:
        """The partition's values as a 1-d tensor on the host; not to be written."""
        return piece.local.detach().to("cpu")


def partition_on_nvme(owner: Any) -> torch.Tensor:
    """A copy of a parameter's partition, padding included, which lies on NVMe."""
    swapper, partition = owner.nvme_swapper, owner.ds_tensor
    if partition.status == PartitionedParamStatus.INFLIGHT:
        swapper.synchronize_reads()
    if partition.status == PartitionedParamStatus.AVAILABLE:
        copy: torch.Tensor = partition.data.clone()
        return copy
    swapper.swap_in([owner], async_op=False)
    copy = partition.data.clone()
    swapper.remove_partition_and_release_buffers([owner])
    return copy


def _patched(piece: Piece, values: torch.Tensor) -> torch.Tensor:
    """The whole partition with new values of a piece, ready to be written: what was read ahead of it is dropped."""
    owner = piece.owner
    if piece.numel == owner.partition_numel():
        whole = values.reshape(-1)
        if owner.ds_tensor.status == PartitionedParamStatus.INFLIGHT:
            owner.nvme_swapper.synchronize_reads()
    else:
        whole = partition_on_nvme(owner)
        whole.narrow(0, piece.within, piece.numel).copy_(values.view(-1))
    if owner.ds_tensor.status == PartitionedParamStatus.AVAILABLE:
        owner.nvme_swapper.remove_partition_and_release_buffers([owner])
    return whole


def slices_of(
    params: Iterable[Any], rank_of: Callable[[Any], int], name_of: Callable[[Any], str], most: int
) -> Iterator[Slice]:
    """The pieces that this rank holds of a stock sub-group's parameters, in order, each of at most `most` elements.

    rank_of(param): this rank in the parameter's process group. name_of(param): its tensor's name. A partition on NVMe
    is read when its slices are asked for.
    """
    offset = 0
    for param in params:
        size = param.partition_numel()
        begin = size * rank_of(param)
        real = max(0, min(size, param.ds_numel - begin))
        on_nvme = param.ds_tensor.final_location == OffloadDeviceEnum.nvme
        values = None
        for within in range(0, real, most):
            if values is None:
                values = partition_on_nvme(param) if on_nvme else param.ds_tensor.data
            part = values.narrow(0, within, min(most, real - within))
            yield Slice(part, name_of(param), param, begin + within, within, offset + within, on_nvme)
        offset += size


def packs_of(
    slices: Iterable[Slice], kind_of: Callable[[Any], Any], most: int
) -> Iterator[tuple[Any, list[Slice]]]:
    """Cuts slices into subgroups of at most `most` elements, of one kind (kind_of(parameter)) each, with the kind."""
    open_: dict[Any, list[Slice]] = {}
    sizes: dict[Any, int] = {}
    for item in slices:
        kind, count = kind_of(item.owner), item.param.numel()
        if kind in open_ and sizes[kind] + count > most:
            yield kind, open_.pop(kind)
        open_.setdefault(kind, []).append(item)
        sizes[kind] = count + (sizes[kind] if len(open_[kind]) > 1 else 0)
    yield from open_.items()


def fitting(name: str) -> str:
    """The name of a tensor as the protocol has room for it; the same on all ranks, and different for different ones."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return fit_name(name, name.encode()[:200].decode(errors="ignore") + "~" + digest)


def key_of(prefix: str, slices: Sequence[Slice], number: int) -> str:
    """The key of a subgroup, unique among those of the engine."""
    return fit_name(f"{slices[0].name}#{number}", f"#{number}", f"{prefix}/")


def find(packs: Iterable[ShardPack]) -> dict[int, tuple[tuple[ShardPack, Piece], ...]]:
    """Where each parameter's pieces are, by ds_id, in order of `first`."""
    found: dict[int, list[tuple[ShardPack, Piece]]] = {}
    for pack in packs:
        for piece in pack.members:
            found.setdefault(piece.owner.ds_id, []).append((pack, piece))
    return {ds_id: tuple(sorted(each, key=lambda pair: pair[1].first)) for ds_id, each in found.items()}


def part_of(values: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The part of a partition's values, padding included or not, that is a piece."""
    return values.view(-1).narrow(0, piece.within, piece.numel)
