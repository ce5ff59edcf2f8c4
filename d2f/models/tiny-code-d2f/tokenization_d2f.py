"""The tokenizer as its tokenizer.json says, whatever the type of the model beside it.

`d2f.saving` puts this file beside a model whose type transformers would take for that of
another tokenizer; transformers runs it under ``trust_remote_code=True``.
"""

from transformers import TokenizersBackend


class D2FTokenizer(TokenizersBackend):
    """transformers' own class, under a name that no model type takes the place of."""
