"""Makes the workplace in which the programs of programs.json run: small models, tokenizers, data, and the programs' own files.

``python benchmarks/capture/prepare.py WORK PROGRAMS [--weights]``: PROGRAMS is a folder with the repositories' files as
``owner+name/path``. With ``--weights`` models get random weights, for a run on a GPU; capture reads their configs alone.
Everything is the same on every machine: texts are made of numbered words, of lengths that a fixed generator draws.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = 2000
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<s>", "</s>", "<|user|>", "<|assistant|>"]
CHAT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|> ' + message['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)


def words(draw: random.Random, low: int, high: int) -> str:
    """A text of so many words."""
    return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randint(low, high)))


def tokenizer(folder: Path, *, pairs: bool = False, length: int = 2048) -> None:
    """Save a tokenizer of numbered words; `pairs` puts [CLS] and [SEP] around them, as BERT has it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: at for at, word in enumerate([*SPECIAL, *(f"w{n}" for n in range(WORDS))])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if pairs:
        ends = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
        made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[UNK]"}
    names |= {} if pairs else {"bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=length, **names)
    fast.chat_template = CHAT
    fast.save_pretrained(folder)


def model(folder: Path, config: object, auto: str, *, weights: bool) -> None:
    """Save a model's config, with random weights where they are wanted."""
    import torch
    import transformers

    config.architectures = [getattr(transformers, auto)._model_mapping[type(config)].__name__]  # type: ignore[attr-defined]
    config.dtype = torch.float32  # type: ignore[attr-defined]
    if weights:
        getattr(transformers, auto).from_config(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)  # type: ignore[attr-defined]


def make_llama() -> Any:
    """The config of a Llama of 0.28 B parameters."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=32000, max_position_embeddings=2048, pad_token_id=0, bos_token_id=4, eos_token_id=5,
    )  # fmt: skip


def make_models(work: Path, *, weights: bool) -> None:
    """The models: a Llama of 0.28 B parameters, GPT-2, BERT-base, T5-small and ViT-base as published."""
    from transformers import BertConfig, GPT2Config, T5Config, ViTConfig, ViTImageProcessor

    home = work / "models"
    llama = make_llama()
    model(home / "llama", llama, "AutoModelForCausalLM", weights=weights)
    model(home / "gpt2", GPT2Config(bos_token_id=4, eos_token_id=5), "AutoModelForCausalLM", weights=weights)
    bert = BertConfig(vocab_size=28996)
    for folder in (home / "bert", work / "nlp" / "bert-base-cased"):
        model(folder, bert, "AutoModelForMaskedLM", weights=weights)
        tokenizer(folder, pairs=True, length=512)
    t5 = T5Config(decoder_start_token_id=0, pad_token_id=0, eos_token_id=5)
    model(home / "t5", t5, "AutoModelForSeq2SeqLM", weights=weights)
    model(home / "vit", ViTConfig(), "AutoModelForImageClassification", weights=weights)
    ViTImageProcessor().save_pretrained(home / "vit")
    for folder in (home / "llama", home / "gpt2", home / "t5", home / "litgpt", work / "hello" / "roberta-base"):
        tokenizer(folder)
    litgpt_checkpoint(home / "litgpt")


def litgpt_checkpoint(folder: Path) -> None:
    """A checkpoint of LitGPT's Pythia of 70 M parameters with random weights; none where LitGPT is not installed."""
    try:
        from litgpt import GPT, Config
        from litgpt.utils import save_config
    except ImportError:
        return
    import torch

    config = Config.from_name("pythia-70m")
    torch.save(GPT(config).state_dict(), folder / "lit_model.pth")
    save_config(config, folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 4, "eos_token_id": 5}))


