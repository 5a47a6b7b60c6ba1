"""Digests of parameters, by which a step notices values that were replaced since the one before.

A version counter does not: `p.data.copy_` leaves it alone, as does whoever writes through another view of the memory.
Nor does a comparison with the slot, which holds gradients by then. So the bytes themselves are hashed: once when they
are written back, once before the next update.
"""

from __future__ import annotations

import functools
from typing import Any, Iterator, Union

import torch
import xxhash

# Elements whose copies are held at a time, where a tensor is read or written in pieces.
PIECE_ELEMENTS = 4 << 20
# Types of the same size that hold bits: NaN equals itself and -0 is not 0.
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
_CACHED_PIECE = 1 << 17
_DEVICE_PIECE = 1 << 20

# On the host a number; on a device a tensor there, so that sealing waits for nothing.
Seal = Union[int, torch.Tensor]


def pieces(tensor: torch.Tensor, limit: int = PIECE_ELEMENTS, first: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """Views of at most `limit` elements that are the tensor one after another in row-major order, with the element
    at which each begins. Where it is cut depends on its shape alone; flattening one copies no more than a piece."""
    count = tensor.numel()
    if count <= limit:
        if count:
            yield first, tensor
        return
    row = count // tensor.shape[0]
    if row > limit:
        for index in range(tensor.shape[0]):
            yield from pieces(tensor[index], limit, first + index * row)
        return
    rows = limit // row
    for index in range(0, tensor.shape[0], rows):
        yield first + index * row, tensor[index : index + rows]


def seal(tensor: torch.Tensor) -> Seal:
    """A digest of the tensor's values in row-major order."""
    if tensor.device.type != "cpu":
        return _device_digest(tensor)
    digest = xxhash.xxh3_64()
    for _, piece in pieces(tensor):
        digest.update(_bytes(piece))
    return digest.intdigest()


def copied(target: torch.Tensor, source: torch.Tensor) -> Seal:
    """Copies all values into `target` and returns their digest, taken while they are in the processor's cache."""
    if target.device.type != "cpu":
        return _device_digest(target.copy_(source))
    digest = xxhash.xxh3_64()
    for (_, to), (_, of) in zip(pieces(target, _CACHED_PIECE), pieces(source, _CACHED_PIECE)):
        digest.update(_bytes(to.copy_(of)))
    return digest.intdigest()


def same(a: Seal, b: Seal) -> bool:
    """Waits for a device's digest. One of a device and one of the host differ."""
    return int(a) == int(b)


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().contiguous().view(-1).view(BITS[tensor.dtype]).numpy()


@functools.lru_cache(maxsize=None)
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0x6D6C706F)
    return torch.randint(-(2**63), 2**63 - 1, (_DEVICE_PIECE,), generator=generator).bitwise_or_(1).to(device)


def _device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Multilinear hash modulo 2^64 in the device's vector operations: each piece is the inner product of its bits with
    fixed random odd numbers, and the pieces are the coefficients of a polynomial. A change of one element always
    shows, any other with a probability near 1."""
    weights = _weights(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for _, piece in pieces(tensor.detach(), _DEVICE_PIECE):
        bits = piece.reshape(-1).view(BITS[tensor.dtype]).to(torch.int64)
        total = total * 0x5851F42D4C957F2D + (bits * weights[: bits.numel()]).sum()
    return total
