"""PYTORCH_ALLOC_CONF is read as torch reads it, and what torch would ignore silently is refused."""

from __future__ import annotations

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.sizes import MIB
from zeroplan.simulate.allocator.config import AllocatorConfig


def test_settings_are_read():
    config = AllocatorConfig.parse("expandable_segments:True, max_split_size_mb:128, garbage_collection_threshold:0.8")
    assert config == AllocatorConfig(expandable_segments=True, max_split_size=128 * MIB, garbage_collection_threshold=0.8)
    assert AllocatorConfig.parse("") == AllocatorConfig()


def test_divisions_by_interval():
    """The example of torch's memory notes: 1 below 512 MiB, 2 below 1 GiB, 4 below 2 GiB, 8 above."""
    divisions = AllocatorConfig.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]").roundup_power2_divisions
    assert divisions == (1,) * 9 + (2, 4) + (8,) * 5
    assert AllocatorConfig.parse("roundup_power2_divisions:4").roundup_power2_divisions == (4,) * 16


GOOD = [
    "",
    "max_split_size_mb:20",
    "max_split_size_mb:99999999999",
    "large_segment_size_mb:11,max_split_size_mb:12",
    "max_non_split_rounding_mb:15,large_segment_size_mb:11",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:[64:0,128:2,>:1]",
    "garbage_collection_threshold:0.99",
    "max_non_split_rounding_mb:64,expandable_segments:False",
    "pinned_use_background_threads:True",
]
BAD = [
    "max_split_size_mb:19",
    "large_segment_size_mb:10",
    "large_segment_size_mb:40,max_split_size_mb:30",
    "max_split_size_mb:30,large_segment_size_mb:40",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:[64:3]",
    "roundup_power2_divisions:[65:2]",
    "garbage_collection_threshold:1.5",
    "garbage_collection_threshold:0",
    "max_non_split_rounding_mb:5",
    "expandable_segments:true",
]


@pytest.mark.parametrize("text", GOOD)
def test_good_settings(text):
    AllocatorConfig.parse(text)


@pytest.mark.parametrize(
    "text", [*BAD, "max_split_size_mb", "max_split_size_mb:", "roundup_power2_divisions:[1:2", "backend:cudaMallocAsync", ","]
)
def test_bad_settings(text):
    with pytest.raises(BadInput) as caught:
        AllocatorConfig.parse(text, where="--alloc-conf")
    assert str(caught.value).startswith("--alloc-conf")


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(BadInput, match="did you mean 'expandable_segments'"):
        AllocatorConfig.parse("expandable_segment:True")


@pytest.mark.torch
def test_torch_agrees_on_what_is_good():
    torch = pytest.importorskip("torch")
    parse = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if parse is None:
        pytest.skip("this torch cannot parse settings without a device")
    try:
        for text in GOOD:
            parse(text)
        for text in BAD:
            parse("large_segment_size_mb:20")  # torch keeps it from one text to the next
            with pytest.raises((ValueError, RuntimeError)):
                parse(text)
    finally:
        parse("large_segment_size_mb:20")
