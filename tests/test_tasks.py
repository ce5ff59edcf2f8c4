"""The tiny tasks: their splits, their checkers, and their tokenizer."""

import re
from hashlib import sha256
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from d2f import models
from d2f.tasks import (
    DEFAULT_TASKS,
    SPLITS,
    TASKS,
    Problem,
    check,
    make_problem,
    make_problems,
    split_of,
)
from d2f.tasks.task import RESPONSE_LENGTH
from d2f.tasks.tokenizer import SPECIAL_TOKENS, main, train_tokenizer
from d2f.tokenizer import load_tokenizer

repeatable = settings(derandomize=True, deadline=None)
problems = st.builds(
    make_problem,
    st.sampled_from(TASKS),
    st.sampled_from(SPLITS),
    st.integers(0, 10**12),
    st.integers(0, 100),
)
# Text near a response is likelier to reach the far corners of a checker than any text.
texts = st.one_of(
    st.text(),
    st.text(alphabet="0123456789+-*/=#._ \n\r٣²½"),
    st.from_regex(r"#### ?-?\d*"),
    st.text("def rate(sizes):\n    =+-*/%[].append for in if return 019"),
)


def some(task, count=200):
    return [make_problem(task, "train", index) for index in range(count)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


# Generation and splits


@repeatable
@given(problems)
def test_own_answer_is_right_and_ends_are_not_needed(problem):
    assert check(problem, problem.answer)
    assert check(problem, f"\n{problem.answer} \n")
    assert not check(problem, "")
    assert not check(problem, problem.question)


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_and_hold_each_key_once(task):
    """Whatever the seed; and fewer problems are the beginning of more."""
    count, keys = 10 if task == "coding" else 100, set()
    for split in SPLITS:
        found = make_problems(task, split, count)
        assert found[: count // 3] == make_problems(task, split, count // 3)
        assert len({problem.key for problem in found}) == len(found) == count
        of_split = {p.key for seed in (0, 1) for p in make_problems(task, split, count, seed)}
        assert all(split_of(key) == split for key in of_split) and not of_split & keys
        keys |= of_split
    assert make_problems(task, "heldout", 0) == []


@pytest.mark.parametrize("task", TASKS)
def test_access_is_independent_of_order(task):
    forwards = [make_problem(task, "train", index, seed=3) for index in range(10)]
    backwards = [make_problem(task, "train", index, seed=3) for index in reversed(range(10))]
    assert forwards == backwards[::-1]
    assert forwards != [make_problem(task, "train", index, seed=4) for index in range(10)]


# Of questions, answers and keys: five problems of each split by each of two seeds.
DIGESTS = {
    "story": "e0ee46c69d27802b",
    "countdown": "fbbccf84683e1a69",
    "sudoku": "1aadb02836d33da0",
    "coding": "ea87fe0fc3ca4556",
}


@pytest.mark.parametrize("task", TASKS)
def test_problems_stay_what_the_bundled_models_were_trained_on(task):
    assert make_problem("story", "train", 1) == Problem(
        "story",
        "At first Ivan has 14 plums. He gives 4 plums to a friend. He loses 2 of them. "
        "How many plums does Ivan have now?",
        "14-4=10\n10-2=8\n#### 8",
        "14-4-2",
    )
    made = [
        make_problem(task, split, index, seed)
        for split in SPLITS
        for seed in (0, 7)
        for index in range(5)
    ]
    texts = [text for p in made for text in (p.question, p.answer, p.key)]
    assert sha256("\n".join(texts).encode()).hexdigest()[:16] == DIGESTS[task]


def test_more_problems_than_a_split_holds(monkeypatch):
    monkeypatch.setattr("d2f.tasks.task.MAX_REPEATS", 3)
    with pytest.raises(ValueError, match=r"heldout split of countdown, got 100000"):
        make_problems("countdown", "heldout", 100_000)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("chess", "train", 1, 0),
         "task: got 'chess'; expected one of story, countdown, sudoku, coding"),
        (("story", "test", 1, 0), "split: got 'test'; expected one of train, tuning, heldout"),
        (("story", "train", 1, -2), "non-negative"),
    ],
)  # fmt: skip
def test_errors_say_what_was_expected(asked, message):
    for make in (make_problem, make_problems):
        with pytest.raises(ValueError, match=message):
            make(*asked)


# Checkers


