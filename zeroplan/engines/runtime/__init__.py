"""The included runtime (`zeroplan_runtime`): padded flats by unit, a ring of gathered blocks, gradients that land in place."""
