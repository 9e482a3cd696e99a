import ast
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
from long_description import RELATIVE_LINK, long_description


def modules() -> dict[str, Path]:
    """Every source file by its module name, the package itself (the facade over all layers) left out."""
    source = Path(lowtide.__file__).parent
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path
    del found["lowtide"]
    return found


MODULES = modules()


def parsed(module: str) -> ast.Module:
    """Parse a source file: only where a test reads it, for all of them take seconds in each worker."""
    return ast.parse(MODULES[module].read_text(encoding="utf-8"), str(MODULES[module]))


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


def is_or_is_in(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


REGISTRIES = ("lowtide.runtime.recipes", "lowtide.estimator.cuda.ops")
"""Folders with a file for each kind of operator: the same kind has the same name in both."""


def test_no_two_files_have_the_same_name() -> None:
    folders: dict[str, list[str]] = {}
    for module in MODULES:
        folder, _, name = module.rpartition(".")
        folders.setdefault(name, []).append(folder)
    allowed = [sorted(REGISTRIES), ["lowtide.api", "lowtide.cli"]]
    twice = {name: sorted(where) for name, where in folders.items() if len(where) > 1 and name != "__main__"}
    assert {name: where for name, where in twice.items() if where not in allowed} == {}


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


@pytest.mark.parametrize("module", [name for name in MODULES if not is_or_is_in(name, ["lowtide._torch"])])
def test_private_names_of_torch_are_used_in_one_package(module: str) -> None:
    assert set(private_to_torch(parsed(module))) <= KNOWN_TO_ALL


def test_private_names_of_torch_are_seen() -> None:
    code = "import torch._C\nfrom torch.utils._x import y\ntorch.a._b.c\nx._base\nself._base\nx._mine\nx._version"
    assert sorted({*private_to_torch(ast.parse(code))}) == ["_C", "_b", "_base", "_version", "_x"]


def test_imported_packages_are_declared_as_dependencies() -> None:
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {
        re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower()
        for requirement in [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    }
    packages = {name.partition(".")[0] for module in MODULES for name in imported(ast.walk(parsed(module)))}
    packages -= {"lowtide", "triton", *sys.stdlib_module_names}  # triton comes with torch, where there is one
    distributions = importlib.metadata.packages_distributions()
    assert {name for package in packages for name in map(str.lower, distributions.get(package, [package]))} <= declared


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


def test_a_torch_newer_than_any_tested_is_taken_and_said_once(tmp_path: Path, run_python: RunPython) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '3.0.0'", encoding="utf-8")
    code = "from lowtide.utils.optional_deps import require_torch; require_torch('one'); require_torch('two')"
    done = run_python("-c", code, path=tmp_path)
    assert done.returncode == 0
    assert done.stderr.count("torch 3.0.0 is newer than any that Lowtide was tested with, up to 2.15") == 1


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "2.14.0a0+git1234567"])
def test_a_torch_that_is_new_enough_is_taken(version: str, tmp_path: Path, run_python: RunPython) -> None:
    (tmp_path / "torch.py").write_text(f"__version__ = {version!r}", encoding="utf-8")
    code = "from lowtide.utils.optional_deps import require_torch; require_torch('this test')"
    done = run_python("-c", code, path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_links_of_the_long_description_work_outside_of_a_checkout() -> None:
    readme = "[file](docs/a.md#b), ![a picture](docs/c.svg), [web](https://pypi.org), [part](#more)"
    assert long_description(readme, None) == "file, *a picture*, [web](https://pypi.org), [part](#more)"
    assert long_description(readme, "https://example.org/x/") == (
        "[file](https://example.org/x/blob/HEAD/docs/a.md#b), ![a picture](https://example.org/x/raw/HEAD/docs/c.svg), "
        "[web](https://pypi.org), [part](#more)"
    )
    own = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    assert RELATIVE_LINK.search(own)
    assert RELATIVE_LINK.search(long_description(own, None)) is None
