"""``ds_config.json``: read as DeepSpeed reads it, checked as its engine checks it, and written back without loss."""

from zeroplan.interop.ds_config.findings import At, Finding, Severity
from zeroplan.interop.ds_config.forms import lightning_form, trainer_form
from zeroplan.interop.ds_config.job import Job
from zeroplan.interop.ds_config.reader import DsConfig, fill_from, inspect_ds_config, read_ds_config
from zeroplan.interop.ds_config.schema import Effect
from zeroplan.interop.ds_config.schema_rest import effects, find_key
from zeroplan.interop.ds_config.versions import DEFAULT_CHANGES, older_defaults
from zeroplan.interop.ds_config.wrappers import Wrapper, wrapper
from zeroplan.interop.ds_config.writer import dump_ds_config, write_ds_config

__all__ = [
    "DEFAULT_CHANGES",
    "At",
    "DsConfig",
    "Effect",
    "Finding",
    "Job",
    "Severity",
    "Wrapper",
    "dump_ds_config",
    "effects",
    "fill_from",
    "find_key",
    "inspect_ds_config",
    "lightning_form",
    "older_defaults",
    "read_ds_config",
    "trainer_form",
    "wrapper",
    "write_ds_config",
]
