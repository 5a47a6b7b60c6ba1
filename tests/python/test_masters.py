"""How replaced weights are noticed: the digests of parameters. What then happens to masters: test_faults.py, C18."""

from __future__ import annotations

from typing import Any, Callable

import mlpo
import pytest
import torch
from mlpo.torch import OffloadAdamW, _seal
from torch.nn import Parameter

Make = Callable[..., OffloadAdamW]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DIGESTS = {"host": _seal.seal, "device": _seal._device_digest}


@pytest.mark.parametrize("limit", [1, 2, 7, 24, 59, 60, 1000])
def test_pieces_are_the_tensor_in_row_major_order(limit: int) -> None:
    """Whatever the strides: each piece begins where the one before ended, and none has more elements than asked for."""
    plain = torch.arange(60).view(3, 4, 5)
    gaps = torch.zeros(3, 4, 10, dtype=torch.int64)[..., ::2].copy_(plain)
    for tensor in (plain, gaps, plain.permute(2, 0, 1).contiguous().permute(1, 2, 0), plain.reshape(60), plain[:, :0],
                   torch.tensor(5)):  # fmt: skip
        found = list(_seal.pieces(tensor, limit))
        assert sum((piece.reshape(-1).tolist() for _, piece in found), []) == tensor.reshape(-1).tolist()
        assert all(0 < piece.numel() <= limit for _, piece in found)
        ends = [first + piece.numel() for first, piece in found]
        assert [first for first, _ in found] == [0, *ends][:-1] if found else tensor.numel() == 0


def test_copying_seals_what_it_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of the cache, to other strides, empty ones too: the digest is that of the copy."""
    monkeypatch.setattr(_seal, "_CACHED_PIECE", 100)
    for source, target in ((torch.randn(30, 40), torch.zeros(40, 30).t()), (torch.randn(999), torch.zeros(999)),
                           (torch.randn(0, 3), torch.ones(0, 3)), (torch.tensor(2.0), torch.tensor(0.0))):  # fmt: skip
        found = _seal.copied(target, source)
        assert torch.equal(target, source) and found == _seal.seal(source) == _seal.seal(target)


@pytest.mark.parametrize("digest", DIGESTS.values(), ids=DIGESTS.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_change_of_bits_changes_the_digest(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    digest: Callable[[torch.Tensor], Any],
    dtype: torch.dtype,
) -> None:
    """One bit anywhere, elements that change places, the sign of a zero, another NaN; also in later pieces.

    The same values with other strides have the same digest."""
    monkeypatch.setattr(_seal, "PIECE_ELEMENTS", 1000)
    monkeypatch.setattr(_seal, "_DEVICE_PIECE", 700)
    _seal._weights.cache_clear()
    request.addfinalizer(_seal._weights.cache_clear)
    torch.manual_seed(4)
    start = torch.randn(53, 47).to(dtype)
    start[0, 0], start[0, 1] = 0.0, float("nan")
    bits = {4: torch.int32, 2: torch.int16}[start.element_size()]
    before = digest(start)
    assert digest(start.clone()) == before
    assert digest(start.t().contiguous().t()) == before and digest(torch.stack([start, start], -1)[..., 0]) == before
    seen = {int(before)}
    flat = start.view(bits).view(-1)
    for index in (0, 1, 699, 700, 1000, 2490):
        for bit in range(8 * start.element_size()):
            flat[index] ^= torch.tensor(1, dtype=bits) << bit
            seen.add(int(digest(start)))
            flat[index] ^= torch.tensor(1, dtype=bits) << bit
    assert len(seen) == 1 + 6 * 8 * start.element_size()
    for a, b in ((5, 6), (5, 705), (5, 1705), (1400, 2100)):
        other = start.clone().view(-1)
        other[[a, b]] = other[[b, a]]
        seen.add(int(digest(other)))
    seen.add(int(digest(torch.zeros(53, 47, dtype=dtype))))
    seen.add(int(digest(-torch.zeros(53, 47, dtype=dtype))))
    assert len(seen) == 1 + 6 * 8 * start.element_size() + 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_replaced_after_the_backward_pass_took_the_gradient(make: Make, dtype: torch.dtype) -> None:
    """overlap=True: the slot holds the gradient by then, and a write through .data moves no version. Still noticed."""
    model = torch.nn.Linear(20, 30, bias=False).to(dtype)
    optimizer = make(model.parameters(), lr=0.0, weight_decay=0.0, overlap=True)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 20, dtype=dtype)).float().sum().backward()
        model.weight.data.fill_(step + 0.5)
        optimizer.step()
        assert (model.weight == step + 0.5).all()


def test_what_was_not_replaced_is_not_read(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first step on masters are read only where a parameter was written, and only once."""
    a, b = (Parameter(torch.randn(500).bfloat16()) for _ in range(2))
    optimizer = make([a, b])
    reads: list[int] = []
    original = mlpo.Subgroup.read_state

    def counted(self: mlpo.Subgroup, tensor: int, *args: Any) -> Any:
        reads.append(tensor)
        return original(self, tensor, *args)

    monkeypatch.setattr(mlpo.Subgroup, "read_state", counted)
    for step in range(6):
        a.grad, b.grad = torch.randn(500).bfloat16(), torch.randn(500).bfloat16()
        if step == 3:
            b.data[7] += 1
        optimizer.step()
    assert reads == [1]


def test_hidden_bits_survive_what_replaces_nothing(make: Make) -> None:
    """Writing the same 16-bit values, moving .data elsewhere, a state_dict there and back: masters keep their bits."""
    w = Parameter(torch.randn(3000).bfloat16())
    optimizer = make([w], lr=1e-3)

    def step() -> torch.Tensor:
        w.grad = torch.randn(3000).bfloat16()
        optimizer.step()
        return optimizer.state_dict()["state"][0]["master"]

    for _ in range(3):
        before = step()
    with torch.no_grad():
        w.copy_(w.clone())
    w.data = w.data.clone()
    model = torch.nn.Module()
    model.w = w
    model.load_state_dict(model.state_dict())
    optimizer.reload_masters()
    assert torch.equal(optimizer.state_dict()["state"][0]["master"], before)
    assert not torch.equal(before, before.bfloat16().float())
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    assert torch.equal(step(), before)


def test_strided_parameters_are_reloaded_by_piece(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transposed parameter larger than a piece: only what was replaced is reset, in the right place."""
    monkeypatch.setattr(_seal.pieces, "__defaults__", (100, 0))
    w = Parameter(torch.randn(40, 30).bfloat16().t())
    optimizer = make([w], lr=1e-2, weight_decay=0.0)
    for _ in range(2):
        w.grad = torch.randn(30, 40).bfloat16()
        optimizer.step()
    before = optimizer.state_dict()["state"][0]["master"]
    w.data[3, 25], w.data[29, 39] = 7.0, -7.0
    after = optimizer.state_dict()["state"][0]["master"]
    changed = before != after
    assert changed.nonzero().tolist() == [[3, 25], [29, 39]] and after[3, 25] == 7 and after[29, 39] == -7
    assert after.stride() == w.stride()
