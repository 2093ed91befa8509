"""Images that come with each sample of a vision-language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.techniques.base import Facts, OptionValues, TakesTechniques, Technique


class ImagesTechnique(Technique[int]):
    """So many images with each sample."""

    name = "images"
    kind = int
    where = "--images"
    leaf = "images"
    images = Option(int, 0, "Images of each sample, for vision-language models. [0]", WORK, least=1, without=RUNS)
    image_size = Option[int | None](
        int, None, "Pixels of an image's side. [by the config]", WORK, metavar="PIXELS", least=1, without=RUNS
    )

    def leaves(self, asked: OptionValues, engine: TakesTechniques) -> Mapping[str, Any]:
        """Return the images and their size."""
        images, size = asked[ImagesTechnique.images], asked[ImagesTechnique.image_size]
        if size is not None and not images:
            raise BadInput("a size without images", where="--image-size", remedy="give --images 1 as well")
        if images and asked.values.get("depth") == "formula":
            raise BadInput("images are known to a trace alone", where=self.where, remedy="leave --depth out")
        return super().leaves(asked, engine)

    def require(self, value: int, facts: Facts) -> None:
        """Refuse models that have no vision tower; a trace says what the others take."""
        if "vision_config" not in facts.spec.config:
            what = f"images of {facts.spec.model_type} are not known: its config has no vision_config"
            raise BadInput(what, where=self.where, remedy="leave it out")

    def instructions(self, value: int) -> tuple[str, ...]:
        """Return how many a sample has."""
        return (f"give each sample {value} image{'s' * (value > 1)}",)
