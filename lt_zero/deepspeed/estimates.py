"""DeepSpeed's estimates of memory, by lt_zero's forecasts: tables of all ways of offload are printed."""

from __future__ import annotations

from typing import Any

from torch import nn

from lt_zero.planning.estimate import settings_table


def _table(model: Any, stage: int, num_gpus_per_node: int, num_nodes: int) -> None:
    settings_table(model, None, num_gpus_per_node * num_nodes, stage=stage, ranks_per_node=num_gpus_per_node)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory that stage 3 needs for a model; buffers are forecast, so the factor for them has no effect."""
    _table(model, 3, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the memory that stage 3 needs for so many parameters."""
    _table(total_params, 3, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory that stage 2 needs for a model; buffers are forecast, so the factor for them has no effect."""
    _table(model, 2, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory that stage 2 needs for so many parameters."""
    _table(total_params, 2, num_gpus_per_node, num_nodes)
