"""A user's reward for GRPO: the share of words that are not repeated."""


def distinct_words(completions: list[str], **_: object) -> list[float]:
    return [len(set(words)) / max(1, len(words)) for words in (text.split() for text in completions)]
