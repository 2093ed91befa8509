"""Images, videos and sound that come with each sample of a model that takes more than text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.core.workload import Media
from zeroplan.techniques.base import Facts, OptionValues, TakesTechniques, Technique

#: Keys of configs whose models take images, videos or sound beside tokens.
TOWERS = frozenset(("vision_config", "audio_config", "audio_token_id", "audio_token_index"))


class MediaTechnique(Technique[Media]):
    """So many images or videos, and so much sound, with each sample."""

    name = "images"
    kind = Media
    where = "--images"
    leaf = "media"
    images = Option(int, 0, "Images of each sample, for models that take them beside text. [0]", WORK, least=1, without=RUNS)
    image_size = Option[int | None](
        int, None, "Pixels of an image's side. [by the config]", WORK, metavar="PIXELS", least=1, without=RUNS
    )
    video_frames = Option(int, 0, "Frames: each of --images is a video of so many. [0: an image]", WORK, least=1, without=RUNS)
    audio_seconds = Option(int, 0, "Seconds of the recording that comes with each sample. [0]", WORK, least=1, without=RUNS)

    def leaves(self, asked: OptionValues, engine: TakesTechniques) -> Mapping[str, Any]:
        """Return what comes with a sample."""
        found = Media(**{one.name: asked[one] for one in self.options})
        for name in ("image_size", "video_frames"):
            if getattr(found, name) and not found.images:
                what = f"a {name.partition('_')[2]} without images" if name == "image_size" else "frames without a video"
                raise BadInput(what, where=f"--{name.replace('_', '-')}", remedy="give --images 1 as well")
        given = found != Media()
        if given and asked.values.get("depth") == "formula":
            raise BadInput("images and sound are known to a trace alone", where=self._flag(found), remedy="leave --depth out")
        return {self.leaf: found if given else None}

    @staticmethod
    def _flag(value: Media) -> str:
        return "--images" if value.images else "--audio-seconds"

    def require(self, value: Media, facts: Facts) -> None:
        """Refuse models that take text alone; a trace says what the others take."""
        if not TOWERS & facts.spec.config.keys():
            what = f"{facts.spec.model_type} takes text alone: its config has no vision_config or audio_config"
            raise BadInput(what, where=self._flag(value), remedy="leave it out")

    def instructions(self, value: Media) -> tuple[str, ...]:
        """Return what a sample has."""
        one = "video" if value.video_frames else "image"
        seen = f"give each sample {value.images} {one}{'s' * (value.images > 1)}" if value.images else ""
        heard = f"give each sample {value.audio_seconds} s of sound" if value.audio_seconds else ""
        return tuple(filter(None, (seen, heard)))
