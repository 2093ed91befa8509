"""DeepSpeed's transformer layer by the name that users import; it is :mod:`zeroplan_runtime.techniques.transformer`."""

from zeroplan_runtime.techniques.transformer import *  # noqa: F403
