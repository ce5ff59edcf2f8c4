"""python -m decode.lm_eval --model d2f --model_args pretrained=tiny-d2f,tau_conf=0.9 \\
    --tasks d2f_story --apply_chat_template --limit 100 --output_path results

lm-evaluation-harness on our models and decoders: its command line and its arguments, with the model
`d2f` and the tasks d2f_story, d2f_countdown, d2f_sudoku and d2f_coding besides its own.
`run --help` and `ls tasks` are its, too. --model_args of d2f:

  pretrained, adapter, family, dtype, quantize, merge, compile
      the model, as the other commands take it
  decoder=NAME, and the decoder's options
      default: the decoder that suits the model; --batch_size (default 16) changes no answer
  nll=mc, mc_num=128, cfg=0.0, check_greedy=True
      likelihoods of a model that reads both sides: LLaDA's Monte Carlo estimate; how many masks a
      request, scale of classifier-free guidance, whether to find out what greedy decoding gives
  nll=left_to_right
      exact likelihoods of a causal model, or of one that goes block after block
  seed=0
      of draws; each request has its own

In Python: `lm_eval.simple_evaluate(model=decode.lm_eval.D2FLM("tiny-d2f"), ...)`, with
`task_manager=lm_eval.tasks.TaskManager(include_path=decode.lm_eval.TASKS)` for our tasks.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather, parse_flag_from_env
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

import d2f
from d2f import chat, spans
from d2f.command import program
from d2f.config import read_mapping
from d2f.errors import InputError, repr_of
from d2f.model import DiffusionModel
from d2f.tasks import Problem, check, make_problems
from decode.api import DEFAULT_BATCH_SIZE, stream
from decode.cli import DecoderSettings, ModelOptions, command, load, outline, weights_hash
from decode.decoders import Decoder
from decode.decoders.base import (
    DEFAULT_MAX_NEW_TOKENS,
    boolean,
    mask_kind,
    number,
    whole_number,
)
from decode.engine.likelihood import Likelihood
from decode.report import environment
from decode.step import Result

TASKS = str(Path(__file__).parent / "harness" / "tasks")
BATCH_SIZE = 16
# How the harness's errors of its own arguments begin, which it raises as any other ValueError.
_MISNAMED = ("Tasks not found", "Attempted to load model")


def __getattr__(name: str) -> Any:
    if name != "D2FLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    return D2FLM


def with_ours(given: Namespace) -> Namespace:
    """lm-eval's command line with our tasks beside the user's, and more than one request in a
    forward where nobody said how many."""
    from d2f.device import parse_device

    config = getattr(given, "config", None)
    values = read_mapping(config) if config else {}
    theirs = getattr(given, "include_path", None) or values.get("include_path")
    # Of two tasks of a name lm-eval takes the later: the user's.
    given.include_path = [TASKS, *([theirs] if isinstance(theirs, str) else theirs or [])]
    if given.command == "run":
        limit = getattr(given, "limit", None)
        if limit is not None and limit < 0:
            raise InputError(f"--limit must be 0 or more, got {limit:g}")
        given.batch_size = getattr(given, "batch_size", None) or values.get(
            "batch_size", BATCH_SIZE
        )
        # lm-eval's own is a GPU, whether there is one or not; each process of several has its own.
        given.device = given.device or values.get("device") or str(parse_device(None))
    return given


@command(interrupted="interrupted; with --use_cache the same command goes on where it was")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given in (["-h"], ["--help"]):
        usual = "python -m decode.lm_eval"
        print((__doc__ or "").replace(usual, program(usual)).strip())
        return
    if find_spec("lm_eval") is None:
        raise InputError(
            "lm-evaluation-harness is not installed: pip install 'd2f-toolkit[evaluation]'"
        )
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    setup_logging()
    cli = HarnessCLI()
    sys.argv[1:] = given  # where it reads its arguments
    asked = with_ours(cli.parse_args())
    if asked.command == "run":
        try:
            cli.execute(asked)
        except ValueError as error:
            if not str(error).startswith(_MISNAMED):
                raise
            raise InputError(f"{error}; `ls tasks` has the tasks") from error
        Processes().end()
    else:
        cli.execute(asked)


# What lm-eval asks of a generation, as options of a decoder.

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
KNOWN = ("until", "do_sample", "temperature", "top_p", "top_k", *LENGTHS)
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}  # change nothing
OF_A_TASK = ("temperature", "top_p", "top_k", "stop", "max_new_tokens")  # not of model_args
OF_A_REQUEST = (*OF_A_TASK, "seed")


def asked_decoder(decoder: Decoder, asked: Mapping[str, Any], seed: int) -> Decoder:
    """The decoder as a request's generation_kwargs ask for it: stops, length, choice of tokens.

    As in transformers, a temperature counts only with do_sample, which is meant where a temperature
    above 0 is given and do_sample is not; do_sample without a temperature is 1. Raises InputError
    for what is not honoured.
    """
    given = {k: v for k, v in asked.items() if v is not None and v != NEUTRAL.get(k)}
    unknown = sorted(set(given) - set(KNOWN))
    if unknown:
        raise InputError(
            f"gen_kwargs: {', '.join(unknown)} is not honoured here; expected some of "
            f"{', '.join(KNOWN)}"
        )
    until = given.get("until", [])
    temperature = given.get("temperature", 1.0 if given.get("do_sample") else 0.0)
    sampled = given.get("do_sample", temperature != 0)
    if not isinstance(sampled, bool):
        raise InputError(f"gen_kwargs: do_sample must be True or False, got {repr_of(sampled)}")
    top_k = given.get("top_k")
    lengths = [given[name] for name in LENGTHS if name in given]
    values: dict[str, Any] = {
        "stop": tuple([until] if isinstance(until, str) else until),
        "max_new_tokens": lengths[0] if lengths else DEFAULT_MAX_NEW_TOKENS,
        "temperature": temperature if sampled else 0.0,
        "top_p": given.get("top_p", 1.0),
        "top_k": None if top_k in (0, -1) else top_k,  # both are off in what others run
        "seed": seed,
    }
    return replace(decoder, **values)


def request_seed(seed: int, *of: object) -> int:
    """A seed of a request's own, made of what the request is: the same in any order, batch and
    number of processes."""
    digest = hashlib.blake2b(repr((seed, *of)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


# How likely a text is to a model that reads both sides: LLaDA's Monte Carlo estimate.
#
# The estimate (arXiv 2502.09992, equation 6) of log p(target | prompt), which is a lower bound of
# it:
# of a target of L tokens, l = 1..L are masked, each l as likely, which ones drawn without
# replacement, and the log-probabilities of the masked tokens are summed and scaled by L / l::
#
#     target  a b c      l = 2:  a _ _   3/2 (log p(b | a) + log p(c | a))
#
# The l of a group of draws are spread evenly over 1..L from a random start, as the official code
# does
# (which rounds, so that some l come more often than others; here each is exactly as likely). Draws
# of
# a group depend on each other, groups do not: the standard error is that of the groups' mean.

MOST_GROUPS = 8
Masks = NDArray[np.bool_]


@dataclass(frozen=True)
class Score:
    """Of a target. loglikelihood: in nats. standard_error: of it; 0 where it is exact, None where
    one group of draws cannot tell. greedy: whether greedy decoding gives the target. forwards:
    calls of the model that its rows were in."""

    loglikelihood: float
    standard_error: float | None
    greedy: bool
    forwards: int


@dataclass(frozen=True)
class MonteCarlo:
    """draws: masks a target (`mc_num`). batch_size: most of them in a forward. guidance: scale of
    classifier-free guidance, 0 is off: logits l become u + (1 + scale) (l - u), where the prompt is
    masked for u. check_greedy: whether to find out what greedy decoding gives, which takes up to a
    forward a token; else `Score.greedy` is False."""

    draws: int
    batch_size: int
    guidance: float = 0.0
    check_greedy: bool = True

    def score(
        self, model: DiffusionModel, prompt: list[int], target: list[int], seed: int
    ) -> Score:
        """The estimate for a target of a token or more behind a prompt of one or more."""
        rng = np.random.default_rng(seed)
        parts = np.array_split(np.arange(self.draws), min(MOST_GROUPS, self.draws))
        masks = [draw_masks(len(target), len(part), rng) for part in parts]
        values = self.values(model, prompt, target, np.concatenate(masks))
        means = np.array([group.mean() for group in np.split(values, [p[0] for p in parts[1:]])])
        error = means.std(ddof=1) / len(means) ** 0.5 if len(means) > 1 else None
        forwards = -(-self.draws // self.batch_size) * self._calls
        greedy, steps = False, 0
        if self.check_greedy:
            greedy, steps = self._greedy(model, prompt, target)
        return Score(
            float(means.mean()), None if error is None else float(error), greedy, forwards + steps
        )

    @property
    def _calls(self) -> int:
        return 2 if self.guidance else 1

    def values(
        self, model: DiffusionModel, prompt: list[int], target: list[int], masks: Masks
    ) -> NDArray[np.float64]:
        """What each of the masks ``[N, L]`` gives for the target, ``[N]``."""
        found = [
            _value(self._log_probabilities(model, prompt, target, part), target, part)
            for part in np.split(masks, range(self.batch_size, len(masks), self.batch_size))
        ]
        return np.concatenate(found)

    @torch.inference_mode()
    def _log_probabilities(
        self, model: DiffusionModel, prompt: list[int], target: list[int], masks: Masks
    ) -> Tensor:
        """Log-probabilities ``[M, V]`` at the M masked positions of the targets, row after row."""
        ids = torch.tensor([prompt + target] * len(masks), device=model.device)  # [N, P + L]
        masked = torch.from_numpy(masks).to(model.device)
        assert model.mask_id is not None
        ids[:, len(prompt) :][masked] = model.mask_id
        logits = _logits(model, ids, masked)
        if self.guidance:
            ids[:, : len(prompt)] = model.mask_id
            without = _logits(model, ids, masked)
            logits = without + (1 + self.guidance) * (logits - without)
        return logits.log_softmax(-1)

    def _greedy(
        self, model: DiffusionModel, prompt: list[int], target: list[int]
    ) -> tuple[bool, int]:
        """Whether the surest token first, one a forward from all masked, gives the target, as the
        official code defines it; and the forwards. It ends at the first token that differs: none
        is taken back."""
        masks = np.ones((1, len(target)), dtype=bool)
        for step in range(len(target)):
            places = np.flatnonzero(masks[0])
            surest, tokens = self._log_probabilities(model, prompt, target, masks).max(-1)
            first = int(surest.argmax())
            if int(tokens[first]) != target[places[first]]:
                return False, (step + 1) * self._calls
            # The token is the target's own, so the target with fewer masks is what comes next.
            masks[0, places[first]] = False
        return True, len(target) * self._calls


def draw_masks(length: int, size: int, rng: np.random.Generator) -> Masks:
    """A group of masks ``[size, length]``, of each a uniform number 1..length of masked positions;
    together the numbers are spread evenly."""
    masks = np.zeros((size, length), dtype=bool)
    counts = spread_counts(int(rng.integers(length)), size, length)
    for row, count in zip(masks, counts, strict=True):
        row[rng.choice(length, count, replace=False)] = True
    return masks


def spread_counts(start: int, size: int, length: int) -> NDArray[np.int64]:
    """As many numbers as `size` of 1..length, as even as can be: of 4, from 2 on, and 1..8:
    3 5 7 1."""
    return (start + np.arange(size) * length // size) % length + 1


def _value(logs: Tensor, target: list[int], masks: Masks) -> NDArray[np.float64]:
    """The sum over each mask's positions, scaled by L / l, ``[N]``."""
    rows, places = np.nonzero(masks)
    wanted = torch.tensor(target, device=logs.device)[torch.from_numpy(places).to(logs.device)]
    each = logs.gather(-1, wanted[:, None])[:, 0].double().cpu().numpy()  # [M]
    sums = np.bincount(rows, weights=each, minlength=len(masks))
    scaled: NDArray[np.float64] = sums * masks.shape[1] / masks.sum(1)
    return scaled


