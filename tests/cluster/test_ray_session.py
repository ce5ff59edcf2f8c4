"""How cores and GPUs are divided among workers."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2f.errors import InputError
from decode.workers import share

NODES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=4)


@given(nodes=NODES, workers=st.integers(1, 12), gpus=st.integers(0, 2))
def test_the_workers_fit_with_their_cores_and_would_not_with_more(nodes, workers, gpus):
    def placed(cores: int) -> int:
        """Workers put on the nodes one by one."""
        count = 0
        for free, cards in nodes:
            while free >= cores and cards >= gpus:
                free, cards, count = free - cores, cards - gpus, count + 1
                if count > 99:
                    break
        return count

    there = [{"CPU": float(cores), "GPU": float(cards), "memory": 1e9} for cores, cards in nodes]
    if placed(1) < workers:
        with pytest.raises(InputError, match=re.escape(f"--workers {workers}: there are cores")):
            share(there, workers, "--workers", gpus)
        return
    found = share(there, workers, "--workers", gpus)
    assert placed(found) >= workers > placed(found + 1)
