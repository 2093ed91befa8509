"""Micro batches with images, videos and sound, for any model of transformers that says itself what it takes.

Note [What an image becomes]
    An image is a square. Its pixels have the shape that the model takes: patches with their numbers by time, height and width
    (``image_grid_thw``), or one tensor of the size that the config's tower has, with its sizes where they are asked for. How
    many tokens stand for it in the text is the number of features that the model's own ``get_image_features`` returns for it,
    which a processor counts by formulas of its own. A processor that cuts an image into tiles gives the model one image a tile.

    A video is the same of ``get_video_features``, with a grid that is as many patches long as its frames make, or with its
    frames in a dimension of their own. Some models want text between frames (Qwen3-VL's times), or a token behind the last
    (LLaVA-OneVision's new line): their forward, which compares tokens and features, says which. Sound is the same of
    ``get_audio_features``: a log-mel spectrogram of 100 frames a second. What Whisper's tower takes is cut into pieces of
    30 s, the last one padded; other towers take it as long as it is. Qwen2-Audio has no such method: its tower tells lengths.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import Media
from zeroplan.trace.functions import CudaFunctions
from zeroplan.trace.known import KnownValues
from zeroplan.trace.recorder import StorageRecorder

#: Config keys of the tiles into which a processor cuts an image by its size.
_TILED = "image_grid_pinpoints"
_GRID_SIZE = 448  # pixels of a side, where the model takes any
_FRAMES = 100  # of a spectrogram a second
_METHODS = {"images": "get_image_features", "videos": "get_video_features", "audio": "get_audio_features"}


@dataclass(frozen=True, slots=True)
class Given:
    """One argument of a forward for one image, video or recording: numbers that the model reads, a mask, or noise.

    Attributes:
        shape: of one.
        values: the numbers; None for others.
        marked: of a mask, how many of its positions are no padding; None for noise.
        joined: several stand one behind the other, not in a dimension of their own.
    """

    shape: tuple[int, ...]
    values: tuple[int, ...] | None = None
    marked: int | None = None
    joined: bool = False

    def tensor(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the argument of `count` of them."""
        if self.values is not None:
            return torch.tensor([self.values] * count, dtype=torch.int64)
        shape = (count * self.shape[0], *self.shape[1:]) if self.joined else (count, *self.shape)
        if self.marked is None:
            return torch.rand(shape).to(dtype)
        return (torch.arange(shape[-1]) < self.marked).to(torch.int64).expand(shape).clone()


