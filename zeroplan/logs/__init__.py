"""Logs of training runs: what went wrong, as the log's own lines show it. :func:`zeroplan.logs.diagnose.diagnose` reads one."""
