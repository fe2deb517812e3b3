"""Detects faults of a running job: ranks that make different calls, fail, or wait long for a collective.

Input: the calls and waits of a job's processes. Output: an error or a log line that says what is wrong, on which rank, and
where. `watch` runs a thread in every process that compares the ranks' calls, and tells ranks that wait long where the
others are. `stacks` reads the stack of the thread that computes.
"""
