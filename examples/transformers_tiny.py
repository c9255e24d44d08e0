"""transformers.Trainer over potluck: a tiny GPT learns the letters of a text, nothing downloaded.

potluck run --workers 2 examples/transformers_tiny.py
torchrun --nproc-per-node 2 examples/transformers_tiny.py
python examples/transformers_tiny.py
"""

import argparse
import hashlib
import sys
import tempfile

try:
    import torch
    from sklearn.datasets import (
        load_breast_cancer,
        load_diabetes,
        load_digits,
        load_iris,
        load_wine,
    )
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, set_seed
except ModuleNotFoundError as error:
    sys.exit(
        f"this needs {error.name.partition('.')[0]}: pip install 'potluck[torch,sklearn,ecosystem]'"
    )

from potluck.torch.plugins.transformers import TrainingArguments

LENGTH = 64


def bundled_text():
    """The descriptions of scikit-learn's data sets, about 15,000 characters, as samples."""
    loaders = (load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine)
    text = "\n".join(load().DESCR for load in loaders).encode("ascii", "replace")
    samples = torch.tensor(list(text)).unfold(0, LENGTH, LENGTH // 2)
    return [{"input_ids": sample, "labels": sample} for sample in samples]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=128, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                ddp_backend="potluck",
                ddp_find_unused_parameters=False,
                use_cpu=True,
                output_dir=folder,
                max_steps=args.steps,
                per_device_train_batch_size=8,
                learning_rate=3e-3,
                logging_steps=5,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=bundled_text(),
        )
        trainer.train()

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    world_size = trainer.args.world_size
    backend = torch.distributed.get_backend() if world_size > 1 else "none"
    digest = hashlib.sha256(
        b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    )
    print(
        f"rank {trainer.args.process_index} of {world_size}, backend {backend}: "
        f"loss {float(losses[0]):.4f} -> {float(losses[-1]):.4f}, "
        f"parameters {digest.hexdigest()[:12]}"
    )


if __name__ == "__main__":
    main()
