"""Learn scratch memory by trials: run an operator once on its own, on real tensors, and record its allocations.

An operator runs as it is if its tensors have at most LARGEST_TRIAL bytes. A larger convolution runs on a few rows of
its batch and on twice as many, because its memory grows linearly with the rows. Any other larger operator stays
unknown. Results of trials are kept until the process ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.fake_modes import on_real_tensors
from lowtide._torch.pytree import tree_leaves, tree_map
from lowtide._torch.tensors import find_parts, get_storage_id
from lowtide.estimator.tensor_geometry import Geometry
from lowtide.memory.cpu_recorder import CpuRecorder
from lowtide.memory.events import Allocate, EventStream, Free, Mark

if TYPE_CHECKING:
    from collections.abc import Hashable

aten = torch.ops.aten

LARGEST_TRIAL = 2**26
"""Largest number of bytes of arguments with which an operator runs as it is."""

FEW_ROWS = 8


_BATCHED = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
"""Operators with a batch -> number of leading arguments whose first dimension is the batch."""


@dataclass(frozen=True, slots=True)
class _Script:
    """Recorded memory of one run of an operator.

    `events` holds allocations (+bytes) and frees (-bytes) in order. `results` holds the bytes of each result, 0 for a
    result that is an argument.
    """

    events: tuple[int, ...]
    results: tuple[int, ...]

    def extrapolate(self, other: _Script, times: float) -> _Script:
        """Extrapolate linearly: return `self` plus `times` the difference from `self` to `other`."""
        events, results = (
            tuple(round(a + (b - a) * times) for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in ((self.events, other.events), (self.results, other.results))
        )
        return _Script(events, results)

    def count_beyond_results(self) -> int:
        """Return the bytes at the peak without those of the results."""
        level = peak = 0
        for n_bytes in self.events:
            level += n_bytes
            peak = max(peak, level)
        return max(0, peak - sum(self.results))


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator call with shapes and strides instead of tensors. Its scratch memory depends on nothing else."""

    func: Any
    args: Any
    kwargs: Any

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any) -> _Call:
        return cls(func, *tree_map(lambda leaf: Geometry.of(leaf) if _is_tensor(leaf) else leaf, (args, kwargs)))

    @property
    def geometries(self) -> list[Geometry]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Geometry)]

    @property
    def rows(self) -> int:
        """Number of rows of the batch; 0 for operators without a batch."""
        return int(self.args[0].shape[0]) if self.func in _BATCHED else 0

    @property
    def n_bytes(self) -> int:
        return sum(geometry.n_bytes for geometry in self.geometries)

    def key(self) -> Hashable:
        return (self.func, torch.get_num_threads(), *tree_leaves((self.args, self.kwargs)))

    def trials(self) -> list[Callable[[Callable[[str], None]], tuple[int, ...]]]:
        """Return functions that run the call once each: one with all rows, two with fewer rows, or none at all."""
        if not all(geometry.whole for geometry in self.geometries):
            return []
        if self.n_bytes <= LARGEST_TRIAL:
            return [partial(self._run, self.rows)]
        if self.rows <= 2 * FEW_ROWS:
            return []
        return [partial(self._run, rows) for rows in (FEW_ROWS, 2 * FEW_ROWS)]

    def learned(self, scripts: list[_Script]) -> _Script | None:
        """Derive the memory of this call from `scripts`, those of its trials. Return None if that is impossible."""
        if len(scripts) < 2:
            return scripts[0] if scripts else None
        few, more = scripts
        if (len(few.events), len(few.results)) != (len(more.events), len(more.results)):
            return None
        return few.extrapolate(more, (self.rows - FEW_ROWS) / FEW_ROWS)

    def _real(self, rows: int) -> tuple[list[Any], Any]:
        batched = _BATCHED.get(self.func, 0)
        args = [tree_map(partial(_real, rows=rows if n < batched else 0), arg) for n, arg in enumerate(self.args)]
        if self.func is aten.mkldnn_rnn_layer_backward.default:
            args[_WORKSPACE] = _compute_workspace(args)
        return args, tree_map(_real, self.kwargs)

    def _run(self, rows: int, mark: Callable[[str], None]) -> tuple[int, ...]:
        args, kwargs = self._real(rows)
        counted = {get_storage_id(tensor) for tensor in _list_dense_parts(args, kwargs)}
        mark("begin")
        try:
            out = self.func(*args, **kwargs)
        finally:
            mark("end")
        sizes = []
        for result in _list_dense_parts(out):
            sizes.append(0 if get_storage_id(result) in counted else result.untyped_storage().nbytes())
            counted.add(get_storage_id(result))
        return tuple(sizes)


