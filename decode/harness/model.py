"""Answer lm-evaluation-harness with a model and a decoder of ours: `D2FLM`."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather, parse_flag_from_env
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

import d2f
from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.api import DEFAULT_BATCH_SIZE, stream
from decode.cli import DecoderSettings, ModelOptions, checked_outline, load, weights_hash
from decode.decoders import Decoder
from decode.decoders.base import (
    DEFAULT_MAX_NEW_TOKENS,
    boolean,
    number,
    whole_number,
)
from decode.decoders.session import mask_kind
from decode.engine.likelihood import Likelihood
from decode.harness.monte_carlo import MonteCarlo, Score
from decode.report import environment

logger = logging.getLogger("lm_eval.d2f")  # below lm-eval's, whose level holds for it

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
KNOWN = ("until", "do_sample", "temperature", "top_p", "top_k", *LENGTHS)
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}  # change nothing
SET_BY_TASK = ("temperature", "top_p", "top_k", "stop", "max_new_tokens")  # not by model_args
CACHE_KEY = "d2f settings"
LOADING = ("adapter", "family", "dtype", "quantize", "threads", "merge", "compile")
KINDS = {  # method of lm-eval's: what its requests are called in reports
    "generate_until": "generation",
    "loglikelihood": "likelihood",
    "loglikelihood_rolling": "rolling likelihood",
}
Pair = tuple[list[int], list[int]]
"""Ids of a prompt, one or more, and of its target."""
Asked = tuple[Instance, int]
"""A request, and how many times it came before."""


def asked_decoder(decoder: Decoder, asked: Mapping[str, Any], seed: int) -> Decoder:
    """Apply a request's generation_kwargs to the decoder: stops, length, choice of tokens.

    As in transformers, a temperature counts only with do_sample, which is meant where a temperature
    above 0 is given and do_sample is not; do_sample without a temperature is 1. Raises InputError
    for what is not honoured.
    """
    given = {k: v for k, v in asked.items() if v is not None and v != NEUTRAL.get(k)}
    if unknown := sorted(set(given) - set(KNOWN)):
        raise InputError(
            f"gen_kwargs: {', '.join(unknown)} is not honoured here; expected some of "
            f"{', '.join(KNOWN)}"
        )
    until, top_k = given.get("until", []), given.get("top_k")
    temperature = given.get("temperature", 1.0 if given.get("do_sample") else 0.0)
    sampled = given.get("do_sample", temperature != 0)
    boolean("gen_kwargs: do_sample", sampled)
    lengths = [given[name] for name in LENGTHS if name in given]
    values: dict[str, Any] = {
        "stop": tuple([until] if isinstance(until, str) else until),
        "max_new_tokens": lengths[0] if lengths else DEFAULT_MAX_NEW_TOKENS,
        "temperature": temperature if sampled else 0.0,
        "top_p": given.get("top_p", 1.0),
        "top_k": None if top_k in (0, -1) else top_k,  # others' ways to say off
        "seed": seed,
    }
    return replace(decoder, **values)


def request_seed(seed: int, *of: object) -> int:
    """Make a request's seed from what it is: the same in any order, batch and process."""
    digest = hashlib.blake2b(repr((seed, *of)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


@dataclass
class TaskFigures:
    """Count what one task and kind of request cost in this run; answers of a cache are not in it.

    tokens: visible ones of responses, scored ones of likelihoods. forwards: calls of the model that
    each request was in. seconds: wall time, of several processes the longest. truncated: requests
    whose prompt lost its beginning, for the model's context. errors: standard errors of
    likelihoods, by (document, request of it); empty where they are exact.
    """

    requests: int = 0
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    truncated: int = 0
    errors: dict[tuple[int, int], float | None] = field(default_factory=dict)

    def add(self, requests: int, tokens: int, forwards: int) -> None:
        """Count requests that were answered."""
        self.requests += requests
        self.tokens += tokens
        self.forwards += forwards

    def merge(self, other: TaskFigures) -> None:
        """Add the figures of a process that ran at the same time."""
        self.add(other.requests, other.tokens, other.forwards)
        self.seconds = max(self.seconds, other.seconds)
        self.truncated += other.truncated
        self.errors |= other.errors

    def report(self) -> dict[str, Any]:
        """Return the entry of the results file."""
        found: dict[str, Any] = {
            **{name: getattr(self, name) for name in ("requests", "tokens", "forwards", "seconds")},
            "tokens_per_forward": self.tokens / self.forwards if self.forwards else 0.0,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "truncated_prompts": self.truncated,
        }
        if self.errors:
            known = [error for error in self.errors.values() if error is not None]
            found["mean_standard_error"] = sum(known) / len(known) if known else None
            found["standard_errors"] = {}
            for (document, _), error in sorted(self.errors.items()):
                short = None if error is None else float(f"{error:.4g}")
                found["standard_errors"].setdefault(str(document), []).append(short)
        return found


@register_model("d2f")
class D2FLM(TemplateLM):
    """A model for `lm_eval.simple_evaluate`, and for its command line as ``--model d2f``.

    Args:
        pretrained: folder, hub or bundled name, or a loaded model.
        decoder: a name, or a `Decoder`; default: the one that suits the model.
        batch_size: most requests in a forward, ``auto`` is max_batch_size or 16; no answer depends
            on it.
        nll: ``mc``, LLaDA's Monte Carlo estimate, for a model that reads both sides, or
            ``left_to_right``, exact, for the others; default: what fits.
        mc_num, cfg, check_greedy: of the estimate (`MonteCarlo`).
        seed: of draws, from which each request has its own.
        options: adapter, family, dtype, quantize, threads, merge and compile as in `d2f.load`, and
            the decoder's. Length, stops and sampling come by a task's generation_kwargs.

    Raises InputError, before weights are read.
    """

    def __init__(
        self,
        pretrained: str | DiffusionModel,
        *,
        decoder: str | Decoder | None = None,
        device: str | None = None,
        batch_size: int | str = DEFAULT_BATCH_SIZE,
        max_batch_size: int | None = None,
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
        if str(batch_size).startswith("auto"):
            batch_size = max_batch_size or DEFAULT_BATCH_SIZE
        self.batch_size = int(batch_size) if str(batch_size).isdecimal() else 0
        whole_number("batch_size", self.batch_size)
        whole_number("mc_num", mc_num)
        whole_number("seed", seed, least=0, most=2**64 - 1)
        number("cfg", cfg)
        loading = {name: options.pop(name) for name in LOADING if name in options}
        for name in ("check_greedy", "merge", "compile"):
            boolean(name, ({"check_greedy": check_greedy} | loading).get(name, True))
        if named := [name for name in SET_BY_TASK if name in options]:
            raise InputError(
                f"{', '.join(named)}: a task says it itself, or --gen_kwargs, not the model"
            )
        self.seed = seed
        self.monte_carlo = MonteCarlo(mc_num, self.batch_size, float(cfg), check_greedy)
        # Ask as an Accelerator does: without a GPU, processes find each other only with cpu.
        on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
        self.processes = PartialState(cpu=on_cpu)
        self._rank, self._world_size = self.processes.process_index, self.processes.num_processes
        loaded = pretrained if isinstance(pretrained, DiffusionModel) else None
        where = str(self.processes.device) if self.world_size > 1 else device
        wanted = ModelOptions(model=str(pretrained), device=where, **loading)
        shape = loaded or checked_outline(wanted)
        if shape.tokenizer is None:
            raise InputError(f"{shape.path}: lm-eval asks by text, and this has no tokenizer")
        kind = mask_kind(shape.contract)
        self.way = "mc" if kind == "bidirectional" else "left_to_right"
        if nll not in (None, self.way) or (cfg and self.way != "mc"):
            asked = f"cfg={cfg}" if nll in (None, self.way) else f"nll={nll}"
            raise InputError(
                f"{asked}: expected nll={self.way} and what goes with it for a model that is {kind}"
            )
        if isinstance(decoder, Decoder):
            self.decoder = replace(decoder, **options)
        else:
            chosen = DecoderSettings(decoder, options)
            self.decoder = chosen.decoder(shape, DEFAULT_MAX_NEW_TOKENS)
        self.decoder.check(shape.contract)
        self.model, self.weights = (loaded, weights_hash(loaded)) if loaded else load(wanted)
        self._device = self.model.device
        self.tokenizer: Any = self.model.tokenizer
        self.figures: dict[tuple[str, str], TaskFigures] = {}  # by task and kind of request
        # Most tokens of a prompt and its target together.
        self.room = self.model.context_length
        if self.way != "mc":
            self.room -= Likelihood.of(self.model.contract).extra_positions

    # Several processes, as `accelerate launch` starts them.

    def all_gather(self, tensor: Tensor) -> Tensor:
        return gather(tensor) if self.world_size > 1 else tensor

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        # Our figures go along with what lm-eval gathers at the end: a process that found all of its
        # answers in the cache is asked for nothing before.
        if self.world_size == 1:
            return [obj]
        found: list[Any] | None = [None] * self.world_size if self.rank == dst else None
        torch.distributed.gather_object((obj, self.figures), found, dst=dst)
        self.figures = {}
        for _, figures in found or []:
            for key, one in figures.items():
                self.figures.setdefault(key, TaskFigures()).merge(one)
        return None if found is None else [one for one, _ in found]

    def barrier(self) -> None:
        self.processes.wait_for_everyone()

    # Texts and ids.

    @property
    def eot_token_id(self) -> int:
        return self.model.end_ids[0]

    @property
    def prefix_token_id(self) -> int:
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
        """Encode a text. A chat template writes the special tokens itself: none are added to a text
        that begins with one."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(tuple(self.tokenizer.all_special_tokens))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        how: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        how["continue_final_message"] = not add_generation_prompt
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **how))

    def _cut(self, ids: list[int], room: int, figures: TaskFigures) -> list[int]:
        """Keep the last tokens that there is room for, as lm-eval's own models do."""
        if room < 1:
            raise InputError(
                f"a request asks for as much as the model's context of {self.max_length} tokens, "
                "which leaves no room for a prompt"
            )
        figures.truncated += len(ids) > room
        return ids[-room:] or [self.prefix_token_id]

    def pair(self, figures: TaskFigures, context: str, continuation: str) -> Pair:
        """Encode a prompt and its target."""
        if context:
            prompt, target = self._encode_pair(context, continuation)
        else:
            prompt, target = [], self.tok_encode(continuation, add_special_tokens=False)
        return self._cut(prompt, self.room - len(target), figures), target

    def windows(self, text: str) -> list[Pair]:
        """Cut a text into targets, each behind as much of what stands before it as fits."""
        ids = self.tok_encode(text)
        # A window's targets may be as many as it is given, and one token stands before them.
        windows = get_rolling_token_windows(ids, self.prefix_token_id, self.room - 1, 1)
        found = [make_disjoint_window(window) for window in windows]
        return found or [([self.prefix_token_id], [])]

    # Requests.

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Decode responses, cut before the first end id or stop string."""
        return self._answers("generate_until", requests, disable_tqdm, self._texts)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Score continuations, and find whether greedy decoding gives them."""
        return self._answers("loglikelihood", requests, disable_tqdm, self._scored)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Score whole texts, a long one window by window."""
        found = self._answers("loglikelihood_rolling", requests, disable_tqdm, self._scored)
        return [value for value, _ in found]

    def _answers(
        self,
        method: str,
        requests: Sequence[Instance],
        quiet: bool,
        answer: Callable[[TaskFigures, list[Asked]], Iterator[tuple[int, Any]]],
    ) -> list[Any]:
        """Answer requests task by task: count what each costs, show how far it is, and give the
        answers to lm-eval's cache as they come."""
        kind = KINDS[method]
        kept, places = distinct(requests)
        tasks: dict[str, list[int]] = {}
        for i, (request, _) in enumerate(kept):
            tasks.setdefault(request.task_name or "", []).append(i)
        found: dict[int, Any] = {}
        for task, its in tasks.items():
            figures = self.figures.setdefault((task, kind), TaskFigures())
            began = time.perf_counter()
            hidden = True if quiet or self.rank != 0 else None  # None: without a terminal
            with tqdm(total=len(its), desc=f"{task} {kind}", disable=hidden) as bar:
                for n, value in answer(figures, [kept[i] for i in its]):
                    found[its[n]] = value
                    cached = value[0] if method == "loglikelihood_rolling" else value
                    self.cache_hook.add_partial(method, kept[its[n]][0].args, cached)
                    bar.update()
            figures.seconds += time.perf_counter() - began
        return [found[i] for i in places]

    def _texts(self, figures: TaskFigures, asked: list[Asked]) -> Iterator[tuple[int, str]]:
        jobs = []
        for n, (request, repeat) in enumerate(asked):
            context, how = request.args
            place = (request.task_name, request.doc_id, request.idx, repeat)
            decoder = asked_decoder(self.decoder, how, request_seed(self.seed, *place, context))
            room = self.max_length - decoder.length - decoder.extra_positions
            jobs.append((n, self._cut(self.tok_encode(context), room, figures), decoder))
        jobs.sort(key=lambda job: -(len(job[1]) + job[2].length))
        _, prompts, decoders = zip(*jobs, strict=True)
        for event in stream(self.model, prompts, decoders, batch_size=self.batch_size):
            if event.result is not None:
                figures.add(1, len(event.result.tokens), event.result.forwards)
                yield jobs[event.request][0], event.result.text or ""

    def _scored(
        self, figures: TaskFigures, asked: list[Asked]
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Yield (a request's number, the score of all its pairs) as it is known: the windows of a
        text, or one prompt and its target."""
        parts = [
            self.windows(*request.args)
            if request.request_type == "loglikelihood_rolling"
            else [self.pair(figures, *request.args)]
            for request, _ in asked
        ]
        owners = [n for n, pairs in enumerate(parts) for _ in pairs]
        scores: list[list[Score]] = [[] for _ in parts]
        for at, score in self.scores([pair for pairs in parts for pair in pairs]):
            n = owners[at]
            scores[n].append(score)
            if len(scores[n]) == len(parts[n]):
                whole = Score.total(scores[n])
                tokens = sum(len(target) for _, target in parts[n])
                figures.add(1, tokens, whole.forwards)
                if whole.standard_error != 0:
                    request, _ = asked[n]
                    figures.errors[request.doc_id or 0, request.idx] = whole.standard_error
                yield n, (whole.loglikelihood, whole.greedy)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scores = dict(self.scores([(prompt, target) for _, prompt, target in requests]))
        return [(scores[i].loglikelihood, scores[i].greedy) for i in range(len(requests))]

    def scores(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Score]]:
        """Yield (a pair's number, its score) as it is known, the longest first."""
        yield from ((i, Score.total([])) for i, pair in enumerate(pairs) if not pair[1])
        order = [i for i, (_, target) in enumerate(pairs) if target]
        order.sort(key=lambda i: -sum(map(len, pairs[i])))
        if self.way == "mc":
            for i in order:
                seed = request_seed(self.seed, *pairs[i])
                yield i, self.monte_carlo.score(self.model, *pairs[i], seed)
        elif order:
            contract = self.model.contract
            kinds = [Likelihood.of(contract, given=len(pairs[i][0])) for i in order]
            texts = [[*pairs[i][0], *pairs[i][1]] for i in order]
            for event in stream(self.model, texts, kinds, batch_size=self.batch_size):
                if (result := event.result) is not None:
                    each = result.likelihoods
                    greedy = all(one.greedy for one in each)
                    logprob = sum(one.logprob for one in each)
                    yield order[event.request], Score(logprob, 0.0, greedy, result.forwards)

    # The cache of answers.

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take lm-eval's cache of responses. Its keys are prompts and generation_kwargs alone, so
        the settings that made the answers are kept in it, too. Raises InputError for a cache of
        other settings."""
        cache = cache_hook.dbdict
        if cache is not None:
            there = cache.get(CACHE_KEY, {} if len(cache) else self.settings)
            differ = [
                f"{name} {there.get(name)!r}, not {value!r}"
                for name, value in self.settings.items()
                if there.get(name) != value
            ]
            if differ:
                raise InputError(
                    f"{cache.filename} has answers of other settings: {'; '.join(differ)}"
                )
            cache[CACHE_KEY] = self.settings
        super().set_cache_hook(cache_hook)

    @property
    def settings(self) -> dict[str, Any]:
        """All that an answer depends on besides its request."""
        options = asdict(self.decoder).items()
        estimate = self.monte_carlo
        return {
            "version": d2f.__version__,
            "weights": self.weights,
            "adapted": self.model.is_adapted,
            "dtype": self.model.precision,
            "device": self.model.device.type,
            "compiled": self.model.is_compiled,
            "decoder": self.decoder.name,
            "options": {k: v for k, v in options if k not in (*SET_BY_TASK, "seed")},
            "seed": self.seed,
            "nll": self.way,
            "mc_num": estimate.draws,
            "cfg": estimate.guidance,
            "check_greedy": estimate.check_greedy,
        }

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes of the model beside its results, figures by task among it;
        those of the next evaluation begin anew."""
        tasks: dict[str, dict[str, Any]] = {}
        for (task, kind), figures in sorted(self.figures.items()):
            tasks.setdefault(task, {})[kind] = figures.report()
        self.figures = {}
        return {
            "model_num_parameters": self.model.backbone.num_parameters(),
            "model_dtype": str(self.model.dtype),
            "d2f": {
                **self.settings,
                "model": self.model.path,
                "environment": environment(self.model),
                "processes": self.world_size,
                "tasks": tasks,
            },
        }


def distinct(requests: Sequence[Instance]) -> tuple[list[Asked], list[int]]:
    """Return the requests to answer, each with how many times it came before; and for each that was
    given, which of them answers it.

    lm-eval gives one that wants k answers k times. To processes with fewer requests it gives their
    last again, so that all run as many forwards; ours wait for nobody, and a copy answers those.
    """
    kept: list[Asked] = []
    places: dict[int, list[int]] = {}
    answers = []
    for request in requests:
        its = places.setdefault(id(request), [])
        answers.append(its[0] if len(its) == (request.repeats or 1) else len(kept))
        if answers[-1] == len(kept):
            its.append(len(kept))
            kept.append((request, len(its) - 1))
    return kept, answers
