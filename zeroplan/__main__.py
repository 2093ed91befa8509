"""``python -m zeroplan`` is the command ``zeroplan``."""

from zeroplan.cli.main import run

if __name__ == "__main__":  # a process that it spawns imports this file again
    run()
