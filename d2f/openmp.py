"""How PyTorch's threads wait for each other on a CPU; imports no torch.

Between two parallel loops OpenMP's threads spin, each on a core, to be ready at once. Where
something else wants these cores, a thread that has work waits until one that only spins is moved
away, in every loop of every layer: decoding falls to a small part. A thread that sleeps at once has
to be woken for each loop, which costs a quarter of the speed on an idle machine. So they spin for
some microseconds, which the gaps between the loops of a forward take, and sleep then.

The runtime reads it from the environment when torch is loaded. So this package says it when it is
imported, which is before torch in all our commands; where torch came first, or the user said
something, it stays as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

SPINS = "GOMP_SPINCOUNT"  # of GNU's runtime, which PyTorch's wheels for CPUs bring
COUNT = "10000"
_USERS = (SPINS, "OMP_WAIT_POLICY")
_said = False


def spin_briefly() -> None:
    """Let waiting threads sleep soon, unless the user's environment says how they wait."""
    global _said
    if "torch" not in sys.modules and not any(name in os.environ for name in _USERS):
        os.environ[SPINS] = COUNT
        _said = True


def users_environment() -> Mapping[str, str]:
    """The environment without what this module put there: for other projects' programs."""
    return {name: text for name, text in os.environ.items() if not (_said and name == SPINS)}
