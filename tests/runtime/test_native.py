"""Compiled saved-tensor hooks: used where they are built, the same bits, and Python's wherever they can't be had."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.utils import native_cache

STEP = Path(__file__).parents[1] / "native_step.py"
USED = (
    "import warnings; warnings.simplefilter('always')\n"
    "import lowtide.runtime.engine, lowtide.runtime.recompute\n"
    "from lowtide.runtime import saved_values\n"
    "print('python' if saved_values.native is None else 'compiled')"
)


def run(*args: str, timeout: int = 300, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run Python with these variables of the environment; without LOWTIDE_NATIVE unless it is among them."""
    env = {name: it for name, it in os.environ.items() if name != native_cache.SETTING} | environment
    env["PYTHONPATH"] = os.pathsep.join([str(Path(lowtide.__file__).parents[1]), str(STEP.parent)])
    return subprocess.run(
        [sys.executable, *args], env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_hooks_in_python_are_used_where_nothing_is_built(tmp_path):
    done = run("-c", USED, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert (done.stdout, done.stderr) == ("python\n", "")
    assert not [*tmp_path.iterdir()]  # nothing is built, either
    said = run("-m", "lowtide", "--version", TORCH_EXTENSIONS_DIR=str(tmp_path)).stdout.splitlines()[3]
    assert said == "hooks: Python (`lowtide native --build` compiles them, if there is a C++ compiler)"


def test_a_broken_library_is_said_once_and_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    library = native_cache.library(torch.__version__)
    library.parent.mkdir(parents=True)
    library.write_bytes(b"no library")
    done = run("-c", USED, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.stdout == "python\n"
    assert done.stderr.count("compiled hooks could not be loaded") == 1
    assert "lowtide native --build" in done.stderr
    off = run("-c", USED, TORCH_EXTENSIONS_DIR=str(tmp_path), LOWTIDE_NATIVE="0")
    assert (off.stdout, off.stderr) == ("python\n", "")


@pytest.mark.slow
def test_a_build_without_a_compiler_is_said_once_and_leaves_nothing(tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent)])
    done = run("-c", USED, TORCH_EXTENSIONS_DIR=str(tmp_path), LOWTIDE_NATIVE="1", PATH=path, CXX="no-compiler")
    assert done.stdout == "python\n"
    assert done.stderr.count("compiled hooks could not be built") == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    by_hand = run(
        "-m", "lowtide", "native", "--build", TORCH_EXTENSIONS_DIR=str(tmp_path), PATH=path, CXX="no-compiler"
    )
    assert by_hand.returncode == 1
    assert by_hand.stderr.startswith("could not be compiled: ")


def test_the_library_is_of_one_torch_and_one_source(monkeypatch):
    one, other = native_cache.library("2.13.0"), native_cache.library("2.13.1")
    assert one != other
    assert native_cache.SOURCE.is_file()  # part of the package


def test_the_source_states_the_torch_that_its_private_names_are_from():
    assert "Private names of torch, read in 2.13" in native_cache.SOURCE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def built():
    """Compiled hooks, in torch's own folder of extensions: a minute, unless they are there."""
    if not native_cache.library(torch.__version__).exists():
        done = run("-m", "lowtide", "native", "--build", timeout=900)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["gpt2", "bert", "resnet"])
def test_real_models_have_the_same_bits_bytes_and_operators(built, model):
    """Gradients and losses of four steps, saved tensors by kind and their bytes, operators, and what drifted."""
    done = [run(str(STEP), model, LOWTIDE_NATIVE=setting) for setting in "01"]
    (python, *lines), (compiled, *others) = (each.stdout.splitlines() for each in done)
    assert (python, compiled) == ("python", "compiled"), done[1].stderr
    assert [line.split()[0] for line in lines] == ["kept", "recomputed", "captured", "replayed", "offloaded"]
    assert lines == others


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled_hooks_pass_the_tests_of_those_in_python(built):
    folder, root = Path(__file__).parent, Path(__file__).parents[2]
    options = ("-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", f"--rootdir={root}")
    done = run(
        *("-m", "pytest", *options, str(folder)),
        LOWTIDE_NATIVE="1",
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_names_that_the_hooks_look_up_are_declared_and_exist_in_the_package() -> None:
    """So that a renamed function is found without a compiler."""
    source = native_cache.SOURCE.read_text(encoding="utf-8")
    declared = set(re.findall(r"\bX\((\w+)\)", source))
    assert set(re.findall(r"\b(?:s|lent)_(\w+)\b", source)) == declared
    package = "\n".join(path.read_text(encoding="utf-8") for path in native_cache.SOURCE.parents[1].rglob("*.py"))
    assert [name for name in sorted(declared) if not re.search(rf"\b{name}\b", package)] == []
