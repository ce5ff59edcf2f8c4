"""Whatever a configuration says, it is read or refused in one line; nonsense is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ablation.ablation_config import read_ablation
from hypothesis import given
from hypothesis import strategies as st

from d2f.config import dump, read_mapping
from decode.cli import split
from decode.compare.config import read_config as read_comparison
from distill.config import read_config
from tests.fuzz.odd import LEAVES, TEXT, VALUES, damaged
from tests.fuzz.outcome import attempt, budget

CONFIGS = Path(__file__).parents[2] / "configs"


def read_options(path: Path) -> object:
    return split(read_mapping(path), str(path))


KINDS = [
    pytest.param("training", read_config, id="training"),
    pytest.param("comparison", read_comparison, id="comparison"),
    pytest.param("ablations", read_ablation, id="ablations"),
    pytest.param("published", read_options, id="options"),
]
SHIPPED = {
    folder: [(path.read_text(encoding="utf-8"), read_mapping(path)) for path in paths]
    for folder in ("training", "comparison", "ablations", "published")
    for paths in [sorted((CONFIGS / folder).glob("*.yaml"))]
}
NONSENSE = [-1, -0.5, 10**12, 1e300, math.inf, -math.inf, math.nan, "many", [], {}, True]
# Take some of them: any number of at least 0, lists or mappings.
MEANT = {"seed", "seeds", "block_size", "betas", "tau", "factor", "gamma", "entropy_threshold",
         "distance_penalty"}  # fmt: skip


def places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within values."""
    members: Any = values.items() if isinstance(values, dict) else ()
    for key, value in enumerate(values) if isinstance(values, list) else members:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


@st.composite
def changed(draw: st.DrawFn, folder: str) -> dict[str, Any]:
    """A shipped configuration with some of its values replaced, removed, or put beside others."""
    values = copy.deepcopy(draw(st.sampled_from(SHIPPED[folder]))[1])
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(values)) or [("x",)]))
        parent = at(values, path[:-1])
        kind = draw(st.sampled_from(["replace", "remove", "add", "nest"]))
        if kind == "remove" and isinstance(parent, dict):
            parent.pop(path[-1], None)
        elif kind == "add" and isinstance(parent, dict):
            parent[draw(TEXT)] = draw(VALUES)
        elif kind == "nest":
            for _ in range(draw(st.sampled_from([1, 30, 200]))):
                parent[path[-1]] = [parent.get(path[-1]) if isinstance(parent, dict) else 1]
        else:
            parent[path[-1]] = draw(VALUES)
    return values


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "c.yaml"


def written(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    return file


@pytest.mark.parametrize(("folder", "reader"), KINDS)
@budget(0.5)
@given(data=st.data())
def test_changed_configurations(file, folder, reader, data):
    values = data.draw(changed(folder))
    try:
        text = dump(values)
    except (UnicodeEncodeError, RecursionError):
        text = repr(values)
    attempt(lambda: reader(written(file, text)))


@pytest.mark.parametrize(("folder", "reader"), KINDS)
@budget(0.5)
@given(data=st.data())
def test_damaged_text(file, folder, reader, data):
    text = data.draw(damaged(data.draw(st.sampled_from(SHIPPED[folder]))[0]))
    attempt(lambda: reader(written(file, text)))


@budget()
@given(st.binary(max_size=200))
def test_any_bytes(file, content):
    file.write_bytes(content)
    attempt(lambda: read_config(file), nonsense=True)


@pytest.mark.parametrize(("folder", "reader"), KINDS[:3])
@budget(0.5)
@given(data=st.data())
def test_no_number_takes_nonsense(file, folder, reader, data):
    values = copy.deepcopy(data.draw(st.sampled_from(SHIPPED[folder]))[1])
    numbers = [
        path
        for path in places(values)
        if isinstance(at(values, path), int | float)
        and not isinstance(at(values, path), bool)
        and not MEANT & set(map(str, path))
    ]
    path = data.draw(st.sampled_from(numbers))
    at(values, path[:-1])[path[-1]] = data.draw(st.sampled_from(NONSENSE))
    attempt(lambda: reader(written(file, dump(values))), nonsense=True)


@budget()
@given(
    st.sampled_from(["steps", "optimizer.lr", "lora.targets", "x.y", "data", "", ".", "0"]), TEXT
)
def test_any_override(key, text):
    path = CONFIGS / "training" / "tiny-d2f.yaml"
    attempt(lambda: read_config(path, [f"--{key}", text]))


@budget(0.3)
@given(LEAVES, st.integers(1, 300))
def test_unknown_keys(file, value, count):
    values = copy.deepcopy(SHIPPED["training"][0][1]) | {
        f"key{i}": str(value) for i in range(count)
    }
    attempt(lambda: read_config(written(file, repr(values))), nonsense=True)
