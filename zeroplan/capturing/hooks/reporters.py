"""Packages that only report (plots, logs, uploads): where one is missing, the script gets a stand-in that does nothing.

They hold nothing on a GPU, so that a script is captured on a machine where nobody has installed them. Only a script's own
``import`` finds the stand-in: a library that asks whether the package is there is told that it is not.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zeroplan.capturing.source import callers_file, is_users

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture

PACKAGES = frozenset(
    ("matplotlib", "seaborn", "plotly", "visdom", "wandb", "mlflow", "comet_ml", "neptune", "clearml", "swanlab", "aim",
     "trackio", "tensorboard", "tensorboardX", "tensorboard_logger", "dvclive", "sacred", "boto3", "gpustat", "GPUtil",
     "loguru", "colorlog", "IPython", "ipywidgets", "torchinfo", "torchsummary", "codecarbon")
)  # fmt: skip


class Nothing:
    """Whatever it is asked for is another of it; it is empty, and ends with success."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function where one is decorated, else nothing."""
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else Nothing()

    def __getitem__(self, _key: Any) -> Any:
        return Nothing()

    def __setitem__(self, _key: Any, _value: Any) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        yield Nothing()  # as of plt.subplots(): figure, axes
        yield Nothing()

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __bool__(self) -> bool:
        return False


class _Config(dict[str, Any]):
    """A run's settings, as ``wandb.config`` has them: what the script has put in, by key or by attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name, Nothing())

    __setattr__ = dict.__setitem__


class _TrackedRun(Nothing):
    """A run with the settings that it is started with."""

    config = _Config()

    def __init__(self, *_: Any, config: Any = None, **__: Any) -> None:
        _TrackedRun.config.update(config if isinstance(config, dict) else vars(config) if hasattr(config, "__dict__") else {})


class _Reporter(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if self.__name__ == "wandb" and name in ("init", "config", "run"):
            return {"init": _TrackedRun, "config": _TrackedRun.config, "run": None}[name]
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing if name[:1].isupper() else Nothing()


class _ReporterFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root = fullname.partition(".")[0]
        if root not in PACKAGES or (root != fullname and not isinstance(sys.modules.get(root), _Reporter)):
            return None
        file = callers_file()
        if root == fullname and not (is_users(file) or "/torch/utils/tensorboard/" in file):
            return None
        self._capture.invented[root] = f"the package {root} is not installed: its calls do nothing"
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Make the module."""
        return _Reporter(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""


def install(capture: Capture) -> None:
    """Find them behind all that are there."""
    if importlib.util.find_spec("tensorboard") is None:  # which torch's own writer imports, and more
        for name in ("torch.utils.tensorboard", "torch.utils.tensorboard.writer"):
            sys.modules.setdefault(name, _Reporter(name))
    sys.meta_path.append(_ReporterFinder(capture))
