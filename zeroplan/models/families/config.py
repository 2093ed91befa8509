"""Reads a model's config: every value is checked for type and range here, so that families only describe shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput, did_you_mean

#: Widest dimension a tensor may have (a vocabulary of 2^28 is a hundred times the largest published).
WIDEST = 1 << 28
#: Most blocks, experts or heads of a model.
MOST = 1 << 16
#: Most blocks of one stack; the deepest published transformer has about 1,000.
DEEPEST = 10_000

#: Keys of whole numbers that transformers lets be null: what they hold then follows from another key.
NULLABLE = frozenset(
    {
        "conv_groups",
        "ffn_hidden_size",
        "head_dim",
        "n_embed",
        "n_head",
        "n_inner",
        "num_decoder_layers",
        "num_experts",
        "num_key_value_heads",
        "num_kv_heads",
        "num_ln_in_parallel_attn",
        "num_local_experts",
        "position_buckets",
        "word_embed_proj_dim",
    }
)

_REMEDY = "check the config.json"

#: What other programs call a size. transformers takes its own default where a config has such a name alone, and says nothing.
_ELSEWHERE = {
    "num_hidden_layers": ("n_layers", "n_layer", "num_layers"),
    "hidden_size": ("n_embd", "d_model", "dim", "embed_dim", "hidden_dim"),
    "num_attention_heads": ("n_heads", "n_head", "num_heads"),
    "num_key_value_heads": ("n_kv_heads", "num_kv_heads", "num_query_groups"),
    "intermediate_size": ("n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", "intermediate_dim"),
    "vocab_size": ("n_vocab", "padded_vocab_size"),
}


class NotDescribedError(Exception):
    """A variant that the family's description does not cover; transformers' meta device describes it instead."""


class Config:
    """A config as a mapping of checked values.

    Args:
        data: the published config.
        where: the file or model it came from, for messages.
    """

    def __init__(self, data: Mapping[str, Any], where: str = "config") -> None:
        self.data, self.where = data, where
        #: Every default that was asked for, by key; tests compare them with transformers' own.
        self.defaults: dict[str, object] = {}

    def bad(self, what: str, remedy: str = _REMEDY) -> BadInput:
        """The error to raise for a fault of this config."""
        return BadInput(what, where=self.where, remedy=remedy)

    def _get(self, names: tuple[str, ...], default: object) -> tuple[str, Any]:
        for name in names:
            if self.data.get(name) is not None:
                return name, self.data[name]
        if names[0] not in self.data:
            self.defaults[names[0]] = default
            other = next((key for key in _ELSEWHERE.get(names[0], ()) if self.data.get(key) is not None), None)
            if other is not None and default is not None:
                what = f"has {other!r} and no {names[0]!r}, for which transformers takes {_show(default)}"
                raise self.bad(what, f"name it {names[0]!r}")
        return names[0], default

    def _integer(self, names: tuple[str, ...], default: int | None, low: int, high: int) -> int:
        name, value = self._get(names, default)
        null = next((key for key in names if key in self.data and self.data[key] is None and key not in NULLABLE), None)
        if null is not None and self.data.get(name) is None:
            raise self.bad(f"{null!r} must be a whole number, not null", "write it, or leave the key out")
        if value is None:
            near = did_you_mean(name, (key for key in list(self.data)[:1000] if isinstance(key, str)))
            raise self.bad(f"key {name!r} is missing", near or _REMEDY)
        whole = isinstance(value, float) and value.is_integer()
        if isinstance(value, bool) or not (isinstance(value, int) or whole):
            raise self.bad(f"{name!r} must be a whole number, not {_show(value)}")
        if not low <= value <= high:
            raise self.bad(f"{name!r} must be between {low:,} and {high:,}, not {_show(value)}")
        if whole:
            raise self.bad(
                f"{name!r} must be a whole number, and {_show(value)} is none to transformers", f"write {int(value)}"
            )
        return int(value)

    def size(self, *names: str, default: int | None = None, null: int | None = None, low: int = 1) -> int:
        """A dimension of a tensor; the first of `names` that is set decides.

        Args:
            names: the key, and its other spellings.
            default: the value when no key is there.
            null: the value when a key is there and holds null; None means `default`.
            low: the smallest value allowed.

        Raises:
            BadInput: when it is missing without a default, no whole number, or out of range.
        """
        return self._integer(names, self._or_null(names, default, null), low, WIDEST)

    def count(self, *names: str, default: int | None = None, null: int | None = None, low: int = 1) -> int:
        """A number of heads, experts or groups, read as :meth:`size` is."""
        return self._integer(names, self._or_null(names, default, null), low, MOST)

    def _or_null(self, names: tuple[str, ...], default: int | None, null: int | None) -> int | None:
        given_null = null is not None and any(name in self.data for name in names)
        return null if given_null else default

    def optional_size(self, name: str, *, default: int) -> int | None:
        """A dimension whose part of the model is left out when the key holds null."""
        return None if name in self.data and self.data[name] is None else self.size(name, default=default)

    def side(self, name: str, *, default: int) -> int:
        """The side of a square, given as one number or as two that are equal."""
        value = self.data.get(name)
        if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
            return Config({name: value[0]}, self.where).size(name)
        return self.size(name, default=default)

    def depth(self, *names: str, default: int | None = None, low: int = 1) -> int:
        """A number of blocks."""
        return self._integer(names, default, low, DEEPEST)

    def flag(self, *names: str, default: bool, null: bool | None = None) -> bool:
        """A truth value; `null` is what a null means, by default the same as no key."""
        given_null = null is not None and any(name in self.data for name in names)
        name, value = self._get(names, null if given_null else default)
        if not isinstance(value, bool | int) or value not in (0, 1):
            raise self.bad(f"{name!r} must be true or false, not {_show(value)}")
        return bool(value)

    def text(self, *names: str, default: str = "") -> str:
        """A word."""
        name, value = self._get(names, default)
        if not isinstance(value, str) or len(value) > 200:
            raise self.bad(f"{name!r} must be a text, not {_show(value)}")
        return value

    def indices(self, name: str) -> frozenset[int]:
        """A list of block indices; missing means none."""
        value = self.data.get(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list | tuple) or len(value) > DEEPEST or not all(type(item) is int for item in value):
            raise self.bad(f"{name!r} must be a list of block indices, not {_show(value)}")
        return frozenset(value)

    def section(self, name: str) -> Config:
        """A nested config; missing means empty."""
        value = self.data.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.bad(f"{name!r} must be an object, not {_show(value)}")
        return Config(value, f"{self.where}: {name}")

    def none_of(self, *names: str) -> None:
        """Refuses variants that the description does not cover. Raises NotDescribedError: when one of the flags is set."""
        for name in names:
            if self.data.get(name):
                raise NotDescribedError(name)

    def words(self, name: str) -> tuple[str, ...]:
        """A list of words, or words divided by ``|``; missing means none."""
        value = self.data.get(name)
        if value is None:
            return ()
        if isinstance(value, str) and len(value) <= 1000:
            return tuple(word for word in value.lower().split("|") if word)
        if isinstance(value, list | tuple) and len(value) <= 100 and all(isinstance(word, str) for word in value):
            return tuple(value)
        raise self.bad(f"{name!r} must be a list of words, not {_show(value)}")

    def whole_heads(self, hidden: int, *names: str, default: int) -> int:
        """The number of heads, in an architecture that transformers builds only where it divides the width.

        Raises:
            BadInput: when it does not, is no whole number, or out of range.
        """
        heads = self.count(*names, default=default)
        self.divided(hidden, heads, f"the width and {names[0]!r}")
        return heads

    def divided(self, whole: int, parts: int, what: str) -> int:
        """`whole` / `parts`, where the architecture needs it even. Raises BadInput: when it is not."""
        if whole % parts:
            raise self.bad(f"{what}: {whole:,} is not a multiple of {parts:,}")
        return whole // parts


def _show(value: object) -> str:
    """A value of unknown size as a short text."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a number of more than 38 digits"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
