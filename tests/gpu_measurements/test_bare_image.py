"""A CUDA image with torch and four wheels has all that the measurements need."""

from __future__ import annotations

import json

import pytest
from bare_image import make_site, run_there

from benchmarks.gpu.bring_up import MEASUREMENTS
from benchmarks.gpu.native_tests import files_marked


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return make_site(tmp_path_factory.mktemp("site"))


def test_other_packages_are_not_there(site):
    """Or nothing else here would say anything."""
    code = "import importlib.util as u; print([n for n in {!r} if u.find_spec(n)])"
    names = ["wandb", "fastapi", "torchao", "datasets", "pydantic", "torch", "hypothesis"]
    done = run_there(site, "-c", code.format(names))
    assert done.stdout.split() == ["['pydantic',", "'torch',", "'hypothesis']"]


def test_every_module_that_is_started_can_be_imported(site):
    modules = {found.command.split()[0] for found in MEASUREMENTS if "httpx" not in found.needs}
    code = f"import benchmarks.gpu.session, {', '.join(sorted(modules))}"
    done = run_there(site, "-c", code)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_tests_that_are_run_there_can_be_collected(site):
    files = ["tests/kernels", *files_marked()]
    done = run_there(site, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
def test_a_dry_run_measures_everything_in_small(site, tmp_path):
    path = tmp_path / "dry.json"
    done = run_there(site, "-m", "benchmarks.gpu", "--dry-run", "--output", str(path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    (run,) = json.loads(path.read_text())["runs"]
    assert run["facts"]["dry_run"] is True
    assert list(run["measured"]) == [found.name for found in MEASUREMENTS]
    for found in MEASUREMENTS:
        entry = run["measured"][found.name]
        if entry["state"] == "done":
            assert found.small is not None and entry["found"]
        elif found.small is None:
            assert run["facts"]["device"] != "cpu" or entry["why"] == "needs a GPU"
        else:  # an image of transformers may have it, or not
            assert entry["why"] == "needs httpx"
    assert "Dry run: no figure here means anything." in done.stdout