@repeatable
@given(problems, texts)
def test_check_never_raises(problem, text):
    assert check(problem, text) in (True, False)
    assert check(problem, problem.answer + text) in (True, False)


@repeatable
@given(problems.filter(lambda problem: problem.task != "coding"), st.data())
def test_a_changed_digit_or_line_is_wrong(problem, data):
    """In a story only the result counts, elsewhere every digit does."""
    start = problem.answer.index("####") if problem.task == "story" else 0
    places = [i for i, sign in enumerate(problem.answer) if sign.isdigit() and i >= start]
    place = data.draw(st.sampled_from(places))
    digit = data.draw(st.sampled_from(sorted(set("123456789") - {problem.answer[place]})))
    assert not check(problem, problem.answer[:place] + digit + problem.answer[place + 1 :])
    if problem.task != "story":
        lines = problem.answer.split("\n")
        line = data.draw(st.integers(0, len(lines) - 1))
        assert not check(problem, "\n".join(lines[:line] + lines[line + 1 :]))
        assert not check(problem, "\n".join([*lines, lines[line]]))
        assert not check(problem, problem.answer + "\njunk")


# Problem, right responses, wrong ones.
VERDICTS = [
    (
        Problem("story", "", "25+17=42\n42/2=21\n#### 21", "25+17/2"),
        # The integer after the first mark counts.
        ["#### 21", "1+1=3\n####21 rolls", "#### 21.", "#### 21\n#### 5"],
        [
            "#### 5\n#### 21", "#### 210", "#### 2", "#### 21.5", "#### -21", "#### x 21", "21",
            "####", "#### " + "1" * 5000,
        ],
    ),
    (
        Problem("countdown", "", "", "2,5,8,9=75"),
        # Every line counts.
        ["9-2=7\n8+7=15\n15*5=75", "9 - 2 = 7\n\n7+8=15\n 5*15=75\n\n", "9*8=72\n5-2=3\n72+3=75"],
        [
            "5*8=40\n40-2=38\n38+9=47",  # another target
            "8+7=15\n9-2=7\n15*5=75",  # 7 is not there yet
            "9-2=7\n8+7=15\n15*5=75\n75", "9-2=7\n8+7=15", "9*8=72\n5-2=3\n72+3=74",
            "9*8=73\n5-2=3\n73+2=75", "9-2=7,8+7=15,15*5=75", "9/2=4\n8+4=12\n12*5=60",
            "2-9=-7\n8--7=15\n15*5=75",
        ],
    ),
    (
        Problem("countdown", "", "", "4,4,10=10"),
        ["4/4=1\n1*10=10", "4*10=40\n40/4=10"],
        ["4-4=0\n0+10=10"],
    ),
]  # fmt: skip


def test_verdicts():
    for problem, right, wrong in VERDICTS:
        assert [text for text in [*right, *wrong] if check(problem, text)] == right


# What is generated


def test_story_steps_follow_and_its_words_tell_every_number_in_order():
    """So that the story alone says the chain; doubling and tripling are words."""
    words, counts = {"doubles": "2", "twice": "2", "triples": "3"}, []
    for problem in some("story"):
        told = re.findall(r"\d+|doubles|twice|triples", problem.question)
        assert [words.get(number, number) for number in told] == re.findall(r"\d+", problem.key)
        *steps, result = problem.answer.split("\n")
        value = re.match(r"\d+", problem.key)[0]
        chain = value
        for step in steps:
            left, operator, right, out = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", step).groups()
            assert left == value
            assert eval(f"{left}{operator}{right}=={out}")  # "/" is exact: no rounding here
            assert 1 <= int(out) <= 99
            chain += operator + right
            value = out
        assert result == f"#### {value}"
        assert chain == problem.key
        counts.append(len(steps))
    assert set(counts) == {1, 2, 3, 4, 5, 6}


def test_countdown_tells_the_numbers_of_its_key():
    for problem in some("countdown"):
        *numbers, target = map(int, re.findall(r"\d+", problem.question))
        assert problem.key == f"{','.join(map(str, sorted(numbers)))}={target}"
        assert len(numbers) in (3, 4) and max(numbers) <= 12 and 10 <= target <= 99


