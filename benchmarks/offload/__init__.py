"""Offload beside DeepSpeed's, and beside what the machine's links and memory allow."""
