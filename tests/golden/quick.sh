#!/usr/bin/env bash
# Compares the quick subset of the golden answers; exits 1 on a difference.
set -e
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${ZEROPLAN_PYTHON:-.venv/bin/python}" -m tests.golden.make --check --quick
