"""The configurations that ship with the package are found by name, from any folder."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from benchmarks.ablation import Ablation
from d2f import shipped
from d2f.config import check, read_mapping
from d2f.errors import InputError
from d2f.models import resolve
from d2f.shipped import ABLATIONS, COMPARISON, DECODING, EVALUATION, TRAINING, find_config
from d2f.tasks import find_task
from decode.cli import read_settings, split
from decode.compare.config import options_file
from decode.compare.config import read_config as read_comparison
from decode.decoders import DECODERS
from decode.pipeline import parse
from decode.server.options import parse as parse_serve
from decode.server.ray_app import application, command_line
from distill.config import read_config
from distill.rollouts import parse as parse_rollouts

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "configs").glob("*/*.yaml"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No file of the repository is found by a relative path."""
    monkeypatch.chdir(tmp_path)


def test_every_file_is_found_and_no_two_have_one_name():
    assert sorted(shipped.shipped().values()) == FILES
    assert len({path.stem for path in FILES}) == len(FILES) > 20
    folders = {*TRAINING, *DECODING, *COMPARISON, *ABLATIONS, *EVALUATION, "accelerate", "ray"}
    assert folders == {path.parent.name for path in FILES}
    for folder in folders:  # as `d2f configs` lists them: gsm8k before gsm8k-chat
        assert list(shipped.shipped(folder)) == sorted(shipped.shipped(folder))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_is_read_by_its_name_with_all_that_it_refers_to(path):
    """What a configuration names itself (another one, a bundled adapter) is there, too."""
    name = path.stem
    if path.parent.name in TRAINING:
        adapter = read_config(name).init_adapter
        made = {f"{read_config(n).output}/adapter" for n in shipped.shipped(*TRAINING)}
        bundled = adapter and (Path(resolve(adapter)) / "adapter_config.json").is_file()
        assert adapter is None or bundled or adapter in made  # or another configuration makes it
    elif path.parent.name in COMPARISON:
        config = read_comparison(name)  # reads which decoder options the entries name
        named = [e for e in config.entries if getattr(e, "config", None)]
        assert bool(named) == ("config:" in path.read_text())
        assert all(options_file(e, task) for e in named for task in config.tasks)
    elif path.parent.name in ABLATIONS:
        assert check(Ablation, read_mapping(path), name).train in shipped.shipped(*TRAINING)
    elif path.parent.name in EVALUATION:
        if "judge: math" in path.read_text() and find_spec("math_verify") is None:
            pytest.skip("math-verify is missing")
        assert find_task(name, allow_code_execution=True).name == name
    elif path.parent.name in DECODING:
        assert (
            read_settings(parse(["--config", name, "--tau-conf", "0.5"])).given["tau_conf"] == 0.5
        )
        decoder, given = split(read_mapping(path), name)
        made = DECODERS[decoder or "d2f"](**given)
        assert all(getattr(made, key) == value for key, value in given.items())
        assert given.get("block_size") == yaml.safe_load(path.read_text()).get("block_size")
    elif path.parent.name == "ray":
        (made,) = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text())).applications
        assert made.import_path == f"{application.__module__}:{application.__name__}"
        assert parse_serve(command_line(made.args)).named
    else:
        assert find_config(name, "accelerate") == path


def test_the_published_wino_plus_is_two_stages_that_fit_each_other_and_their_collections():
    """Stage 2 trains stage 1's adapter on, in the blocks and by the terms of the paper; the
    commands that collect their rollouts, in the comments, write what the stages read."""
    stages = [f"llada-8b-wino-plus-{task}" for task in ("gsm8k", "countdown")]
    first, second = map(read_config, stages)
    assert second.init_adapter == f"{first.output}/adapter" and second.init == first.init
    lora = first.objective.lora
    assert (lora.r, lora.alpha, lora.dropout) == (128, 128, 0.0)
    for name, config in zip(stages, (first, second), strict=True):
        terms = config.objective
        assert (terms.tau1, terms.tau2, terms.defer_weight, terms.sharpen_weight) == (
            0.6, 0.9, 1.0, 0.1,
        )  # fmt: skip
        text = find_config(name, *TRAINING).read_text()
        lines = text.partition("distill.rollouts ")[2].replace("\\\n#", " ").splitlines()
        asked = parse_rollouts(shlex.split(lines[0]))
        assert asked.output == config.data.file and asked.model == config.init
        assert config.objective.block_shares == {asked.given["block_size"]: 1.0}
        assert (asked.given["tau1"], asked.given["tau2"]) == (terms.tau1, terms.tau2)
        assert asked.ladder == [0, 0.1, 0.2, 0.3, 0.4, 0.5]
        assert ["train" in task.file.splits for task in asked.chosen] == [True]


