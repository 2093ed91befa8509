"""A user's script on TRL's ORPO trainer, which TRL keeps among its experiments: pairs of one JSON-lines folder.

``orpo.py --config recipe.yaml``, by any launcher.
"""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.orpo import ORPOConfig, ORPOTrainer


def main() -> None:
    parser = TrlParser((ScriptArguments, ORPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    name = model_args.model_name_or_path
    trainer = ORPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(name, dtype=model_args.dtype),
        args=training_args,
        train_dataset=load_dataset(script_args.dataset_name)[script_args.dataset_train_split],
        processing_class=AutoTokenizer.from_pretrained(name),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()


if __name__ == "__main__":
    main()
