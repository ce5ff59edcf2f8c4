"""--tensor-parallel: the ranks behind the first follow it instead of doing the command's work."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from d2f.rank_number import rank


def followed(options: argparse.Namespace, each: Iterable[argparse.Namespace] = ()) -> bool:
    """On a rank behind the first: load the models that it loads, in its order, follow it until it
    has ended, and say True. each: the options of each model, where there are several. Raises
    InputError, of which the first rank speaks, and RankError."""
    if options.tensor_parallel == 1 or rank() == 0:
        return False
    from d2f.leading import follow
    from decode.commands.load_model import check_options, load

    for one in each or [options]:
        check_options(one)
        load(one)
    follow()
    return True
