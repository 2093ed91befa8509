"""Pretrained weights that are fetched by an address: the model keeps its own, of the same shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from zeroplan.capturing.hooks.imports import changes, when_imported

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture


class Fetched(dict[str, Any]):
    """Weights that were not fetched; a model that loads them stays as it is."""


def install(capture: Capture) -> None:
    """Replace torch's way to an address, and timm's, which asks a hub."""
    import torch.hub

    home: Any = torch.hub

    def fetched(url: str, *_: Any, **__: Any) -> Fetched:
        return Fetched()

    changes(home, nn.Module)
    home.load_state_dict_from_url = fetched
    own = nn.Module.load_state_dict

    def load_state_dict(module: nn.Module, held: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if isinstance(held, Fetched):
            return nn.modules.module._IncompatibleKeys([], [])
        return own(module, held, *args, **kwargs)

    plain: Any = nn.Module
    plain.load_state_dict = load_state_dict
    when_imported("torchvision._internally_replaced_utils", lambda module: setattr(module, "load_state_dict_from_url", fetched))
    when_imported("torchvision.models._api", lambda module: setattr(module, "load_state_dict_from_url", fetched))
    when_imported("timm.models._builder", lambda module: setattr(module, "load_pretrained", lambda *_, **__: None))
