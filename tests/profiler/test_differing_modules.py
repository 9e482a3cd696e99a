"""Differences between two steps, by module."""

from lowtide.profiler.differing_modules import CallShape, find_differing_modules

ROOT = CallShape("", None, 3)


def calls(*inside: tuple[str, int, int]) -> list[CallShape]:
    """The model, and calls in it: path, number of the call that it is in, tensors saved."""
    return [ROOT, *(CallShape(path, parent, n_saved) for path, parent, n_saved in inside)]


def test_equal_steps_have_nothing_uneven() -> None:
    assert find_differing_modules(calls(("a", 0, 2), ("a.b", 1, 5)), calls(("a", 0, 2), ("a.b", 1, 5))) == frozenset()


def test_the_innermost_modules_that_saved_something_else() -> None:
    one = calls(("a", 0, 2), ("a.b", 1, 5), ("c", 0, 1), ("d", 0, 4))
    assert find_differing_modules(one, calls(("a", 0, 2), ("a.b", 1, 6), ("c", 0, 1), ("d", 0, 5))) == {"a.b", "d"}


def test_a_module_whose_calls_inside_are_others() -> None:
    one = calls(("a", 0, 2), ("a.b", 1, 5), ("a.b", 1, 5))
    assert find_differing_modules(one, calls(("a", 0, 2), ("a.b", 1, 5))) == {"a"}
    assert find_differing_modules(one, calls(("a", 0, 2), ("a.b", 1, 5), ("a.c", 1, 5))) == {"a"}


def test_the_model_itself() -> None:
    assert find_differing_modules(calls(("a", 0, 2)), calls(("b", 0, 2))) == {""}
    assert find_differing_modules([ROOT], [CallShape("", None, 4)]) == {""}
    assert find_differing_modules([ROOT], [ROOT, ROOT]) == {""}
