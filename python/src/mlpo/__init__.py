"""mlpo: client of mlpo-daemon, which keeps FP32 optimizer state on storage and applies Adam to it.

    client = mlpo.connect()
    subgroup = client.subgroup("decoder.0", numel, dtype="bfloat16", initial=masters)
    subgroup.grad.torch().copy_(gradient)
    info = subgroup.submit_grad().result()
    subgroup.submit_update(lr=1e-3).result()
    parameters.copy_(subgroup.param.torch())

For PyTorch there is mlpo.torch.OffloadAdamW, which does this behind torch.optim's interface.
"""

from ._client import Client, connect
from ._errors import MlpoError, NonFiniteGradientError, NotOfferedError, TimeoutError
from ._request import GradInfo, Request, wait_any
from ._saving import Restored, Saved
from ._subgroup import Kind, State, Subgroup, TensorSpec
from ._views import View

VALUE = Kind.VALUE
ZERO = Kind.ZERO
SKIP = Kind.SKIP

__version__ = "0.1.0"

__all__ = [
    "SKIP",
    "VALUE",
    "ZERO",
    "Client",
    "GradInfo",
    "Kind",
    "MlpoError",
    "NonFiniteGradientError",
    "NotOfferedError",
    "Request",
    "Restored",
    "Saved",
    "State",
    "Subgroup",
    "TensorSpec",
    "TimeoutError",
    "View",
    "connect",
    "wait_any",
]