def test_sudoku_has_one_solution():
    """Against a plain search over the rows that fit."""

    def solve(puzzle):
        rows = list(map("".join, permutations("1234")))
        fits = [
            [row for row in rows if re.fullmatch(line.replace("_", "."), row)] for line in puzzle
        ]
        for grid in product(*fits):
            columns = zip(*grid, strict=True)
            boxes = [
                {grid[y][x] for y in (top, top + 1) for x in (left, left + 1)}
                for top in (0, 2)
                for left in (0, 2)
            ]
            if all(len(set(unit)) == 4 for unit in [*columns, *boxes]):
                yield "\n".join(grid)

    counts = set()
    for problem in some("sudoku", 40):
        title, *puzzle = problem.question.split("\n")
        assert title == "Sudoku:"
        assert problem.key == "".join(puzzle)
        assert list(solve(puzzle)) == [problem.answer]
        counts.add(problem.key.count("_"))
    assert counts == {6, 7, 8, 9, 10}


# Tokenizer


@repeatable
@given(text=st.text() | problems.flatmap(lambda p: st.sampled_from([p.question, p.answer])))
def test_any_text_round_trips_digit_by_digit(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    pieces = [tokenizer.decode([i]) for i in ids]
    assert all(re.fullmatch(r" ?\d|[^0-9]+", piece) for piece in pieces)


def test_responses_fit_with_their_end(tokenizer):
    for task in DEFAULT_TASKS:
        lengths = [len(tokenizer(problem.answer).input_ids) + 1 for problem in some(task)]
        assert max(lengths) <= RESPONSE_LENGTH[task]


def test_special_tokens_have_fixed_ids_and_a_mark_is_one_token(tokenizer):
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.mask_token_id == 1
    assert tokenizer.decode(tokenizer("#### 7<|endoftext|>").input_ids, True) == "#### 7"
    assert [tokenizer.decode([i]) for i in tokenizer("#### 42").input_ids] == ["####", " 4", "2"]


def test_chat_template(tokenizer):
    messages = [
        {"role": "user", "content": "Use 1 and 2 to make 3.\n"},
        {"role": "assistant", "content": "1+2=3"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|user|>Use 1 and 2 to make 3.\n<|assistant|>1+2=3<|endoftext|>"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(prompt)
    assert prompt.endswith("<|assistant|>")
    system = {"role": "system", "content": "You are a helpful assistant."}
    assert tokenizer.apply_chat_template([system, *messages], tokenize=False) == text
    with pytest.raises(Exception, match="role must be user or assistant, got tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)


def test_command_saves_the_same_bytes_twice(tokenizer, tmp_path, capsys):
    tokenizer.save_pretrained(tmp_path / "a")
    main(["--output", str(tmp_path / "b")])
    assert capsys.readouterr().out == f"512 tokens saved in {tmp_path / 'b'}\n"
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert "tokenizer.json" in names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    loaded = AutoTokenizer.from_pretrained(tmp_path / "b")
    problem = make_problem("story", "heldout", 0)
    assert loaded(problem.question).input_ids == tokenizer(problem.question).input_ids
    assert (loaded.mask_token_id, loaded.chat_template) == (1, tokenizer.chat_template)


def test_the_bundled_tokenizer_is_made_of_the_tasks_that_its_models_know():
    made = train_tokenizer(1024, tasks=DEFAULT_TASKS)
    bundled = load_tokenizer(str(models.HERE / "tiny-ar"))
    assert made.get_vocab() == bundled.get_vocab()
    text = "\n".join(f"{p.question}\n{p.answer}" for task in TASKS for p in some(task, 20))
    assert made(text).input_ids == bundled(text).input_ids
    assert made.chat_template == bundled.chat_template


def test_other_tasks_and_vocabulary_sizes(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("d2f.tasks.tokenizer.PROBLEMS_A_TASK", 300)
    made = train_tokenizer(1024, tasks=["story", "coding"])
    words = [made.decode([i]) for i in made("def rate(sizes):\n    for").input_ids]
    assert words == ["def", " rate", "(", "sizes", ")", ":", "\n", "    ", "for"]
    for option, said in (
        ("--tasks=chess", "task: got 'chess'; expected one of story, countdown, sudoku, coding"),
        ("--vocab-size=259", "vocab_size must be at least 260, got 259"),
    ):
        with pytest.raises(SystemExit):
            main(["--output", str(tmp_path / "b"), option])
        assert said in capsys.readouterr().err
    assert len(train_tokenizer(vocab_size=300)) == 300
