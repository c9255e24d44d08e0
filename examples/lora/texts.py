"""The samples of finetune.py: lines of JSON as tokens, and a model's folder that is whole."""

import json
import sys
from pathlib import Path

import torch


def check_folder(folder):
    """Exit, with the names, if files of weights are missing from a folder of Hugging Face's."""
    folder, shards = Path(folder), {"model.safetensors"}
    if not (folder / "config.json").is_file():
        sys.exit(f"{folder} is no model's folder: it has no config.json")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    missing = sorted(name for name in shards if not (folder / name).is_file())
    if missing:
        sys.exit(f"{folder} lacks {', '.join(missing)}: copy the whole folder to this machine")


def read_samples(path, tokenizer, length):
    """Of each line its first ``length`` tokens, and what is learned of them: -100 for a prompt."""
    samples = []
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = entry.get("prompt", "")
            text = entry["completion"] if "prompt" in entry else entry["text"]
            given = first + tokenizer(prompt, add_special_tokens=False)["input_ids"]
            learned = tokenizer(text, add_special_tokens=False)["input_ids"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            sys.exit(
                f"{path}:{number}: {line[:60]!r} is no sample ({why}): a line is "
                '{"text": ...}, or {"prompt": ..., "completion": ...}'
            )
        learned = [*learned, tokenizer.eos_token_id]
        labels = [-100] * len(given) + learned
        if any(label >= 0 for label in labels[1:length]):
            samples.append(((given + learned)[:length], labels[:length]))
    if not samples:
        sys.exit(f"{path} has no sample with a token to learn among its first --length {length}")
    return samples


def collate(samples):
    """Tokens, attention mask and labels of samples, filled up to the longest one with zeros."""
    longest = max(len(tokens) for tokens, _ in samples)
    tokens, mask, labels = [], [], []
    for row, learned in samples:
        fill = longest - len(row)
        tokens.append(row + [0] * fill)
        mask.append([1] * len(row) + [0] * fill)
        labels.append(learned + [-100] * fill)
    return torch.tensor(tokens), torch.tensor(mask), torch.tensor(labels)
