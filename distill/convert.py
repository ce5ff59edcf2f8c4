"""Bring a checkpoint into another form: an autoregressive one into a start of diffusion training, a
trained one into one folder of merged weights, its family's official format, or the hub.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from d2f import flags as command_line
from d2f.command import command
from d2f.errors import InputError
from d2f.flags import Switch, Verbose, check_family_name, check_model_name
from d2f.quiet import quiet


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


@command(interrupted="interrupted: nothing was written")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    with quiet(options.verbose):
        from distill import export

        if options.is_gguf:
            lines = export.convert_gguf(Path(options.model), options.output)
        elif options.family is not None:
            lines = export.convert_checkpoint(
                options.model, options.family, options.output, options.mask_token
            )
        else:
            lines = export.export_model(options.model, options.output, options.official)
    print("\n".join(lines))
    if options.upload is not None:
        from huggingface_hub import HfApi

        HfApi().create_repo(options.upload, exist_ok=True)
        place = HfApi().upload_folder(repo_id=options.upload, folder_path=options.output)
        print(f"uploaded: {place}")


if __name__ == "__main__":
    sys.exit(main())
