"""Megatron-core's process groups for a plan. They are global in a process: one plan at a time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from relax_hpc.recipe.tables.trainer import Parallel

_current: tuple[int, ...] = ()


def join(plan: Parallel, seed: int) -> ProcessGroupCollection:
    """Form the groups of `plan` over all processes; those of another plan are given up."""
    global _current
    if not dist.is_initialized():  # a trainer of one process
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        _current = ()
    virtual = plan.virtual_pipeline if plan.virtual_pipeline > 1 else None
    wanted = (plan.tensor, plan.pipeline, plan.virtual_pipeline, plan.context, plan.expert, plan.expert_tensor)
    if wanted != _current or not parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=plan.tensor,
            pipeline_model_parallel_size=plan.pipeline,
            virtual_pipeline_model_parallel_size=virtual,
            context_parallel_size=plan.context,
            expert_model_parallel_size=plan.expert,
            expert_tensor_parallel_size=plan.expert_tensor,
            create_gloo_process_groups=False,
        )
        _current = wanted
    model_parallel_cuda_manual_seed(seed)
    return ProcessGroupCollection.use_mpu_process_groups()
