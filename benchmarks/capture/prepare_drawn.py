"""Makes the workplace of programs_drawn.json and programs_third.json: small models, data, the programs' files; as prepare.py.

``python -m benchmarks.capture.prepare_drawn WORK PROGRAMS [--weights]``.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import shutil
import struct
from pathlib import Path
from typing import Any

from benchmarks.capture.prepare import (
    METRIC,
    SPECIAL,
    WORDS,
    lines,
    make_glue,
    make_images,
    make_llama,
    make_wikitext,
    model,
    tokenizer,
    words,
)

#: What stands in for a metric that is downloaded by name: its columns, and what it returns.
METRICS = {
    "accuracy": ("kind", "kind", '{"accuracy": 0.5}'),
    "squad": (
        '{"id": datasets.Value("string"), "prediction_text": datasets.Value("string")}',
        '{"id": datasets.Value("string"), "answers": {"text": datasets.List(datasets.Value("string")),'
        ' "answer_start": datasets.List(kind)}}',
        '{"exact_match": 0.0, "f1": 0.0}',
    ),
    "sacrebleu": (
        'datasets.Value("string")',
        'datasets.List(datasets.Value("string"))',
        '{"score": 0.0}',
    ),
    "seqeval": (
        'datasets.List(datasets.Value("string"))',
        'datasets.List(datasets.Value("string"))',
        'dict.fromkeys(("overall_precision", "overall_recall", "overall_f1", "overall_accuracy"), 0.0)',
    ),
}


def make_metrics(work: Path) -> None:
    """Metrics where the programs look for them by name."""
    for name, (predictions, references, result) in METRICS.items():
        text = METRIC.replace('"predictions": kind', f'"predictions": {predictions}')
        text = text.replace('"references": kind', f'"references": {references}')
        begin = text.index("        right = ")
        home = work / name
        home.mkdir(parents=True, exist_ok=True)
        (home / f"{name}.py").write_text(f"{text[:begin]}        return {result}\n")
    glue = work / "nlp" / "glue"
    glue.mkdir(parents=True, exist_ok=True)
    (glue / "glue.py").write_text(METRIC)


def make_pieces(folder: Path) -> None:
    """Save XLNet's tokenizer, of numbered words as its pieces."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    names = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "cls": "<cls>", "sep": "<sep>", "pad": "<pad>", "mask": "<mask>"}
    pieces = [*names.values(), "<eod>", "<eop>", "\u2581", *(f"\u2581w{n}" for n in range(WORDS))]
    made = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=512, **{f"{key}_token": name for key, name in names.items()}
    ).save_pretrained(folder)


def make_models(work: Path, *, weights: bool) -> None:
    """A Llama of 0.28 B parameters, SmolLM-360M, BERT-base, ViT-base, XLNet-base and T5-small as published, a small LLaVA."""
    from transformers import (
        BertConfig,
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaProcessor,
        PreTrainedTokenizerFast,
        T5Config,
        ViTConfig,
        ViTImageProcessor,
        XLNetConfig,
    )

    home = work / "models"
    llama = make_llama()
    model(home / "llama", llama, "AutoModelForCausalLM", weights=weights)
    smol = LlamaConfig(
        hidden_size=960, intermediate_size=2560, num_hidden_layers=32, num_attention_heads=15, num_key_value_heads=5,
        vocab_size=49152, max_position_embeddings=2048, tie_word_embeddings=True, pad_token_id=0, bos_token_id=4,
        eos_token_id=5,
    )  # fmt: skip
    model(work / "smol" / "HuggingFaceTB" / "SmolLM-360M", smol, "AutoModelForCausalLM", weights=weights)
    for folder in (home / "bert", work / "nlp" / "bert-base-cased"):
        model(folder, BertConfig(vocab_size=28996), "AutoModelForMaskedLM", weights=weights)
        tokenizer(folder, pairs=True, length=512)
    model(home / "xlnet", XLNetConfig(), "AutoModelForQuestionAnswering", weights=weights)
    make_pieces(home / "xlnet")
    model(home / "vit", ViTConfig(), "AutoModelForImageClassification", weights=weights)
    ViTImageProcessor().save_pretrained(home / "vit")
    t5 = T5Config(decoder_start_token_id=0, pad_token_id=0, eos_token_id=5)
    model(home / "t5", t5, "AutoModelForSeq2SeqLM", weights=weights)
    for folder in (home / "llama", work / "smol" / "HuggingFaceTB" / "SmolLM-360M", home / "llava", home / "t5"):
        tokenizer(folder)
    tower = CLIPVisionConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=224, patch_size=16
    )
    llava = LlavaConfig(
        vision_config=tower, text_config=llama, image_token_index=len(SPECIAL) + WORDS, image_seq_length=196,
        vision_feature_layer=-2, pad_token_id=0,
    )  # fmt: skip
    model(home / "llava", llava, "AutoModelForImageTextToText", weights=weights)
    talks = PreTrainedTokenizerFast.from_pretrained(home / "llava")
    talks.add_special_tokens({"additional_special_tokens": ["<image>"]})
    chat = (
        "{% for message in messages %}{{ '<|' + message['role'] + '|> ' }}{% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image> "
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ ' </s> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
    )
    talks.chat_template = chat
    pictures = CLIPImageProcessor(size={"shortest_edge": 224}, crop_size=224)
    LlavaProcessor(
        image_processor=pictures, tokenizer=talks, patch_size=16, vision_feature_select_strategy="default", chat_template=chat,
        image_token="<image>", num_additional_image_tokens=1,
    ).save_pretrained(home / "llava")  # fmt: skip