def test_a_file_comes_before_a_name_and_a_folder_does_not(tmp_path):
    shipped_one = ROOT / "configs" / "training" / "tiny-ar.yaml"
    (tmp_path / "tiny-ar").mkdir()
    for name in ("tiny-ar", "tiny-ar.yaml"):
        assert find_config(name, *TRAINING) == shipped_one
    (tmp_path / "tiny-ar.yaml").write_text("own: 1\n")
    assert find_config("tiny-ar.yaml", *TRAINING) == Path("tiny-ar.yaml")
    assert find_config("tiny-ar", *TRAINING) == shipped_one


def test_in_an_installed_package_they_lie_inside(tmp_path, monkeypatch):
    """And a stranger's configs/ beside it is not read."""
    for place in ("d2f/configs/training/inside.yaml", "configs/training/beside.yaml"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text("{}\n")
    monkeypatch.setattr(shipped, "HERE", tmp_path / "d2f")
    assert list(shipped.shipped()) == ["inside"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tiny-d2g", r"^tiny-d2g: cannot be read: no such file.* did you mean tiny-d2f.*llada-8b"),
        ("configs/tiny-d2f.yaml", "no such file.*tiny-d2f is one of training, .*training.tiny-d2f"),
        ("compare-tiny", "is one of comparison, .*there are .*tiny-ar"),
        (".", "a folder"),
    ],
)
def test_an_unknown_name_is_an_error_that_lists_what_there_is(given, said):
    with pytest.raises(InputError, match=said):
        read_config(given)


def test_the_list_and_the_path_of_one(capsys):
    assert shipped.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = "compare-tiny decoders-tiny frontier-code frontier-tiny real-smollm2 real-smollm2-fp32"
    assert f"comparison:  {', '.join([*names.split(), 'vllm-ways', 'wedlm-tiny'])}" in lines
    assert shipped.main(["ddp"]) == 0
    assert capsys.readouterr().out.strip() == str(ROOT / "configs" / "accelerate" / "ddp.yaml")
    assert shipped.main(["dpp"]) == 2
    assert "did you mean ddp?" in capsys.readouterr().err


def texts() -> list[Path]:
    """What names configurations: the documents, the configurations, the models' cards."""
    cards = (ROOT / "d2f" / "models").glob("*/README.md")
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *FILES,
        *cards,
    ]


def test_the_configurations_that_documents_name_are_there():
    named, paths = set(), set()
    for text in (path.read_text(encoding="utf-8") for path in texts()):
        named |= set(re.findall(r"--config ([a-z][\w.-]*)(?![\w./-])", text))
        paths |= set(re.findall(r"configs/\w+/[\w.-]+\.yaml", text))
    assert {"tiny-d2f", "compare-tiny", "llada-8b-d2f", "d2f", "tiny-d2f-long-sudoku"} <= named
    assert named <= shipped.shipped().keys()
    assert paths and all((ROOT / path).is_file() for path in paths)


def test_the_published_settings_of_d2f_are_there():
    """Table of arXiv 2508.09192's official evaluation scripts: block size, tau_add, tau_conf."""
    found = {}
    for path in FILES:
        if path.parent.name == "published" and path.stem.startswith("d2f-"):
            v = read_mapping(path)
            found[path.stem] = (v["block_size"], v["tau_add"], v["tau_conf"])
    assert found == {
        "d2f-llada-gsm8k": (64, 0.7, 0.9), "d2f-llada-mbpp": (32, 0.9, 0.9),
        "d2f-llada-humaneval": (32, 0.1, 0.9), "d2f-llada-math": (32, 0.1, 0.9),
        "d2f-dream-gsm8k-cot": (32, 0.1, 0.9), "d2f-dream-mbpp": (48, 0.1, 0.9),
        "d2f-dream-humaneval": (32, 0.9, 0.95), "d2f-dream-math": (64, 0.1, 0.9),
    }  # fmt: skip
