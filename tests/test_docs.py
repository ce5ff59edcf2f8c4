"""The commands of docs/from-autoregressive.md run one after another; the links of docs lead on."""

from __future__ import annotations

import json
import re
import statistics

import pytest
from documents import ROOT, in_small, run

import d2f
from benchmarks import adaptive, frontier
from d2f.tasks import find_task
from decode.compare.report import ComparisonReport

WAYS = ("plain", "ours", "compiled")  # of a training step
# Rows of the tables in decoders.md, and the entries of the reports that they are.
ENTRIES = {
    "autoregressive (`tiny-ar`)": ["autoregressive"],
    "WeDLM, verified (`tiny-wedlm`)": ["WeDLM verified"],
    "teacher, static": ["teacher static"],
    "teacher, factor 0.1": ["teacher factor factor 0.1"],
    "teacher, threshold 0.97": ["teacher threshold tau 0.97"],
    "teacher, WINO 0.8 / draft only 0.8 / draft only 0.97": [
        "teacher WINO tau1 0.8",
        "teacher WINO draft only tau1 0.8",
        "teacher WINO draft only tau1 0.97",
    ],
    "teacher, entropy 0.03": ["teacher entropy gamma 0.03"],
    "teacher read block-causally, D2F 0.99": ["teacher D2F tau_conf 0.99"],
    "student, static": ["student static"],
    "student, FreeDave eager, 8 drafts": ["student FreeDave eager drafts 8"],
    "student, block (or threshold) 0.97": ["student block tau 0.97"],
    "student, D2F 0.97 / 0.995": ["student D2F tau_conf 0.97", "student D2F tau_conf 0.995"],
    "student, D2F 0.8, verified on commit": ["student D2F verify on commit tau_conf 0.8"],
}
WEDLM = (
    "vLLM", "vLLM one process", "autoregressive", "WeDLM one token",
    "WeDLM entropy_threshold 0.1", "WeDLM entropy_threshold 0.4", "WeDLM verified",
    "its weights autoregressive",
)  # fmt: skip
PAGE = (ROOT / "docs" / "from-autoregressive.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_way_from_an_autoregressive_checkpoint_runs(tmp_path):
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    smaller = {
        "accelerate launch": "--steps 1 --data.rows 1",
        "python -m decode.pipeline": "--problems 1 --tasks sudoku",
    }
    for command in block.splitlines():
        out = run(in_small(command, smaller), tmp_path)
    assert "tokens/forward" in out
    made = {name: tmp_path / "runs" / "from-ar" / name for name in ("start", "teacher", "student")}
    assert d2f.load(made["start"], device="meta").contract.objective == "next_token"
    teacher = d2f.load(made["teacher"] / "model", device="meta")
    assert (teacher.family, teacher.contract.objective) == ("dream", "masked_diffusion")
    assert d2f.load(made["student"] / "model", device="meta").contract.objective == "d2f"


@pytest.mark.slow
def test_the_way_to_a_scored_checkpoint_runs(tmp_path):
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    found = {
        kind: re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)[1]
        for kind in ("bash", "yaml", "json")
    }
    row = json.loads(found["json"])
    rows = [
        row | {"question": row["question"].replace("3", str(n)), "answer": str(n + 4)}
        for n in range(1, 30)
    ]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "my_task.yaml").write_text(found["yaml"])
    said = [run(in_small(command, {}), tmp_path) for command in found["bash"].splitlines()]
    assert "of 20 right" in said[0] and "of 29 right" in said[1]
    assert all("pass@4" in text for text in said[3:])
    for folder in ("sums", "sums-sampled"):
        assert (tmp_path / "runs" / folder / "report.json").is_file()


