"""Parts of a release: its version, its changelog, its requirements, and its packages."""

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import jinja2
import pytest
import yaml

import package_version
from lowtide.utils.installed_versions import RELEASE, TESTED_TORCH

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the files that the version is read from."""
    folder = tmp_path / "checkout"
    for name in ("src/lowtide/utils/installed_versions.py", ".gitattributes", ".git_archival.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    git(tmp_path, "init", str(folder))
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "First")
    return folder


def archived(checkout: Path) -> Path:
    """Return the folder of an archive that git makes."""
    folder = checkout.with_name("archive")
    git(checkout, "archive", "--format=zip", "--output=../source.zip", "HEAD")
    with zipfile.ZipFile(checkout.with_name("source.zip")) as archive:
        archive.extractall(folder)
    return folder


def test_the_version_is_that_of_the_last_tag_in_a_checkout_and_in_an_archive(checkout: Path) -> None:
    assert package_version.version(checkout) == RELEASE  # no tag so far
    git(checkout, "tag", "v1.2.3")
    assert package_version.version(checkout) == "1.2.3"
    assert package_version.version(archived(checkout)) == "1.2.3"
    git(checkout, "commit", "--allow-empty", "-m", "Second")
    assert re.fullmatch(r"1\.2\.4\.dev1\+g[0-9a-f]+", package_version.version(checkout))


def test_without_tags_the_version_is_the_release_that_the_source_names(checkout: Path) -> None:
    assert package_version.version(archived(checkout)) == RELEASE
    (checkout / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: lowtide\nVersion: 7.8.9\n", encoding="utf-8")
    assert package_version.version(checkout) == "7.8.9"  # an sdist


def test_the_newest_version_of_the_changelog_is_the_release() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changelog, re.M)[0] == RELEASE
    assert f"version: {RELEASE}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f'"{RELEASE}"' in (ROOT / "recipe/meta.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["README.md", "README.ja.md"])
def test_the_readme_names_the_versions_of_torch_that_were_tested(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    (paragraph,) = (line for line in text.split("\n\n") if "2.13" in line and "`loss head`" in line and "3.11" in line)
    named, _, _ = paragraph.partition("`loss head`")
    assert {tuple(map(int, version)) for version in re.findall(r"\b(2)\.(\d+)", named)} == set(TESTED_TORCH)


def test_the_conda_recipe_requires_what_the_package_requires() -> None:
    text = (ROOT / "recipe/meta.yaml").read_text(encoding="utf-8")
    recipe = yaml.safe_load(jinja2.Template(text).render(environ={}, PYTHON="python"))
    assert recipe["package"] == {"name": PROJECT["name"], "version": RELEASE}
    assert recipe["about"]["summary"] == PROJECT["description"]
    python = f"python {PROJECT['requires-python']}"
    requirements = recipe["requirements"]
    assert requirements["run"] == [python, *(_spaced(each) for each in PROJECT["dependencies"])]
    optional = [_spaced(each).replace("torch", "pytorch") for each in PROJECT["optional-dependencies"]["torch"]]
    assert requirements["run_constrained"] == optional
    built_by = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    assert {python, *map(_spaced, built_by)} <= {*requirements["host"]}
    assert recipe["build"]["entry_points"] == [f"{name} = {place}" for name, place in PROJECT["scripts"].items()]


def _spaced(requirement: str) -> str:
    """Return a requirement as conda writes it: `click>=8.2` -> `click >=8.2`."""
    return re.sub(r"(?=[<>=])", " ", requirement, count=1)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("build") is None or find_spec("twine") is None, reason="needs build and twine")
def test_the_packages_pass_twine_and_hold_what_they_should(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)], check=True)
    built = sorted(tmp_path.iterdir())
    assert [each.name.rpartition(".")[2] for each in built] == ["whl", "gz"]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, built)], check=True)
    names = zipfile.ZipFile(built[0]).namelist()
    assert "lowtide/memory/gpus.toml" in names
    assert "lowtide/report/page.css" in names
    assert not [name for name in names if name.startswith(("tests", "bench", "tools"))]
