"""Multi-tensor (`foreach`) optimizers: all parameters are updated at once, with temporary lists of tensors."""

from __future__ import annotations

from lowtide.estimator.cuda.ops.op_registry import Behaviour

Behaviour(
    name="foreach",
    does="the default on CUDA if neither foreach nor fused is requested: intermediate results for all parameters at "
    "once",
    source="torch/optim/optimizer.py: _default_to_fused_or_foreach, torch 2.13",
)
Behaviour(
    name="counters of steps",
    does="are on the CPU, unless the optimizer is fused or capturable",
    source="torch/optim/adam.py: _init_group, torch 2.13",
)