def _list_dense_parts(*values: Any) -> Iterator[Any]:
    """Yield the dense tensors that make up all tensors in nested structures."""
    return (part for leaf in tree_leaves(values) if _is_tensor(leaf) for part in find_parts(leaf))


_table: dict[Hashable, _Script | None] = {}


class Trials:
    """Scratch memory that was learned by trials, and the operator calls to try next."""

    def __init__(self) -> None:
        self._wanted: dict[Hashable, _Call] = {}
        self._untried: dict[str, int] = {}

    def of(self, func: Any, args: Any, kwargs: Any) -> tuple[dict[int, int], list[int]]:
        """Return the bytes of new results by position, and the scratch bytes at the peak, from a trial of this call.

        Both are empty for a call that has not been tried yet; `learn` will try it.
        """
        call = _Call.of(func, args, kwargs)
        key = call.key()
        if key not in _table:
            self._wanted.setdefault(key, call)
            return {}, []
        script = _table[key]
        if script is None:
            self._leave(call)
            return {}, []
        by_contents = torch.Tag.dynamic_output_shape in func.tags  # in the trial a mask selects all elements
        sizes = {} if by_contents else {number: n_bytes for number, n_bytes in enumerate(script.results) if n_bytes}
        return sizes, [script.count_beyond_results()]

    def leave(self, func: Any, args: Any, kwargs: Any) -> None:
        """List this operator in `unknown`, because no trial can show the scratch memory of the call."""
        self._leave(_Call.of(func, args, kwargs))

    def _leave(self, call: _Call) -> None:
        name = str(call.func)
        self._untried[name] = max(call.n_bytes, self._untried.get(name, 0))

    @property
    def unknown(self) -> dict[str, int]:
        """Operators with unknown scratch memory -> bytes of the arguments in their largest call."""
        largest = dict(self._untried)
        for call in self._wanted.values():
            largest[str(call.func)] = max(call.n_bytes, largest.get(str(call.func), 0))
        return largest

    def learn(self) -> None:
        """Run the trials of calls that `of` did not know, and remember their memory.

        Do not call this inside a backward pass, or while another recorder is active.
        """
        wanted, self._wanted = self._wanted, {}
        if not wanted:
            return
        results: list[tuple[Hashable, tuple[int, ...] | None]] = []
        recorder = CpuRecorder(watch=())
        with on_real_tensors(), torch.enable_grad(), torch.random.fork_rng(devices=()), recorder:
            for key, call in wanted.items():
                for run in call.trials():
                    try:
                        results.append((key, run(recorder.mark)))
                    except (RuntimeError, ValueError, TypeError, NotImplementedError):
                        results.append((key, None))
        scripts: dict[Hashable, list[_Script]] = {key: [] for key in wanted}
        for (key, sizes), events in zip(results, _split_at_marks(recorder.stream), strict=True):
            if sizes is not None:
                scripts[key].append(_Script(events, sizes))
        _table.update({key: call.learned(scripts[key]) for key, call in wanted.items()})


def _split_at_marks(stream: EventStream) -> list[tuple[int, ...]]:
    trials: list[list[int]] = []
    inside = False
    for event in stream:
        if type(event) is Mark:
            inside = event.label == "begin"
            if inside:
                trials.append([])
        elif inside:
            trials[-1].append(event.bytes if type(event) is Allocate else -event.bytes if type(event) is Free else 0)
    return [tuple(events) for events in trials]


def _real(leaf: Any, rows: int = 0) -> Any:
    """Convert a Geometry to a real tensor (with `rows` rows if not 0). Clone a generator. Return other leaves as is."""
    if isinstance(leaf, torch.Generator):
        return leaf.clone_state()
    return leaf.real(rows) if isinstance(leaf, Geometry) else leaf


_WORKSPACE = 22


def _compute_workspace(args: list[Any]) -> Any:
    """Run a recurrent layer's forward and return its workspace. A trial of backward crashes without one."""
    reverse, mode, hidden_size, layers, biases, _, bidirectional, batch_sizes, batch_first = args[13:_WORKSPACE]
    settings = (reverse, batch_sizes, mode, hidden_size, layers, biases, bidirectional, batch_first, True)
    return torch.ops.aten.mkldnn_rnn_layer(*args[:7], *settings)[3]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)