def lines(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def make_glue(home: Path, draw: random.Random) -> None:
    """GLUE's MRPC, as a folder of that name."""
    glue = home / "nyu-mll" / "glue"
    for name, count in (("train", 48), ("validation", 40), ("test", 8)):
        judged: list[dict[str, object]] = [
            {"sentence1": words(draw, 15, 60), "sentence2": words(draw, 15, 60), "label": n % 2, "idx": n} for n in range(count)
        ]
        lines(glue / "mrpc" / f"{name}.jsonl", judged)
    files = "".join(f"  - split: {name}\n    path: mrpc/{name}.jsonl\n" for name in ("train", "validation", "test"))
    kept = "".join(f"  - name: {name}\n    dtype: string\n" for name in ("sentence1", "sentence2"))
    label = (
        "  - name: label\n    dtype:\n      class_label:\n        names:\n          '0': different\n          '1': equivalent\n"
    )
    kinds = f"dataset_info:\n- config_name: mrpc\n  features:\n{kept}{label}  - name: idx\n    dtype: int32\n"
    (glue / "README.md").write_text(f"---\n{kinds}configs:\n- config_name: mrpc\n  data_files:\n{files}---\n")


def make_wikitext(home: Path, draw: random.Random, *, train: int, rest: int) -> None:
    """WikiText's second part, as a folder."""
    for name, count in (("train", train), ("validation", rest), ("test", rest)):
        lines(home / f"{name}.jsonl", [{"text": words(draw, 60, 160)} for _ in range(count)])
    files = "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in ("train", "validation", "test"))
    (home / "README.md").write_text(f"---\nconfigs:\n- config_name: wikitext-2-v1\n  data_files:\n{files}---\n")


def make_images(home: Path, draw: random.Random) -> None:
    """Pictures of 96 x 96 in a folder for each class."""
    from PIL import Image

    for split, count in (("train", 48), ("validation", 16)):
        for n in range(count):
            path = home / split / f"kind{n % 3}" / f"{n}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.frombytes("RGB", (96, 96), draw.randbytes(96 * 96 * 3)).save(path)


def make_data(work: Path) -> None:
    """The data, of a few dozen samples each."""
    draw = random.Random(0)

    def talk(low: int, high: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": words(draw, 20, 60)}, {"role": "assistant", "content": words(draw, low, high)}]

    data = work / "data"
    lines(data / "chat" / "train.jsonl", [{"messages": talk(150, 600)} for _ in range(48)])
    for name in ("train", "test"):
        lines(data / "chat_splits" / f"{name}.jsonl", [{"messages": talk(150, 600)} for _ in range(48)])
    lines(
        data / "pairs" / "train.jsonl",
        [{"prompt": (a := talk(50, 300))[:1], "chosen": a[1:], "rejected": talk(50, 300)[1:]} for _ in range(48)],
    )
    lines(data / "prompts" / "train.jsonl", [{"prompt": talk(1, 2)[:1]} for _ in range(48)])
    lines(
        data / "alpaca" / "train.jsonl",
        [{"instruction": words(draw, 20, 80), "input": "", "output": words(draw, 40, 250)} for _ in range(32)],
    )
    (data / "text").mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 200), ("validation", 60)):
        (data / "text" / f"{name}.txt").write_text("".join(words(draw, 80, 160) + "\n" for _ in range(count)))
    for name, count in (("train", 128), ("validation", 40)):
        texts: list[dict[str, object]] = [
            {"sentence1": words(draw, 15, 60), "sentence2": words(draw, 15, 60), "label": ("no", "yes")[n % 2]}
            for n in range(count)
        ]
        table(data / "pairs_text" / f"{name}.csv", texts)
    lines(
        data / "summaries" / "train.json", [{"text": words(draw, 100, 400), "summary": words(draw, 20, 90)} for _ in range(40)]
    )
    make_glue(work / "nlp", draw)
    make_wikitext(work / "hello" / "wikitext", draw, train=400, rest=20)
    make_images(data / "images", draw)
    talks = [{"instruction": words(draw, 20, 80), "input": "", "output": words(draw, 40, 300)} for _ in range(40)]
    (data / "litgpt.json").write_text(json.dumps(talks))


