"""The command line of `python -m decode.pipeline`; parsing it does not import torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from d2f.errors import InputError
from d2f.shipped import DECODING, find_config
from decode.commands.decoder_flags import Kind, add_decoder, add_sampling, offered
from decode.commands.parser import (
    Parser,
    add_model,
    add_tasks,
    add_verbose,
    check_least,
    check_model,
    check_samples,
)
from decode.decoders import find_decoder

DEFAULT_PROBLEMS = 2

_DESCRIPTION = """\
python -m decode.pipeline --tau-add 0.1

Decodes a few held-out problems with the bundled D2F model and shows the pipeline live in a
terminal: the state of each block, its tokens as they appear. For each problem it then says whether
the answer is right, visible tokens per second, forwards (calls of the model) and tokens per
forward. Where standard output is not a terminal it prints plain lines.
"""
_EPILOG = """\
exit status: 0 done; 1 the model gave NaN or infinite logits; 2 bad input, found before any work,
with nothing written; 130 interrupted, the output lines written so far stay.
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace; a decoder option that was not given is not in it.

    Raises InputError for a bad command line, SystemExit after --help.
    """
    options = _parser(offered(arguments)).parse_args(arguments)
    if options.decoder is not None:
        find_decoder(options.decoder)
    prompts = options.prompt is not None or options.prompts_file is not None
    for name in ("tasks", "data", "problems"):
        if prompts and getattr(options, name) is not None:
            raise InputError(f"--{name} is for held-out problems, not for prompts of your own")
    if options.raw and not prompts:
        raise InputError("--raw needs --prompt or --prompts-file")
    check_model(options)
    check_least(options, batch_size=1)
    check_samples("--n", options.n)
    if options.pause is not None and not 0 <= options.pause <= 60:
        raise InputError(f"--pause must lie in [0, 60] seconds, got {options.pause}")
    if options.config is not None:
        options.config = str(find_config(options.config, *DECODING))
    return options


def _parser(kinds: list[Kind]) -> argparse.ArgumentParser:
    parser = Parser(
        "python -m decode.pipeline",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage=argparse.SUPPRESS,  # the description opens with it
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model")
    add_model(model, "merge", "family", "compile", "tensor-parallel")
    _add_prompts(parser.add_argument_group("what to decode (default: held-out problems)"))
    decoder = parser.add_argument_group(
        "decoder", "An option that the chosen decoder does not have is an error."
    )
    tokens = parser.add_argument_group("choice of tokens (all decoders; default: greedy)")
    tokens.add_argument(
        "--n",
        type=int,
        default=1,
        metavar="N",
        help="answers a prompt, at least 1, each with a seed of its own; their ids are ID#1, ID#2, "
        "... (default 1)",
    )
    _add_running(parser.add_argument_group("running and output"))
    add_sampling(tokens, kinds)
    add_decoder(decoder, kinds)  # last, so that a clash is known for one with the command's own
    return parser


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    one = group.add_mutually_exclusive_group()
    one.add_argument(
        "--prompt", metavar="TEXT", help="one user message, through the tokenizer's chat template"
    )
    one.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="JSONL, - for standard input: a line has one of prompt (text), messages (role and "
        "content) or ids (token ids), and may have an id (default: its line number)",
    )
    group.add_argument(
        "--raw",
        action="store_true",
        help="take text prompts as they are, without the chat template",
    )
    add_tasks(group)
    group.add_argument(
        "--problems",
        type=int,
        metavar="N",
        help=f"held-out problems a task, at least 1 (default {DEFAULT_PROBLEMS})",
    )


def _add_running(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch-size",
        type=int,
        default=1,
        metavar="N",
        help="prompts decoded together, at least 1; the tokens do not depend on it (default 1)",
    )
    group.add_argument(
        "--output",
        metavar="FILE",
        help="JSONL: the run's settings, then a line a result as it comes; the same command again "
        "goes on where it stopped",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="JSON of every forward: rows fed, block states, tokens, confidences",
    )
    group.add_argument(
        "--pause",
        type=float,
        metavar="SECONDS",
        help="how long each forward stays on the screen, in a terminal and one prompt at a time; "
        "not counted in any time (default: 0.05 at first, then less and less, 3 seconds over the "
        "whole run)",
    )
    group.add_argument(
        "--quiet", action="store_true", help="only the totals; with --prompt only the response"
    )
    add_verbose(group)