def make_texts(work: Path, draw: random.Random) -> None:
    """Data of the programs of transformers, accelerate and peft."""
    data = work / "data"

    def asked(n: int) -> dict[str, Any]:
        context = words(draw, 150, 420).split()
        at = draw.randrange(len(context) - 3)
        text, begin = " ".join(context[at : at + 3]), len(" ".join([*context[:at], ""]))
        answers = {"text": [text], "answer_start": [begin]}
        return {"id": str(n), "title": "t", "context": " ".join(context), "question": words(draw, 8, 20), "answers": answers}

    for name, count in (("train", 60), ("validation", 20)):
        path = data / "squad" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"data": [asked(n) for n in range(count)]}))
        kinds = [{"sentence": words(draw, 60, 300), "label": ("no", "yes", "so")[n % 3]} for n in range(count * 2)]
        lines(data / "classes" / f"{name}.json", kinds)
        tagged = [words(draw, 20, 110).split() for _ in range(count * 4)]
        tags = ("O", "B-PER", "I-PER", "B-LOC")
        lines(data / "ner" / f"{name}.json", [{"tokens": one, "ner_tags": [draw.choice(tags) for _ in one]} for one in tagged])
        ends = {f"ending{n}": "" for n in range(4)}
        swag = [
            {
                "sent1": words(draw, 10, 30),
                "sent2": words(draw, 2, 5),
                **{key: words(draw, 8, 30) for key in ends},
                "label": n % 4,
            }
            for n in range(count * 2)
        ]
        lines(data / "swag" / f"{name}.json", swag)
        text = "".join(words(draw, 80, 160) + "\n" for _ in range(count * 3))
        (data / "text").mkdir(parents=True, exist_ok=True)
        (data / "text" / f"{name}.txt").write_text(text)
    for name, count in (("train", 128), ("test", 16)):
        lines(data / "guanaco" / f"{name}.jsonl", [{"text": words(draw, 200, 700)} for _ in range(count)])
    (data / "document.txt").write_text(words(draw, 2500, 2500))
    turns = []
    for _ in range(24):
        document, question = draw.randint(400, 900), draw.randint(60, 240)
        ids = [draw.randrange(8, 2000) for _ in range(document + question)]
        turns.append({"teacher_input_ids": ids, "student_input_ids": ids[document:], "ctx_len": document})
    lines(data / "distill.jsonl", turns)
    alpaca = [{"instruction": words(draw, 20, 80), "input": "", "output": words(draw, 40, 400)} for _ in range(40)]
    lines(data / "alpaca" / "train.jsonl", alpaca)
    make_wikitext(work / "smol" / "Salesforce" / "wikitext", draw, train=600, rest=16)
    make_glue(work / "nlp", draw)


