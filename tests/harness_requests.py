"""Requests as lm-eval makes them, for the tests of its adapter."""

from lm_eval.api.instance import Instance


def generation(context, task="t", document=0, repeats=1, **asked):
    place = (task, document, repeats)
    return Instance("generate_until", {}, (context, asked), 0, metadata=place)


def likelihood(context, continuation, task="t", document=0, number=0):
    arguments = (context, continuation)
    return Instance("loglikelihood", {}, arguments, number, metadata=(task, document, 1))


def rolling(text, task="t", document=0):
    return Instance("loglikelihood_rolling", {}, (text,), 0, metadata=(task, document, 1))
