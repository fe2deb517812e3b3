"""Selects a CPU memory allocator that keeps freed memory, as torch's caching allocator does on GPUs.

glibc's allocator may return large tensors to the system, or fragment its memory and request more. A step then randomly
takes up to 1.5 times as long, with tens of thousands of page faults. On CPUs, torch recommends preloading jemalloc or
tcmalloc.
"""

from __future__ import annotations

import ctypes.util

__all__ = ["allocator", "keeping_memory"]

_SETTINGS = "dirty_decay_ms:-1,muzzy_decay_ms:-1"


def allocator() -> str:
    """The name of the allocator that ``keeping_memory`` chooses."""
    return "jemalloc" if ctypes.util.find_library("jemalloc") else "glibc's allocator"


def keeping_memory() -> dict[str, str]:
    """Environment variables for a process that keeps freed memory; empty without jemalloc (``libjemalloc2``)."""
    library = ctypes.util.find_library("jemalloc")
    return {"LD_PRELOAD": library, "MALLOC_CONF": _SETTINGS} if library else {}
