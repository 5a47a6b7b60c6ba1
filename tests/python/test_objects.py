"""Named objects: every kind of buffer, parts, errors, requests that are awaited, other ranks of the job."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
import time

import mlpo
import numpy as np
import pytest
import torch
from running_daemon import THREE_BUFFERS, Daemon, Layout


def test_any_buffer_is_stored_and_filled(client: mlpo.Client) -> None:
    """bytes, bytearray, memoryview, numpy and torch of any type and size, also through another kind."""
    content = random.Random(1).randbytes(300_000)
    for source in (content, bytearray(content), memoryview(content), np.frombuffer(content, np.float32),
                   torch.frombuffer(bytearray(content), dtype=torch.bfloat16)):  # fmt: skip
        client.delete("x") if client.stat("x") is not None else None
        assert client.flush("x", source).result(60) == len(content)
        for out in (bytearray(len(content)), np.empty((3, 25_000), np.float32),
                    torch.empty(100, 1500, dtype=torch.float16)):  # fmt: skip
            assert client.fetch("x", out).result(60) == len(content)
            raw = out.view(torch.uint8).numpy() if isinstance(out, torch.Tensor) else out
            assert bytes(memoryview(raw)) == content
    for empty in (b"", np.empty(0), torch.empty(0)):
        assert client.flush("empty", empty).result(60) == 0
        assert client.stat("empty") == 0
        assert client.fetch("empty", bytearray()).result(60) == 0
    parameter = torch.nn.Parameter(torch.arange(10.0))
    client.flush("grad", parameter).result(60)
    out = torch.empty(10)
    client.fetch("grad", out).result(60)
    assert torch.equal(out, torch.arange(10.0))


def test_parts_names_and_sizes(client: mlpo.Client) -> None:
    """offset and the length of `out` choose a part; names are str or bytes, and the same if their bytes are."""
    client.flush("größe", b"0123456789").result(60)
    assert client.stat("größe".encode()) == 10
    out = bytearray(4)
    assert client.fetch(b"gr\xc3\xb6\xc3\x9fe", out, offset=3).result(60) == 10
    assert out == b"3456"
    assert client.stat("nothing") is None
    client.delete("größe")
    assert client.stat("größe") is None


def test_errors_say_what_and_where(client: mlpo.Client, daemon_of, connect_to) -> None:
    """Unknown names, parts outside, buffers that do not fit, and an object that the paths have no room for."""
    client.flush("ten", bytes(10)).result(60)
    for call, code, text in (
        (lambda: client.fetch("none", bytearray(1)).result(60), errno.ENOENT, "'none'"),
        (lambda: client.delete("none"), errno.ENOENT, "'none'"),
        (lambda: client.fetch("ten", bytearray(11)).result(60), errno.EINVAL, "which has 10"),
        (lambda: client.fetch("ten", bytearray(1), offset=10).result(60), errno.EINVAL, "which has 10"),
        (lambda: client.flush("", b"x").result(60), errno.EINVAL, "name"),
        (lambda: client.flush("n" * 257, b"x").result(60), errno.EINVAL, "257"),
    ):
        with pytest.raises(mlpo.MlpoError, match=text) as caught:
            call()
        assert caught.value.errno == code
    error = client.fetch("none", bytearray(1)).exception(60)
    assert isinstance(error, mlpo.MlpoError) and error.errno == errno.ENOENT
    with pytest.raises((BufferError, TypeError, ValueError)):
        client.fetch("ten", bytes(10))  # not writable
    with pytest.raises(ValueError, match="contiguous"):
        client.flush("x", np.zeros((4, 4))[:, 1])
    with pytest.raises(ValueError, match="contiguous"):
        client.flush("x", torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="zero byte"):
        client.stat("a\0b")
    with pytest.raises(ValueError, match="offset"):
        client.fetch("ten", bytearray(1), offset=-1)


def test_requests_are_waited_for_in_every_way(daemon_of, connect_to) -> None:
    """Order of submission, done(), callbacks, await, and deadlines that leave the request going on."""
    daemon: Daemon = daemon_of(THREE_BUFFERS)
    client = connect_to(daemon)
    content = [random.Random(i).randbytes(200_000) for i in range(5)]
    called = threading.Event()
    requests = [client.flush("x", c) for c in content]
    requests[-1].add_done_callback(lambda _: called.set())
    out = bytearray(200_000)
    assert client.fetch("x", out).result(60) == 200_000  # behind all of them
    assert out == content[-1]
    assert all(request.done() for request in requests)
    assert called.wait(10)
    subgroup = client.subgroup("w", 5000)
    mixed = [client.fetch("x", out), subgroup.submit_grad()]  # one that C knows, and one that it does not
    left = list(mixed)
    while left:
        ended = mlpo.wait_any(left, timeout=60)
        assert ended and all(request.done() for request in ended)
        left = [request for request in left if request not in ended]
    assert mixed[0].result(0) == 200_000

    async def both() -> tuple[int, int]:
        other = bytearray(200_000)
        return await client.flush("y", content[0]), await client.fetch("y", other)

    assert asyncio.run(both()) == (200_000, 200_000)
    daemon.pause()
    try:
        request = client.flush("x", content[1])
        with pytest.raises(mlpo.TimeoutError):
            request.result(0.1)
        assert not request.done()
        with pytest.raises(mlpo.TimeoutError):
            client.stat("x", timeout=0.1)
    finally:
        daemon.resume()
    assert request.result(60) == 200_000


def test_ranks_share_them_until_the_last_has_gone(daemon_of, connect_to) -> None:
    """Another rank sees what was flushed, another job does not; the job's end is theirs, too."""
    daemon: Daemon = daemon_of(Layout())
    first = connect_to(daemon, rank=0, world_size=2)
    second = connect_to(daemon, rank=1, world_size=2, job=first.job)
    other = connect_to(daemon)
    first.flush("x", b"hello").result(60)
    out = bytearray(5)
    second.fetch("x", out).result(60)
    assert out == b"hello" and other.stat("x") is None
    first.close()
    assert second.stat("x") == 5
    with pytest.raises(mlpo.MlpoError) as caught:
        first.flush("x", b"again").result(60)
    assert caught.value.code == -4107  # closed
    second.close()
    assert connect_to(daemon, job=first.job, timeout=10).stat("x") is None


def test_close_ends_what_waits(daemon_of, connect_to) -> None:
    """close() while flushes wait: each ends with the code of a closed client, in reasonable time."""
    daemon: Daemon = daemon_of(THREE_BUFFERS)
    client = connect_to(daemon)
    daemon.pause()
    try:
        requests = [client.flush("x", bytes(500_000)) for _ in range(3)]
        time.sleep(0.1)
        client.close()
        assert [getattr(request.exception(20), "code", 0) for request in requests] == [-4107] * 3
    finally:
        daemon.resume()
