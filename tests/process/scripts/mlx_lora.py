"""mlx_lm's LoRA trainer on potluck's links, on a model and texts that are made here: no downloads.

``mlx_lora.py make DIR`` writes the model and its texts; ``mlx_lora.py train DIR`` trains.
"""

import json
import runpy
import sys
from pathlib import Path

TEXTS = ["the cat sat on the mat", "a dog ran to the door", "one two three four five six"]
MODEL = {
    **{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "eos_token_id": 2},
    **{"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"rms_norm_eps": 1e-5, "vocab_size": 300, "max_position_embeddings": 256},
    **{"rope_theta": 10000.0, "tie_word_embeddings": True},
}


def make(root: Path) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL["vocab_size"],
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(root)
    (root / "config.json").write_text(json.dumps(MODEL))
    mx.random.seed(0)
    weights = llama.Model(llama.ModelArgs.from_dict(MODEL)).parameters()
    metadata = {"format": "mlx"}
    mx.save_safetensors(str(root / "model.safetensors"), dict(tree_flatten(weights)), metadata)
    for name, count in (("train", 64), ("valid", 8), ("test", 8)):
        lines = [json.dumps({"text": f"{TEXTS[n % 3]} {n % 7}"}) for n in range(count)]
        (root / f"{name}.jsonl").write_text("\n".join(lines))


def train(root: Path) -> None:
    import potluck.mlx

    world = potluck.mlx.stand_in()
    print(f"rank {world.rank()} of {world.size()}", flush=True)
    options = "--train --iters 30 --batch-size 4 --num-layers 2 --learning-rate 1e-3"
    sys.argv = ["lora", "--model", str(root), "--data", str(root), *options.split()]
    sys.argv += ["--adapter-path", str(root / "adapters"), "--steps-per-report", "10"]
    runpy.run_module("mlx_lm.lora", run_name="__main__")


if __name__ == "__main__":
    {"make": make, "train": train}[sys.argv[1]](Path(sys.argv[2]))
