"""Training: from-scratch models, the autoregressive baseline and D2F distillation."""

try:
    from d2f import command as siblings
except ImportError as error:  # of a d2f.py of the user's
    import d2f

    _place = next(iter(getattr(d2f, "__path__", None) or [d2f.__file__]))
    raise ImportError(f"{_place} hides the package d2f of d2f-toolkit: rename it") from error

siblings.require("d2f", "decode")
