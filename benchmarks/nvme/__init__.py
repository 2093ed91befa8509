"""Streaming from and to a disk, beside plain direct I/O on the same disk in the same run."""
