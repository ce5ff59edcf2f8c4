"""Train a model from a configuration: the command line of `distill.trainer`."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

if __package__ in (None, ""):  # run as a file, as accelerate launch does
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from d2f.command import command, require_extra
from d2f.device import rank
from d2f.files import locked
from d2f.flags import Switch, Verbose, parse_known
from d2f.quiet import quiet

if TYPE_CHECKING:
    from distill.config import TrainConfig

DEFAULT_CONFIG = "tiny-d2f"


@dataclass(kw_only=True)
class Options:
    """Train a model: from-scratch or warm-started masked diffusion, the autoregressive baseline,
    the D2F student of a bidirectional teacher, WINO+ on rollouts of distill.rollouts, or WeDLM from
    an autoregressive model.

    A killed run goes on where its newest checkpoint is, to the same weights to the bit; a finished
    one says so, and goes on with higher steps. Ctrl-C and SIGTERM save after the step; a traceback
    that follows under accelerate launch is the launcher's own. The result (adapter, merged model,
    contract, card, configuration, log) lies in the configuration's `output`.

    Every key of the configuration can be overridden: --steps 10 --optimizer.lr 1e-4

    d2f train runs in one process; for several call accelerate launch -m distill.train, for their
    kinds with --config_file "$(d2f configs ddp)" or another of accelerate in `d2f configs`, on a
    CPU with --multi_gpu --num_processes N.
    """

    examples = (
        "d2f train --config tiny-d2f --output runs/student",
        'accelerate launch --config_file "$(d2f configs ddp)" -m distill.train --steps 100',
    )

    config: Annotated[str | None, arg(metavar="NAME")] = None
    """YAML file, or a name of training in `d2f configs` (default: tiny-d2f, which distils the
    bundled teacher into a D2F student)"""
    check: Switch = False
    """do not train: say what the run would need, fail on what would fail later"""
    verbose: Verbose = False


def parse(arguments: list[str] | None = None) -> tuple[TrainConfig, Options]:
    """Read the command line: the configuration that it asks for, and the command's own options.
    Raises InputError."""
    usual = f"accelerate launch {'-m distill.train' if __package__ else 'distill/train.py'}"
    options, overrides = parse_known(Options, arguments, usual=usual)
    from d2f.shipped import TRAINING, shipped
    from distill.config import read_config

    given = options.config
    path = shipped(*TRAINING)[DEFAULT_CONFIG] if given is None else given
    config = read_config(path, overrides, to_run=True)
    if config.tracker != "none":  # accelerate leaves a tracker that is not installed out in silence
        require_extra("track", f"tracker: {config.tracker}", config.tracker)
    if given is None and rank() == 0:
        print(
            f"notice: no --config: {DEFAULT_CONFIG}, which distils the bundled teacher "
            f"({config.init}) into {config.output}",
            file=sys.stderr,
        )
    return config, options


def train(config: TrainConfig, *, stop_after: int | None = None) -> Path:
    """Run the training and export its result; see `distill.trainer.train`."""
    from distill.trainer import train

    return train(config, stop_after=stop_after)


@command(
    interrupted="interrupted: the same command goes on",
    needs_less="a higher gradient_accumulation, and gradient_checkpointing: true, need less",
)
def main() -> None:
    """Run the command."""
    config, options = parse()
    with quiet(options.verbose):
        if options.check:
            from distill.check import check

            print(check(config, int(os.environ.get("WORLD_SIZE", "1"))).text)
            return
        # Two runs in one folder would overwrite each other's checkpoints; one process holds the
        # lock for all.
        with locked(Path(config.output)) if rank() == 0 else contextlib.nullcontext():
            train(config)


if __name__ == "__main__":
    sys.exit(main())
