"""The command d2f: one name for every command, and what is said where a user's file hides one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import d2f
from d2f.command import COMMANDS

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "accelerate", "peft", "triton")
USUAL = {
    "d2f.shipped": "d2f configs",
    "distill.train": "accelerate launch -m distill.train",
    "distill.data.__main__": "python -m distill.data",
}


def started(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_version_and_help_list_the_commands_without_anything_heavy():
    code = (
        "import sys; from d2f.command import main\n"
        "try: main(sys.argv[1:])\n"
        f"finally: print('heavy:', *set(sys.modules) & set({HEAVY}))"
    )
    done = started("-c", code, "--version")
    assert done.stdout.splitlines() == [f"d2f-toolkit {d2f.__version__}", "heavy:"]
    done = started("-c", code, "--help")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "heavy:"
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_the_readme_names_every_command():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"lists what follows it:(.*?)\.\n", readme, flags=re.DOTALL)
    assert re.findall(r"`([\w-]+)`", listed) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_help_shows_the_name_it_was_called_by(name):
    """And comes without torch, however it was called."""
    module = COMMANDS[name][0]
    usual = USUAL.get(module, f"python -m {module.removesuffix('.__main__')}")
    for called, other, words in (
        (f"d2f {name}", usual, [name, "--help"]),
        (usual, f"d2f {name}", ["--help"]),
    ):
        main = "d2f.command" if name in words else module
        code = (
            f"import sys; from {main} import main\n"
            "try: main()\n"
            f"finally: print('heavy:', *set(sys.modules) & set({HEAVY}))"
        )
        done = started("-c", code, *words)
        lines = done.stdout.splitlines()
        assert done.returncode == 0, done.stderr
        opening = [line for line in lines if line.startswith((called, f"usage: {called}"))]
        assert opening and lines[-1] == "heavy:"
        assert other == called or not any(f"{other} " in line for line in lines[:4])


def test_train_as_a_file_shows_the_line_that_runs_the_file():
    done = started(str(ROOT / "distill" / "train.py"), "--help")
    assert done.stdout.startswith("usage: accelerate launch distill/train.py")


def test_a_command_gets_its_words_and_gives_its_status():
    done = started("-m", "d2f", "configs", "tiny-d2f")
    assert done.returncode == 0
    assert done.stdout.strip() == str(ROOT / "configs" / "training" / "tiny-d2f.yaml")
    done = started("-m", "d2f", "decode", "--batch-size", "0")
    assert done.returncode == 2 and done.stderr.startswith("error: --batch-size")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected a command"),
        (["deocde"], "'deocde'; did you mean decode"),
        (["--quiet", "decode"], "expected one of decode, .*got '--quiet'"),
    ],
)
def test_another_word_is_an_error_that_lists_the_commands(words, said, capsys):
    from d2f.command import main

    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert re.search(said, capsys.readouterr().err)


def hidden(folder: Path, name: str) -> Path:
    """A user's own file, or folder for a name that ends with a slash."""
    path = folder / name
    if name.endswith("/"):
        path.mkdir()
        (path / "__init__.py").touch()
    else:
        path.write_text("mine = 1\n")
    return path


@pytest.mark.parametrize("name", ["decode.py", "decode/", "distill.py", "triton_kernels.py"])
def test_the_command_says_which_file_hides_which_package(name, tmp_path):
    place = hidden(tmp_path, name)
    done = started("-m", "d2f", "evaluate", "--help", folder=tmp_path)
    package = name.rstrip("/").removesuffix(".py")
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"error: {place} hides the package {package} of d2f-toolkit ({ROOT / package})"
    )


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("decode.py", "from distill.train import train"),
        ("decode/", "import d2f, distill.config"),
        ("d2f.py", "import decode; decode.generate"),
        ("d2f/", "from distill.train import train"),
        ("d2f.py", "import distill.config"),
    ],
)
def test_the_library_says_so_too(name, code, tmp_path):
    place = hidden(tmp_path, name)
    done = started("-c", code, folder=tmp_path)
    package = name.rstrip("/").removesuffix(".py")
    assert f"{place} hides the package {package} of d2f-toolkit" in done.stderr.splitlines()[-1]


def test_files_of_other_names_and_a_hidden_package_that_is_not_needed_are_no_error(tmp_path):
    hidden(tmp_path, "distill.py")
    hidden(tmp_path, "decoding.py")
    done = started("-c", "import d2f, decode; print(decode.D2F().name)", folder=tmp_path)
    assert done.stdout == "d2f\n", done.stderr
