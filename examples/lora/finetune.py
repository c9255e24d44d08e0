"""Fine-tune a language model with LoRA on machines that may be lost and come back.

python examples/lora/make_tiny.py tiny    # or any folder with a causal model of Hugging Face
potluck run --workers 3 examples/lora/finetune.py tiny tiny/train.jsonl --test tiny/test.jsonl \
    --out adapters --sample "two and three make"

Each machine reads the model's folder itself; only adapters are sent. See docs/fine-tuning.md.
"""

import argparse
import sys

try:
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from torch.nn import functional as F
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
except ModuleNotFoundError as error:
    sys.exit(f"this needs {error.name.partition('.')[0]}: pip install 'potluck[torch,ecosystem]'")

from texts import check_folder, collate, read_samples

import potluck.torch as pt


def load_model(args, device):
    """The model of the folder with adapters, which are all that is trained."""
    check_folder(args.model)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16  # adapters: float32
    options = {"dtype": dtype, "local_files_only": True}
    if args.bits == 4:
        quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        options |= {"quantization_config": quantized, "device_map": device}
    model = AutoModelForCausalLM.from_pretrained(args.model, **options)
    model = prepare_model_for_kbit_training(model) if args.bits == 4 else model.to(device)
    torch.manual_seed(0)
    try:
        config = LoraConfig(task_type="CAUSAL_LM", r=args.rank, target_modules=args.targets)
        return get_peft_model(model, config)
    except ValueError as error:
        layers = sorted({name.rpartition(".")[2] for name, _ in model.named_modules() if name})
        sys.exit(f"--targets {args.targets}: {error} It has: {', '.join(layers)}")


def total_loss(model, samples):
    """The sum of the losses of the tokens to learn, and their number."""
    tokens, mask, labels = (each.to(next(model.parameters()).device) for each in samples)
    scores = model(input_ids=tokens, attention_mask=mask).logits[:, :-1].flatten(0, 1).float()
    labels = labels[:, 1:].flatten()
    return F.cross_entropy(scores, labels, reduction="sum"), (labels >= 0).sum().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a folder with config, weights and tokenizer")
    parser.add_argument("train", help="lines of JSON: a text, or a prompt and a completion, each")
    parser.add_argument("--test", help="lines to evaluate on, before each epoch and at the end")
    parser.add_argument("--out", default="adapters", help="folder for the adapters, as peft's")
    parser.add_argument("--merge", help="folder for the model with the adapters merged into it")
    parser.add_argument("--sample", action="append", default=[], help="a prompt to complete")
    parser.add_argument("--checkpoint", help="folder to keep the state in, and to go on from")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of all machines")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample at most")
    parser.add_argument("--rate", type=float, default=1e-3, help="the learning rate")
    parser.add_argument("--rank", type=int, default=8, help="the rank of the adapters")
    parser.add_argument("--targets", nargs="+", default="all-linear", help="names of layers")
    parser.add_argument("--bits", type=int, choices=[4, 16], default=16, help="4: QLoRA")
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    train = read_samples(args.train, tokenizer, args.length)
    test = read_samples(args.test, tokenizer, args.length) if args.test else []
    model = pt.DDP(load_model(args, device), broadcast_buffers=False)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.rate)
    per_sample = sum(len(y) - y.count(-100) for _, y in train) / len(train)  # tokens to learn
    per_epoch = -(-len(train) // args.batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, args.epochs * per_epoch)
    job = pt.ElasticLoop(
        model, optimizer, train, batch_size=args.batch_size, epochs=args.epochs,
        collate=collate, also={"schedule": schedule}, frozen="own", checkpoint=args.checkpoint,
        policy=pt.Policy(shares=pt.ProportionalShares(), save_every=100),
    )  # fmt: skip

    def evaluate():
        if test:
            found = job.evaluate(test, lambda x: {"loss": total_loss(model, x)}, collate=collate)
            if job.ctx.is_master:
                print(f"step {job.step_number}: test loss {found['loss']:.6f}", flush=True)

    for samples in job:
        with job.step():
            if job.step_number % per_epoch == 0:
                evaluate()
            optimizer.zero_grad()
            # The loop weights by samples: so each token counts alike, wherever it is computed.
            loss = total_loss(model, samples)[0] / (len(samples[0]) * per_sample)
            loss.backward()
            pt.clip_grad_norm_(model, 1.0)
            job.log(loss=loss)
            optimizer.step()
            schedule.step()
    evaluate()
    if job.ctx.is_master:
        model.module.save_pretrained(args.out)
        for prompt in args.sample:
            given = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(device)
            made = model.module.eval().generate(**given, max_new_tokens=24, do_sample=False)
            print(repr(tokenizer.decode(made[0], skip_special_tokens=True)))
        if args.merge:
            model.module.merge_and_unload().save_pretrained(args.merge)
            tokenizer.save_pretrained(args.merge)


if __name__ == "__main__":
    main()
