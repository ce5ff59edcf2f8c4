"""The decoders' options on the command line, as a table; it imports none of the decoders."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from d2f.tasks.registry import RESPONSE_LENGTH

DEFAULT_MAX_NEW_TOKENS = 256

DECODER_NAMES = ("d2f", "static", "wino", "autoregressive")
DECODER_HELP = (
    "d2f: the pipeline (default for a model with a mask id); static: LLaDA's low-confidence "
    "decoding; wino: drafts widely, takes back what the rest does not bear out; autoregressive "
    "(default for a causal model)"
)


@dataclass(frozen=True)
class Option:
    """One option of a decoder, named as its field. kind: int, float, bool (a pair of flags) or the
    words to choose from."""

    name: str
    kind: type | tuple[str, ...]
    help: str
    metavar: str | None = None

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Add its flag; it is absent from the namespace where it is not given."""
        flag = "--" + self.name.replace("_", "-")
        if self.kind is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=argparse.SUPPRESS, help=self.help)
        elif isinstance(self.kind, tuple):
            words = self.kind
            group.add_argument(flag, choices=words, default=argparse.SUPPRESS, help=self.help)
        else:
            metavar = self.metavar or {int: "N", float: "SHARE"}[self.kind]
            group.add_argument(
                flag, type=self.kind, default=argparse.SUPPRESS, metavar=metavar, help=self.help
            )


_LENGTHS = ", ".join(f"{task} {length}" for task, length in RESPONSE_LENGTH.items())

DECODER_OPTIONS = (
    Option(
        "max_new_tokens",
        int,
        f"longest response, in tokens, at least 1, kept exactly (default: {_LENGTHS}; for prompts "
        f"{DEFAULT_MAX_NEW_TOKENS}, less where the context leaves less)",
    ),
    Option(
        "block_size",
        int,
        "d2f, static, wino: tokens a block, at least 1 (default: d2f the model's own, else 32; "
        "static one block for the whole response; wino 128)",
    ),
    Option(
        "tau_add",
        float,
        "d2f: share of the last block that must be decoded before another is appended, in [0, 1] "
        "(default 0.1)",
    ),
    Option(
        "tau_act",
        float,
        "d2f: share of a block that must be decoded before the next becomes fully active, in "
        "[0, 1] (default 0.95)",
    ),
    Option(
        "tau_conf",
        float,
        "d2f: confidence above which a token is revealed, in [0, 1] (default 0.9)",
    ),
    Option(
        "revoke",
        ("always", "commit"),
        "d2f: take decided tokens back that WINO's check does not bear out: always, in the active "
        "blocks, or once, when a block would be cached (default: never)",
    ),
    Option(
        "tau_revoke",
        float,
        "d2f with --revoke: probability below which a token is taken back, in [0, 1] (default 0.9)",
    ),
    Option(
        "tau1",
        float,
        "wino: confidence above which a token is drafted, in [0, 1], below tau2 (default 0.6)",
    ),
    Option(
        "tau2",
        float,
        "wino: probability below which a drafted token is taken back, in [0, 1]; 0 takes none back "
        "(default 0.9)",
    ),
    Option(
        "caps",
        bool,
        "wino: the official code's bounds on tokens drafted and taken back in a forward (default), "
        "or the paper's two thresholds alone",
    ),
    Option(
        "early_exit",
        bool,
        "stop once the first end token and all before it are decoded (default), or decode all "
        "(d2f: finish the open blocks)",
    ),
    Option(
        "cache",
        ("none", "prefix", "dual"),
        "blockwise decoders: none feeds every row that may still change (default, exact); prefix "
        "feeds from the current block's start on, dual only the block, after one whole forward at "
        "its start (approximate on a bidirectional model)",
    ),
    Option(
        "steps",
        int,
        "static: forwards a response, a multiple of its number of blocks (default: one token a "
        "forward)",
    ),
)

SAMPLING_OPTIONS = (
    Option("temperature", float, "0 is greedy, at least 0 (default 0)", metavar="T"),
    Option(
        "top_p",
        float,
        "keep the likeliest tokens up to this share of the probability, in (0, 1] (default 1: off)",
        metavar="P",
    ),
    Option("top_k", int, "keep the K likeliest tokens, at least 1 (default: off)", metavar="K"),
    Option("seed", int, "seed of each prompt's random numbers (default 0)"),
)
