"""Small checkpoints as others publish them: an autoregressive model in transformers' own format,
with a tokenizer that has a chat template and no mask token."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved|>"]
TOKENS = len(SPECIAL) + 256
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tokenizer(**more: str) -> PreTrainedTokenizerFast:
    """A byte a token, behind four special tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=SPECIAL, initial_alphabet=alphabet, vocab_size=TOKENS, show_progress=False
    )
    core.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>", "<|reserved|>"],
        chat_template=TEMPLATE,
        **more,
    )


def checkpoint(
    folder: Path, kind: str, *, rows: int = TOKENS, tied: bool = False,
    dtype: torch.dtype = torch.float32, **more: str,
) -> Path:  # fmt: skip
    """A random model of the kind with a vocabulary of `rows`, saved as transformers does."""
    make_config, make = KINDS[kind]
    torch.manual_seed(0)
    model = make(
        make_config(
            vocab_size=rows, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            tie_word_embeddings=tied, eos_token_id=[2, 0], bos_token_id=None,
        )
    )  # fmt: skip
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(1.0 if weight.dim() == 1 else 0.0, 0.2)
    model.to(dtype).save_pretrained(folder)
    tokenizer(**more).save_pretrained(folder)
    return folder
