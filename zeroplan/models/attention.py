"""Models that transformers runs with its own attention alone."""

from __future__ import annotations

from zeroplan.core.versions import TRANSFORMERS

#: Model types of transformers 5.17 whose class says ``_supports_sdpa = False``: ``attn_implementation="sdpa"`` is an error
#: there, and leaving it out means eager attention. Detectors, audio codecs and models without attention are not listed.
EAGER_ONLY = frozenset(
    [
        "big_bird",
        "bigbird_pegasus",
        "bloom",
        "canine",
        "codegen",
        "convbert",
        "deberta",
        "deberta-v2",
        "decision_transformer",
        "flaubert",
        "fnet",
        "fsmt",
        "funnel",
        "gpt_neo",
        "gpt_neox_japanese",
        "gpt_oss",
        "gptj",
        "ibert",
        "imagegpt",
        "layoutlm",
        "layoutlmv2",
        "layoutlmv3",
        "led",
        "lilt",
        "longformer",
        "longt5",
        "luke",
        "markuplm",
        "megatron-bert",
        "mimo_v2_flash",
        "mpnet",
        "mpt",
        "mra",
        "mvp",
        "nllb-moe",
        "nystromformer",
        "openai-gpt",
        "pegasus_x",
        "prophetnet",
        "rembert",
        "roformer",
        "splinter",
        "squeezebert",
        "swin2sr",
        "swinv2",
        "switch_transformers",
        "tapas",
        "visual_bert",
        "xglm",
        "xlm",
        "xlnet",
        "yoso",
    ]
)


def eager_only(model_type: str) -> str | None:
    """A warning where scaled dot-product attention is planned for a model that does not have it; None where it has."""
    if model_type not in EAGER_ONLY:
        return None
    return (
        f"{model_type} has no sdpa attention in transformers {TRANSFORMERS}: planned with eager, which runs unless "
        'attn_implementation="sdpa" is asked for, and that fails'
    )
