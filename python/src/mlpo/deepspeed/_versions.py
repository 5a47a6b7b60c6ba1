"""Which DeepSpeed this package fits. It overrides methods that are nobody's interface, so that each is compared with
what it was written for: a version in which one of them has other parameters is refused when this package is imported,
not in the middle of a run."""

from __future__ import annotations

import inspect
from typing import Any, Mapping

OLDEST = (0, 19, 8)
BEFORE = (0, 20)

# What is overridden, wrapped or called. A parameter that was added with a default would be fine for calls, not for
# overriding, so names must be equal.
_STAGE3 = {
    "step": "self, closure=None",
    "zero_grad": "self, set_to_none=True",
    "destroy": "self",
    "partition_grads": "self, params_to_release, grad_partitions",
    "independent_gradient_partition_epilogue": "self",
    "_finalize_offload_gradient_accumulation": "self",
    "has_overflow": "self, partition_gradients=True",
    "_setup_for_real_optimizer": "self",
    "_configure_offloading": "self, offload_optimizer_config, offload_param_config",
    "_link_all_hp_params": "self",
    "_get_norm_groups": "self",
    "backward_prologue": "self",
    "is_gradient_accumulation_boundary": "self",
    "_pre_step": "self",
    "_post_step": "self, timer_names",
    "_partition_all_parameters": "self",
    "_loss_scale_update_and_overflow_cleanup": "self",
    "_overflow_clean_up": "self, prev_scale",
    "_model_parallel_all_reduce": "self, tensor, op",
    "_grad_norm_counts_every_rank": "self, params, process_group",
    "_autoep_expert_parallel_group": "self, params",
    "_get_sub_group_process_group": "self, sub_group_id",
    "_get_param_partition_rank": "self, param",
    "_get_param_partition_world_size": "self, param",
    "_zero3_partition_group_metadata": "self",
    "_restore_from_bit16_weights": "self",
    "refresh_fp32_params": "self",
    "checkpoint_event_prologue": "self",
    "state_dict": "self",
    "load_state_dict": (
        "self, state_dict_list, load_optimizer_states=True, load_from_fp32_weights=False, checkpoint_folder=None, "
        "load_serial=None, param_shapes=None"
    ),
    "offload_states": "self, include=None, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=False",
    "_fp32_state_allgather": "self, param, fp32_state_partition",
    "_get_fp32_grad_state_partition": "self, param, release_swap_buffers",
    "_get_fp32_opt_state_partition": "self, param, release_swap_buffers, optim_state_key=None",
    "get_fp32_grad_for_param": "self, param",
    "set_fp32_grad_for_param": "self, value, param",
    "get_full_hp_param": "self, param, optim_state_key=None",
    "set_full_hp_param": "self, value, param, optim_state_key=None",
    "get_local_fp32_grad_for_param": "self, param",
    "set_local_grad_for_param": "self, value, param",
    "get_local_fp32_param": "self, param, optim_state_key=None",
    "set_local_hp_param": "self, value, param, optim_state_key=None",
    "update_fp32_grad_for_param_vectorized": "self, update_func, param_list",
    "get_hp_param_device": "self, param, optim_state_key=None",
    "get_fp32_grad_partitions": "self",
}
_ENGINE = {
    "_configure_optimizer": "self, client_optimizer, model_parameters",
    "_configure_basic_optimizer": "self, model_parameters",
    "get_optimizer_configuration": "self, optimizer_parameters, adam_w_mode, allow_legacy_fallback=False",
    "zero_force_ds_cpu_optimizer": "self",
    "zero_nvme_offload_optimizer": "self",
    "save_checkpoint": "self, save_dir, tag=None, client_state={}, save_latest=True, exclude_frozen_parameters=False",
    "load_checkpoint": (
        "self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True, "
        "load_module_only=False, custom_load_fn=None"
    ),
    "_load_zero_checkpoint": "self, load_dir, tag, load_optimizer_states=True",
    "load_module_state_dict": (
        "self, checkpoint, strict=True, custom_load_fn=None, fetch_z3_params=False, z3_params_to_fetch=None, "
        "allowed_missing_keys=None"
    ),
    "_get_all_ckpt_names": "self, checkpoints_path, tag",
    "_get_ckpt_name": "self, checkpoints_path, tag, mp_placeholder=None, pp_placeholder=None",
    "load_universal_checkpoint": "self",
    "use_node_local_storage": "self",
    "zero_load_from_fp32_weights": "self",
}
_SWAPPER = {
    "swap_in": "self, params, async_op=True, swap_in_buffers=None",
    "synchronize_reads": "self",
    "remove_partition_and_release_buffers": "self, params",
    "swap_out_partitioned_params": "self, dst_fp16_params, src_fp32_params",
}


# What zero.Init makes for each parameter: see check_closures.
_CLOSURES = {
    "all_gather": "param_list=None, async_op=False, hierarchy=0",
    "all_gather_coalesced": "params, safe_mode=False, quantize=False",
    "partition": "param_list=None, hierarchy=0, has_been_updated=False, free_data=True",
}


def check(version: str, stage3: Any, engine: Any, swapper: Any) -> None:
    """Raises ImportError for a DeepSpeed that this package does not fit: what is different, and what to do."""
    found = _numbers(version)
    wanted = f"{'.'.join(map(str, OLDEST))} and later, below {'.'.join(map(str, BEFORE))}"
    advice = f'pip install "deepspeed>={".".join(map(str, OLDEST))},<{".".join(map(str, BEFORE))}"'
    if not OLDEST <= found < BEFORE:
        raise ImportError(f"mlpo.deepspeed fits DeepSpeed {wanted}, not {version}: {advice}")
    for owner, methods in ((stage3, _STAGE3), (engine, _ENGINE), (swapper, _SWAPPER)):
        for name, expected in methods.items():
            actual = _parameters(owner, name)
            if actual != _names(expected):
                has = "no such method" if actual is None else f"({', '.join(actual)})"
                raise ImportError(
                    f"mlpo.deepspeed does not fit this DeepSpeed {version}: {owner.__name__}.{name} has {has} where "
                    f"({expected}) was expected. Use a released DeepSpeed {wanted}: {advice}"
                )


def check_closures(methods: Mapping[str, Any]) -> None:
    """As check(), for the methods of one parameter, by name; they can be seen only once there is a model."""
    for name, method in methods.items():
        # Those of an optimizer of ours on the same model look as what they stand for.
        actual = list(inspect.signature(_undecorated(inspect.unwrap(method))).parameters)
        if actual != _names(_CLOSURES[name]):
            raise ImportError(
                f"mlpo.deepspeed does not fit this DeepSpeed: a parameter's {name}() has ({', '.join(actual)}) where "
                f"({_CLOSURES[name]}) was expected"
            )


def _names(expected: str) -> list[str]:
    return [part.split("=")[0].strip() for part in expected.split(",")]


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: "0.19.8+abc" is (0, 19, 8)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _parameters(owner: Any, name: str) -> Any:
    method = getattr(owner, name, None)
    return None if method is None else list(inspect.signature(_undecorated(method)).parameters)


def _undecorated(method: Any) -> Any:
    """What DeepSpeed's instrument_w_nvtx has wrapped, whose wrapper takes anything and does not say what of."""
    free = getattr(getattr(method, "__code__", None), "co_freevars", ())
    return method.__closure__[free.index("func")].cell_contents if "func" in free else method
