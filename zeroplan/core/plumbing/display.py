"""The hook through which an answer prints itself.

Answers are nouns of low layers; what draws them is a layer above all of those. So nothing here imports a renderer: the
package root, which knows both, installs one (:func:`install_renderer`) before it hands out the first public name.
"""

from __future__ import annotations

from typing import Protocol


class Renderer(Protocol):
    """Draws any :class:`Printable`."""

    def text(self, answer: Printable) -> str:
        """Return the answer for a terminal."""
        ...

    def html(self, answer: Printable) -> str:
        """Return the answer for a notebook's cell: a fragment of HTML."""
        ...


_renderer: Renderer | None = None


def install_renderer(renderer: Renderer) -> None:
    """Let `renderer` draw every answer of this process from now on."""
    global _renderer
    _renderer = renderer


class Printable:
    """An answer that ``print`` and notebooks show as its renderer draws it; as its ``repr`` while no renderer is installed."""

    __slots__ = ()

    def __str__(self) -> str:
        return repr(self) if _renderer is None else _renderer.text(self)

    def _repr_html_(self) -> str | None:
        return None if _renderer is None else _renderer.html(self)
