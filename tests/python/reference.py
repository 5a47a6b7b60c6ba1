"""The arithmetic that the daemon promises, in numpy: every operation one rounded FP32 operation, in a fixed order.

numpy's float32 +, -, *, / and sqrt round correctly and contract nothing, so results are compared bit by bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

F = np.float32


@dataclass
class Adam:
    """State of one tensor."""

    p: np.ndarray
    m: np.ndarray
    v: np.ndarray
    step: int = 0

    @staticmethod
    def start(p: np.ndarray) -> Adam:
        p = np.array(p, F).reshape(-1)
        return Adam(p, np.zeros_like(p), np.zeros_like(p))

    def update(self, g, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, grad_scale=1.0) -> None:
        """AdamW; g is float32 (upcast before)."""
        self.step += 1
        beta1, beta2 = betas
        bc1, bc2 = 1 - beta1**self.step, 1 - beta2**self.step
        with np.errstate(all="ignore"):
            g = np.asarray(g, F).reshape(-1) * F(grad_scale)
            p = self.p * F(1 - lr * weight_decay)
            self.m = self.m + (g - self.m) * F(1 - beta1)
            self.v = F(beta2) * self.v + (F(1 - beta2) * g) * g
            self.p = p - F(lr / bc1) * (self.m / (np.sqrt(self.v) / F(math.sqrt(bc2)) + F(eps)))


def upcast(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Slot bytes as float32; bfloat16 comes as uint16."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(F)
    return bits.astype(F)


def rounded(p: np.ndarray, dtype: str) -> np.ndarray:
    """float32 rounded to nearest even, as slot bytes; bfloat16 as uint16. Not for NaN."""
    if dtype == "bfloat16":
        bits = p.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return p.astype({"float16": np.float16, "float32": F}[dtype])


def ulps(difference: np.ndarray, of: np.ndarray) -> float:
    """The largest |difference| in units of the last place of the float32 `of`."""
    if difference.size == 0:
        return 0.0
    return float(np.max(np.abs(difference.astype(np.float64)) / np.spacing(np.abs(of).astype(F)).astype(np.float64)))
