"""The transformers classes whose loss the included runtime computes itself: those that leave it to ``self.loss_function``.

The runtime attaches its loss by the class's name and the predictor lays it over the tape by the same name.
"""

from __future__ import annotations

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


def leaves_loss_to_function(class_name: str) -> bool:
    """Return whether a transformers class is a causal language model whose forward calls ``self.loss_function``."""
    return class_name.endswith(_ENDINGS) and class_name not in _OWN_LOSS
