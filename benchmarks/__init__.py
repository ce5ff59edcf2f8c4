"""Measurements; none of them is a test."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter


def parser(about: str | None) -> ArgumentParser:
    """Make the parser of a benchmark from its docstring, which begins with its command line."""
    program = " ".join((about or "").split()[:3])
    return ArgumentParser(program, description=about, formatter_class=RawDescriptionHelpFormatter)
