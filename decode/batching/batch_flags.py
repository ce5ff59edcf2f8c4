"""The command line of `python -m decode.batch`; parsing it does not import torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from d2f.shipped import DECODING, find_config
from decode.commands.decoder_flags import Kind, add_decoder, add_sampling, offered
from decode.commands.parser import (
    Parser,
    add_model,
    add_verbose,
    add_workers,
    check_least,
    check_model,
    check_workers,
)

_DESCRIPTION = """\
python -m decode.batch --model tiny-d2f --input prompts.jsonl --output answers

Answers every row of a file or data set: a folder with one file of the input's kind, in its order,
each row with its own fields and text, tokens, forwards and finish_reason. The same command again
goes on where it stopped. docs/batch.md says what a row may be and what the folder holds.
"""
_EPILOG = """\
exit status: 0 done; 2 bad input, found before any work, or no row could be answered;
130 interrupted, what is answered stays and the same command goes on.
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace. Raises InputError, SystemExit after --help."""
    options = _parser(offered(arguments)).parse_args(arguments)
    check_model(options)
    check_least(options, batch_size=1)
    check_workers(options)
    if options.config is not None:
        options.config = str(find_config(options.config, *DECODING))
    return options


def _parser(kinds: list[Kind]) -> argparse.ArgumentParser:
    parser = Parser(
        "python -m decode.batch",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage=argparse.SUPPRESS,  # the description opens with it
        allow_abbrev=False,
    )
    add_model(parser.add_argument_group("model"), "merge", "family", "compile", "tensor-parallel")
    _add_input(parser.add_argument_group("input"))
    decoder = parser.add_argument_group(
        "decoder", "An option that the chosen decoder does not have is an error."
    )
    tokens = parser.add_argument_group("choice of tokens (all decoders; default: greedy)")
    _add_running(parser.add_argument_group("running and output"))
    add_sampling(tokens, kinds)
    add_decoder(decoder, kinds)  # last, so that a clash is known for one with the command's own
    return parser


def _add_input(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input",
        required=True,
        metavar="FILE",
        help="rows: JSONL, parquet (by its ending), or a data set, which is a folder of "
        "save_to_disk or a hub name",
    )
    group.add_argument("--split", metavar="NAME", help="of a data set (default train)")
    group.add_argument("--dataset-config", metavar="NAME", help="of a data set that has several")
    group.add_argument(
        "--column",
        metavar="NAME",
        help="what is asked: text, chat messages or token ids (default: the first of messages, "
        "prompt, question and ids that a row has)",
    )
    group.add_argument(
        "--raw",
        action="store_true",
        help="take text prompts as they are, without the chat template",
    )


def _add_running(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="folder for the answers; one of another run is refused",
    )
    group.add_argument(
        "--batch-size",
        type=int,
        default=32,
        metavar="N",
        help="rows that each worker decodes together, at least 1; the tokens do not depend on it "
        "(default 32)",
    )
    add_workers(group)
    add_verbose(group)
