"""examples:
  python -m decode.lm_eval --model d2f --model_args pretrained=tiny-d2f,tau_conf=0.9 \\
    --tasks d2f_story --apply_chat_template --limit 100 --output_path results
  python -m decode.lm_eval ls tasks

lm-evaluation-harness on our models and decoders: its command line and its arguments, with the model
`d2f` and the tasks d2f_story, d2f_countdown, d2f_sudoku and d2f_coding besides its own.
`run --help` is its, too. --model_args of d2f:

  pretrained, adapter, family, dtype, quantize, merge, compile
      the model, as the other commands take it
  decoder=NAME, and the decoder's options
      default: the decoder that suits the model; --batch_size (default 16) changes no answer
  nll=mc, mc_num=128, cfg=0.0, check_greedy=True
      likelihoods of a model that reads both sides: LLaDA's Monte Carlo estimate; how many masks a
      request, scale of classifier-free guidance, whether to find out what greedy decoding gives
  nll=left_to_right
      exact likelihoods of a causal model, or of one that goes block after block
  seed=0
      of draws; each request has its own

In Python: `lm_eval.simple_evaluate(model=decode.lm_eval.D2FLM("tiny-d2f"), ...)`, with
`task_manager=lm_eval.tasks.TaskManager(include_path=decode.lm_eval.TASKS)` for our tasks.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.command import command, program
from d2f.errors import InputError

if TYPE_CHECKING:
    from decode.harness.model import D2FLM as D2FLM

TASKS = str(Path(__file__).parent / "harness" / "tasks")
BATCH_SIZE = 16
# The harness raises errors of its own arguments as plain ValueErrors that begin so.
_MISNAMED = ("Tasks not found", "No tasks specified", "Attempted to load model")


def __getattr__(name: str) -> Any:
    if name != "D2FLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from decode.harness.model import D2FLM

    return D2FLM


def with_ours(given: Namespace) -> Namespace:
    """Add our tasks to lm-eval's command line, and more than one request in a forward where nobody
    said how many."""
    from d2f.config import read_mapping
    from d2f.device import parse_device

    config = getattr(given, "config", None)
    values = read_mapping(config) if config else {}
    theirs = getattr(given, "include_path", None) or values.get("include_path")
    # lm-eval takes the later of two tasks of a name: the user's.
    given.include_path = [TASKS, *([theirs] if isinstance(theirs, str) else theirs or [])]
    if given.command == "run":
        limit = getattr(given, "limit", None)
        if limit is not None and limit < 0:
            raise InputError(f"--limit must be 0 or more, got {limit:g}")
        size = getattr(given, "batch_size", None) or values.get("batch_size", BATCH_SIZE)
        given.batch_size = size
        # lm-eval's default is a GPU, whether there is one or not.
        given.device = given.device or values.get("device") or str(parse_device(None))
    return given


@command(interrupted="interrupted; with --use_cache the same command goes on where it was")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given in (["-h"], ["--help"]):
        usual = "python -m decode.lm_eval"
        print((__doc__ or "").replace(usual, program(usual)).strip())
        return
    if find_spec("lm_eval") is None:
        raise InputError(
            "lm-evaluation-harness is not installed: pip install 'd2f-toolkit[evaluation]'"
        )
    from accelerate import PartialState
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    import decode.harness.model  # noqa: F401 (registers the model)

    setup_logging()
    cli = HarnessCLI()
    sys.argv[1:] = given  # where it reads its arguments
    asked = with_ours(cli.parse_args())
    try:
        cli.execute(asked)
    except ValueError as error:
        if not str(error).startswith(_MISNAMED):
            raise
        raise InputError(f"{error}; `ls tasks` has the tasks") from error
    if PartialState().num_processes > 1:
        PartialState().destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
