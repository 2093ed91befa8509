"""``--samples N,LENGTH``: data and tokenizers that are missing are replaced by invented ones of that number and length.

Note [Invented data]
    A dataset that is neither on the disk nor in the cache gets N rows, whose texts have LENGTH words, each one token of the
    usual tokenizers. Its columns are those of the data set's card where its name is known (:data:`KNOWN`); else what TRL's
    trainer, if the script imports one, asks for; else those column names of :data:`COLUMNS` that the script's text has as
    literals. A tokenizer that is missing is one of numbered words with as many entries as the model's config has, and its
    special tokens. Answers name all that was invented.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroplan.capturing.recorder import StoppedError
from zeroplan.capturing.source import user_line

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture

WORD = "the"
#: Errors by which libraries say that something is not there.
_MISSING = (OSError, ValueError, ImportError, KeyError)


def _text(length: int) -> str:
    return " ".join([WORD] * length)


def _turns(length: int) -> list[dict[str, str]]:
    half = max(1, length // 2)
    return [{"role": "user", "content": _text(length - half)}, {"role": "assistant", "content": _text(half)}]


def _messages(length: int) -> list[dict[str, str]]:
    """ShareGPT's turns; the speakers' names are those that the script has."""
    names = ("human", "gpt") if "human" in program_text() else ("user", "assistant")
    half = max(1, length // 2)
    return [{"from": names[0], "value": _text(length - half)}, {"from": names[1], "value": _text(half)}]


def _span(length: int) -> dict[str, Any]:
    return {"text": [WORD], "answer_start": [0]}


def _image(_: int) -> Any:
    from PIL import Image

    return Image.new("RGB", (224, 224))


def _small_image(_: int) -> Any:
    from PIL import Image

    return Image.new("RGB", (32, 32))


def _sound(_: int) -> Any:
    return {"array": [0.0] * 16_000 * 5, "sampling_rate": 16_000, "path": None}


#: What a column of that name holds, of a length in words.
COLUMNS: dict[str, Callable[[int], Any]] = {
    **dict.fromkeys(
        ("text", "content", "sentence", "sentence1", "sentence2", "question", "question1", "question2", "context", "premise",
         "hypothesis", "instruction", "output", "article", "document", "dialogue", "summary", "highlights", "abstract",
         "prompt", "completion", "response", "query", "chosen", "rejected", "code", "story", "review", "title", "target"),
        _text,
    ),
    "input": lambda _: "",
    **dict.fromkeys(("messages", "conversation"), _turns),
    "conversations": _messages,
    **dict.fromkeys(("label", "labels", "idx"), lambda _: 0),
    "tokens": lambda n: [WORD] * n,
    **dict.fromkeys(("ner_tags", "pos_tags", "chunk_tags"), lambda n: [0] * n),
    **dict.fromkeys(("image", "img", "pixel_values"), _image),
    "audio": _sound,
    "answers": _span,
    "input_ids": lambda n: [5] * n,
}  # fmt: skip
_PAIR = ("prompt", "chosen", "rejected")
#: The columns of well-known data sets, by the last part of their names, as their cards have them.
KNOWN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("wikitext", "wikitext-2-raw-v1", "openwebtext", "c4", "bookcorpus", "tiny_shakespeare"), ("text",)),
    **dict.fromkeys(("imdb", "ag_news", "yelp_review_full", "rotten_tomatoes"), ("text", "label")),
    **dict.fromkeys(("squad", "squad_v2"), ("id", "title", "context", "question", "answers")),
    "conll2003": ("id", "tokens", "pos_tags", "chunk_tags", "ner_tags"),
    "cnn_dailymail": ("article", "highlights", "id"),
    "xsum": ("document", "summary", "id"),
    "samsum": ("id", "dialogue", "summary"),
    "alpaca": ("instruction", "input", "output", "text"),
    "cifar10": ("img", "label"),
    "cifar100": ("img", "label"),
    "food101": ("image", "label"),
    "beans": ("image", "labels"),
    **dict.fromkeys(("wmt14", "wmt16", "opus_books"), ("translation",)),
    "swag": ("sent1", "sent2", "ending0", "ending1", "ending2", "ending3", "label"),
    "ultrachat_200k": ("prompt", "prompt_id", "messages"),
    "capybara": ("messages",),
}
#: Of GLUE's tasks the columns.
GLUE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mrpc", "rte", "stsb", "wnli"), ("sentence1", "sentence2", "label", "idx")),
    **dict.fromkeys(("sst2", "cola"), ("sentence", "label", "idx")),
    **dict.fromkeys(("mnli", "ax"), ("premise", "hypothesis", "label", "idx")),
    "qqp": ("question1", "question2", "label", "idx"),
    "qnli": ("question", "sentence", "label", "idx"),
}
#: What TRL's trainers ask for, by the class that a script imports; conversations.
_TRL: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("KTOTrainer", ("prompt", "completion", "label")),
    ("DPOTrainer", _PAIR), ("ORPOTrainer", _PAIR), ("CPOTrainer", _PAIR), ("RewardTrainer", _PAIR),
    ("GRPOTrainer", ("prompt",)), ("RLOOTrainer", ("prompt",)), ("OnlineDPOTrainer", ("prompt",)),
    ("SFTTrainer", ("messages",)),
)  # fmt: skip
_CLASSES = {"label", "labels", "ner_tags", "pos_tags", "chunk_tags"}


def columns_of(name: str, config: str | None, program: str) -> tuple[str, ...]:
    """Return the columns of an invented data set.

    Args:
        name: the data set's.
        config: its configuration's name.
        program: the script's text.
    """
    last = name.rstrip("/").rpartition("/")[2].lower()
    if last == "glue":
        return GLUE.get(config or "", GLUE["mrpc"])
    if last in KNOWN:
        return KNOWN[last]
    for trainer, columns in _TRL:
        if trainer in program:
            return columns
    literals = literals_of(program)
    return tuple(column for column in COLUMNS if column in literals) or ("text", "label")


def literals_of(program: str) -> set[Any]:
    """The constants of a program's text."""
    try:
        return {one.value for one in ast.walk(ast.parse(program)) if isinstance(one, ast.Constant)}
    except (SyntaxError, ValueError):
        return set()


