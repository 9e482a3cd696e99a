"""Replacements for functions of torch are removed in any order, and those of other code stay in place."""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide._torch.compiled_code import not_compiled_alone
from lowtide._torch.patching import replace_function, wrap_module_calls
from lowtide.script.step_detector import StepDetector
from lowtide.script.step_listener import StepListener


class Owner:
    @staticmethod
    def name(text: str) -> str:
        return text


def saying(word: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    return lambda function: lambda text: f"{word}({function(text)})"


def test_each_may_go_first() -> None:
    owner: Any = type("Owner", (), {"name": lambda text: text})
    original = vars(owner)["name"]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        removes = [replace_function(owner, "name", saying(word)) for word in "abc"]
        assert owner.name("x") == "c(b(a(x)))"
        words = list("abc")
        for place in order:
            removes[place]()
            removes[place]()  # twice is once
            words.remove("abc"[place])
            expected = "x"
            for word in words:
                expected = f"{word}({expected})"
            assert owner.name("x") == expected
        assert vars(owner)["name"] is original


def test_others_keep_their_place() -> None:
    owner: Any = type("Owner", (), {"name": lambda text: text})
    remove = replace_function(owner, "name", saying("a"))
    below = owner.name
    owner.name = staticmethod(lambda text: f"other({below(text)})")
    assert owner.name("x") == "other(a(x))"
    remove()
    assert owner.name("x") == "other(x)"
    remove = replace_function(owner, "name", saying("b"))
    assert owner.name("x") == "other(b(x))"
    remove()
    assert owner.name("x") == "other(x)"
    owner.name = below  # the other code takes its own replacement off
    remove()
    assert owner.name("x") == "x"


def test_steps_of_two_threads_may_overlap() -> None:
    before = vars(torch.autograd)["_engine_run_backward"]
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with lowtide.step():
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=other)
    with lowtide.step():
        thread.start()
        assert entered.wait(60)
    left.set()
    thread.join()
    assert vars(torch.autograd)["_engine_run_backward"] is before


def test_a_step_has_nothing_to_do_with_forwards_of_other_threads() -> None:
    model, inside, over = nn.Linear(4, 4), threading.Event(), threading.Event()
    outputs: list[torch.Tensor] = []

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            over.wait(60)
            return model(x)

    thread = threading.Thread(target=lambda: outputs.append(Slow()(torch.ones(1, 4))))
    thread.start()
    assert inside.wait(60)
    with lowtide.step() as step:
        over.set()
        thread.join()
        kept = model(torch.ones(1, 4))
        kept.sum().backward(retain_graph=True)
        outputs[0].sum().backward(inputs=[model.weight], retain_graph=True)
    assert step.n_released >= 1
    assert kept.grad_fn is None
    assert outputs[0].grad_fn is not None


def test_a_watch_that_is_paused_in_a_step_stays_paused() -> None:
    model = nn.Linear(4, 4)
    with lowtide.watch(model) as watch:
        with lowtide.step():
            watch.pause()
        assert not vars(torch.autograd)["_engine_run_backward"].__qualname__.startswith("Events")
    model(torch.ones(1, 4)).sum().backward()


def test_calls_of_modules_may_have_arguments_of_any_name() -> None:
    class OpWorkspaces(nn.Module):
        def forward(self, x: int, *, module: int, call: int, begins: int, ends: int, plain: int) -> int:
            return x + module + call + begins + ends + plain

    calls: list[object] = []
    given = {"module": 1, "call": 2, "begins": 3, "ends": 4, "plain": 5}
    remove = wrap_module_calls(lambda module: calls.append(type(module)), lambda module, output: calls.append(output))
    with StepDetector(StepListener()):
        assert OpWorkspaces()(6, **given) == 21
    remove()
    assert calls == [OpWorkspaces, 21]
    assert OpWorkspaces()(6, **given) == 21
    assert len(calls) == 2


def test_the_end_of_a_call_that_raises_is_reported() -> None:
    class Raises(nn.Module):
        def forward(self) -> None:
            raise ValueError("no")

    calls: list[object] = []
    remove = wrap_module_calls(lambda module: calls.append("begins"), lambda module, output: calls.append(output))
    with pytest.raises(ValueError, match="no"):
        Raises()()
    remove()
    assert calls == ["begins", None]


class Sliced(nn.Module):
    """A model that makes a module in forward, as transformers' decoders do with `self.layers[:n]`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        return x


def test_compiled_code_that_makes_modules_is_not_split() -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(replace_function(nn.Module, "__init__", functools.partial(functools.partial, called)))
        compiled = torch.compile(Sliced(), backend="eager", fullgraph=True)
        assert compiled(torch.ones(2, 4)).shape == (2, 4)


def test_compiled_code_does_not_begin_in_a_replacement() -> None:
    """Numbers of Lowtide's own would be sizes of the graph with `dynamic=True`."""
    seen = list[str]()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.append(graph.code)
        return graph.forward

    plain, beside = Sliced(), Sliced()
    torch.compile(plain, backend=backend, dynamic=True)(torch.ones(2, 4))
    torch._dynamo.reset()  # it would take the code of the other one
    with contextlib.ExitStack() as stack:
        for name in ("__call__", "__init__"):
            stack.callback(replace_function(nn.Module, name, functools.partial(functools.partial, called)))
        torch.compile(beside, backend=backend, dynamic=True)(torch.ones(2, 4))
    assert len(seen) == 2
    assert seen[0] == seen[1]


@not_compiled_alone
def called(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return plain(*args, **kwargs)
