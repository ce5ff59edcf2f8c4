"""The folder of a run, without a training: what its parts say and what it is taken for; the card,
and digests of what a run reads."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import pytest
from data_rows import pairs, run_settings, stream, write
from huggingface_hub import ModelCard

import d2f
from d2f.errors import InputError
from distill import checkpoint as identity
from distill.checkpoint import RunFolder, flat
from distill.config import TrainConfig
from distill.export import card, curve, data_name, samples_hash
from distill.log import Log, keep_lines

TASKS = {"tasks": {"countdown": 1.0, "story": 1.0}}


# The log


def test_a_log_grows_by_a_line_of_json_and_is_cut_after_a_step(tmp_path):
    path = tmp_path / "log.jsonl"
    keep_lines(path, 3)
    assert not path.exists(), "where there is no log, none is made"
    for steps in ((1, 2), (3, 4)):
        log = Log(path)
        for step in steps:
            log.write({"step": step, "loss": float("nan")})
        descriptor = log._file._descriptor
        log.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    keep_lines(path, 3)
    assert path.read_text() == "".join(f'{{"step": {n}, "loss": NaN}}\n' for n in (1, 2, 3))


# The folder


def begun(config, **changes) -> RunFolder:
    """The folder of a run that has begun and kept something."""
    RunFolder(config).begin(0)
    (Path(config.output) / "checkpoints" / "step-0000001").mkdir(parents=True)
    return RunFolder(config.model_copy(update=changes))


def test_a_run_is_finished_where_its_record_and_its_folders_say_so(tmp_path):
    config = run_settings(tmp_path / "run", TASKS)
    folder = begun(config)
    assert not folder.is_finished and folder.expected == ["model"]
    folder.finish()
    assert not folder.is_finished, "the folder is not there"
    (tmp_path / "run" / "model").mkdir()
    assert folder.is_finished and RunFolder(config).is_finished
    official = RunFolder(config.model_copy(update={"export_official": True}))
    assert official.expected == ["model", "official"] and not official.is_finished
    (tmp_path / "run" / "official").mkdir()
    assert not official.is_finished, "what lies there is not of this run's end"
    (tmp_path / "run" / "checkpoints" / "step-0000002").mkdir()
    assert not RunFolder(config.model_copy(update={"steps": 3})).is_finished
    RunFolder(config).begin(2)
    assert not RunFolder(config).is_finished, "it goes on"


def test_a_d2f_run_is_expected_to_leave_its_adapter(tmp_path):
    config = run_settings(tmp_path, TASKS, "d2f", init="tiny-teacher", export_official=True)
    assert RunFolder(config).expected == ["adapter", "model", "official"]


@pytest.mark.parametrize(
    "name", ["model", "adapter", "official", "best", "checkpoints/step-0000001"]
)
def test_whatever_a_run_has_kept_is_not_mixed_with_another(tmp_path, name):
    config = run_settings(tmp_path / "run", TASKS)
    RunFolder(config).begin(0)
    other = config.model_copy(update={"seed": 1})
    RunFolder(other)  # nothing was kept
    (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(InputError, match=r"holds another run \(seed: 0 there, 1 now\): expected"):
        RunFolder(other)
    RunFolder(config)


def test_what_changes_no_weights_may_change_under_way(tmp_path):
    config = run_settings(tmp_path, TASKS)
    free = {"tracker": "wandb", "wandb_mode": "online", "log_every": 3, "save_every": 3, "keep": 3,
            "export_official": True, "gradient_accumulation": 2,
            "gradient_checkpointing": True}  # fmt: skip
    begun(config, **free)
    with pytest.raises(InputError, match="mixed_precision: 'no' there, 'bf16' now; eval_every: "):
        RunFolder(config.model_copy(update={"eval_every": 1, "mixed_precision": "bf16"}))


def test_a_folder_of_an_earlier_version_is_the_same_run(tmp_path):
    """Without a record; without a key that came later."""
    config = run_settings(tmp_path, TASKS)
    begun(config)
    (tmp_path / "run.json").unlink()
    there = config.model_dump(mode="json")
    del there["attention"]
    (tmp_path / "config.yaml").write_text(json.dumps(there))
    assert RunFolder(config).record == {}


def test_a_key_that_this_version_does_not_know_is_told(tmp_path):
    """The configuration there is then compared as it was written."""
    config = run_settings(tmp_path, TASKS)
    begun(config)
    there = config.model_dump(mode="json") | {"flavour": "sweet"}
    (tmp_path / "config.yaml").write_text(json.dumps(there))
    with pytest.raises(InputError, match=r"another run \(flavour: 'sweet' there, None now\)"):
        RunFolder(config)


def test_the_same_rows_at_another_place_are_the_same_run_and_other_rows_are_not(tmp_path):
    first, second = (write(tmp_path / name, pairs(3)) for name in ("a.jsonl", "b.jsonl"))
    config = run_settings(tmp_path / "run", {"file": str(first)})
    begun(config).check_inputs()
    moved = config.model_copy(update={"data": config.data.model_copy(update={"file": str(second)})})
    RunFolder(moved).check_inputs()
    write(first, pairs(4))
    with pytest.raises(InputError, match=r"\(data\.file had SHA-256 \w+\.\.\., has \w+\.\.\. now"):
        RunFolder(config).check_inputs()
    write(second, pairs(4))
    with pytest.raises(InputError, match=r"data\.file: '.*a\.jsonl' there, '.*b\.jsonl' now"):
        RunFolder(moved)


def reading(place: str) -> list[TrainConfig]:
    """Runs that read everything that may be a path."""
    noise = {"schedule": "pipeline", "states": place}
    given = {"init": place, "init_adapter": place, "noise": noise}
    given["evaluation"] = {"loss_file": place}
    return [
        run_settings(Path("d2f"), {"file": place}, "d2f", **given),
        run_settings(Path("scratch"), {"dataset": place}, tokenizer=place),
    ]


def test_of_what_no_digest_is_known_the_place_counts(tmp_path, monkeypatch):
    """Of hub names, and of all that a run of an earlier version read."""
    monkeypatch.chdir(tmp_path)
    found = []
    for number, config in enumerate(reading("a")):
        (tmp_path / config.output / "checkpoints" / "step-0000001").mkdir(parents=True)
        config.save(tmp_path / config.output / "config.yaml")
        for place in ("./a", str(tmp_path / "a"), "b/../a"):
            RunFolder(reading(place)[number])
        with pytest.raises(InputError, match="holds another run") as caught:
            RunFolder(reading("b")[number])
        found += re.findall(r"([\w.]+): 'a' there, 'b' now", str(caught.value))
    assert sorted(found) == sorted(identity.PATHS)


@pytest.mark.parametrize("text", ["[]", "3"])
def test_a_record_that_is_none_is_said(tmp_path, text):
    config = run_settings(tmp_path, TASKS)
    begun(config)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match=r"run\.json is not the record of a run: put it back"):
        RunFolder(config)


def test_an_extension_is_of_a_run_that_has_ended_and_told_once(tmp_path):
    config = run_settings(tmp_path, TASKS)  # of two steps
    longer = config.model_copy(update={"steps": 5})
    begun(config)
    with pytest.raises(InputError, match=r"2 there, 5 now.*more steps are for a run that has come"):
        RunFolder(longer)
    (tmp_path / "checkpoints" / "step-0000002").mkdir()
    curve = "from there on the learning rate is the cosine of 5 steps"
    said = f"extended at step 2 from 2 to 5 steps: {curve}"
    folder = RunFolder(longer)
    assert (folder.steps_there, folder.begin(2)) == (2, said)
    assert RunFolder(longer).begin(3) is None, "its configuration says five steps by now"
    config.save(tmp_path / "config.yaml")  # as if killed before it was written
    RunFolder(longer).begin(2)
    (tmp_path / "checkpoints" / "step-0000005").mkdir()
    constant = config.optimizer.model_copy(update={"schedule": "constant"})
    again = longer.model_copy(update={"steps": 1000, "optimizer": constant})
    longer.model_copy(update={"optimizer": constant}).save(tmp_path / "config.yaml")
    assert RunFolder(again).begin(5) == (
        "extended at step 5 from 5 to 1,000 steps: from there on the learning rate is constant"
    )
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["extended"] == [{"step": 2, "from": 2, "to": 5},
                                  {"step": 5, "from": 5, "to": 1000}]  # fmt: skip
    with pytest.raises(InputError, match="steps: 1000 there, 5 now"):
        RunFolder(longer)


def test_values_are_compared_by_dotted_keys():
    found = flat({"a": 1, "b": {"c": {"d": 0.5}, "e": [1, 2]}, "f": None, "g": True})
    assert found == {"a": 1, "b.c.d": 0.5, "b.e": "[1, 2]", "f": "None", "g": True}


# What it reads


def test_digests_are_of_what_is_read_and_no_more(tmp_path):
    path = write(tmp_path / "d.jsonl", pairs(3))
    assert identity.digests(run_settings(tmp_path, TASKS)) == {}
    found = identity.digests(run_settings(tmp_path, {"file": str(path)}))
    assert found == {"data.file": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert identity.digests(run_settings(tmp_path, {"dataset": "nobody/nothing"})) == {}
    with pytest.raises(InputError, match=r"none\.jsonl: cannot be read: No such file"):
        identity.digests(run_settings(tmp_path, {"file": str(tmp_path / "none.jsonl")}))


def test_a_data_sets_digest_is_of_names_and_contents_but_not_of_caches(tmp_path):
    folder = tmp_path / "set"

    def digest() -> str:
        return identity.digests(run_settings(tmp_path, {"dataset": str(folder)}))["data.dataset"]

    (folder / "train").mkdir(parents=True)
    (folder / "train" / "a.arrow").write_text("1")
    first = digest()
    for name in ("cache-1.arrow", ".lock"):
        (folder / "train" / name).write_text("x")
    assert digest() == first
    (folder / "train" / "a.arrow").write_text("2")
    second = digest()
    (folder / "train" / "a.arrow").rename(folder / "train" / "b.arrow")
    assert len({first, second, digest()}) == 3


# The card


def test_a_card_says_what_made_a_result(tmp_path):
    path = write(tmp_path / "d.jsonl", pairs(3))
    config = run_settings(tmp_path / "my-run", {"file": str(path)})
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1, "loss": 2, "samples": 3}\n{"step": 3, "loss": 1, "samples": 4}\n'
                   '{"step": 2000, "loss": 0.5, "samples": 4567}\n')  # fmt: skip
    data = stream(file=str(path))
    text = card(config, data, log, [{"step": 2, "from": 2, "to": 2000}])
    assert ModelCard(text).data.tags == ["d2f", "diffusion-language-model", "masked_diffusion"]
    text = ModelCard(text).text
    head, rest = text.split("\n\n| step | loss |\n|---|---|\n")
    assert head.strip().splitlines() == [
        "# my-run", "", "Trained by the objective `masked_diffusion`.", "", "| | |", "|---|---|",
        f"| made by | d2f-toolkit {d2f.__version__} |",
        "| command | `accelerate launch -m distill.train --config config.yaml` |",
        "| starts from | random weights |",
        "| data | d.jsonl |",
        f"| SHA-256 of the first 256 samples | `{samples_hash(data)}` |",
        f"| SHA-256 of d.jsonl | `{hashlib.sha256(path.read_bytes()).hexdigest()}` |",
        "| steps | 2,000, 4,567 samples |",
        "|  | extended at step 2 from 2 to 2,000 steps: from there on the learning rate is the "
        "cosine of 2,000 steps |",
    ]  # fmt: skip
    table, rest = rest.split("\n\nconfig.yaml, every key resolved:\n\n```yaml\n")
    assert table.splitlines() == ["| 1 | 2.0000 |", "| 3 | 1.0000 |", "| 2,000 | 0.5000 |"]
    config.save(tmp_path / "config.yaml")
    assert rest == (tmp_path / "config.yaml").read_text() + "```\n"
    plain = card(run_settings(tmp_path / "b", TASKS | {"rows": 2}, init="start"), data, log)
    assert "| starts from | start |" in plain and "SHA-256 of d" not in plain
    assert "extended" not in plain


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (TASKS, "generated countdown, story problems, split train, seed 4"),
        ({"file": "some/where.jsonl"}, "where.jsonl"),
        ({"dataset": "nobody/nothing"}, "nothing"),
    ],
)
def test_data_is_called_by_what_it_is(tmp_path, data, said):
    assert data_name(run_settings(tmp_path, data, seed=4)) == said


def test_the_hash_of_samples_tells_prompt_from_response_and_leaves_out_what_is_left_out(tmp_path):
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "q " * 99, "response": "c"}]
    long, short = (
        stream(file=str(write(tmp_path / name, kept)), on_long="drop", chat_template="none")
        for name, kept in (("two.jsonl", rows), ("one.jsonl", rows[:1]))
    )
    sample = short.sample(0)
    line = json.dumps([sample.prompt, sample.response]).encode()
    assert samples_hash(short) == hashlib.sha256(line * 256).hexdigest()
    assert samples_hash(long) == hashlib.sha256(line * 128).hexdigest()


@pytest.mark.parametrize(
    ("count", "steps"),
    [(1, [0]), (2, [0, 1]), (10, list(range(10))), (11, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]),
     (91, list(range(0, 91, 10)))],
)  # fmt: skip
def test_the_points_of_a_curve_are_evenly_apart(count, steps):
    table = curve([{"step": step, "loss": 1.0} for step in range(count)])
    assert table == ["| step | loss |", "|---|---|", *(f"| {step} | 1.0000 |" for step in steps)]
