"""Train the tasks' tokenizer on generated problems and save it in the transformers format:
python -m d2f.tasks.tokenizer --output DIR [--tasks story,sudoku] [--vocab-size 512] [--seed 0]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from d2f.tasks.task import DEFAULT_TASKS, make_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROBLEMS_A_TASK = 1500
SPECIAL_TOKENS = ("<|endoftext|>", "<|mask|>", "<|user|>", "<|assistant|>")  # ids 0 to 3
END, MASK, USER, ASSISTANT = SPECIAL_TOKENS
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256  # every byte has a token
# A word with its space, a digit with its space, a line end, "####", a sign, other blanks.
PIECES = r" ?[A-Za-z]+| ?\d|\n|#+|[^\sA-Za-z\d]|\s+"
# A system message, which every chat client sends, is left out: with a word more than they know the
# small models answer nothing right.
CHAT_TEMPLATE = f"""
{{%- for message in messages -%}}
    {{%- if message['role'] == 'user' -%}}
        {{{{- '{USER}' + message['content'] -}}}}
    {{%- elif message['role'] == 'assistant' -%}}
        {{{{- '{ASSISTANT}' + message['content'] + '{END}' -}}}}
    {{%- elif message['role'] not in ('system', 'developer') -%}}
        {{{{- raise_exception('role must be user or assistant, got ' + message['role']) -}}}}
    {{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
    {{{{- '{ASSISTANT}' -}}}}
{{%- endif -%}}
"""


def train_tokenizer(
    vocab_size: int = 512, seed: int = 0, tasks: Sequence[str] = DEFAULT_TASKS
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on train problems of tasks; any text round-trips.

    Numbers go digit by digit. `<|endoftext|>` (end and padding), `<|mask|>`, `<|user|>` and
    `<|assistant|>` have the ids 0 to 3, and the chat template uses them. Equal arguments give
    equal bytes when saved. The vocabulary is smaller than vocab_size where the text has no more
    merges to give: len(tokenizer) is its real size.

    Raises ValueError if vocab_size cannot hold the special tokens and the 256 bytes, and for an
    unknown task.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB_SIZE}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    problems = (
        make_problem(task, "train", i, seed) for task in tasks for i in range(PROBLEMS_A_TASK)
    )
    texts = (text for problem in problems for text in (problem.question, problem.answer))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        mask_token=MASK,
        extra_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def main(arguments: list[str] | None = None) -> None:
    """Train and save a tokenizer, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, help="folder to save the tokenizer in")
    parser.add_argument(
        "--tasks", default=",".join(DEFAULT_TASKS), help="with commas (%(default)s)"
    )
    parser.add_argument("--vocab-size", type=int, default=512, help="most tokens (512)")
    parser.add_argument("--seed", type=int, default=0, help="of the problems (0)")
    options = parser.parse_args(arguments)
    try:
        tokenizer = train_tokenizer(options.vocab_size, options.seed, options.tasks.split(","))
    except ValueError as error:
        parser.error(str(error))
    tokenizer.save_pretrained(options.output)
    print(f"{len(tokenizer)} tokens saved in {options.output}")


if __name__ == "__main__":
    main()
