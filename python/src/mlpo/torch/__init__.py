"""mlpo.torch: optimizers for PyTorch whose FP32 state is kept by mlpo-daemon."""

from ._optimizer import OffloadAdamW

__all__ = ["OffloadAdamW"]
