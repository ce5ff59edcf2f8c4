"""A Python with what a CUDA image with torch has, and nothing else of what is installed here."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What such an image has, each with what it requires: checked against the package list of one that
# had torch 2.11 for CUDA 13.
IMAGE = ("torch", "triton", "transformers", "numpy", "peft", "accelerate", "psutil", "jinja2",
         "einops", "pytest", "hypothesis", "pytest-xdist")  # fmt: skip
WHEELS = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection")


def make_site(folder: Path) -> Path:
    """`folder` with links to the packages of the image and the wheels."""
    wanted, found = [*IMAGE, *WHEELS], set()
    while wanted:
        name = re.split(r"[^\w.-]", wanted.pop())[0].lower().replace("_", "-")
        if name in found:
            continue
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # for another system
            continue
        found.add(name)
        wanted += [need for need in package.requires or () if "extra ==" not in need]
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            (folder / top).exists() or (folder / top).symlink_to(package.locate_file(top))
    return folder


def run_there(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a Python with that site alone does with a command line."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "VIRTUAL"))
    }
    environment["PYTHONPATH"] = f"{site}{os.pathsep}{ROOT}"
    # -S: without the packages that are installed here.
    return subprocess.run(
        [sys.executable, "-S", *arguments], cwd=ROOT, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
