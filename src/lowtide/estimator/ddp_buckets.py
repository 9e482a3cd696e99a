"""Account for DistributedDataParallel's gradient buckets in an estimated step, without communication.

A bucket is a flat tensor that holds gradients until they are reduced over the processes. All buckets together are as
large as all gradients. They are allocated when a model is wrapped, and again in the second forward, in the order in
which gradients arrived. Each gradient is copied into its bucket; with `gradient_as_bucket_view` it then becomes a
view of the bucket.

Read in torch/csrc/distributed/c10d/reducer.cpp: initialize_buckets, initialize_bucket_views, rebuild_buckets,
mark_variable_ready_dense, delay_all_reduce; torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

import torch
from torch.nn.parallel import DistributedDataParallel

from lowtide._torch.distributed import (
    SYNC_BUFFERS,
    after_backward,
    assign_buckets,
    awaits_first_backward,
    compute_bucket_limits,
    find_communication_hooks,
    find_ddp_wrappers,
    find_sent_parameters,
    has_new_buckets,
)
from lowtide._torch.fake_modes import is_fake, without_function_modes
from lowtide._torch.tensors import get_storage_id

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.estimator.allocation_tracker import AllocationTracker


class Reducers:
    """Context manager that replaces the reducer of each DDP wrapper among `modules` by one that sends nothing."""

    def __init__(self, modules: Iterable[Any], tracker: AllocationTracker) -> None:
        self._reducers = [_Reducer(wrapper, tracker) for wrapper in find_ddp_wrappers(modules)]
        self._stack = contextlib.ExitStack()

    @property
    def buckets(self) -> list[Tensor]:
        """Tensors that DDP allocates: the buckets of gradients, and maps of the parameters that were used."""
        return [tensor for reducer in self._reducers for tensor in (*reducer.buckets, *reducer.maps)]

    @property
    def unknown(self) -> list[str]:
        """Notes on communication hooks (`register_comm_hook`). Their memory is unknown, because they are not called."""
        return [
            f"{hook}, which sends gradients of DistributedDataParallel (register_comm_hook): the memory that it takes"
            for hook in dict.fromkeys(hook for reducer in self._reducers for hook in reducer.hooks)
        ]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for reducer in self._reducers:
                reducer.begin(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


class _Reducer:
    """Replacement of the reducer and the logger of one DDP wrapper. Calls unrelated to memory do nothing."""

    def __init__(self, wrapper: DistributedDataParallel, tracker: AllocationTracker) -> None:
        self._wrapper, self._tracker = wrapper, tracker
        self._parameters, self._sparse = find_sent_parameters(wrapper)
        self._limits, self._limits_then = compute_bucket_limits(wrapper)
        self._is_new = has_new_buckets(wrapper)
        self._rebuilds = wrapper.static_graph or not wrapper.find_unused_parameters
        self._delays = awaits_first_backward(wrapper)
        """True if gradients are copied to buckets after backward, not as they arrive."""
        self._expects = False
        """True if the backward pass of the last forward reduces gradients."""
        self._order: dict[int, None] = {}
        """Numbers of the parameters, in the order in which their gradients first arrived."""
        self.buckets: list[Tensor] = []
        self.maps: list[Tensor] = []
        """DDP's maps of the parameters that were used: one element per parameter."""
        self._views: dict[int, Tensor] = {}
        self.hooks, self._sent_as = find_communication_hooks(wrapper)
        self._awaited: dict[int, set[int]] = {}
        """Numbers of the parameters whose gradients are missing in each bucket, by the bucket's storage."""
        self._sent: list[Tensor] = []
        """Copies of buckets in a smaller dtype, which torch's hooks send. They may be needed until backward ends."""

    def begin(self, stack: contextlib.ExitStack) -> None:
        """Replace the wrapper's reducer until `stack` is closed."""
        numbers = range(len(self._parameters))
        if self._wrapper.gradient_as_bucket_view and all(p.grad is not None for p in self._parameters):
            self._views = {n: self._tracker.adopt(self._gradient(n)) for n in numbers}
            self.buckets = [*self._views.values()]
            self._tracker.in_place.update(map(get_storage_id, self.buckets))
        else:
            with self._tracker.unrecorded():
                self._allocate_buckets([*reversed(numbers)] if self._is_new else [*numbers])
        if self._wrapper.static_graph or self._wrapper.find_unused_parameters:
            n_maps = 2 if self._tracker.device == "cpu" else 1  # one map is on the host
            with self._tracker.unrecorded():
                like = torch.empty(len(numbers), dtype=torch.int32, device=self._tracker.device)
                self.maps = [like, *(torch.empty_like(like) for _ in range(n_maps - 1))]
        for tensor in (*self.buckets, *self.maps):
            self._tracker.adopt(tensor)
        for number, parameter in enumerate(self._parameters):
            came = functools.partial(self._handle_gradient, number)
            hook = parameter.register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]
            stack.callback(hook.remove)
        stack.callback(self._tracker.in_place.clear)
        for name, obj in (("reducer", self), ("logger", self), (SYNC_BUFFERS, _broadcast_buffers)):
            stack.enter_context(patch.object(self._wrapper, name, obj))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def prepare_for_backward(self, outputs: object) -> None:
        self._expects = True

    def _rebuild_buckets(self) -> bool:
        if self._is_new or not self._rebuilds or len(self._order) < len(self._parameters):
            return False
        self._is_new = True
        self.buckets.clear()
        self._views.clear()
        self._allocate_buckets([*self._order])
        for number in self._order:
            self._move_into_bucket(number)
        return True

    def _delay_all_reduce(self) -> None:
        self._delays = False
        for number in range(len(self._parameters)):
            self._move_into_bucket(number)

    def _allocate_buckets(self, order: Sequence[int]) -> None:
        """Allocate a bucket for each group of parameters; `order` lists the parameters' numbers."""
        groups = assign_buckets(
            [self._parameters[number] for number in order],
            self._limits_then if self._is_new else self._limits,
            self._sparse,
            order,
        )
        for group in groups if self._is_new else reversed(groups):
            parameters = [self._parameters[number] for number in group]
            if self._sparse[group[0]]:
                continue  # sparse gradients are reduced without a bucket
            with torch.no_grad(), without_function_modes(), self._tracker.ledger.purpose("communication buffers"):
                like = parameters[0]
                bucket = torch.empty(sum(p.numel() for p in parameters), dtype=like.dtype, device=self._tracker.device)
                self.buckets.append(bucket)
                self._tracker.in_place.add(get_storage_id(bucket))
                place = 0
                for number, parameter in zip(group, parameters, strict=True):
                    self._views[number] = bucket.as_strided(parameter.size(), parameter.stride(), place)
                    place += parameter.numel()

    def _handle_gradient(self, number: int, parameter: Tensor) -> None:
        """Handle the arrival of the complete gradient of parameter `number`."""
        if self._expects:
            after_backward(self._end_backward)
            self._order[number] = None
            if not self._delays:
                self._move_into_bucket(number)
            if self._sent_as and number in self._views:
                self._record_arrival(number)

    def _record_arrival(self, number: int) -> None:
        """Record that the gradient of parameter `number` has arrived in its bucket.

        If it is the bucket's last gradient, allocate the copies in other dtypes that communication hooks send.
        """
        if not self._awaited:
            for index, bucket_view in self._views.items():
                self._awaited.setdefault(get_storage_id(bucket_view), set()).add(index)
        awaited, view = self._awaited[get_storage_id(self._views[number])], self._views[number]
        awaited.discard(number)
        if not awaited and view.dtype not in self._sent_as:
            n_elements = view.untyped_storage().nbytes() // view.element_size()
            with torch.no_grad(), without_function_modes(), self._tracker.ledger.purpose("communication buffers"):
                self._sent += [
                    torch.empty(n_elements, dtype=dtype, device=self._tracker.device) for dtype in self._sent_as
                ]

    def _end_backward(self) -> None:
        self._expects = False
        self._sent.clear()
        self._awaited.clear()

    def _move_into_bucket(self, number: int) -> None:
        """Make the gradient of parameter `number` a view of its bucket, if DDP is set to `gradient_as_bucket_view`."""
        view = self._views.get(number)
        if view is None or not self._wrapper.gradient_as_bucket_view or self._parameters[number].grad is None:
            return
        gradient = self._gradient(number)
        if is_fake(gradient) and get_storage_id(gradient) != get_storage_id(view):
            with without_function_modes():
                gradient.data = view

    def _gradient(self, number: int) -> Tensor:
        gradient = self._parameters[number].grad
        assert gradient is not None
        return gradient


def _broadcast_buffers(tensors: Sequence[Tensor], *_: Any) -> None:
    """Allocate and free one concatenated tensor for each dtype of `tensors`, as DDP does to broadcast buffers."""
    sent = [torch.cat([t.reshape(-1) for t in tensors if t.dtype is dtype]) for dtype in {t.dtype for t in tensors}]
    del sent