def invented_rows(columns: Sequence[str], count: int, length: int, config: str | None = None) -> dict[str, list[Any]]:
    """Return a column's values by its name; texts of several in one row share the length."""
    conversational = set(columns) in (set(_PAIR), {"prompt", "completion", "label"}, {"prompt"})
    texts = sum(COLUMNS.get(column) is _text for column in columns) or 1
    share = max(1, length // (2 if conversational else texts if texts < 4 else 2))
    rows: dict[str, list[Any]] = {}
    for column in columns:
        if column == "translation":
            pair = (config or "de-en").split("-")
            rows[column] = [{language: _text(length) for language in pair} for _ in range(count)]
        elif conversational and column in ("prompt", "chosen", "rejected", "completion"):
            role = "user" if column == "prompt" else "assistant"
            rows[column] = [[{"role": role, "content": _text(share)}] for _ in range(count)]
        elif column in _CLASSES:
            made = COLUMNS[column](length)
            rows[column] = [(at % 2 if made == 0 else made) for at in range(count)]
            if conversational:
                rows[column] = [bool(at % 2) for at in range(count)]
        else:
            make = COLUMNS.get(column)
            value = WORD if make is None else make(share if make is _text else length)
            rows[column] = [value] * count
    return rows


def program_text() -> str:
    """The text of the script, or of the module that is run."""
    path = sys.argv[0] if sys.argv else ""
    if not path.endswith((".py", ".ipynb")):
        path = getattr(sys.modules.get("__main__"), "__file__", None) or path
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def _refused(what: str, error: BaseException) -> StoppedError:
    text = " ".join(str(error).split())[:100]
    says = f"{what} is neither here nor in the cache: --samples 64,512 invents 64 rows of 512 tokens, and tokenizers ({text})"
    return StoppedError(says, user_line())


def install_datasets(capture: Capture, module: Any) -> None:
    """Let ``load_dataset`` invent what is missing."""
    own = module.load_dataset

    def load_dataset(path: Any, name: Any = None, *args: Any, split: Any = None, **kwargs: Any) -> Any:
        try:
            return own(path, name, *args, split=split, **kwargs)
        except _MISSING as error:
            if capture.job.samples is None:
                raise _refused(f"the data set {path}", error) from None
        count, length = capture.job.samples
        columns = columns_of(str(path), name if isinstance(name, str) else None, program_text())
        says = f"the data set {path} is invented: {count} rows of {length} tokens, columns {', '.join(columns)}"
        capture.invented[str(path)] = says
        made = _dataset(module, invented_rows(columns, count, length, name if isinstance(name, str) else None))
        if kwargs.get("streaming"):
            made = made.to_iterable_dataset()
        if isinstance(split, (list, tuple)):
            return [made for _ in split]
        if split is not None:
            return made
        kind = module.IterableDatasetDict if kwargs.get("streaming") else module.DatasetDict
        splits: tuple[str, ...] = ("train", "validation", "test")
        if str(path).endswith("glue") and name == "mnli":
            splits = ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched")
        return kind(dict.fromkeys(splits, made))

    module.load_dataset = load_dataset
    select = module.Dataset.select

    def within(self: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        """Take those rows of an invented data set that there are, where a script names rows of the real one."""
        if capture.invented and isinstance(indices, range) and len(indices) and indices[-1] >= len(self):
            indices = [at for at in indices if at < len(self)]
        return select(self, indices, *args, **kwargs)

    module.Dataset.select = within
    load: Any = sys.modules.get("datasets.load")
    if load is not None:
        load.load_dataset = load_dataset


def _dataset(module: Any, rows: Mapping[str, list[Any]]) -> Any:
    """A data set of rows, whose labels are classes."""
    made = module.Dataset.from_dict(dict(rows))
    for column in rows:
        if column in ("label", "labels") and not isinstance(rows[column][0], bool):
            made = made.cast_column(column, module.ClassLabel(names=["no", "yes"]))
        elif column in ("ner_tags", "pos_tags", "chunk_tags"):
            names = module.ClassLabel(names=["O", "B-X", "I-X"])
            made = made.cast_column(column, module.Sequence(names) if hasattr(module, "Sequence") else module.List(names))
        elif column in ("image", "img"):
            made = made.cast_column(column, module.Image())
        elif column == "audio":
            made = made.cast_column(column, module.Audio(sampling_rate=16_000))
    return made


def install_configs(capture: Capture, module: Any) -> None:
    """Let configs that are not in the cache come from the catalog."""
    base = getattr(module, "PreTrainedConfig", None) or module.PretrainedConfig
    own = base.get_config_dict.__func__

    def get_config_dict(cls: Any, /, name: Any, **kwargs: Any) -> Any:
        try:
            return own(cls, name, **dict(kwargs))
        except (OSError, ValueError):
            from zeroplan.models.catalog import find

            known = find(str(name))
            if known is None:
                raise
            for key in ("cache_dir", "revision", "token", "local_files_only", "force_download", "subfolder", "_from_auto",
                        "trust_remote_code", "proxies", "_commit_hash", "code_revision"):  # fmt: skip
                kwargs.pop(key, None)
            # What decides no memory the catalog leaves out; of it, scripts ask for the token that decoders begin with.
            begins = {"decoder_start_token_id": 0} if known.config.get("is_encoder_decoder") else {}
            return {**begins, **known.config, "_name_or_path": str(name)}, kwargs

    base.get_config_dict = classmethod(get_config_dict)


def _found_or_made(capture: Capture, own: Callable[[], Any], name: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the tokenizer that is found, else an invented one; transformers makes one without words where files miss."""
    try:
        found = own()
    except Exception as error:
        return _tokenizer(capture, name, kwargs, error)
    if len(found) > 1 + len(found.all_special_tokens):
        return found
    return _tokenizer(capture, name, kwargs, OSError("it would have no words"))


def install_tokenizers(capture: Capture, module: Any) -> None:
    """Let tokenizers that are missing be ones of numbered words; `module` is ``transformers.tokenization_utils_base``."""
    base = module.PreTrainedTokenizerBase
    own = base.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        return _found_or_made(capture, lambda: own(cls, name, *args, **kwargs), name, kwargs)

    base.from_pretrained = classmethod(from_pretrained)


def install_auto(capture: Capture, module: Any) -> None:
    """The same for ``AutoTokenizer``, which asks for files first; `module` is that of transformers' tokenization_auto."""
    auto = module.AutoTokenizer
    own = auto.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        return _found_or_made(capture, lambda: own(cls, name, *args, **kwargs), name, kwargs)

    auto.from_pretrained = classmethod(from_pretrained)


#: Kinds of models that put tokens of their own around a text.
_FRAMED = frozenset(("bert", "roberta", "distilbert", "electra", "albert", "deberta", "deberta-v2", "xlm-roberta", "mpnet",
                     "camembert", "modernbert"))  # fmt: skip
_CHAT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|> ' + message['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)


def _tokenizer(capture: Capture, name: Any, kwargs: Mapping[str, Any], error: BaseException) -> Any:
    if capture.job.samples is None:
        if isinstance(error, StoppedError):
            raise error
        raise _refused(f"the tokenizer of {str(name)[:80]}", error) from None
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoConfig, PreTrainedTokenizerFast

    try:
        config = kwargs.get("config") or AutoConfig.from_pretrained(name)
    except (OSError, ValueError, StoppedError):
        config = None
    size = max(int(getattr(config, "vocab_size", 0) or 0), 1000)
    framed = getattr(config, "model_type", "") in _FRAMED
    special = ["[PAD]", "[UNK]", "[MASK]", "[CLS]", "[SEP]", "<s>", "</s>", "<|user|>", "<|assistant|>", WORD]
    words = {word: at for at, word in enumerate([*special, *(f"w{at}" for at in range(size - len(special)))])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    if framed:
        made.post_processor = processors.TemplateProcessing(
            "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", words["[CLS]"]), ("[SEP]", words["[SEP]"])]
        )
    else:
        names |= {"bos_token": "<s>", "eos_token": "</s>"}
    longest = int(getattr(config, "max_position_embeddings", 0) or getattr(config, "n_positions", 0) or 1 << 20)
    given = {key: value for key, value in kwargs.items() if key in ("padding_side", "truncation_side", "model_max_length")}
    types = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if framed and getattr(
        config, "model_type", "") == "bert" else {}  # fmt: skip
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **{"model_max_length": longest, **names, **types, **given})
    fast.chat_template = _CHAT
    fast.name_or_path = str(name)
    capture.invented[f"tokenizer {name}"] = f"the tokenizer of {name} is invented: {size} words, one token each"
    return fast


