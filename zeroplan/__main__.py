"""``python -m zeroplan`` is the command ``zeroplan``."""

from zeroplan.cli.main import run

run()
