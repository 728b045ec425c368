"""A node that shares a model's experts out with others: what it may be asked for, and its steps beside theirs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.model_config import ModelConfig
from tandem.engine.contracts.model_shape import ModelShape
from tandem.engine.parallel.expert_group import ExpertGroup, GroupPlace
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.step import ScheduledRow


def shares_experts(options: NodeOptions) -> bool:
    return options.data_parallel_size > 1 and options.enable_expert_parallel


def check_expert_group(options: NodeOptions, config: ModelShape) -> None:
    """Raises ConfigError where nodes can't share out this model's experts, or can't do what is asked for beside it."""
    size = options.data_parallel_size
    if size > 1 and not options.enable_expert_parallel:
        raise ConfigError(
            f"--data-parallel-size {size}: a node is one of several only where they share experts out "
            "(--enable-expert-parallel); leave it out, or have `tandem serve` start as many"
        )
    if not shares_experts(options):
        return
    name = f"--data-parallel-size {size} with --enable-expert-parallel"
    if isinstance(config, ModelConfig) and config.mixture is None:
        raise ConfigError(f"{name}: not for {config.architecture}, which has no experts; leave it out")
    if options.data_parallel_rank >= size:
        raise ConfigError(f"--data-parallel-rank {options.data_parallel_rank}: give 0 to {size - 1}")
    if not options.data_parallel_rpc_port:
        raise ConfigError(f"{name}: give --data-parallel-rpc-port, the port where the nodes meet; `tandem serve` does")
    cache = options.cache
    refused = {
        "--tensor-parallel-size": options.tensor_parallel_size > 1,
        "--compile": options.compile,
        "--calculate-kv-scales": cache.calculate_kv_scales,
        "--precise-kv-tokens": cache.precise_kv_tokens,
        "--kv-quality-sample-rate": cache.kv_quality_sample_rate,
    }
    for option, is_given in refused.items():
        if is_given:
            raise ConfigError(f"{name} does not go with {option}: leave one out")


def join_expert_group(options: NodeOptions, device: torch.device, max_rows: int) -> ExpertGroup | None:
    """The group of this node, once all of its nodes have met; None: it has all experts. `max_rows`: of a step."""
    if not shares_experts(options):
        return None
    place = GroupPlace(options.data_parallel_rank, options.data_parallel_size, options.data_parallel_rpc_port)
    return ExpertGroup.join(place, device, max_rows)


class GroupSteps:
    """A node's steps beside those of the others of its group."""

    def __init__(self, group: ExpertGroup, runner: ModelRunner) -> None:
        self._group, self._runner = group, runner

    def begin(self, wake: Callable[[], object]) -> None:
        """Has the others take part from now on. `wake` is called when they begin a step that this node hasn't."""
        self._group.begin_serving()
        self._group.agreement.wake_by(wake)

    @property
    def is_behind(self) -> bool:
        """Whether another node has begun a step that this one hasn't."""
        return self._group.agreement.is_behind

    def accompany(self) -> None:
        """Launches a step of padding beside those of the others."""
        self._group.begin_step(1)
        self._runner.run_dummy((ScheduledRow(0, 0, 1),))

    def leave(self) -> bool:
        """Says that this node has no steps of its own any more; whether that is so of all."""
        return self._group.agreement.leave()

    def close(self) -> None:
        self._group.leave()


def make_group_steps(group: ExpertGroup | None, runner: ModelRunner) -> GroupSteps | None:
    return None if group is None else GroupSteps(group, runner)