def parquet(folder: Path, held: dict[str, Any], features: Any) -> None:
    """Write columns as a data set of these features."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(held, schema=features.arrow_schema), folder / "train.parquet")


def make_preferences(work: Path, draw: random.Random) -> None:
    """Data of TRL's programs."""
    data = work / "data"

    def turn(role: str, low: int, high: int) -> list[dict[str, str]]:
        return [{"role": role, "content": words(draw, low, high)}]

    triples: list[dict[str, Any]] = []
    judged: list[dict[str, Any]] = []
    for n in range(48):
        prompt = turn("user", 20, 80)
        replies = {key: turn("assistant", 60, 320) for key in ("reference", "chosen", "rejected")}
        triples.append({"prompt": prompt, **replies})
        judged.append({"prompt": prompt, "completion": replies["chosen"], "label": bool(n % 2)})
    lines(data / "triples" / "train.jsonl", triples)
    lines(data / "judged" / "train.jsonl", judged)
    lines(data / "prompts" / "train.jsonl", [{"prompt": turn("user", 20, 120)} for _ in range(48)])
    make_images(data / "images", draw)
    from datasets import Features, Image, List, Value

    pictures = sorted((data / "images" / "train").rglob("*.png"))
    part = {"type": Value("string"), "text": Value("string")}
    said = List({"role": Value("string"), "content": List(part)})
    features = Features({"images": List(Image()), "prompt": said, "chosen": said, "rejected": said})

    def seen(role: str, low: int, high: int, *, image: bool = False) -> list[dict[str, Any]]:
        parts = [{"type": "image", "text": None}] if image else []
        return [{"role": role, "content": [*parts, {"type": "text", "text": words(draw, low, high)}]}]

    rows = [
        {"images": [{"bytes": path.read_bytes(), "path": None}], "prompt": seen("user", 10, 40, image=True),
         "chosen": seen("assistant", 40, 160), "rejected": seen("assistant", 40, 160)}
        for path in pictures
    ]  # fmt: skip
    parquet(data / "image_pairs", {key: [row[key] for row in rows] for key in rows[0]}, features)


