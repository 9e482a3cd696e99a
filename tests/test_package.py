import ast
import graphlib
import importlib.metadata
import itertools
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import lowtide
from conftest import RunPython

# The layers, lowest first. Imports run down or sideways, never up.
LAYERS = [
    ["lowtide.units", "lowtide.errors"],
    [
        f"lowtide._{name}"
        for name in (
            *("clock", "code", "interrupts", "nodes", "quiet", "removable", "require", "slots", "standins", "torch"),
        )
    ],
    ["lowtide.memory", "lowtide.planner", "lowtide.report"],
    ["lowtide.runtime.fingerprint"],
    ["lowtide.runtime"],
    ["lowtide.diagnostics.graph"],
    ["lowtide.levers.accumulation"],
    ["lowtide.profiler"],
    ["lowtide.levers"],
    ["lowtide.runtime.guards", "lowtide.api.apply"],
    ["lowtide.estimator"],
    ["lowtide.api.rehearse", "lowtide.api.timeline", "lowtide.api.verify"],
    ["lowtide.api.shape_buckets"],
    ["lowtide.diagnostics.leaks", "lowtide.api.release"],
    ["lowtide.api.fit", "lowtide.diagnostics.oom"],
    ["lowtide.script"],
    ["lowtide.cli.demo"],
    ["lowtide.cli", "lowtide.__main__"],
]
TORCH_FREE = [
    "lowtide.units",
    "lowtide.errors",
    "lowtide.utils.stderr_filter",
    "lowtide.utils.removable",
    "lowtide.utils.optional_deps",
]
TORCH_FREE += ["lowtide.planner", "lowtide.report", "lowtide.diagnostics.oom.explanation"]
TORCH_FREE += [f"lowtide.memory.{name}" for name in ("allocator", "cards", "events", "snapshots")]


DESIGN = Path(__file__).resolve().parents[1] / "docs" / "design.md"


def test_the_documented_table_of_folders_is_in_the_order_of_the_layers() -> None:
    rows = re.findall(r"^\| (`.+?) \|", DESIGN.read_text(encoding="utf-8").partition("## Stages")[2], re.MULTILINE)
    names = [name.removesuffix("/").removesuffix(".py") for row in rows for name in re.findall(r"`([\w./]+)`", row)]
    names = names[: names.index("cli") + 1]
    heights = {name.partition(".")[2]: height for height, layer in enumerate(LAYERS) for name in layer}
    assert [heights[name] for name in names] == sorted(heights[name] for name in names)
    assert set(heights) - set(names) == {"__main__"}


def modules() -> dict[str, ast.Module]:
    """Every source file by its module name, the package itself (the facade over all layers) left out."""
    source = Path(lowtide.__file__).parent
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    del found["lowtide"]
    return found


MODULES = modules()


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The modules that these statements import; a name taken from the facade counts as one taken from its home."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide their layer"
            assert node.module is not None
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                home = lowtide._HOMES.get(alias.name) if node.module == "lowtide" else None
                yield home or (below if below in MODULES else node.module)