def test_the_task_file_that_builds_on_another_is_one(tmp_path):
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(like: .*?)```", page, re.DOTALL)
    rows = [{"question": f"{n}+1?", "answer": f"{n + 1}"} for n in range(20)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.yaml").write_text(text)
    task = find_task(str(tmp_path / "mine.yaml"))
    problem = task.problems("heldout", 1)[0]
    assert problem.prompt.count("Question: ") == 5  # with gsm8k's four examples
    assert task.right(problem, f"about {int(problem.answer) + 0.5}")


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a text of docs/`page`, without its head."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(heading)[2]
    lines = re.search(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_training_step_on_a_cpu_is_what_its_files_say():
    heading = "## A step beside the plain one, on a CPU"
    rows = table("training.md", heading)
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").partition(heading)[2]
    said = []
    for row, name in zip(rows, ("small", "eighth"), strict=True):
        path = f"benchmarks/results/train-step-cpu-{name}.json"
        assert f"(../{path})" in row[0]
        measured = json.loads((ROOT / path).read_text())["measured"]
        speeds, peaks = (
            [statistics.median(one[key] for one in measured if one["way"] == way) for way in WAYS]
            for key in ("tokens_per_second", "peak_mib")
        )
        assert row[1:] == [*(f"{x:,.0f}" for x in speeds), *(f"{x:,.0f} MiB" for x in peaks)]
        said.append((speeds[2] / speeds[0], 100 * peaks[2] / peaks[0]))
    found = re.findall(r"([\d.]+) times(?: the speed)? at\s+(\d+) %", text)
    assert found == [(f"{times:.1f}", f"{peak:.0f}") for times, peak in said]


def test_what_compiled_forwards_take_is_what_the_file_says():
    forward = ROOT / "benchmarks" / "results" / "forward"
    files = {"4": "compiled-tiny.json", "2": "compiled-tiny-2-cores.json"}
    measured = {cores: json.loads((forward / name).read_text()) for cores, name in files.items()}
    rows = table("cpu.md", "## Compiled")
    assert [tuple(row[:3]) for row in rows] == [
        (cores, f"`{name}`", size)
        for cores in files
        for name in ("tiny-ar", "tiny-d2f")
        for size in ("1", "4", "16")
    ]
    for cores, name, size, *said in rows:
        runs = [
            [run[size] for run in measured[cores][way][name.strip("`")]]
            for way in ("graph", "native")
        ]
        took = [statistics.median(run["forward"] for run in some) for some in runs]
        above = [statistics.median(r["forward"] - r["products"] for r in some) for some in runs]
        assert said[:4] == [f"{x:.2f} ms" for x in (*took, *above)]
        assert said[4] == f"{100 * above[1] / above[0]:.0f} %"


def test_the_decoders_on_story_are_what_the_report_says():
    report = ComparisonReport.load(
        ROOT / "benchmarks" / "results" / "decoders-tiny" / "report.json"
    )
    forward = {r.entry: r.tokens_per_forward for r in report.speeds if r.workload == "story"}
    rows = table("decoders.md", "## What they do on the bundled models")
    assert [label for label, _, _ in rows] == list(ENTRIES)
    for label, right, tokens in rows:
        entries = ENTRIES[label]
        found = [report.accuracy(entry, "story").right for entry in entries]
        assert right == " / ".join(map(str, found)), label
        assert tokens == " / ".join(f"{forward[entry]:.2f}" for entry in entries), label


def test_wedlm_beside_vllm_is_what_the_report_says():
    report = ComparisonReport.load(ROOT / "benchmarks" / "results" / "wedlm-tiny" / "report.json")
    speed = {(r.workload, r.entry, r.concurrency): f"{r.throughput:,.0f}" for r in report.speeds}
    rows = table("decoders.md", "## WeDLM on a model trained for it")
    for (label, *cells), entry in zip(rows, WEDLM, strict=True):
        expected = []
        for task in ("story", "sudoku"):
            expected.append(str(report.accuracy(entry, task).right))
            expected += [speed[task, entry, level] for level in (1, 16)]
        assert cells == expected, label


def test_the_readmes_ratios_are_those_of_the_report():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{frontier.BEGIN}{frontier.text()}<!-- end -->" in readme


def test_the_tables_of_adaptive_widths_are_those_of_the_reports():
    blocks = adaptive.blocks()
    assert len(blocks) == 5
    for page, begin, block in blocks:
        assert f"{begin}{block}<!-- end -->" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_links_lead_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        place = page.parent / name if name else page
        assert place.is_file(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", place.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]
            assert heading in anchors, target


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md", "README.md"])
def test_the_files_that_a_page_names_are_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    folders = "d2f|decode|distill|triton_kernels|benchmarks|configs|tests|docs"
    named = set(re.findall(rf"(?<![\w/.])(?:{folders})/[\w/-]*(?:\.\w+)?", text))
    assert len(named) > 10
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
