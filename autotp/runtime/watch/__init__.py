"""What a job notices of its faults while it runs.

Input: what the processes of a job do. Output: an error or a log line that says what is wrong, on which rank, and where.
`watch` is a thread in every process that compares calls, and tells the ranks that wait long where the others are; it asks
`stacks` where its process is.
"""