def make_configs(work: Path, source: Path) -> None:
    """Files of DeepSpeed, accelerate and FSDP for the programs on two GPUs."""
    home = work / "configs"
    home.mkdir(exist_ok=True)
    batches = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    auto = dict.fromkeys(batches, "auto")
    sized = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    stage3 = {"stage": 3, **dict.fromkeys(sized, "auto"), "stage3_gather_16bit_weights_on_model_save": True}
    for name, zero in (("zero2", {"stage": 2}), ("zero3", stage3)):
        (home / f"{name}.json").write_text(json.dumps({**auto, "bf16": {"enabled": "auto"}, "zero_optimization": zero}))
    (home / "fsdp.json").write_text(json.dumps({"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}))
    theirs = source / "huggingface+peft/examples/sft/configs/deepspeed_config.yaml"
    if theirs.is_file():
        shutil.copy(theirs, home / "peft_deepspeed.yaml")


METRIC = '''"""A metric of that name, for a machine without a network."""
import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        kind = datasets.Value("int32")
        features = datasets.Features({"predictions": kind, "references": kind})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        right = sum(int(a) == int(b) for a, b in zip(predictions, references))
        return {"accuracy": right / max(1, len(references)), "f1": 0.0}
'''


def make_metrics(work: Path) -> None:
    """Metrics where the programs look for them by name."""
    for home, name in ((work, "accuracy"), (work, "glue"), (work, "rouge"), (work / "nlp", "glue")):
        path = home / name / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(METRIC)


def copy_programs(work: Path, source: Path) -> None:
    """Put the programs' files where their commands look for them."""
    programs = work / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    single = {
        "macorisd+transformers-qwen3/examples/pytorch": (
            "language-modeling/run_clm.py", "text-classification/run_glue.py", "summarization/run_summarization.py",
            "image-classification/run_image_classification.py", "speech-recognition/run_speech_recognition_ctc.py",
        ),
        "huggingface+accelerate/examples": ("nlp_example.py", "by_feature/gradient_accumulation.py"),
        "huggingface+peft/examples/olora_finetuning": ("olora_finetuning.py",),
        "deepspeedai+DeepSpeedExamples/training/HelloDeepSpeed": ("train_bert.py", "train_bert_ds.py"),
        "Lightning-AI+pytorch-lightning/examples/pytorch/basics": ("transformer.py",),
        "artidoro+qlora": ("qlora.py",),
    }  # fmt: skip
    for home, files in single.items():
        for name in files:
            if (source / home / name).is_file():
                shutil.copy(source / home / name, programs / Path(name).name)
    shutil.copytree(source / "huggingface+peft/examples/sft", programs / "peft_sft", dirs_exist_ok=True)
    for home, folder in (
        ("karpathy+nanoGPT", "nanogpt"), ("karpathy+minGPT/projects/chargpt", "mingpt"), ("tloen+alpaca-lora", "alpaca"),
        ("pytorch+examples/word_language_model", "wlm"), ("pytorch+examples/distributed/FSDP2", "fsdp2"),
        ("huggingface+trl/examples/accelerate_configs", "configs"), ("uclaml+SPIN", "spin"), ("haotian-liu+LLaVA", "llava"),
        ("pytorch+torchtitan", "torchtitan"),
    ):  # fmt: skip
        if (source / home).is_dir():
            shutil.copytree(source / home, work / folder, dirs_exist_ok=True)
    shutil.copytree(source / "karpathy+minGPT/mingpt", work / "mingpt" / "mingpt", dirs_exist_ok=True)
    (work / "hello").mkdir(exist_ok=True)
    (work / "nltk_data" / "tokenizers" / "punkt").mkdir(parents=True, exist_ok=True)  # run_summarization asks for it alone
    (work / "lightning" / "data").mkdir(parents=True, exist_ok=True)


def make_bare_data(work: Path) -> None:
    """Texts for the programs that read characters or words of their own."""
    import pickle

    draw = random.Random(1)
    letters = [chr(65 + n) for n in range(57)] + [" ", "\n", "!", ",", ".", "'", "-", "?"]
    text = "O God, O God!" + "".join(draw.choice(letters) for _ in range(20000))
    (work / "mingpt" / "input.txt").write_text(text[: 128 + 256])
    home = work / "nanogpt" / "data" / "shakespeare_char"
    home.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 20000), ("val", 8000)):
        (home / f"{name}.bin").write_bytes(b"".join(draw.randrange(65).to_bytes(2, "little") for _ in range(count)))
    with (home / "meta.pkl").open("wb") as file:
        pickle.dump({"vocab_size": 65, "itos": {}, "stoi": {}}, file)
    home = work / "wlm" / "data" / "wikitext-2"
    home.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 400), ("valid", 60), ("test", 60)):
        (home / f"{name}.txt").write_text("".join(words(draw, 80, 120) + "\n" for _ in range(count)))
    (work / "lightning" / "data" / "wikitext-2.txt").write_text("".join(words(draw, 34, 34) + "\n" for _ in range(4130)))


def main() -> None:
    """Make everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("programs", type=Path)
    parser.add_argument("--weights", action="store_true")
    asked = parser.parse_args()
    copy_programs(asked.work, asked.programs)
    make_models(asked.work, weights=asked.weights)
    make_data(asked.work)
    make_bare_data(asked.work)
    make_metrics(asked.work)
    make_configs(asked.work, asked.programs)


if __name__ == "__main__":
    main()
