"""New training scripts, one module a loop: texts of Python programs that run what was planned.

A script is put together of the parts in :mod:`.parts` and a loop of its form's own. What a file beside it says (batches, stage,
precision of a ds_config), it reads there; what no file can say (the model, the sequence length, checkpointing) stands in it.
"""
