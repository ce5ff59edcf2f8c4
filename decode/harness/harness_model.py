"""`D2FLM`: a model and a decoder of ours as lm-eval asks for one."""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from torch import Tensor
from tqdm import tqdm

import d2f
from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.api import DEFAULT_BATCH_SIZE, stream
from decode.commands.decoder_settings import DecoderSettings
from decode.commands.load_model import load, outline, weights_hash
from decode.decoders import Decoder
from decode.decoders.checks import boolean, not_negative, whole_number
from decode.decoders.options import DEFAULT_MAX_NEW_TOKENS
from decode.harness.asked_decoder import OF_A_REQUEST, OF_A_TASK, asked_decoder, request_seed
from decode.harness.harness_text import HarnessText
from decode.harness.monte_carlo import MonteCarlo, Score
from decode.harness.processes import Processes
from decode.harness.response_cache import claim
from decode.harness.scoring import Scoring
from decode.harness.task_figures import Figures, TaskFigures, reports, together
from decode.reporting.environment import environment

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
        not_negative("cfg", cfg)
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
            wanted = Namespace(
                model=pretrained, adapter=adapter, family=family, dtype=dtype, quantize=quantize,
                merge=merge, compile=compile, device=self.processes.device(device), verbose=False,
                tensor_parallel=1, threads=threads,
            )  # fmt: skip
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
                room = self.max_length - decoders[i].length - decoders[i].overhang
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
