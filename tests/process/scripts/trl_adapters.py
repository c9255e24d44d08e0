"""TRL's SFTTrainer and DPOTrainer with adapters of peft, on the model and texts of a folder.

trl_adapters.py FOLDER
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from potluck.torch.plugins import start

folder = Path(sys.argv[1])
lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
start("potluck", None)
assert dist.get_backend() == "potluck"


def train(name: str, trainer: Any, config: Any, rows: list[dict[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as output:
        options = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
        training = trainer(
            model=AutoModelForCausalLM.from_pretrained(folder),
            args=config(
                output_dir=output,
                max_steps=6,
                per_device_train_batch_size=4,
                learning_rate=1e-2,
                logging_steps=1,
                ddp_find_unused_parameters=False,
                **options,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(folder),
            peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"),
        )
        training.train()
    losses = [float(entry["loss"]) for entry in training.state.log_history if "loss" in entry]
    adapters = [each for each in training.model.parameters() if each.requires_grad]
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in adapters))
    size, found = training.args.world_size, digest.hexdigest()[:12]
    print(f"{name} of {size}: loss {losses[0]} -> {losses[-1]}, adapters {found}", flush=True)


train("SFT", SFTTrainer, SFTConfig, lines)
compared = [{"prompt": each["prompt"], "chosen": each["completion"]} for each in lines]
train("DPO", DPOTrainer, DPOConfig, [{**each, "rejected": " none"} for each in compared])
