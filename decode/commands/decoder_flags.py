"""The decoders' options on the command line, as a table; it imports none of the decoders."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from d2f.tasks.registry import RESPONSE_LENGTH
from decode.defaults import DEFAULT_MAX_NEW_TOKENS

DECODER_NAMES = (
    "d2f",
    "static",
    "threshold",
    "factor",
    "entropy",
    "wino",
    "freedave",
    "block",
    "wedlm",
    "autoregressive",
)
DECODER_HELP = (
    "d2f: the pipeline (default for LLaDA- and Dream-like models); static: LLaDA's low-confidence "
    "decoding; threshold, factor: Fast-dLLM's rules; entropy: the EB sampler; wino: drafts "
    "widely, takes back what the rest does not bear out; freedave: static decoding that drafts "
    "itself, without loss; block: block diffusion with an exact cache (SDAR, where it is the "
    "default, D2F students); wedlm: streaming decoding of a causal diffusion "
    "model, where it is the default; autoregressive (default for a causal model)"
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
        "tokens a block, at least 1 (default: d2f and block the model's own, else 32, for block on "
        "absolute blocks 4; threshold on a WINO+ model its own; static and freedave one block for "
        "the whole response; wino 128; the others 32)",
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
        "leakage",
        bool,
        "wino: let the shadow see the tokens that it verifies, the paper's ablation (default: no)",
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
        "its start (approximate on a bidirectional model, exact on a "
        "block-causal one whose own block size divides block_size)",
    ),
    Option(
        "tau",
        float,
        "threshold: confidence from which a token is revealed, at least 0; above 1 only the surest "
        "one is (default 0.9); block: confidence above which dynamic reveals, in [0, 1] (default "
        "0.85)",
    ),
    Option(
        "factor",
        float,
        "factor: the n-th surest token is revealed where its confidence is at least 1 - F / (n + "
        "1), at least 0 (default 1)",
        metavar="F",
    ),
    Option(
        "gamma",
        float,
        "entropy: bound in nats on what tokens revealed together tell about each other, at least 0 "
        "(default 0.1)",
        metavar="NATS",
    ),
    Option(
        "proxy",
        ("entropy", "confidence", "margin"),
        "entropy: what tokens are sorted by before the bound is taken (default entropy)",
    ),
    Option(
        "lossless",
        int,
        "d2f: states that a forward checks, at least 1, drafted from the predictions at hand: the "
        "same tokens in no more forwards, each with more rows (default: off)",
    ),
    Option(
        "drafts",
        int,
        "freedave: states that a forward checks, at least 1; 1 is static decoding (default 4)",
    ),
    Option(
        "drafting",
        ("tree", "batch"),
        "freedave: tree feeds once what is the same in all states (default), batch feeds all of "
        "each",
    ),
    Option(
        "eager",
        bool,
        "freedave: let drafts go on in the next blocks; for block-causal models (default: no)",
    ),
    Option(
        "steps",
        int,
        "static: forwards a response, a multiple of its number of blocks (default: one token a "
        "forward)",
    ),
    Option(
        "denoising_steps",
        int,
        "block: forwards a block is given, from 1 to its size (default: one token a forward)",
    ),
    Option(
        "reveal",
        ("static", "dynamic", "sequential"),
        "block: static the n most confident tokens, n what makes the steps even; dynamic all above "
        "tau if these are n or more (default); sequential the n leftmost",
    ),
    Option(
        "align",
        ("absolute", "prompt"),
        "block: blocks begin at position 0 or at the prompt's end (default: as the model was "
        "trained)",
    ),
    Option(
        "window", int, "wedlm: slots of the window, at least 1 (default: as trained here, else 16)"
    ),
    Option(
        "entropy_threshold",
        float,
        "wedlm: entropy below which a mask is filled, its penalty included, at least 0; 0 fills "
        "one a forward (default 0.4)",
        metavar="NATS",
    ),
    Option(
        "distance_penalty",
        float,
        "wedlm: what is added to the entropy for each position from the first mask, at least 0 "
        "(default 0.02)",
        metavar="NATS",
    ),
    Option(
        "refill",
        ("paper", "repository"),
        "wedlm: paper tops the window up after it commits (default), repository before",
    ),
    Option(
        "verify",
        ("ar",),
        "wedlm: commit only what greedy autoregressive decoding of the model confirms",
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
    Option(
        "seed",
        int,
        "seed of the random numbers, of which each prompt and answer has its own (default 0)",
    ),
)
