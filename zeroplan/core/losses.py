"""The transformers classes whose loss the included runtime computes itself: those that leave it to ``self.loss_function``.

The runtime attaches its loss by the class's name and the predictor lays it over the tape by the same name. Likewise the masked
language models whose head and loss take each token by itself.
"""

from __future__ import annotations

import math

#: The label of a token without loss, in torch and transformers.
IGNORED_LABEL = -100
#: Ends of class names of causal language models.
_ENDINGS = ("ForCausalLM", "LMHeadModel")
#: Causal language models that compute a loss of their own in their forward (transformers 5.17).
_OWN_LOSS = frozenset(
    f"{name}ForCausalLM"
    for name in (
        *(
            "Bart",
            "BigBirdPegasus",
            "Blenderbot",
            "BlenderbotSmall",
            "Clvp",
            "CpmAnt",
            "Gemma4Assistant",
            "Gemma4UnifiedAssistant",
        ),
        *("Marian", "MBart", "Musicgen", "MusicgenMelody", "Mvp", "Pegasus", "PLBart", "ProphetNet", "TrOCR", "Whisper"),
    )
) | {"BlipTextLMHeadModel", "FlaubertWithLMHeadModel", "XLMWithLMHeadModel", "XLNetLMHeadModel"}


def labelled_tokens(tokens: int, share: float) -> int:
    """Return how many of `tokens` have a label where a `share` of them has."""
    return min(tokens, math.ceil(share * tokens))


def leaves_loss_to_function(class_name: str) -> bool:
    """Return whether a transformers class is a causal language model whose forward calls ``self.loss_function``."""
    return class_name.endswith(_ENDINGS) and class_name not in _OWN_LOSS


#: Masked language models with a second loss or with hidden states that are no tokens' (transformers 5.17).
_NOT_BY_TOKEN = frozenset(f"{name}ForMaskedLM" for name in ("Luke", "ModernVBert", "Perceiver", "Reformer"))


def scores_each_token(class_name: str) -> bool:
    """Return whether a transformers class is a masked language model whose head and loss see one token at a time."""
    return class_name.endswith("ForMaskedLM") and class_name not in _NOT_BY_TOKEN
