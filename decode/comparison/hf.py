"""`generate` of transformers as an entry: static batches, nothing enters before all are done."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from d2f.device import parse_device, parse_dtype
from d2f.errors import InputError
from d2f.hub import folder_of
from d2f.load_tokenizer import load_tokenizer
from d2f.models import resolve
from d2f.weight_files import stored, weight_files
from decode.comparison.answers import Answer, Run
from decode.comparison.comparison_config import Transformers
from decode.comparison.entry_prompts import encode_all
from decode.comparison.workload import Workload


class TransformersRunner:
    """Loads the model as AutoModelForCausalLM with its own attention. Raises InputError.

    An answer is there when `generate` returns, which is when its whole batch is done; its first
    token is there after the first forward.
    """

    def __init__(self, entry: Transformers, workloads: list[Workload]):
        import torch
        from transformers import AutoModelForCausalLM

        if entry.threads is not None:
            torch.set_num_threads(entry.threads)
        self.device = parse_device(entry.device)
        dtype = parse_dtype(entry.dtype, self.device)
        place = str(folder_of(resolve(entry.model)))
        try:
            stored(weight_files(Path(place)))
            model = AutoModelForCausalLM.from_pretrained(
                place, dtype=dtype, use_safetensors=True, trust_remote_code=False
            )
        except (ValueError, OSError) as error:
            raise InputError(f"entry {entry.name}: {entry.model}: {error}") from error
        self.model = model.to(self.device).eval()
        self.tokenizer: Any = load_tokenizer(place)
        if self.tokenizer is None:
            raise InputError(f"entry {entry.name}: {entry.model} has no tokenizer")
        ends = self.model.generation_config.eos_token_id
        self.ends = list(ends) if isinstance(ends, list) else [] if ends is None else [ends]
        if not self.ends:
            raise InputError(f"entry {entry.name}: {entry.model} names no end token")
        self.workloads = {workload.name: workload for workload in workloads}
        self.prompts = {w.name: encode_all(self.tokenizer, w, entry.name) for w in workloads}
        cuda = self.device.type == "cuda"
        self.facts: dict[str, Any] = {
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "dtype": str(dtype).removeprefix("torch."),
            "threads": None if cuda else torch.get_num_threads(),
            "attention": self.model.config._attn_implementation,
        }

    def run(self, name: str, count: int, concurrency: int) -> Run:
        """The first `count` prompts of a workload in batches of `concurrency`."""
        prompts = self.prompts[name][:count]
        answers = [Answer(i) for i in range(len(prompts))]
        calls = 0
        began = time.perf_counter()
        # A static batch: the next one starts when the longest answer of this one is done.
        for first in range(0, len(prompts), concurrency):
            part = slice(first, first + concurrency)
            calls += self._batch(prompts[part], answers[part], self.workloads[name], began)
        return Run(answers, time.perf_counter() - began, calls=calls)

    def _batch(
        self, prompts: list[list[int]], answers: list[Answer], workload: Workload, began: float
    ) -> int:
        import torch
        from transformers import StoppingCriteriaList

        steps: list[float] = []
        sent = time.perf_counter() - began
        width = max(len(ids) for ids in prompts)
        ids = torch.full((len(prompts), width), self.ends[0])
        seen = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            seen[row, width - len(prompt) :] = 1
        watch = StoppingCriteriaList([_Watch(steps, began, len(prompts))])
        options: dict[str, Any] = {}
        if workload.stop:
            options = {"stop_strings": list(workload.stop), "tokenizer": self.tokenizer}
        with torch.inference_mode():
            out = self.model.generate(
                ids.to(self.device),
                attention_mask=seen.to(self.device),
                # Greedy as all entries, whatever the checkpoint's generation_config says.
                do_sample=False,
                num_beams=1,
                temperature=None,
                top_p=None,
                top_k=None,
                max_new_tokens=workload.max_new_tokens,
                eos_token_id=self.ends,
                pad_token_id=self.ends[0],
                stopping_criteria=watch,
                **options,
            ).cpu()
        texts = []
        for row in out[:, width:].tolist():
            end = next((i for i, token in enumerate(row) if token in self.ends), None)
            visible = row if end is None else row[:end]
            text = self.tokenizer.decode(visible, skip_special_tokens=True)
            # A row that has ended is fed padding until its batch has; that is not counted as its
            # own.
            texts.append((text, len(visible) + (end is not None)))
        done = time.perf_counter() - began
        for row, (answer, (text, own)) in enumerate(zip(answers, texts, strict=True)):
            answer.submitted, answer.prefill, answer.first = sent, steps[0], steps[0]
            answer.finished, answer.text, answer.own_tokens = done, text, own
            answer.first_tokens = 1
            answer.forwards = own
            # The last token is generated and not fed.
            answer.rows = len(prompts[row]) + own - 1
        return len(steps)


class _Watch:
    """A stopping criterion that never stops: it notes when each step ended."""

    def __init__(self, steps: list[float], began: float, rows: int):
        self.steps, self.began, self.rows = steps, began, rows

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        import torch

        self.steps.append(time.perf_counter() - self.began)
        return torch.zeros(self.rows, dtype=torch.bool, device=input_ids.device)
