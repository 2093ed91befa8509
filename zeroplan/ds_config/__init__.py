"""``ds_config.json``, for the planner and the included runtime: read as DeepSpeed reads it, checked, and written without loss.

Import from the modules: nothing is loaded that is not asked for, and the runtime needs a part only.
"""
