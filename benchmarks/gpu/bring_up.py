"""What there is to measure on a GPU, in the order in which it is: first whether anything that
follows can be believed, then decoding, which is the project's aim, then the parts of both."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from itertools import product

PARTS = ("correctness", "decoding", "kernels", "training", "decode_step", "forward", "compare")
SANITIZER = "compute-sanitizer"


@dataclass(frozen=True)
class Measurement:
    """A process that measures something and writes each row to the file that `--json` names.

    command: a module of benchmarks with its arguments. small: those of a dry run; None where it
    means something on a GPU alone, or another measurement runs the same module. seconds: about how
    long it takes on an H100, guessed, until it was measured. needs: modules without which it does
    not run. before: a program that runs it.
    """

    part: str
    name: str
    seconds: int
    command: str
    small: str | None = None
    needs: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def hindrance(self, *, cuda: bool, dry: bool) -> str:
        """Why it does not run here, empty where it does."""
        if self.small is None and not cuda:
            return "needs a GPU"
        if self.small is None and dry:
            return "not for a dry run"
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        missing += [name for name in self.before[:1] if shutil.which(name) is None]
        return f"needs {' and '.join(missing)}" if missing else ""

    def words(self, *, dry: bool) -> list[str]:
        """The module and its arguments."""
        module, *arguments = self.command.split()
        return [module, *(self.small or "").split()] if dry else [module, *arguments]


TESTS = ("pytest", "hypothesis")
MEASUREMENTS = (
    Measurement(
        "correctness", "kernels' tests", 120, "benchmarks.gpu.native_tests kernels --jobs 12",
        needs=TESTS,
    ),
    Measurement(
        "correctness", "tests marked gpu", 150, "benchmarks.gpu.native_tests marked", needs=TESTS
    ),
    Measurement(
        "correctness", "memory that kernels touch", 100, "benchmarks.gpu.native_tests slots",
        needs=TESTS, before=(SANITIZER, "--tool", "memcheck", "--error-exitcode", "99"),
    ),
    Measurement(
        "decoding", "matrix products, LLaDA-8B", 30,
        "benchmarks.gpu.skinny_products --shapes LLaDA-8B",
        "--shapes tiny --rows 1 --repeat 1",
    ),
    Measurement(
        "decoding", "kernels of a step, LLaDA-8B", 150,
        "benchmarks.gpu.step_kernels --shape LLaDA-8B --rows 64 --cached 512 4096",
        "--shape tiny --rows 4 --cached 16 --repeat 1 --models plain",
    ),
    Measurement(
        "decoding", "matrix products, Dream-7B", 30,
        "benchmarks.gpu.skinny_products --shapes Dream-7B",
    ),
    Measurement(
        "kernels", "attention, 512 cached, 1,024 in training", 90,
        "benchmarks.span_attention --rows 16 64 128 --cached 512 --lengths 1024",
        "--rows 4 --cached 16 --lengths 8 --repeat 1",
    ),
    Measurement(
        "kernels", "attention, 4,096 cached, 4,096 in training", 90,
        "benchmarks.span_attention --rows 16 64 128 --cached 4096 --lengths 4096",
    ),
    Measurement(
        "kernels", "masked KL", 90,
        "benchmarks.masked_kl --vocabularies 126464 --rows 512 4096",
        "--rows 3 --vocabularies 300 --width 8 --repeat 1",
    ),
    Measurement(
        "kernels", "confidence", 30,
        "benchmarks.confidence --rows 16 64 --vocabularies 126464",
        "--rows 1 --vocabularies 300 --width 8 --repeat 1",
    ),
    Measurement(
        "training", "a training step of 1,024 tokens", 90, "benchmarks.train_step --repeat 3",
        "--shape tiny --length 64 --repeat 1 --ways ours",
    ),
    Measurement(
        "training", "a training step of 4,096 tokens", 90,
        "benchmarks.train_step --repeat 3 --length 4096 --checkpointing --ways ours",
    ),
    *(
        Measurement(
            "decode_step", f"a decoding step of {shape}, {cached:,} cached", 75,
            f"benchmarks.decode_step --shapes {shape} --rows 16 64 --cached {cached} --repeat 10",
            "--shapes tiny --rows 4 --cached 16 --repeat 1" if i == 0 else None,
        )
        for i, (shape, cached) in enumerate(product(("LLaDA-8B", "Dream-7B"), (512, 4096)))
    ),
    *(
        Measurement(
            "forward", f"parts of a forward of {model}", 60,
            f"benchmarks.forward --model {model} --device cuda",
            f"--model {model} --problems 1 --batch-sizes 1" if model == "tiny-d2f" else None,
        )
        for model in ("tiny-d2f", "tiny-ar")
    ),
    Measurement(
        "compare", "the bundled models compared", 400,
        "benchmarks.gpu.compare_entries --output {beside}-compare-{code}",
        "--output {beside}-compare-{code}", needs=("httpx",),
    ),
)  # fmt: skip
