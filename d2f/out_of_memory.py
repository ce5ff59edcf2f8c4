"""Whether an error is that of a device or a machine without memory; imports no torch."""

from __future__ import annotations

import re

# What torch raises on a CPU is a plain RuntimeError.
_OF_A_CPU = re.compile(r"DefaultCPUAllocator: (can't allocate memory: [^\n]*?bytes)")


def out_of_memory(error: BaseException) -> str | None:
    """What was out of memory, as a line; None where the error is another one."""
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU
        return f"out of memory: {str(error).splitlines()[0]}"
    found = _OF_A_CPU.search(str(error)) if isinstance(error, RuntimeError) else None
    return f"out of memory: {found[1]}" if found else None