def make_third(work: Path, draw: random.Random) -> None:
    """Data that only the programs of the third list read."""
    data = work / "data"

    def turn(role: str, low: int, high: int) -> list[dict[str, str]]:
        return [{"role": role, "content": words(draw, low, high)}]

    pairs, advised = [], []
    for _ in range(48):
        prompt = turn("user", 20, 120)
        pairs.append({"prompt": prompt, "chosen": turn("assistant", 40, 260), "rejected": turn("assistant", 40, 260)})
        advised.append({"prompt": turn("user", 20, 120), "privileged_context": words(draw, 30, 90)})
    lines(data / "pairs" / "train.jsonl", pairs)
    lines(data / "advised" / "train.jsonl", advised)
    for name, count in (("train", 48), ("validation", 8)):
        said_twice = [{"translation": {"en": words(draw, 10, 90), "ro": words(draw, 10, 90)}} for _ in range(count)]
        lines(data / "translations" / f"{name}.json", said_twice)
    from datasets import Features, Image, List, Value

    part = {"type": Value("string"), "text": Value("string")}
    said = List({"role": Value("string"), "content": List(part)})
    pictures = sorted((data / "images" / "train").rglob("*.png"))
    talks = [
        [
            {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": words(draw, 10, 40)}]},
            {"role": "assistant", "content": [{"type": "text", "text": words(draw, 40, 200)}]},
        ]
        for _ in pictures
    ]
    held = {"images": [[{"bytes": path.read_bytes(), "path": None}] for path in pictures], "messages": talks}
    parquet(data / "image_talks", held, Features({"images": List(Image()), "messages": said}))
    for home in (work / "lit" / "data", data):  # MNIST's files
        shutil.copytree(work / "Datasets", home, dirs_exist_ok=True)


def make_bare(work: Path, draw: random.Random) -> None:
    """MNIST's files, WikiText as one text, nanochat's tokenizer and shards."""
    for home, count in ((work / "Datasets", 4000), (work / "ff" / "data", 24000)):
        raw = home / "MNIST" / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        for name, size in (("train", count), ("t10k", count // 2)):
            pixels = draw.randbytes(size * 784)
            (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, size, 28, 28) + pixels)
            (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, size) + bytes(n % 10 for n in range(size)))
    (work / "lit" / "data").mkdir(parents=True, exist_ok=True)
    (work / "lit" / "data" / "wikitext-2.txt").write_text("".join(words(draw, 34, 34) + "\n" for _ in range(4130)))
    import pyarrow as pa
    import pyarrow.parquet as pq
    import tiktoken
    import torch

    home = work / "nanochat" / "home"
    (home / "tokenizer").mkdir(parents=True, exist_ok=True)
    (home / "base_data_climbmix").mkdir(exist_ok=True)
    ranks = {bytes([n]): n for n in range(256)}
    for first in range(97, 123):
        for second in range(97, 123):
            ranks[bytes([first, second])] = len(ranks)
    special = {f"<|{name}|>": len(ranks) + n for n, name in enumerate(("bos", "user_start", "user_end", "assistant_start",
               "assistant_end", "python_start", "python_end", "output_start", "output_end"))}  # fmt: skip
    made = tiktoken.Encoding("numbered", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens=special)
    (home / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(made))
    torch.save(torch.ones(made.n_vocab, dtype=torch.int32), home / "tokenizer" / "token_bytes.pt")
    for n in range(2):
        texts = [words(draw, 200, 900) for _ in range(200)]
        pq.write_table(pa.table({"text": texts}), home / "base_data_climbmix" / f"shard_{n:05d}.parquet", row_group_size=50)


def copy_programs(work: Path, source: Path) -> None:
    """Put the programs' files where their commands look for them."""
    programs = work / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    single = {
        "macorisd+transformers-qwen3/examples/pytorch": (
            "question-answering/run_qa_no_trainer.py", "question-answering/run_qa_beam_search.py",
            "question-answering/trainer_qa.py", "question-answering/utils_qa.py", "text-classification/run_classification.py",
            "token-classification/run_ner_no_trainer.py", "language-modeling/run_mlm.py", "multiple-choice/run_swag.py",
            "image-classification/run_image_classification_no_trainer.py", "token-classification/run_ner.py",
            "text-classification/run_glue_no_trainer.py",
            "question-answering/run_qa.py", "multiple-choice/run_swag_no_trainer.py",
            "question-answering/run_qa_beam_search_no_trainer.py", "translation/run_translation_no_trainer.py",
        ),
        "huggingface+accelerate/examples/by_feature": (
            "memory.py", "multi_process_metrics.py", "gradient_accumulation_for_autoregressive_models.py", "local_sgd.py",
            "ddp_comm_hook.py", "profiler.py",
        ),
        "huggingface+peft/examples": (
            "lily_finetuning/lily_finetuning.py", "unilora_finetuning/unilora_finetuning.py",
            "hira_finetuning/hira_finetuning.py", "corda_finetuning/corda_finetuning.py", "mica_finetuning/mica_finetuning.py",
        ),
        "huggingface+trl/examples/scripts": (
            "mpo_vlm.py", "tpo.py", "distillation.py", "kto.py", "dpo_vlm.py", "sdft.py", "cpo.py", "sft_vlm.py",
        ),
        "deepspeedai+DeepSpeedExamples/training": (
            "DeepSpeed-SuperOffload/finetune_zero3.py", "offload_states/offload_states.py",
        ),
        "Lightning-AI+pytorch-lightning/examples/pytorch/domain_templates": ("generative_adversarial_net.py",),
        "pytorch+examples": ("imagenet/main.py",),
    }  # fmt: skip
    for home, files in single.items():
        for name in files:
            shutil.copy(source / home / name, programs / Path(name).name)
    for home, folder in (
        ("huggingface+peft/examples/cartridge_self_study", "programs/cartridge"), ("karpathy+nanochat", "nanochat"),
        ("Lightning-AI+pytorch-lightning/examples/fabric/kfold_cv", "lit/fabric/kfold_cv"),
        ("Lightning-AI+pytorch-lightning/examples/fabric/language_model", "lit/fabric/language_model"),
        ("Lightning-AI+pytorch-lightning/examples/fabric/image_classifier", "lit/fabric/image_classifier"),
        ("deepspeedai+DeepSpeedExamples/training/gan", "gan"), ("pytorch+examples/mnist", "mnist"),
        ("deepspeedai+DeepSpeedExamples/training/bf16_master_weight", "bf16"), ("pytorch+examples/mnist_forward_forward", "ff"),
    ):  # fmt: skip
        keep = shutil.ignore_patterns("*.png", "*.csv", "*.ipynb", "*.lock", "logs", "*.tex")
        shutil.copytree(source / home, work / folder, dirs_exist_ok=True, ignore=keep)
    (work / "configs").mkdir(exist_ok=True)
    config = {  # as finetune_llama-8b_1gpu.sh writes it for zerooffload and a batch of 4
        "train_batch_size": 4, "gradient_accumulation_steps": 1, "bf16": {"enabled": True}, "wall_clock_breakdown": True,
        "zero_optimization": {"stage": 3, "overlap_comm": False, "reduce_bucket_size": 4e8, "sub_group_size": 4e8,
                              "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }  # fmt: skip
    (work / "configs" / "zerooffload.json").write_text(json.dumps(config))


def main() -> None:
    """Make everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("programs", type=Path)
    parser.add_argument("--weights", action="store_true")
    asked = parser.parse_args()
    draw = random.Random(2)
    copy_programs(asked.work, asked.programs)
    make_models(asked.work, weights=asked.weights)
    make_texts(asked.work, draw)
    make_preferences(asked.work, draw)
    make_bare(asked.work, draw)
    make_third(asked.work, random.Random(3))
    make_metrics(asked.work)


if __name__ == "__main__":
    main()
