"""How long tests wait. A limit only ends what hangs: it is far above what anything takes on a slow machine that is busy.

An inner limit is below the outer one, so that the message is from where it hangs. ``pyproject.toml`` has the outermost, that of
a test.
"""

#: Seconds: for a collective of gloo's, for the ranks of a pool, and for any other process or condition.
COLLECTIVE, RANKS, PATIENCE = 300, 450, 600
