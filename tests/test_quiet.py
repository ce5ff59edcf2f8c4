"""Commands show what libraries say only where asked; a library's user is left alone."""

import logging
import subprocess
import sys
import warnings

import pytest
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging as transformers_logging

import d2f
from d2f.models import resolve
from d2f.quiet import quiet

BAR = "Loading weights"


def settings():
    loggers = [logging.getLogger(n).level for n in ("bitsandbytes", "transformers")]
    bars = transformers_logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    return loggers, bars, warnings.filters[:]


@pytest.fixture(autouse=True)
def bars():
    """Whatever a test before left."""
    transformers_logging.enable_progress_bar()


def test_everything_is_as_it_was_before():
    before = settings()
    with quiet():
        assert settings() != before
        assert not transformers_logging.is_progress_bar_enabled()
    assert settings() == before
    with pytest.raises(KeyError), quiet():
        raise KeyError
    assert settings() == before
    with quiet(verbose=True):
        assert settings() == before


def test_what_is_silenced_and_what_is_not(capsys):
    with warnings.catch_warnings(record=True) as seen, quiet():
        warnings.warn("old", FutureWarning, stacklevel=1)
        warnings.warn("ours", RuntimeWarning, stacklevel=1)
        assert not logging.getLogger("bitsandbytes.cextension").isEnabledFor(logging.WARNING)
        assert logging.getLogger("bitsandbytes.cextension").isEnabledFor(logging.ERROR)
        assert logging.getLogger("d2f").isEnabledFor(logging.WARNING)
        warnings.simplefilter("always")
    assert [str(w.message) for w in seen] == ["ours"]


def test_load_shows_a_bar_only_where_asked(capfd):
    before = settings()
    d2f.load(resolve("tiny-d2f"))
    assert BAR not in capfd.readouterr().err
    d2f.load(resolve("tiny-d2f"), progress=True)
    assert BAR in capfd.readouterr().err
    assert settings() == before


DOORS = [
    "import distill.trainer",
    "import d2f.saving",  # d2f.families first, where transformers' models are imported
    """
import decode
decode.AsyncEngine
model = __import__("d2f").load("tiny-d2f-long")  # an adapter
decode.generate(model, "Use 3, 5 and 7 to make 22.", "d2f", on_error="return")
assert model.adapter is not None
""",
]
FORKS = """
import os, sys, torch
for code in sys.argv[1:]:
    if not (child := os.fork()):
        exec(code)
        break
    assert os.waitpid(child, 0)[1] == 0, code
"""


def test_a_library_is_quiet_without_being_asked():
    """Whichever part is imported first, with an adapter too."""
    command = [sys.executable, "-c", FORKS, *DOORS]
    done = subprocess.run(command, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "UserWarning: 1 answer" not in line]
    assert (done.returncode, said) == (0, [])


LINES = [
    "decode.pipeline --problems 1 --tasks sudoku",
    "decode.evaluate --problems 1 --tasks sudoku",
    "decode.record_states --problems 1 --tasks sudoku --output {folder}/states.json",
    "decode.tune --problems 1 --heldout 1 --repetitions 1 --tasks sudoku --tau-add 0.1 --tau-act 1 "
    "--tau-conf 0.9 --no-figures --output {folder}/tune",
    "distill.rollouts --model tiny-d2f --decoder d2f --problems 1 --tasks sudoku "
    "--output {folder}/rollouts.jsonl",
    "decode.compare.__main__ --config compare-tiny --vllm-python {folder}/none --output {folder}/o",
]


def test_commands_are_quiet(tmp_path):
    """Nothing on standard error but what is wrong (there is no vLLM), from the start of the process
    on."""
    code = "from importlib import import_module\n"
    for line in LINES:
        module, *words = line.format(folder=tmp_path).split()
        code += f"import_module({module!r}).main({words})\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: ") and "none" in said


def test_with_v_a_command_shows_what_the_libraries_say(capfd):
    from decode.pipeline import main

    assert main([*LINES[0].split()[1:], "-v"]) == 0
    assert BAR in capfd.readouterr().err
