"""Make an autoregressive checkpoint a folder that diffusion training starts from: d2f convert."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from d2f import flags as command_line
from d2f.command import command
from d2f.errors import CheckpointError, InputError
from d2f.flags import Verbose, check_model_name
from d2f.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from d2f.model import DiffusionModel
    from d2f.parts import Outline

MASK_TOKEN = "<|mask|>"


@dataclass(kw_only=True)
class Options:
    """Make of an autoregressive checkpoint (transformers' Llama, Qwen2 or Qwen3) a folder that the
    training of a diffusion model starts from: a mask token in its tokenizer and in its vocabulary,
    and the contract of the family. No weight that it has changes. It is not a diffusion model yet:
    the contract's objective stays `next_token` until `objective: masked_diffusion` has trained it
    (docs/from-autoregressive.md).

        --family   starts from           row p predicts      for the objectives
        dream      qwen2, llama          position p + 1      masked_diffusion, then d2f
        llada      llama                 position p          masked_diffusion, then d2f
        wedlm      llama, qwen2, qwen3   position p          wedlm
        sdar       qwen3                 position p          masked_diffusion
    """

    model: str
    """folder, hub name or bundled model"""
    family: str
    """dream, llada, wedlm or sdar"""
    output: Path
    """new folder for the result"""
    mask_token: str | None = None
    """a new token, or a special one that the tokenizer has (default: the tokenizer's own mask
    token, else <|mask|>)"""
    verbose: Verbose = False

    def check(self) -> None:
        """Raise InputError for a model that cannot be."""
        check_model_name(self.model)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Raises InputError, SystemExit after --help."""
    return command_line.parse(Options, arguments, usual="python -m distill.convert")


def convert_checkpoint(
    name: str, family_name: str, output: Path, mask_token: str | None = None
) -> list[str]:
    """Write the converted checkpoint to `output`, whole or not at all; say in lines what was done.

    name: folder, hub name or bundled model. mask_token: default the tokenizer's own, else
    `MASK_TOKEN`. Raises InputError before any weights are read where model, family, mask token or
    output do not go together.
    """
    import torch

    from d2f.convert import convert
    from d2f.device import parse_dtype
    from d2f.files import make_folder, writing_folder
    from d2f.loading import describe, load
    from d2f.saving import save_model

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} is there already: expected a new or empty folder as --output")
    make_folder(output.parent)
    if mask_token is not None and not (mask_token.strip() and mask_token.isprintable()):
        raise InputError(f"--mask-token is {mask_token!r}: expected text that can be seen")
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
    token = str(wanted or tokenizer.mask_token or MASK_TOKEN)
    there = tokenizer.get_vocab().get(token)
    if there is None:
        tokenizer.add_special_tokens({"mask_token": token})
        return f"mask token {token}: added to the tokenizer as id {tokenizer.mask_token_id}"
    roles = [
        role
        for role in ("bos_token", "eos_token", "unk_token", "pad_token")
        if getattr(tokenizer, role) == token
    ]
    if there in end_ids or roles:
        means = "ends a response" if there in end_ids else f"is the tokenizer's {roles[0]}"
        raise InputError(f"--mask-token {token} {means}: expected a token of its own")
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
        model.backbone.resize_token_embeddings(mask_id + 1, mean_resizing=True)
    return (
        f"embeddings: resized from {size} to {model.vocab_size} rows, the new ones drawn around "
        "the mean of the others"
    )


@command(interrupted="interrupted: nothing was written")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    with quiet(options.verbose):
        lines = convert_checkpoint(
            options.model, options.family, options.output, options.mask_token
        )
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