def _logits(model: DiffusionModel, ids: Tensor, masked: Tensor) -> Tensor:
    """fp32 logits ``[M, V]`` of ids ``[N, P + L]`` at the masked of the last L positions."""
    hidden = model.hidden(ids, spans.bidirectional(ids.shape[1]))
    rows, places = masked.nonzero(as_tuple=True)
    first = ids.shape[1] - masked.shape[1] - model.logit_shift  # row that predicts the target's 0
    return model.head(hidden[rows, first + places]).float()


# Log-likelihoods of targets behind prompts, by the way that fits the model.

WAYS = ("mc", "left_to_right")
Pair = tuple[list[int], list[int]]  # ids of a prompt, one or more, and of its target
NOTHING = Score(0.0, 0.0, True, 0)  # of a target without tokens


@dataclass(frozen=True)
class Scoring:
    """way: ``mc``, LLaDA's Monte Carlo estimate, for a model that reads both sides, or
    ``left_to_right``, exact, for a causal model or one that goes block after block."""

    way: str
    monte_carlo: MonteCarlo
    seed: int

    @staticmethod
    def of(model: DiffusionModel, way: str | None, monte_carlo: MonteCarlo, seed: int) -> Scoring:
        """way: None takes the one that fits. Raises InputError for one that does not."""
        fitting = "mc" if mask_kind(model.contract) == "bidirectional" else "left_to_right"
        if way not in (None, *WAYS):
            raise InputError(f"nll must be {' or '.join(WAYS)}, got {way!r}")
        if way not in (None, fitting):
            raise InputError(
                f"nll={way} does not fit {model.path or 'the model'}, which is "
                f"{mask_kind(model.contract)}: expected {fitting}"
            )
        if fitting != "mc" and monte_carlo.guidance:
            raise InputError(f"cfg needs nll=mc, and this model takes {fitting}")
        return Scoring(fitting, monte_carlo, seed)

    def room(self, model: DiffusionModel) -> int:
        """Most tokens of a prompt and its target together."""
        if self.way == "mc":
            return model.context_length
        return model.context_length - Likelihood.of(model.contract).extra_positions

    def scores(
        self, model: DiffusionModel, pairs: Sequence[Pair], batch_size: int
    ) -> Iterator[tuple[int, Score]]:
        """(a pair's number, its score) as soon as it is known, the longest first."""
        yield from ((i, NOTHING) for i, (_, target) in enumerate(pairs) if not target)
        order = [i for i, (_, target) in enumerate(pairs) if target]
        order.sort(key=lambda i: -sum(map(len, pairs[i])))
        if self.way == "mc":
            for i in order:
                seed = request_seed(self.seed, *pairs[i])
                yield i, self.monte_carlo.score(model, *pairs[i], seed)
        elif order:
            kinds = [Likelihood.of(model.contract, given=len(pairs[i][0])) for i in order]
            texts = [[*prompt, *target] for prompt, target in (pairs[i] for i in order)]
            for event in stream(model, texts, kinds, batch_size=batch_size):
                if event.result is not None:
                    yield order[event.request], _exact(event.result)


