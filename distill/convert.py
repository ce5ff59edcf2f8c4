"""Bring a checkpoint into another form: an autoregressive one into a start of diffusion training, a
trained one into one folder of merged weights, its family's official format, or the hub.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from d2f import flags as command_line
from d2f.command import command
from d2f.errors import CheckpointError, InputError
from d2f.flags import Switch, Verbose, check_family_name, check_model_name
from d2f.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from d2f.model import DiffusionModel
    from d2f.parts import Outline
    from distill.config import TrainConfig

MASK_TOKEN = "<|mask|>"


@dataclass(kw_only=True)
class Options:
    """Bring a model into another form.

    With --family: make of an autoregressive checkpoint (transformers' Llama, Qwen2 or Qwen3) a
    folder that the training of a diffusion model starts from: a mask token in its tokenizer and in
    its vocabulary, and the contract of the family. No weight that it has changes. It is not a
    diffusion model yet: the contract's objective stays `next_token` until
    `objective: masked_diffusion` has trained it (docs/from-autoregressive.md).

        --family   starts from           row p predicts      for the objectives
        dream      qwen2, llama          position p + 1      masked_diffusion, then d2f
        llada      llama                 position p          masked_diffusion, then d2f
        wedlm      llama, qwen2, qwen3   position p          wedlm
        sdar       qwen3                 position p          masked_diffusion

    Without: write a trained model, or the result of a finished run by the run's folder, as one
    model: an adapter is merged into its base. --official writes LLaDA's or Dream's own format;
    --upload puts what was written on the Hugging Face hub. A .gguf file becomes a folder of fp32
    weights with its tokenizer and chat template (pip install 'd2f-toolkit[gguf]').
    """

    model: str
    """folder of a model or of a finished run, hub name, bundled model, or a .gguf file"""
    output: Path
    """new folder for the result"""
    family: str | None = None
    """dream, llada, wedlm or sdar: what an autoregressive model is to become"""
    mask_token: str | None = None
    """a new token, or a special one that the tokenizer has (default: the tokenizer's own mask
    token, else a reserved one, else <|mask|>)"""
    official: Switch = False
    """write the format that the family's own code reads"""
    upload: str | None = None
    """hub name as owner/name; huggingface-cli login first"""
    verbose: Verbose = False

    def check(self) -> None:
        """Raise InputError for a model that cannot be, or options that do not go together."""
        if self.is_gguf:
            if self.family is not None or self.official:
                raise InputError("a .gguf file is converted by itself: leave out what it shall be")
            if not Path(self.model).is_file():
                raise InputError(f"--model {self.model}: no such file")
        else:
            check_model_name(self.model)
        check_family_name(self.family)
        if self.family is not None and (self.official or self.upload):
            raise InputError("--official and --upload are for a trained model: leave out --family")
        if self.family is None and self.mask_token is not None:
            raise InputError("--mask-token needs --family")
        if self.output.exists() and (not self.output.is_dir() or any(self.output.iterdir())):
            raise InputError(f"--output {self.output}: expected a new or empty folder")

    @property
    def is_gguf(self) -> bool:
        return self.model.endswith(".gguf")


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Raises InputError, SystemExit after --help."""
    return command_line.parse(Options, arguments, usual="python -m distill.convert")


def export(name: str, output: Path, official: bool = False) -> list[str]:
    """Write a trained model, or a finished run's, to `output` as one model, whole or not at all;
    say in lines what was done. Raises InputError."""
    import torch

    from d2f.checkpoint import folder_of
    from d2f.device import parse_dtype
    from d2f.files import make_folder, writing_folder
    from d2f.loading import describe, load
    from d2f.models import resolve
    from d2f.saving import save_model, save_official

    config = _run(Path(name))
    outline = describe(name if config is None else f"{name}/model")
    dtype = parse_dtype(outline.config.dtype, torch.device("cpu"))
    model = load(outline, dtype=dtype, device="cpu")
    model.contract = dataclasses.replace(model.contract, base=None, base_hash=None)
    if config is not None and config.init is not None and config.family is None:
        # Its official configuration and code come along.
        model.path = str(folder_of(resolve(config.init), weights=False))
    make_folder(output.parent)
    with writing_folder(output) as beside:
        (save_official if official else save_model)(model, beside, dtype=dtype)
        if config is not None:
            shutil.copy(Path(name) / "model" / "README.md", beside)
    form = f"{model.family}'s official format" if official else "transformers' format"
    return [f"{output}: {form}, {str(dtype).removeprefix('torch.')}"]


def convert_gguf(file: Path, output: Path) -> list[str]:
    """Write a .gguf file's model to `output` in transformers' format, whole or not at all; say in
    lines what was done. Raises InputError."""
    import importlib.util

    if importlib.util.find_spec("gguf") is None:
        raise InputError("a .gguf file needs the package gguf: pip install 'd2f-toolkit[gguf]'")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from d2f.files import make_folder, writing_folder
    from d2f.loading import describe
    from d2f.saving import write_weights

    folder, given = str(file.parent), {"gguf_file": file.name}
    try:
        config = AutoConfig.from_pretrained(folder, **given)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given)
        tokenizer = AutoTokenizer.from_pretrained(folder, **given)
    except Exception as error:  # transformers raises whatever comes of what it does not know
        raise InputError(f"{file}: transformers cannot read it: {error}") from error
    config.quantization_config, config.dtype = None, torch.float32  # the file's; now they are fp32
    del config.quantization_config
    config.name_or_path = ""
    config.architectures = [type(model).__name__]
    make_folder(output.parent)
    with writing_folder(output) as beside:
        config.save_pretrained(beside)
        weights = model.state_dict()
        if config.tie_word_embeddings:
            del weights["lm_head.weight"]
        write_weights(weights, beside / "model.safetensors")
        tokenizer.save_pretrained(beside)
        outline = describe(beside)  # what cannot be loaded is said now
    lines = [f"{output}: {config.model_type}, family {outline.family}, weights in float32"]
    if tokenizer.chat_template is None:
        lines.append("it has no chat template: prompts are taken as they are with --raw")
    return lines


def _run(folder: Path) -> TrainConfig | None:
    """Read the configuration of a finished run, None where the folder is none. Raises InputError
    for a run that has not ended."""
    from distill.checkpoint import CONFIG, RECORD

    if not (folder / RECORD).is_file():
        return None
    from distill.config import read_config

    if not (folder / "model").is_dir():
        raise InputError(
            f"{folder}: the run has not ended, so it has no result: train it to its end"
        )
    return read_config(folder / CONFIG)


def convert_checkpoint(
    name: str, family_name: str, output: Path, mask_token: str | None = None
) -> list[str]:
    """Write the converted checkpoint to `output`, whole or not at all; say in lines what was done.

    name: folder, hub name or bundled model. mask_token: default the tokenizer's own, else
    `MASK_TOKEN`. Raises InputError before any weights are read where model, family and mask token
    do not go together.
    """
    import torch

    from d2f.convert import convert
    from d2f.device import parse_dtype
    from d2f.files import make_folder, writing_folder
    from d2f.loading import describe, load
    from d2f.saving import save_model

    outline = describe(name)
    _check_source(name, outline, family_name)
    tokenizer = outline.tokenizer
    assert tokenizer is not None
    lines = [_add_mask(tokenizer, mask_token, outline.end_ids)]
    mask_id = int(tokenizer.convert_tokens_to_ids(tokenizer.mask_token))
    # Weights are written as they were stored: a conversion rounds nothing.
    dtype = parse_dtype(outline.config.dtype, torch.device("cpu"))
    model = load(outline, dtype=dtype, device="cpu")
    lines.append(_make_room(model, mask_id))
    made = convert(model, family_name)
    # Until masked diffusion has trained it, it reads one side only: `d2f` training warns by this.
    made.contract = dataclasses.replace(made.contract, objective="next_token")
    make_folder(output.parent)
    with writing_folder(output) as beside:
        save_model(made, beside, dtype=dtype)
        # Read back before the folder takes its name: some tokenizers drop a token when saved.
        again = describe(beside)
        kept = again.tokenizer is not None and again.tokenizer.mask_token_id == mask_id
        if not kept or again.contract != made.contract:
            raise CheckpointError(f"{name}: its tokenizer does not keep a mask token when saved")
    c = made.contract
    lines.append(
        f"{c.family}: row p predicts position {'p + 1' if c.logit_shift else 'p'}, RoPE in "
        f"{'fp32' if c.rope_fp32 else 'the dtype of the weights'}, prompt rule {c.prompt_rule}, "
        f"end ids {', '.join(map(str, c.end_ids))}; weights in {str(dtype).removeprefix('torch.')}"
    )
    if tokenizer.chat_template is None:
        lines.append("the tokenizer has no chat template: train with data.chat_template: none")
    first = "wedlm" if c.family == "wedlm" else "masked_diffusion"
    lines.append(f"{output}: not trained as a diffusion model yet: next, objective {first}")
    return lines


def _check_source(name: str, outline: Outline, family_name: str) -> None:
    """Raise CheckpointError unless this model can become one of the family."""
    from d2f.families import FAMILIES, get_family

    family, kind = get_family(family_name), outline.config.model_type
    tokenizer = outline.tokenizer
    problem = None
    if outline.is_diffusion:
        problem = (
            "expected an autoregressive model, got a diffusion model of the family "
            f"{outline.family}: train it as it is"
        )
    elif not family.needs_mask:
        problem = f"the family must be of a diffusion model, got {family_name}"
    elif kind not in family.starts:
        fit = [other.name for other in FAMILIES.values() if kind in other.starts]
        problem = (
            f"the family {family_name} starts from {' or '.join(family.starts)}, "
            f"got {kind}, from which {' and '.join(fit)} can start"
        )
    elif tokenizer is None:
        problem = "expected a tokenizer beside the model, found none"
    elif not outline.end_ids and tokenizer.eos_token_id is None:
        problem = (
            "expected a token that ends a response, as eos_token_id in config.json or "
            "eos_token of the tokenizer, found neither"
        )
    if problem:
        raise CheckpointError(f"{name}: {problem}")


def _add_mask(
    tokenizer: PreTrainedTokenizerBase, wanted: str | None, end_ids: Sequence[int]
) -> str:
    """Give the tokenizer its mask token and say what was done. Raises InputError for a token that
    means something else."""
    from d2f.convert import reserved_tokens

    free = [tokenizer.convert_ids_to_tokens(id) for id in reserved_tokens(tokenizer, end_ids)]
    token = str(wanted or tokenizer.mask_token or (free or [MASK_TOKEN])[-1])
    there = tokenizer.get_vocab().get(token)
    if there is None:
        tokenizer.add_special_tokens({"mask_token": token})
        return f"mask token {token}: added to the tokenizer as id {tokenizer.mask_token_id}"
    roles = ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id")
    if there in (*end_ids, *(getattr(tokenizer, role) for role in roles)):
        raise InputError(
            f"--mask-token {token} begins, ends, pads or replaces text: expected a token of its own"
        )
    added = tokenizer.added_tokens_decoder.get(there)
    if tokenizer.mask_token != token and not (added is not None and added.special):
        raise InputError(
            f"--mask-token {token} is an ordinary token of the tokenizer (id {there}), which text "
            "may contain: expected a new or a special token"
        )
    tokenizer.add_special_tokens({"mask_token": token})
    return f"mask token {token}: id {there}, which the tokenizer has already"


def _make_room(model: DiffusionModel, mask_id: int) -> str:
    """Resize the embeddings where the mask id does not fit in them, and say so."""
    import torch

    size = model.vocab_size
    if mask_id < size:
        return f"embeddings: their {size} rows have room for it, none was added"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the new rows are drawn: the same each time
        # A multiple of 64, which matrix products and processes that share the model divide by.
        size_now = -(-(mask_id + 1) // 64) * 64
        model.backbone.resize_token_embeddings(size_now, mean_resizing=True)
    return (
        f"embeddings: resized from {size} to {model.vocab_size} rows, the new ones drawn around "
        "the mean of the others"
    )


@command(interrupted="interrupted: nothing was written")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    with quiet(options.verbose):
        if options.is_gguf:
            lines = convert_gguf(Path(options.model), options.output)
        elif options.family is not None:
            lines = convert_checkpoint(
                options.model, options.family, options.output, options.mask_token
            )
        else:
            lines = export(options.model, options.output, options.official)
    print("\n".join(lines))
    if options.upload is not None:
        from huggingface_hub import HfApi

        HfApi().create_repo(options.upload, exist_ok=True)
        place = HfApi().upload_folder(repo_id=options.upload, folder_path=options.output)
        print(f"uploaded: {place}")


if __name__ == "__main__":
    sys.exit(main())
