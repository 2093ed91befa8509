"""``zeroplan``: the section of the included runtime's own keys, which DeepSpeed ignores. See :class:`RuntimeOptions`."""

from __future__ import annotations

from zeroplan.ds_config.runtime_options import RuntimeOptions
from zeroplan.ds_config.schema import HONOURED, IGNORED, B, F, I, Mode, free, mem, section

ZEROPLAN = section(
    "zeroplan",
    Mode.EXACT,
    "",
    mem("ring", I, lo=2, deepspeed=IGNORED, runtime=HONOURED),
    mem("wide_numel", I, lo=1, deepspeed=IGNORED, runtime=HONOURED),
    mem("direct_linear", B, deepspeed=IGNORED, runtime=HONOURED),
    mem("fused_loss", B, deepspeed=IGNORED, runtime=HONOURED),
    free("audit_steps", I, attr="audit_steps", lo=0, deepspeed=IGNORED, runtime=HONOURED),
    free("timeout", F, attr="timeout", lo=1, deepspeed=IGNORED, runtime=HONOURED),
    mem("delayed_update", I, lo=0, deepspeed=IGNORED, runtime=HONOURED),
    free("nvme_in_memory", B, attr="nvme_in_memory", deepspeed=IGNORED, runtime=HONOURED),
    holder=RuntimeOptions,
)
