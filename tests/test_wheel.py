"""The package from its wheel, in an empty folder: commands, configurations, models, types.

The wheel is built from the source distribution, so that both are whole. It lies in an environment
of its own, which finds its dependencies where this one does but not this one's editable install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_paths

import pytest

import d2f

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SOURCES = ("d2f", "decode", "distill", "triton_kernels", "configs")
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
SMALL = ("--steps", "1", "--data.rows", "2", "--tracker", "none")


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it, and an empty folder to work in."""

    environment: Path
    packages: Path
    folder: Path

    def run(self, *words: str, status: int = 0) -> str:
        """Run a program of the environment, or a Python for words that begin with a flag; what it
        printed, standard error last."""
        name = "python" if words[0].startswith("-") else words[0]
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MYPY"))}
        done = subprocess.run(
            [self.environment / "bin" / name, *words[name != "python" :]],
            cwd=self.folder,
            env=variables | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> tuple[Path, Path]:
    """The environment, and where its packages lie."""
    place = tmp_path_factory.mktemp("wheel")
    source, made = place / "source", place / "environment"
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    venv.create(made, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-index", "--no-deps"]
    for words in (
        [sys.executable, "-c", build, place],
        [*pip, "wheel", *offline, "--no-build-isolation", "-w", place, "{sdist}"],
        [*pip, "--python", made / "bin" / "python", "install", *offline, "{wheel}"],
    ):
        found = {"{sdist}": place.glob("*.tar.gz"), "{wheel}": place.glob("*.whl")}
        words = [next(found[w]) if w in found else w for w in words]
        done = subprocess.run(words, cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    paths = get_paths(vars={"base": str(made), "platbase": str(made)})
    packages = Path(paths["purelib"])
    # Names of folders only: what their own .pth files do, as that of an editable install, is left.
    others = dict.fromkeys(get_paths()[key] for key in ("purelib", "platlib"))
    (packages / "dependencies.pth").write_text("".join(f"{other}\n" for other in others))
    return made, packages


@pytest.fixture
def installed(environment, tmp_path) -> Installed:
    return Installed(*environment, tmp_path)


def test_everything_is_imported_from_the_wheel(installed):
    names = SOURCES[:4]
    code = f"import {', '.join(names)}\nfor m in {', '.join(names)}: print(m.__file__)"
    places = installed.run("-c", code).split()
    assert places == [str(installed.packages / name / "__init__.py") for name in names]


def test_the_wheel_has_what_the_repository_has(installed):
    """Every module, configuration, model and py.typed, and nothing else."""

    def files(folder: Path, names: tuple[str, ...]) -> set[str]:
        paths = [path for name in names for path in (folder / name).rglob("*") if path.is_file()]
        return {str(p.relative_to(folder)) for p in paths if p.suffix != ".pyc"}

    there = files(ROOT, SOURCES)
    expected = {"d2f/" + name if name.startswith("configs/") else name for name in there}
    assert files(installed.packages, SOURCES[:4]) == expected


def test_the_command_decodes_trains_and_finds_configurations_by_name(installed):
    assert installed.run("d2f", "--version") == f"d2f-toolkit {d2f.__version__}\n"
    words = ("decode", "--model", "tiny-d2f", "--problems", "1", "--tasks", "story", "--quiet")
    assert "tokens" in installed.run("d2f", *words, "--config", "tiny-d2f-story")
    assert "usage: d2f compare" in installed.run("d2f", "compare", "--help")
    assert not list(installed.folder.iterdir())
    path = Path(installed.run("d2f", "configs", "ddp").strip())
    assert path == installed.packages / "d2f" / "configs" / "accelerate" / "ddp.yaml"


def test_training_outside_the_repository(installed):
    installed.run("d2f", "train", "--config", "tiny-d2f", *SMALL, "--output", "run")
    assert (installed.folder / "run" / "model" / "model.safetensors").is_file()
    card = (installed.folder / "run" / "model" / "README.md").read_text()
    assert "`d2f train --config config.yaml`" in card


def test_files_of_the_same_names_in_the_working_folder_do_not_disturb_the_command(installed):
    for name in ("d2f", "decode", "distill", "triton_kernels"):
        (installed.folder / f"{name}.py").write_text("raise SystemExit('mine')\n")
    assert "d2f evaluate" in installed.run("d2f", "evaluate", "--help")
    said = installed.run("-c", "import distill", status=1)
    assert "mine" in said