def run_at_import(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported: not those in functions or under `if TYPE_CHECKING`."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from run_at_import([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from run_at_import([*node.body, *(s for h in node.handlers for s in h.body), *node.orelse])


def is_or_is_in(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def layer(module: str) -> int:
    for height, packages in enumerate(LAYERS):
        if is_or_is_in(module, packages):
            return height
    pytest.fail(f"{module} is in no layer: add it to LAYERS in {Path(__file__).name}")


@pytest.mark.parametrize("module", MODULES)
def test_no_import_points_up(module: str) -> None:
    below = {other for other in imported(ast.walk(MODULES[module])) if other.startswith("lowtide.")}
    assert [other for other in sorted(below) if layer(other) > layer(module)] == []


def test_no_imports_go_in_a_circle() -> None:
    graph = {name: set(imported(run_at_import(tree.body))) - {name} for name, tree in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("module", [name for name in MODULES if is_or_is_in(name, TORCH_FREE)])
def test_torch_free_code_does_not_even_reach_torch(module: str) -> None:
    reached, new = {module}, {module}
    while new:
        new = {other for name in new & MODULES.keys() for other in imported(ast.walk(MODULES[name]))} - reached
        reached |= new
    assert sorted(name for name in reached if is_or_is_in(name, ["torch"])) == []


KNOWN_TO_ALL = {"_version", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
"""Private names that torch's own documents tell users of, or that have been as they are since its first release."""


def private_to_torch(tree: ast.Module) -> Iterator[str]:
    """The private names of torch that a module uses: imported, reached from `torch`, or of torch's own objects."""
    own = {name for kind in (torch.Tensor, torch.UntypedStorage, nn.Module, Optimizer) for name in dir(kind)}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if is_or_is_in(module, ["torch"]):
                found = [f"{module}.{alias.name}" for alias in names]
            case ast.Import(names=names):
                found = [alias.name for alias in names if is_or_is_in(alias.name, ["torch"])]
            case ast.Attribute(value=ast.Name(id="self")):
                found = []
            case ast.Attribute(attr=name) if name in own:
                found = [name]
            case ast.Attribute() if not is_or_is_in(name := ast.unparse(node), ["torch.ops"]):  # operators' own names
                found = [name] if is_or_is_in(name, ["torch", "nn", "F"]) else []
            case _:
                found = []
        parts = {part for name in found for part in name.split(".")}
        yield from (part for part in parts if part.startswith("_") and not part.startswith("__"))


@pytest.mark.parametrize("module", [name for name in MODULES if name != "lowtide._torch"])
def test_private_names_of_torch_are_used_in_one_module(module: str) -> None:
    assert set(private_to_torch(MODULES[module])) <= KNOWN_TO_ALL


def test_private_names_of_torch_are_seen() -> None:
    code = "import torch._C\nfrom torch.utils._x import y\ntorch.a._b.c\nx._base\nself._base\nx._mine\nx._version"
    assert sorted({*private_to_torch(ast.parse(code))}) == ["_C", "_b", "_base", "_version", "_x"]


def test_what_is_imported_is_declared_as_a_dependency() -> None:
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {
        re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower()
        for requirement in [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    }
    packages = {name.partition(".")[0] for tree in MODULES.values() for name in imported(ast.walk(tree))}
    packages -= {"lowtide", *sys.stdlib_module_names}
    distributions = importlib.metadata.packages_distributions()
    assert {name for package in packages for name in map(str.lower, distributions[package])} <= declared


def test_importing_lowtide_loads_nothing_slow(run_python: RunPython) -> None:
    slow = {"torch", "click", "matplotlib", "numpy", "scipy", "rich"}
    code = f"import sys, lowtide; print(sorted({slow} & set(sys.modules)))"
    assert run_python("-c", code).stdout == "[]\n"


def test_the_public_names_are_the_same_everywhere() -> None:
    tree = ast.parse(Path(lowtide.__file__).read_text(encoding="utf-8"))
    seen_by_type_checkers = {
        alias.name: node.module
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen_by_type_checkers == lowtide._HOMES
    assert {*lowtide._HOMES, "__version__"} == set(lowtide.__all__)
    assert set(lowtide.__all__) <= set(dir(lowtide))


@pytest.mark.parametrize("name", lowtide.__all__)
def test_a_public_name_is_there(name: str) -> None:
    assert getattr(lowtide, name) is getattr(lowtide, name)


def test_another_name_is_not() -> None:
    with pytest.raises(AttributeError, match="'lowtide' has no attribute 'fitt'"):
        _ = lowtide.fitt  # type: ignore[attr-defined]


# What `import torch` may find instead of a torch that serves, and what the error says it found.
NO_TORCH = {
    "absent": ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "No module named 'torch'"),
    "too old": ("__version__ = '2.9.1+cu128'", "Found: torch 2.9.1+cu128 (in "),
    "older than two figures compare": ("__version__ = '1.13.1'", "Found: torch 1.13.1 (in "),
    "broken": ("raise OSError('libcudart.so.13: cannot open shared object file')", "OSError: libcudart.so.13"),
    "something else": ("", "has no version, so it is not PyTorch"),
}


@pytest.fixture(params=NO_TORCH)
def no_torch(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    source, found = NO_TORCH[request.param]
    (tmp_path / "torch.py").write_text(source, encoding="utf-8")
    return tmp_path, found


@pytest.mark.parametrize("name", ["fit", "measure", "Verdict"])
def test_without_torch_a_name_that_needs_it_says_what_to_install(
    name: str, no_torch: tuple[Path, str], run_python: RunPython
) -> None:
    path, found = no_torch
    done = run_python("-c", f"from lowtide import {name}", path=path)
    assert done.returncode == 1
    assert f"lowtide.TorchMissing: lowtide.{name} needs torch 2.10 or newer." in done.stderr
    assert found in done.stderr
    assert 'pip install "lowtide[torch]"' in done.stderr


def test_without_torch_plans_and_errors_still_work(no_torch: tuple[Path, str], run_python: RunPython) -> None:
    names = [name for name, home in lowtide._HOMES.items() if home.startswith(("lowtide.errors", "lowtide.planner"))]
    assert {"LowtideError", "Plan", "Profile", "plan"} < set(names)
    done = run_python("-c", f"from lowtide import {', '.join(names)}", path=no_torch[0])
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "2.14.0a0+git1234567", "3.0.0"])
def test_a_torch_that_is_new_enough_is_taken(version: str, tmp_path: Path, run_python: RunPython) -> None:
    (tmp_path / "torch.py").write_text(f"__version__ = {version!r}", encoding="utf-8")
    code = "from lowtide.utils.optional_deps import require_torch; require_torch('this test')"
    done = run_python("-c", code, path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
