"""Every command: its name, its help without torch, how it ends, and who hides its package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import d2f
from d2f import command as command_line
from d2f.command import COMMANDS, HiddenPackageError, command, main, require
from d2f.errors import InputError, NonFiniteLogitsError, OutputError

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "accelerate", "peft", "triton", "datasets")


def started(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


def heavy_after(code: str) -> list[str]:
    done = started("-c", f"import sys\n{code}\nprint('heavy:', *set(sys.modules) & set({HEAVY}))")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


def test_importing_a_package_brings_nothing_heavy():
    assert heavy_after("import d2f, decode, distill, triton_kernels, decode.decoders") == []


def test_version_and_help_list_the_commands(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"d2f-toolkit {d2f.__version__}\n"
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in COMMANDS)
    assert main([]) == 2


def test_the_readme_names_every_command():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"The command is `d2f`, followed by(.*?)\(", readme, flags=re.DOTALL)
    assert re.findall(r"`([\w-]+)`", listed) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_help_shows_its_name_and_comes_without_torch(name):
    code = f"sys.argv[1:] = ['{name}', '--help']\nfrom d2f.command import main\n"
    code += "try: main()\nexcept SystemExit as end: assert not end.code\n"
    done = started("-c", f"import sys\n{code}print('heavy:', *set(sys.modules) & set({HEAVY}))")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert lines[0].startswith((f"usage: d2f {name}", f"d2f {name}")) and lines[-1] == "heavy:"


def test_train_as_a_file_shows_the_line_that_runs_the_file():
    done = started(str(ROOT / "distill" / "train.py"), "--help")
    assert done.stdout.startswith("usage: accelerate launch distill/train.py")


def test_a_command_gets_its_words_and_gives_its_status(monkeypatch, capsys):
    monkeypatch.setattr(command_line, "_called_as", None)
    monkeypatch.setattr("sys.argv", ["d2f"])
    assert main(["configs", "tiny-d2f"]) == 0
    assert capsys.readouterr().out == f"{ROOT}/configs/training/tiny-d2f.yaml\n"
    assert main(["decode", "--batch-size", "0"]) == 2
    assert capsys.readouterr().err == "error: --batch-size must be at least 1, got 0\n"
    assert main(["deocde"]) == 2
    assert "no command 'deocde'; did you mean decode?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, 0, ""),
        (InputError("bad"), 2, "error: bad\n"),
        (OutputError("full"), 2, "error: full\n"),
        (FloatingPointError("of this command"), 2, "error: of this command\n"),
        (NonFiniteLogitsError("nan"), 1, "error: nan\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, "stopped, it goes on\n"),
    ],
)
def test_what_is_raised_is_a_line_and_a_status(capsys, error, status, said):
    @command(FloatingPointError, interrupted="stopped, it goes on")
    def main():
        if error is not None:
            raise error

    assert main() == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (lambda: torch.zeros(10**15), "can't allocate memory: you tried to allocate 4000000000000"),
        (lambda: np.zeros(10**15), "Unable to allocate"),
        (lambda: raised(torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")), "CUDA out of"),
    ],
)
def test_too_little_memory_is_a_line(capsys, fails, said):
    assert command(interrupted="")(fails)() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory: ") and said in line


def raised(error):
    raise error


def test_a_status_of_its_own_stays_and_a_bug_is_seen():
    assert command(interrupted="")(lambda status: status)(7) == 7
    with pytest.raises(ZeroDivisionError):
        command(interrupted="")(lambda: 1 / 0)()


def test_a_reader_who_left_is_no_traceback():
    """As with `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as unread:
        done = subprocess.run(
            [sys.executable, "-m", "d2f", "configs"], stdout=unread, stderr=subprocess.PIPE,
            cwd=ROOT, text=True,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")


def hidden(folder: Path, name: str) -> Path:
    """A user's own file, or folder for a name that ends with a slash."""
    path = folder / name
    if name.endswith("/"):
        path.mkdir()
        (path / "__init__.py").touch()
    else:
        path.write_text("mine = 1\n")
    return path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("decode.py", ["-m", "d2f", "evaluate", "--help"]),
        ("d2f.py", ["-c", "import decode; decode.generate"]),
        ("d2f/", ["-c", "from distill.train import train"]),
    ],
)
def test_a_file_that_hides_a_package_is_named(name, words, tmp_path):
    place = hidden(tmp_path, name)
    done = started(*words, folder=tmp_path)
    package = name.rstrip("/").removesuffix(".py")
    assert (
        done.returncode
        and f"{place} hides the package {package} of d2f-toolkit" in (done.stderr.splitlines()[-1])
    )


def test_a_hidden_package_that_is_not_needed_is_no_error(tmp_path, monkeypatch):
    hidden(tmp_path, "distill.py")
    done = started("-c", "import d2f, decode; print(decode.D2F().name)", folder=tmp_path)
    assert done.stdout == "d2f\n", done.stderr
    (tmp_path / "hidden_by_a_file.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    require("distill_of_nobody", "no_package_of_this_name")
    with pytest.raises(HiddenPackageError, match=r"hidden_by_a_file\.py hides the package"):
        require("no_package_of_this_name", "hidden_by_a_file")


def test_public_names_are_there_when_asked_for():
    assert all(hasattr(d2f, name) for name in d2f.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lood'"):
        _ = d2f.lood
