"""Make a tiny language model and texts to try finetune.py with. Nothing is downloaded.

python examples/lora/make_tiny.py DIR
"""

import json
import sys
from pathlib import Path

try:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
except ModuleNotFoundError as error:
    sys.exit(f"this needs {error.name.partition('.')[0]}: pip install 'potluck[torch,ecosystem]'")

WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
]


def make(folder, shard_size="5GB"):
    """Write a Llama of about 100,000 random parameters, its tokenizer of bytes, and the texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128, pad_token_id=0, bos_token_id=None,
        eos_token_id=1, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=shard_size)

    sums = [(a, b) for a in range(7) for b in range(6)]
    for name, chosen in (("train", sums * 4), ("test", sums[::5])):
        lines = [
            {"prompt": f"{WORDS[a]} and {WORDS[b]} make", "completion": f" {WORDS[a + b]}"}
            for a, b in chosen
        ]
        (Path(folder) / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    make(sys.argv[1])
