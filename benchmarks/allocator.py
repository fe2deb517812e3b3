"""The memory allocator of processes that compute on processors: one that keeps what is freed, as on GPUs torch's own does.

glibc's gives large tensors back, or scatters small ones among them and asks for more: a step then takes half as long again,
or not, by chance, with tens of thousands of page faults. torch's advice for processors is jemalloc or tcmalloc, preloaded.
"""

from __future__ import annotations

import ctypes.util

__all__ = ["allocator", "keeping_memory"]

_SETTINGS = "dirty_decay_ms:-1,muzzy_decay_ms:-1"


def allocator() -> str:
    """The name of the allocator that ``keeping_memory`` chooses."""
    return "jemalloc" if ctypes.util.find_library("jemalloc") else "glibc's allocator"


def keeping_memory() -> dict[str, str]:
    """Environment variables for a process that keeps its memory, as far as this machine has jemalloc (``libjemalloc2``)."""
    library = ctypes.util.find_library("jemalloc")
    return {"LD_PRELOAD": library, "MALLOC_CONF": _SETTINGS} if library else {}