def _exact(result: Result) -> Score:
    each = result.likelihoods
    greedy = all(one.greedy for one in each)
    return Score(sum(one.logprob for one in each), 0.0, greedy, result.forwards)


# What decoding and scoring cost, task by task, for lm-eval's results file.


@dataclass
class TaskFigures:
    """Of one task and kind of request, what was computed in this run and not read from a cache.

    requests: how many, an answer that is asked for again as another. tokens: of responses, visible
    ones (before the first end id or stop string); of likelihoods, those that were scored. forwards:
    calls of the model that each request was in, added. seconds: wall time of the task's requests of
    this kind, of several processes the longest. truncated: requests whose prompt lost tokens at its
    left, for the model's context. standard_errors: of likelihoods, by (document, request of it);
    empty where they are exact.
    """

    requests: int = 0
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    truncated: int = 0
    standard_errors: dict[tuple[int, int], float | None] = field(default_factory=dict)

    def add(self, other: TaskFigures) -> None:
        """Take in those of another process, which ran at the same time."""
        self.requests += other.requests
        self.tokens += other.tokens
        self.forwards += other.forwards
        self.seconds = max(self.seconds, other.seconds)
        self.truncated += other.truncated
        self.standard_errors |= other.standard_errors

    def add_result(self, result: Result) -> None:
        """Count a response."""
        self.requests += 1
        self.tokens += len(result.tokens)
        self.forwards += result.forwards

    def add_scores(self, place: tuple[int, int], tokens: int, scores: Sequence[Score]) -> float:
        """Count a text's likelihood, found as one score or as those of its windows, of `tokens`
        tokens together; the sum of its scores. place: (document, request of it)."""
        self.requests += 1
        self.tokens += tokens
        self.forwards += sum(score.forwards for score in scores)
        errors = [score.standard_error for score in scores]
        if any(error != 0 for error in errors):  # windows are drawn apart: their variances add up
            known = None if None in errors else sum(error**2 for error in errors if error) ** 0.5
            self.standard_errors[place] = known
        return sum(score.loglikelihood for score in scores)

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.tokens} tokens in {self.forwards} forwards "
            f"({self.per_forward:.2f} a forward) and {self.seconds:.1f} s "
            f"({self.per_second:.1f} a second)"
        )

    @property
    def per_forward(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def report(self) -> dict[str, Any]:
        """As the results file has it."""
        found: dict[str, Any] = {
            "requests": self.requests,
            "tokens": self.tokens,
            "forwards": self.forwards,
            "seconds": self.seconds,
            "tokens_per_forward": self.per_forward,
            "tokens_per_second": self.per_second,
            "truncated_prompts": self.truncated,
        }
        if self.standard_errors:
            errors: dict[str, list[float | None]] = {}
            for (document, _), error in sorted(self.standard_errors.items()):
                short = None if error is None else float(f"{error:.4g}")
                errors.setdefault(str(document), []).append(short)
            known = [error for error in self.standard_errors.values() if error is not None]
            found["mean_standard_error"] = sum(known) / len(known) if known else None
            found["standard_errors"] = errors  # of each document's requests, in their order
        return found


Figures = dict[tuple[str, str], TaskFigures]  # (task, kind of request)


def together(processes: Iterable[Figures]) -> Figures:
    """The figures of several processes as one."""
    found: Figures = {}
    for figures in processes:
        for key, one in figures.items():
            found.setdefault(key, TaskFigures()).add(one)
    return found


def reports(figures: Figures) -> dict[str, dict[str, Any]]:
    """Task: kind of request: its figures."""
    found: dict[str, dict[str, Any]] = {}
    for (task, kind), one in sorted(figures.items()):
        found.setdefault(task, {})[kind] = one.report()
    return found


# lm-eval's texts as our models' tokens.


class HarnessText(TemplateLM):
    """What lm-eval asks of a model's tokenizer."""

    model: DiffusionModel
    tokenizer: Any

    @property
    def eot_token_id(self) -> int:
        return self.model.end_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        return self.model.context_length

    @property
    def max_gen_toks(self) -> int:
        return DEFAULT_MAX_NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text. One that begins with a special token, as what a chat template writes does,
        has those that it needs."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(tuple(self.tokenizer.all_special_tokens))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        if add_generation_prompt:
            return chat.render(self.tokenizer, chat_history)
        # The last message is the beginning of the answer, which is not closed.
        return chat.render(self.tokenizer, chat_history[:-1]) + chat_history[-1]["content"]

    def prompt(self, text: str, room: int, figures: TaskFigures) -> list[int]:
        """Ids of a prompt, one or more."""
        return self._cut(self.tok_encode(text), room, figures)

    def pair(self, context: str, continuation: str, room: int, figures: TaskFigures) -> Pair:
        """Ids of a context and of its continuation, at most `room` together."""
        if context:
            prompt, target = self._encode_pair(context, continuation)
        else:
            prompt, target = [], self.tok_encode(continuation, add_special_tokens=False)
        return self._cut(prompt, room - len(target), figures), target

    def windows(self, text: str, room: int) -> list[Pair]:
        """A text in parts of at most `room` tokens together with what stands before them, as much
        of it as fits."""
        # A window's targets may be as many as it is given, and one token stands before them.
        windows = get_rolling_token_windows(
            self.tok_encode(text), self.prefix_token_id, room - 1, 1
        )
        return [make_disjoint_window(window) for window in windows]

    def _cut(self, ids: list[int], room: int, figures: TaskFigures) -> list[int]:
        """The last tokens, as many as there is room for, as lm-eval's own models do; one where
        there are none."""
        if room < 1:
            raise InputError(
                f"a request asks for as much as the model's context of {self.max_length} tokens, "
                "which leaves no room for a prompt"
            )
        figures.truncated += len(ids) > room
        return ids[-room:] or [self.prefix_token_id]


# lm-eval's several processes, as `accelerate launch` starts them.


class Processes:
    """Those of this run; alone where it was not launched as one of several."""

    def __init__(self) -> None:
        # As an Accelerator asks for it; without a GPU processes know of each other only with cpu.
        on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
        self.state = PartialState(cpu=on_cpu)

    @property
    def rank(self) -> int:
        return self.state.process_index

    @property
    def size(self) -> int:
        return self.state.num_processes

    def device(self, asked: str | None) -> str | None:
        """Each process has a device of its own; one alone takes what is asked for."""
        return str(self.state.device) if self.size > 1 else asked

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The processes' tensors, one behind the other, in each of them."""
        return gather(tensor) if self.size > 1 else tensor

    def gather_object(self, value: Any, to: int) -> list[Any] | None:
        """The processes' values in process `to`, None in the others."""
        if self.size == 1:
            return [value]
        found = [None] * self.size if self.rank == to else None
        torch.distributed.gather_object(value, found, dst=to)
        return found

    def wait(self) -> None:
        """Until all are here."""
        self.state.wait_for_everyone()

    def end(self) -> None:
        """Leave the others, at the end of the program."""
        if self.size > 1:
            self.state.destroy_process_group()


# lm-eval's cache of responses (--use_cache), kept to the settings that made it.
#
# Its keys are prompts and generation_kwargs alone: another model, decoder or threshold would find
# the
# answers of the last one. So what made the answers is kept in it, too.

KEY = "d2f settings"


def claim(cache: MutableMapping[str, Any], settings: dict[str, Any], place: str) -> None:
    """Mark an empty cache with the settings. Raises InputError for one that has answers of others,
    or of nobody knows what."""
    there = cache.get(KEY)
    if there == settings:
        return
    if there is None and not len(cache):
        cache[KEY] = settings
        return
    if there is None:
        raise InputError(
            f"{place} has answers of other software: expected an empty cache, or our own"
        )
    differ = [
        f"{name} {there.get(name)!r}, not {settings.get(name)!r}"
        for name in sorted(there.keys() | settings.keys())
        if there.get(name) != settings.get(name)
    ]
    raise InputError(f"{place} has answers of other settings: {'; '.join(differ)}")


# `D2FLM`: a model and a decoder of ours as lm-eval asks for one.

logger = logging.getLogger("lm_eval.d2f")  # lm-eval's own settings of what is shown hold for it


@register_model("d2f")
class D2FLM(HarnessText):
    """A model for `lm_eval.simple_evaluate`, and for its command line as ``--model d2f``.

    pretrained: folder, hub or bundled name, or a loaded model. adapter, family, dtype, quantize,
    threads, device, merge, compile: as `d2f.load` and the commands take them. decoder: a name, or
    a `Decoder`; default: the one that suits the model. options: of that decoder. What a task says
    itself, how long an answer is, where it stops, at which temperature, comes by its
    generation_kwargs.
    batch_size: most requests in a forward, ``auto`` is max_batch_size or 16; no answer depends on
    it. nll, mc_num, cfg: how likelihoods are found (`Scoring`, `MonteCarlo`). check_greedy: whether
    a Monte Carlo likelihood is told apart from greedy decoding, which few tasks ask (those with
    choices do not). seed: of draws, from which each request has its own.

    Raises InputError for what cannot be, before weights are read.
    """

    def __init__(
        self,
        pretrained: str | DiffusionModel,
        *,
        adapter: str | None = None,
        decoder: str | Decoder | None = None,
        family: str | None = None,
        dtype: str | None = None,
        quantize: str | None = None,
        threads: int | str | None = None,
        device: str | None = None,
        batch_size: int | str = DEFAULT_BATCH_SIZE,
        max_batch_size: int | None = None,
        merge: bool = True,
        compile: bool = False,
        nll: str | None = None,
        mc_num: int = 128,
        cfg: float = 0.0,
        check_greedy: bool = True,
        seed: int = 0,
        trust_remote_code: bool = False,
        **options: Any,
    ):
        super().__init__()
        if trust_remote_code:
            logger.warning("trust_remote_code is for data sets: no model's code is run here")
        self.batch_size = _batch_size(batch_size, max_batch_size)
        whole_number("mc_num", mc_num)
        whole_number("seed", seed, least=0, most=2**64 - 1)
        number("cfg", cfg)
        for name, value in (("merge", merge), ("compile", compile), ("check_greedy", check_greedy)):
            boolean(name, value)
        _refuse([name for name in OF_A_TASK if name in options])
        monte_carlo = MonteCarlo(mc_num, self.batch_size, float(cfg), check_greedy)
        self.processes = Processes()
        self._rank, self._world_size = self.processes.rank, self.processes.size
        self.seed = seed
        loaded = pretrained if isinstance(pretrained, DiffusionModel) else None
        shape = loaded or outline(str(pretrained), adapter, family)
        if shape.tokenizer is None:
            raise InputError(f"{shape.path}: lm-eval asks by text, and this has no tokenizer")
        self.scoring = Scoring.of(shape, nll, monte_carlo, seed)
        self.decoder = _decoder(shape, decoder, options)
        self.decoder.check(shape.contract)
        if loaded is not None:
            self.model, self.weights = loaded, weights_hash(loaded)
        else:
            wanted = ModelOptions(
                model=str(pretrained),
                adapter=adapter,
                family=family,
                dtype=dtype,  # type: ignore[arg-type]
                quantize=quantize,  # type: ignore[arg-type]
                merge=merge,
                compile=compile,
                device=self.processes.device(device),
                threads=threads,  # type: ignore[arg-type]
            )
            self.model, self.weights = load(wanted)
        self._device = self.model.device
        self.tokenizer = self.model.tokenizer
        self.figures: Figures = {}
        self._room = self.scoring.room(self.model)

    # What lm-eval asks of several processes.

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self.processes.all_gather(tensor)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        # Our figures go along with what lm-eval gathers at the end: a process that found all of its
        # answers in the cache is asked for nothing before.
        found = self.processes.gather_object((obj, self.figures), dst)
        self.figures = together(figures for _, figures in found or [])
        return None if found is None else [one for one, _ in found]

    def barrier(self) -> None:
        self.processes.wait()

    # Requests.

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Responses, cut before the first end id or stop string."""
        kept, answers = distinct(requests)
        texts = [""] * len(kept)
        decoders = []
        for request, repeat in kept:
            context, asked = request.args
            place = (request.task_name, request.doc_id, request.idx, repeat)
            seed = request_seed(self.seed, *place, context)
            decoders.append(asked_decoder(self.decoder, asked, seed))
        for figures, places, bar in self._tasks(kept, "generation", disable_tqdm):
            prompts = {}
            for i in places:
                room = self.max_length - decoders[i].length - decoders[i].extra_positions
                prompts[i] = self.prompt(kept[i][0].args[0], room, figures)
            order = sorted(places, key=lambda i: -(len(prompts[i]) + decoders[i].length))
            asked = [prompts[i] for i in order], [decoders[i] for i in order]
            for event in stream(self.model, *asked, batch_size=self.batch_size):
                if event.result is not None:
                    i = order[event.request]
                    texts[i] = event.result.text or ""
                    figures.add_result(event.result)
                    self.cache_hook.add_partial("generate_until", kept[i][0].args, texts[i])
                    bar.update()
        return [texts[i] for i in answers]

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations, and whether greedy decoding gives them."""
        kept, answers = distinct(requests)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(kept)
        for figures, places, bar in self._tasks(kept, "likelihood", disable_tqdm):
            pairs = []
            for i in places:
                context, continuation = kept[i][0].args
                pairs.append(self.pair(context, continuation, self._room, figures))
            for n, score in self.scoring.scores(self.model, pairs, self.batch_size):
                request = kept[places[n]][0]
                value = figures.add_scores(_place(request), len(pairs[n][1]), [score])
                found[places[n]] = (value, score.greedy)
                self.cache_hook.add_partial("loglikelihood", request.args, found[places[n]])
                bar.update()
        return [found[i] for i in answers]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """The same of ids, for what builds on lm-eval's `TemplateLM`."""
        pairs = [(prompt, target) for _, prompt, target in requests]
        scores = dict(self.scoring.scores(self.model, pairs, self.batch_size))
        return [(scores[i].loglikelihood, scores[i].greedy) for i in range(len(pairs))]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods of whole texts, of a long one window by window."""
        kept, answers = distinct(requests)
        found = [0.0] * len(kept)
        for figures, places, bar in self._tasks(kept, "rolling likelihood", disable_tqdm):
            windows = [self.windows(kept[i][0].args[0], self._room) for i in places]
            pairs = [pair for its in windows for pair in its]
            owners = [n for n, its in enumerate(windows) for _ in its]
            scores: list[list[Score]] = [[] for _ in windows]
            tokens = [sum(len(target) for _, target in its) for its in windows]
            for at, score in self.scoring.scores(self.model, pairs, self.batch_size):
                n = owners[at]
                scores[n].append(score)
                if len(scores[n]) == len(windows[n]):
                    request = kept[places[n]][0]
                    value = figures.add_scores(_place(request), tokens[n], scores[n])
                    found[places[n]] = value
                    self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
                    bar.update()
        return [found[i] for i in answers]

    def _tasks(
        self, kept: Sequence[tuple[Instance, int]], kind: str, quiet: bool
    ) -> Iterator[tuple[TaskFigures, list[int], Any]]:
        """Task by task: where to count, its requests' numbers, its progress; the time until it is
        asked for the next one counts as the task's."""
        tasks: dict[str, list[int]] = {}
        for i, (request, _) in enumerate(kept):
            tasks.setdefault(request.task_name or "", []).append(i)
        for task, places in tasks.items():
            figures = self.figures.setdefault((task, kind), TaskFigures())
            hidden = quiet or self.rank != 0
            with tqdm(total=len(places), desc=f"{task} {kind}", disable=hidden) as bar:
                began = time.perf_counter()
                yield figures, places, bar
                figures.seconds += time.perf_counter() - began
            logger.info(f"{task}, {kind} so far: {figures}")

    # What is kept beside the answers.

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Raises InputError for a cache of other settings."""
        if cache_hook.dbdict is not None:
            claim(cache_hook.dbdict, self.settings, cache_hook.dbdict.filename)
        super().set_cache_hook(cache_hook)

    @property
    def settings(self) -> dict[str, Any]:
        """All that an answer depends on besides its request."""
        monte_carlo = self.scoring.monte_carlo
        return {
            "version": d2f.__version__,
            "weights": self.weights,
            "adapted": self.model.is_adapted,
            "dtype": self.model.precision,
            "device": self.model.device.type,
            "compiled": self.model.is_compiled,
            "decoder": self.decoder.name,
            "options": {k: v for k, v in asdict(self.decoder).items() if k not in OF_A_REQUEST},
            "seed": self.seed,
            "nll": self.scoring.way,
            "mc_num": monte_carlo.draws,
            "cfg": monte_carlo.guidance,
            "check_greedy": monte_carlo.check_greedy,
        }

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes of the model beside its results, figures by task among it; those of
        the next evaluation begin anew."""
        figures, self.figures = self.figures, {}
        return {
            "model_num_parameters": self.model.backbone.num_parameters(),
            "model_dtype": str(self.model.dtype),
            "d2f": self.settings
            | {
                "model": self.model.path,
                "environment": environment(self.model),
                "processes": self.world_size,
                "tasks": reports(figures),
            },
        }


def distinct(requests: Sequence[Instance]) -> tuple[list[tuple[Instance, int]], list[int]]:
    """Requests, each with how many times it came before; and for each that was given, which of them
    answers it.

    lm-eval gives one that wants k answers k times. To processes with fewer requests it gives their
    last again, so that all run as many forwards; ours wait for nobody, and a copy answers those.
    """
    kept: list[tuple[Instance, int]] = []
    places: dict[int, list[int]] = {}
    answers = []
    for request in requests:
        its = places.setdefault(id(request), [])
        if len(its) < (request.repeats or 1):
            its.append(len(kept))
            kept.append((request, len(its) - 1))
            answers.append(its[-1])
        else:
            answers.append(its[0])
    return kept, answers


def _place(request: Instance) -> tuple[int, int]:
    return (request.doc_id or 0, request.idx)


def _decoder(
    shape: DiffusionModel, decoder: str | Decoder | None, options: dict[str, Any]
) -> Decoder:
    if not isinstance(decoder, Decoder):
        return DecoderSettings(decoder, options).decoder(shape, DEFAULT_MAX_NEW_TOKENS)
    if options:
        raise InputError(f"{', '.join(options)}: a decoder that is made has its options")
    plain = {field.name: field.default for field in fields(decoder)}
    _refuse([name for name in OF_A_TASK if getattr(decoder, name) != plain[name]])
    return decoder


def _refuse(of_a_task: list[str]) -> None:
    if of_a_task:
        named = ", ".join(of_a_task)
        raise InputError(f"{named}: a task says it itself, or --gen_kwargs, not the model")


def _batch_size(asked: int | str, most: int | None) -> int:
    """lm-eval's --batch_size: a number, or ``auto``."""
    text = str(asked)
    if text.partition(":")[0] == "auto":
        size = most or DEFAULT_BATCH_SIZE
    else:
        size = int(text) if text.isdecimal() else 0
    whole_number("batch_size", size)
    return size


# The held-out problems of the tiny tasks and their judges, as lm-eval's task files name them.

PROBLEMS = 500  # as decode.evaluate takes them; --limit for fewer


def heldout(toy_task: str, **others: Any) -> dict[str, Dataset]:
    """The splits of a tiny task. others: lm-eval hands on the model's arguments, too."""
    problems = make_problems(toy_task, "heldout", PROBLEMS)
    return {"heldout": Dataset.from_list([asdict(problem) for problem in problems])}


def judge(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the response solves the problem, as `d2f.tasks.check` has it."""
    return {"solved": float(check(Problem(**doc), results[0]))}


if __name__ == "__main__":
    sys.exit(main())