@dataclass(frozen=True, slots=True)
class Medium:
    """One image, video or recording as a model takes it. See Note [What an image becomes].

    Attributes:
        count: so many of them in a sample.
        given: its arguments, by their names in the forward.
        asked: those names in the method that makes features, where they differ.
        token_id: the placeholder in the text.
        kind: what ``mm_token_type_ids`` calls its tokens.
        marks: that argument of the forward; None where there is none.
        tokens: placeholder tokens of one.
        parts: so many runs of placeholders stand for one, with a token of text between.
        by_sample: they have a dimension of their own behind the samples'.
    """

    count: int
    given: Mapping[str, Given]
    asked: Mapping[str, str]
    token_id: int
    kind: int
    marks: str | None
    tokens: int = 0
    parts: int = 1
    by_sample: bool = False

    @property
    def length(self) -> int:
        """Tokens of one, with the token of text behind each run."""
        return self.tokens + self.parts

    def arguments(self, samples: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return what tells the model of those in each of `samples` samples."""
        made = {name: one.tensor(samples * self.count, dtype) for name, one in self.given.items()}
        if self.by_sample:
            made = {name: tensor.unflatten(0, (samples, self.count)) for name, tensor in made.items()}
        return made


def media_of(model: nn.Module, config: Mapping[str, Any], media: Media) -> tuple[Medium, ...]:
    """Return how a model takes what comes with each sample.

    Args:
        model: the model on the meta device.
        config: its config, with transformers' defaults.
        media: what comes with a sample.

    Raises:
        BadInput: a model that takes no such thing, takes something beside it, or does not take that size.
    """
    found = []
    if media.images:
        found.append(_seen(model, config, media))
    if media.audio_seconds:
        found.append(_heard(model, config, media.audio_seconds))
    return tuple(found)


def _owner(model: nn.Module, what: str) -> Any:
    return next((module for module in model.modules() if hasattr(type(module), _METHODS[what])), None)


def _token(config: Mapping[str, Any], what: str) -> int | None:
    found = config.get(f"{what}_token_id", config.get(f"{what}_token_index"))
    return found if isinstance(found, int) else None


def _seen(model: nn.Module, config: Mapping[str, Any], media: Media) -> Medium:
    kind, vision = str(config.get("model_type")), config.get("vision_config")
    what, single = ("videos", "video") if media.video_frames else ("images", "image")
    owner, token = _owner(model, what), _token(config, single)
    if owner is None or not isinstance(vision, Mapping) or token is None:
        raise _refused(kind, what, f"it has no {_METHODS[what]}, no vision_config or no {single}_token_id")
    asked = inspect.signature(getattr(owner, _METHODS[what])).parameters
    forward = inspect.signature(owner.forward).parameters
    pixels, grid = ("pixel_values_videos", "video_grid_thw") if media.video_frames else ("pixel_values", "image_grid_thw")
    taken = {pixels, "pixel_values", grid, "image_sizes"}
    needed = {name for name, p in asked.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    if needed - taken or (_TILED in config and not media.video_frames):
        raise _refused(kind, what, f"it takes {', '.join(sorted(needed - taken)) or 'tiles'} beside pixels")
    marks = next((name for name in ("mm_token_type_ids", "token_type_ids") if name in forward), None)
    renamed = {} if pixels in asked else {pixels: "pixel_values"}
    plain = Medium(media.images, {}, renamed, token, 2 if media.video_frames else 1, marks)
    if grid in asked:
        shape, sides = _patches(kind, vision, media)
        tries = [replace(plain, given={pixels: Given(shape, joined=True), grid: Given((3,), sides)})]
    else:
        side, sizes = _side(kind, vision, media.image_size, free="image_sizes" in asked), "image_sizes" in asked
        channels = int(vision.get("num_channels") or vision.get("in_channels") or 3)
        frames = (media.video_frames,) if media.video_frames else ()
        given = {pixels: Given((*frames, channels, side, side))}
        given |= {"image_sizes": Given((2,), (side, side))} if sizes else {}
        tries = [replace(plain, given=given, by_sample=nested) for nested in ((False,) if frames else (False, True))]
    found = _first(owner, kind, what, tries)
    return found if what == "images" else _laid_out(model, kind, found)


def _laid_out(model: nn.Module, kind: str, video: Medium) -> Medium:
    """Return a video with its placeholders as the model's forward takes them."""
    times = next((one.values[0] for one in video.given.values() if one.values), 1)
    why = ""
    for tried in (video, replace(video, parts=times), replace(video, tokens=video.tokens + 1)):
        one = replace(tried, count=1)
        recorder = StorageRecorder([*model.parameters(), *model.buffers()], known=KnownValues())
        try:
            with torch.no_grad(), recorder, CudaFunctions(known=True):
                batch = media_inputs((one,), 1, one.length + 1, next(model.parameters()).dtype)
                model(**{name: tensor.to("meta") for name, tensor in batch.items()})
        except Exception as error:  # as in _first
            why = why or (str(error).splitlines() or [""])[0] or type(error).__name__
        else:
            return tried
    raise _refused(kind, "videos", f"its forward takes no such placeholders ({why[:80]})")


def _heard(model: nn.Module, config: Mapping[str, Any], seconds: int) -> Medium:
    kind, token = str(config.get("model_type")), _token(config, "audio")
    tower = config.get("audio_config") or config.get("encoder_config")
    owner = _owner(model, "audio") or next((one for one in model.modules() if hasattr(one, "audio_tower")), None)
    if owner is None or not isinstance(tower, Mapping) or token is None:
        raise _refused(kind, "audio", f"it has no {_METHODS['audio']}, no audio_config or no audio_token_id")
    forward = inspect.signature(owner.forward).parameters
    marks = next((name for name in ("mm_token_type_ids", "token_type_ids") if name in forward), None)
    frames, count, positions, bins = _FRAMES * seconds, 1, tower.get("max_source_positions"), tower.get("num_mel_bins")
    real = frames
    if isinstance(bins, int):
        if isinstance(positions, int) and "n_window" not in tower:  # Whisper's
            count, frames = -(-frames // (2 * positions)), 2 * positions
        shape = (bins, frames)
    elif isinstance(tower.get("input_dim"), int):  # pairs of frames side by side
        shape = (frames // 2, int(tower["input_dim"]))
    else:
        raise _refused(kind, "audio", "its audio_config has no num_mel_bins or input_dim")
    given = {"input_features": Given(shape)}
    mask = next((name for name in ("feature_attention_mask", "input_features_mask") if name in forward), None)
    method = getattr(owner, _METHODS["audio"], None)
    if mask is not None and (method is None or mask in inspect.signature(method).parameters):
        given[mask] = Given((frames,), marked=frames if count > 1 else real)
    plain = Medium(count, given, {}, token, 3, marks)
    if method is not None:
        return _first(owner, kind, "audio", [plain])
    lengths = getattr(owner.audio_tower, "_get_feat_extract_output_lengths", None)
    if lengths is None:
        raise _refused(kind, "audio", "its tower does not tell how long its output is")
    return replace(plain, tokens=int(lengths(torch.tensor([given[mask].marked if mask in given else frames]))[1]))


def _first(owner: Any, kind: str, what: str, tries: Iterable[Medium]) -> Medium:
    """Return the first that the model takes, with the features that it makes of one."""
    why = ""
    for tried in tries:
        try:
            return replace(tried, tokens=_features(owner, _METHODS[what], tried))
        except Exception as error:  # a model's own code, which raises anything at a shape that it does not take
            why = why or (str(error).splitlines() or [""])[0] or type(error).__name__
    raise _refused(kind, what, f"its {_METHODS[what]} takes none of that shape ({why[:80]})")


def _refused(kind: str, what: str, why: str) -> BadInput:
    return BadInput(
        f"{what} of {kind} {'is' if what == 'audio' else 'are'} not known: {why}",
        where={"images": "--images", "videos": "--video-frames", "audio": "--audio-seconds"}[what],
        remedy="leave it out for batches of text, or give estimate(module, inputs=...) a batch",
    )


def _patches(kind: str, vision: Mapping[str, Any], media: Media) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Return the shape of one's patches, and their grid: processors round each side to whole merged patches."""
    patch, merge = vision.get("patch_size"), vision.get("spatial_merge_size")
    if not isinstance(patch, int) or not isinstance(merge, int):
        raise _refused(kind, "images", "its vision_config has no patch_size or no spatial_merge_size")
    side = max(1, round((media.image_size or _GRID_SIZE) / (patch * merge))) * merge
    channels = int(vision.get("in_channels") or vision.get("in_chans") or vision.get("num_channels") or 3)
    thick = int(vision.get("temporal_patch_size", 1))
    times = -(-media.video_frames // thick) if media.video_frames else 1
    return (times * side * side, channels * thick * patch**2), (times, side, side)


def _side(kind: str, vision: Mapping[str, Any], size: int | None, *, free: bool) -> int:
    own = vision.get("image_size")
    own = own[0] if isinstance(own, list | tuple) else own
    if not isinstance(own, int):
        raise _refused(kind, "images", "its vision_config has no image_size")
    if size is not None and size != own and not free:
        raise BadInput(f"{kind} scales every image to {own} pixels", where="--image-size", remedy="leave it out")
    return size if free and size is not None else own


def _features(owner: Any, method: str, medium: Medium) -> int:
    """Return how many features the model makes of one."""
    recorder = StorageRecorder([*owner.parameters(), *owner.buffers()], known=KnownValues())
    weight = next(p for p in owner.parameters() if p.is_floating_point())
    given = replace(medium, count=1).arguments(1, weight.dtype)
    with torch.no_grad(), recorder, CudaFunctions(known=True):
        on_meta = {medium.asked.get(name, name): tensor.to("meta") for name, tensor in given.items()}
        made = getattr(owner, method)(**on_meta)
    found = getattr(made, "pooler_output", None)
    found = getattr(made, "last_hidden_state", made) if found is None else found
    parts = found if isinstance(found, list | tuple) else [found]
    return sum(part.numel() // part.shape[-1] for part in parts)


def media_inputs(media: Sequence[Medium], samples: int, length: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the keyword arguments of a forward: each sample begins with what comes with it, one text token after each.

    Raises:
        BadInput: when the placeholders are more than the sequence has.
    """
    needed = sum(one.count * one.length for one in media)
    if needed > length:
        what = ", ".join(f"{one.count} × {one.tokens}" for one in media)
        raise BadInput(
            f"{what} tokens of images or sound need more than {length} tokens", where="--seq-len", remedy=f"at least {needed}"
        )
    ids = torch.full((samples, length), 5, dtype=torch.int64)
    kinds = torch.zeros_like(ids)
    made: dict[str, torch.Tensor] = {"input_ids": ids, "labels": ids}
    at = 0
    for one in media:
        for _ in range(one.count):
            for _ in range(one.parts):
                run = slice(at, at + one.tokens // one.parts)
                ids[:, run], kinds[:, run] = one.token_id, one.kind
                at = run.stop + 1
        made |= one.arguments(samples, dtype)
        if one.marks is not None:
            made[one.marks] = kinds
    return made | {"labels": ids.clone()}
