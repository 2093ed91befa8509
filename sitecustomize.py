"""Lets this folder's packages win over an editable install's finder."""

import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuildRedirecting" not in type(finder).__name__]
