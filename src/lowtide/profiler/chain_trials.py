"""Try chains of elementwise recomputes in one kernel, and choose the kinds of nodes that plans may compute so.

When the audit's backward is about to read a tensor, the longest chain that ends with its recompute runs, from tensors
that a plan might keep. It has to give the tensor's bits. If it does not, each of its operators runs alone, and the
kinds of those that differ are refused; all kinds of the chain if none differs alone, or if it fails.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from lowtide._torch.device_timing import Stopwatch
from lowtide.profiler.implementations import CLEARLY
from lowtide.runtime.recipes import IMPLEMENTATIONS, RECIPES
from lowtide.runtime.recipes.chains import CHAIN
from lowtide.runtime.recompute_chain import Chain, ChainedRecompute, can_chain, find_chain, get_pending_recompute
from lowtide.state.bitwise import identical
from lowtide.state.step_outcome import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from lowtide.runtime.recompute import Recompute
    from lowtide.runtime.saved_values import Value


class ChainTrials:
    """Trials of the chains of one audited step."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._makers: weakref.WeakKeyDictionary[Value, ChainedRecompute] = weakref.WeakKeyDictionary()
        """Exact recomputes of the values that the step saves."""
        self._exact: set[str] = set()
        self._refused: set[str] = set()
        self._fused_ms, self._single_ms = 0.0, 0.0

    def list_first(self) -> dict[str, str]:
        """Return the implementation `CHAIN` for each node where it runs the first implementation outside of chains."""
        if not can_chain(self._place):
            return {}
        functions = {kind: others[CHAIN].function for kind, others in IMPLEMENTATIONS.items() if CHAIN in others}
        return {kind: CHAIN for kind, function in functions.items() if function is RECIPES[kind].function}

    def add(self, value: Value, maker: Recompute) -> None:
        """Let chains contain `value`, for which `maker` gives the original bits."""
        if isinstance(maker, ChainedRecompute):
            self._makers[value] = maker

    def run(self, value: Value, get_ms: Callable[[Value], float]) -> None:
        """Try the chain that ends with the kept `value`, if there is one. `get_ms` returns the time of one recompute of
        a value.
        """
        chain = find_chain(value, self._get_maker) if value in self._makers else None
        if chain is None:
            return
        kinds = {maker.recipe.node for _, maker in chain.members}
        try:
            is_exact = self._is_exact(chain)
            if is_exact is None:
                return
            if is_exact:
                prepared = chain.prepare((len(chain.members) - 1,))
                assert prepared is not None
                watch = Stopwatch(self._place)
                watch.start()
                chain.launch(prepared)
                spent = watch.stop()
                self._fused_ms += spent.device + spent.host
                self._single_ms += sum(get_ms(member) for member, _ in chain.members)
                self._exact |= kinds
            else:
                self._refused |= self._find_differing(chain) or kinds
        except Exception as error:  # a kernel may fail in any way: its operators are not chained
            if is_out_of_memory(error):
                return
            self._refused |= kinds

    def choose(self) -> dict[str, str]:
        """Return the implementation `CHAIN` for each kind of node that was exact in all chains; none if the kernels did
        not take clearly less time than single recomputes.
        """
        if self._fused_ms > CLEARLY * self._single_ms:
            return {}
        return dict.fromkeys(sorted(self._exact - self._refused), CHAIN)

    def clear(self) -> None:
        self._makers.clear()

    def _get_maker(self, value: Value) -> Recompute | None:
        """Return the recompute of a value that chains may contain: its own, or an exact one of a kept value."""
        if (pending := get_pending_recompute(value)) is not None:
            return pending
        maker = self._makers.get(value)
        return None if maker is None or maker.recipe.node in self._refused else maker

    def _is_exact(self, chain: Chain) -> bool | None:
        """Return True if the chain gives the bits of its last value; None if it has no kernel."""
        made, original = compute_last(chain), chain.members[-1][0].tensor
        return None if made is None or original is None else identical(made, original)

    def _find_differing(self, chain: Chain) -> set[str]:
        """Return the kinds of nodes whose operators give other bits alone."""
        differing = set[str]()
        intermediates: dict[Value, Tensor] = {}
        try:
            for value, maker in chain.members:
                for intermediate, tensor in intermediates.items():  # the last recipe that read it has freed it
                    intermediate.tensor = tensor
                operands = tuple(handle for handle in maker.operands if handle is not None)
                alone = compute_last(Chain([(value, maker)], operands))  # first: the recipe may overwrite an operand
                if value.tensor is None:
                    intermediates[value] = maker.make(value)
                original = intermediates.get(value, value.tensor)
                if alone is not None and original is not None and not identical(alone, original):
                    differing.add(maker.recipe.node)
        finally:
            for value in intermediates:
                value.tensor = None
        return differing


def compute_last(chain: Chain) -> Tensor | None:
    """Return the result of a chain's last recompute, computed by one kernel; None if there is no kernel."""
    prepared = chain.prepare((len(chain.members) - 1,))
    return None if prepared is None else chain.launch(prepared)[0]