def install_evaluate(capture: Capture, module: Any) -> None:
    """Let metrics that are missing score 1."""
    own = module.load

    class Metric:
        """A metric that is not here."""

        def __init__(self, name: str) -> None:
            self.name = name

        def add_batch(self, *_: Any, **__: Any) -> None:
            """Nothing is kept."""

        add = add_batch

        def compute(self, *_: Any, **__: Any) -> dict[str, float]:
            """Return invented scores."""
            names = {
                self.name,
                "accuracy",
                "f1",
                "overall_precision",
                "overall_recall",
                "overall_f1",
                "overall_accuracy",
                "score",
            }
            return dict.fromkeys(names, 1.0)

    def load(path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return own(path, *args, **kwargs)
        except Exception as error:
            if capture.job.samples is None:
                raise _refused(f"the metric {path}", error) from None
            capture.invented[f"metric {path}"] = f"the metric {path} is invented"
            return Metric(str(path))

    module.load = load


def install_image_processors(capture: Capture, module: Any) -> None:
    """Let image processors that are missing be those of the model's kind, by its config; `module` has AutoImageProcessor."""
    auto = module.AutoImageProcessor
    own = auto.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return own(cls, name, *args, **kwargs)
        except Exception as error:
            if capture.job.samples is None:
                raise _refused(f"the image processor of {name}", error) from None
        from transformers import AutoConfig, ViTImageProcessor

        side = int(getattr(AutoConfig.from_pretrained(name), "image_size", 224) or 224)
        capture.invented[f"processor {name}"] = f"the image processor of {name} is invented: {side} x {side} pixels"
        return ViTImageProcessor(size={"height": side, "width": side})

    auto.from_pretrained = classmethod(from_pretrained)


def install_torchvision(capture: Capture, module: Any) -> None:
    """Let torchvision's data sets that are missing hold blank pictures, as many as published; `module` is its ``datasets``."""
    shapes = {**dict.fromkeys(("MNIST", "FashionMNIST", "KMNIST", "QMNIST"), (60_000, 28, 28)),
              **dict.fromkeys(("CIFAR10", "CIFAR100"), (50_000, 32, 32, 3))}  # fmt: skip
    for name, shape in shapes.items():
        _blank(capture, getattr(module, name), name, shape)


#: Pictures of the part for tests, in each of these data sets.
_TESTED = 10_000


def _blank(capture: Capture, kind: Any, name: str, shape: tuple[int, ...]) -> None:
    own = kind.__init__

    def init(self: Any, root: Any, train: bool = True, transform: Any = None, target_transform: Any = None,
             download: bool = False, **kwargs: Any) -> None:  # fmt: skip
        try:
            own(self, root, train=train, transform=transform, target_transform=target_transform, download=download, **kwargs)
            return
        except Exception as error:
            if capture.job.samples is None:
                raise _refused(f"torchvision's data set {name}", error) from None
        import numpy
        import torch
        from torchvision.datasets.vision import VisionDataset

        VisionDataset.__init__(self, root, transform=transform, target_transform=target_transform)
        count = shape[0] if train else _TESTED
        self.train, self.classes = train, [str(at) for at in range(10)]
        blank = numpy.zeros((count, *shape[1:]), dtype="uint8")
        labels = [at % 10 for at in range(count)]
        self.data, self.targets = (torch.from_numpy(blank), torch.tensor(labels)) if len(shape) == 3 else (blank, labels)
        capture.invented[name] = f"torchvision's data set {name} is invented: {count} blank pictures"

    kind.__init__ = init


def install(capture: Capture) -> None:
    """Attach all of them."""
    from zeroplan.capturing.hooks.imports import when_imported

    when_imported("datasets", lambda module: install_datasets(capture, module))
    when_imported("evaluate", lambda module: install_evaluate(capture, module))
    when_imported("transformers.configuration_utils", lambda module: install_configs(capture, module))
    when_imported("transformers.tokenization_utils_base", lambda module: install_tokenizers(capture, module))
    when_imported("transformers.models.auto.tokenization_auto", lambda module: install_auto(capture, module))
    when_imported("transformers.models.auto.image_processing_auto", lambda module: install_image_processors(capture, module))
    when_imported("torchvision.datasets", lambda module: install_torchvision(capture, module))
