"""mlpo.deepspeed: DeepSpeed ZeRO-3 with its optimizer state in mlpo-daemon, without a fork.

    import mlpo.deepspeed

    engine, *_ = mlpo.deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

in place of deepspeed.initialize(), or mlpo.deepspeed.enable() before somebody else calls that. The configuration is
DeepSpeed's, with "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu" or "nvme"}}, and may have a
top-level "mlpo" block (_config.Settings has its keys). Importing it raises ImportError for a DeepSpeed that it does not
fit.
"""

try:
    import deepspeed as _deepspeed
except ModuleNotFoundError as _error:
    if _error.name != "deepspeed":
        raise
    raise ImportError('mlpo.deepspeed needs DeepSpeed: pip install "mlpo[deepspeed]"') from _error
from deepspeed.runtime.engine import DeepSpeedEngine as _Engine
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper as _Swapper
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as _Stage3

from . import _versions

_versions.check(_deepspeed.__version__, _Stage3, _Engine, _Swapper)

from ._enabling import disable, enable, initialize  # noqa: E402
from ._optimizer import MlpoZeroOptimizer_Stage3  # noqa: E402

__all__ = ["MlpoZeroOptimizer_Stage3", "disable", "enable", "initialize"]
