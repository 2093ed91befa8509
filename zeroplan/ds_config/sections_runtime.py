"""``zeroplan``: the section of the included runtime's own keys, which DeepSpeed ignores. See :class:`RuntimeOptions`."""

from __future__ import annotations

from zeroplan.ds_config.runtime_options import RuntimeOptions
from zeroplan.ds_config.schema import BOOL, FLOAT, HONOURED, IGNORED, INT, Mode, free, mem, section

ZEROPLAN = section(
    "zeroplan",
    Mode.EXACT,
    "",
    mem("ring", INT, lo=2, deepspeed=IGNORED, runtime=HONOURED),
    mem("wide_numel", INT, lo=1, deepspeed=IGNORED, runtime=HONOURED),
    mem("direct_linear", BOOL, deepspeed=IGNORED, runtime=HONOURED),
    mem("fused_loss", BOOL, deepspeed=IGNORED, runtime=HONOURED),
    mem("labelled_tokens_only", BOOL, deepspeed=IGNORED, runtime=HONOURED),
    mem("chunked_cross_entropy", INT, lo=0, deepspeed=IGNORED, runtime=HONOURED),
    free("audit_steps", INT, attr="audit_steps", lo=0, deepspeed=IGNORED, runtime=HONOURED),
    free("timeout", FLOAT, attr="timeout", lo=1, deepspeed=IGNORED, runtime=HONOURED),
    mem("delayed_update", INT, lo=0, deepspeed=IGNORED, runtime=HONOURED),
    free("nvme_in_memory", BOOL, attr="nvme_in_memory", deepspeed=IGNORED, runtime=HONOURED),
    holder=RuntimeOptions,
)
