"""mlpo.cuda with torch on a GPU; run by tests/device/check."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import mlpo  # noqa: E402
import mlpo.cuda  # noqa: E402
import torch  # noqa: E402
from running_daemon import Daemon, Layout  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)
if not mlpo.cuda.available():
    pytest.skip(mlpo.cuda.why_not(), allow_module_level=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_training_by_streams_is_torch_adamw(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    """Ten steps on two streams with nothing waited for in between, against torch's AdamW on FP32 masters."""
    numel = 300_007
    torch.manual_seed(1)
    masters = torch.randn(numel)
    reference = torch.nn.Parameter(masters.clone())
    adam = torch.optim.AdamW([reference], lr=1e-2, weight_decay=0.1, foreach=False)
    with Daemon(tmp_path, Layout()) as daemon, mlpo.connect(socket=daemon.socket, job="device") as client:
        subgroup = client.subgroup("w", numel, dtype=dtype, initial=masters.numpy())
        with mlpo.cuda.attach(client) as side:
            slot = side.slot(subgroup)
            out = torch.cuda.Stream()
            parameters = torch.empty(numel, dtype=dtype, device="cuda")
            for _ in range(10):
                gradient = torch.randn(numel, device="cuda").to(dtype)
                reference.grad = gradient.float().cpu()
                adam.step()
                info = slot.copy_grad(gradient).result(timeout=60)
                total = torch.empty(1, dtype=torch.float64, device="cuda")
                finite = torch.empty(1, dtype=torch.int32, device="cuda")
                mlpo.cuda.norm([gradient], total, finite)
                assert total.item() == info.sum_of_squares and finite.item() == 1
                update = subgroup.submit_update(lr=1e-2, weight_decay=0.1)
                slot.copy_param(parameters, stream=out)
                out.synchronize()
                update.result(timeout=60)
            expected = reference.detach().to(dtype).float()
            # FP32 that differs in its last bits may be rounded to the neighbour: at most this share of the value away.
            step = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
            difference = (parameters.cpu().float() - expected).abs()
            allowed = step * expected.abs() + 1e-6 * expected.abs().max()
            assert (difference <= allowed).all(), (difference - allowed).max()


def test_pack_is_torchs_cast() -> None:
    """Every bfloat16 and float16 pattern to FP32 and back, and random FP32 to both, as torch rounds them."""
    patterns = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).cuda()
    for dtype in (torch.bfloat16, torch.float16):
        halves = patterns.view(dtype)
        wide = torch.empty(65536, device="cuda")
        mlpo.cuda.pack([halves], wide)
        assert torch.equal(wide.nan_to_num(7.0), halves.float().nan_to_num(7.0))
        values = torch.randint(-(2**31), 2**31 - 1, (1_000_003,), dtype=torch.int32, device="cuda").view(torch.float32)
        narrow = torch.empty(values.numel(), dtype=dtype, device="cuda")
        mlpo.cuda.pack([values], narrow)
        assert torch.equal(narrow.float().nan_to_num(7.0), values.to(dtype).float().nan_to_num(7.0))
