"""examples/lora: a real run with a worker that is killed and comes back, and what peft makes of it;
mistakes in folders and texts."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="pip install 'potluck[ecosystem]'")

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.commands import Command, potluck_command
from support.examples import EXAMPLES, example

LORA = EXAMPLES / "lora"
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
sys.path.insert(0, str(LORA))  # finetune.py imports texts.py
make = example("lora/make_tiny").make
finetune, texts = example("lora/finetune"), example("lora/texts")


pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make(folder)
    return folder


def test_a_worker_killed_and_back_leaves_the_losses_of_one_process(
    tiny: Path, tmp_path: Path
) -> None:
    """Losses to 1e-4: float32 sums in another order. Shares follow the workers' speeds."""
    script = str(Path(__file__).parent / "scripts/finetune_killed.py")
    given = [*(str(tiny), str(tiny / "train.jsonl"), "--test", str(tiny / "test.jsonl"))]
    given += ["--epochs", "2", "--sample", "two and three make"]
    losses = []
    for name, start in {"one": [sys.executable], "three": [*potluck_command(), "run"]}.items():
        (folder := tmp_path / name).mkdir()
        kept = ["--out", str(folder / "adapters"), "--merge", str(folder / "merged")]
        workers = ["--workers", "3"] if name == "three" else []
        with Command([*start, *workers, script, str(folder), *given, *kept], env=QUIET) as run:
            assert run.finish(400) == 0, run.text
        found = re.findall(r"step (\d+): test loss (\d+\.\d+)$", run.text, re.MULTILINE)
        assert [int(step) for step, _ in found] == [0, 6, 12]
        assert "'two and three make" in run.text
        losses.append([float(loss) for _, loss in found])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][2] < losses[0][1] < losses[0][0] - 0.1
    assert "worker 2 killed by SIGKILL" in run.text
    assert re.search(r"worker 2 rejoined at step \d+", run.text), run.text
    assert re.search(r"steps run again +1$", run.text, re.MULTILINE), run.text
    assert re.search(r"parameters +equal on all", run.text), run.text
    check_adapters(tiny, tmp_path / "three")


def check_adapters(base: Path, folder: Path) -> None:
    """peft reads them, and the merged model is the base with them."""
    saved = sorted(path.name for path in (folder / "adapters").iterdir())
    assert {"adapter_config.json", "adapter_model.safetensors"} < set(saved)
    plain = AutoModelForCausalLM.from_pretrained(base)
    tokens = AutoTokenizer.from_pretrained(folder / "merged")("one and", return_tensors="pt")
    with torch.no_grad():
        before = plain(**tokens).logits
        adapted = PeftModel.from_pretrained(plain, str(folder / "adapters"))(**tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged")(**tokens).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    assert (adapted - before).abs().max() > 0.01


def arguments(folder: Path, **options: Any) -> Any:
    values = {"model": str(folder), "bits": 16, "rank": 2, **options}
    return type("Arguments", (), {"targets": "all-linear", **values})


def test_a_folder_without_its_weights_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no model's folder: it has no config\.json"):
        finetune.load_model(arguments(tmp_path), torch.device("cpu"))
    shutil.copy(tiny / "config.json", tmp_path)
    with pytest.raises(SystemExit, match=r"lacks model\.safetensors: copy the whole folder"):
        finetune.load_model(arguments(tmp_path), torch.device("cpu"))
    make(tmp_path / "parts", shard_size="200KB")
    parts = sorted((tmp_path / "parts").glob("model-*.safetensors"))
    assert len(parts) > 1
    finetune.load_model(arguments(tmp_path / "parts"), torch.device("cpu"))
    parts[1].unlink()
    with pytest.raises(SystemExit, match=f"lacks {re.escape(parts[1].name)}: copy"):
        finetune.load_model(arguments(tmp_path / "parts"), torch.device("cpu"))


def test_targets_that_match_nothing_are_refused_with_what_there_is(tiny: Path) -> None:
    with pytest.raises(SystemExit, match=r"--targets \['query'\]: .* It has: .*down_proj.*q_proj"):
        finetune.load_model(arguments(tiny, targets=["query"]), torch.device("cpu"))
    model = finetune.load_model(arguments(tiny, targets=["q_proj"]), torch.device("cpu"))
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert len(trained) == 4
    assert all("q_proj.lora_" in name for name in trained)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"text": "torn', "JSONDecodeError"),
        ('{"prompt": "a"}', "KeyError: 'completion'"),
        ('{"prompt": "a", "completion": 3}', "Error"),
        ('["text"]', "AttributeError"),
    ],
)
def test_a_line_that_is_no_sample_is_named(line: str, why: str, tiny: Path, tmp_path: Path) -> None:
    (path := tmp_path / "torn.jsonl").write_text(json.dumps({"text": "whole"}) + "\n\n" + line)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    with pytest.raises(SystemExit, match=re.escape(f"{path}:3: {line[:60]!r} is no sample")) as it:
        texts.read_samples(path, tokenizer, 64)
    assert why in str(it.value)


def test_samples_without_a_token_to_learn_do_not_count(tiny: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    long = {"prompt": "x" * 20, "completion": "y"}
    (path := tmp_path / "texts.jsonl").write_text(json.dumps(long) + "\n")
    with pytest.raises(SystemExit, match="no sample with a token to learn among its first"):
        texts.read_samples(path, tokenizer, 20)
    [(tokens, labels)] = texts.read_samples(path, tokenizer, 21)
    assert (len(tokens), labels[:20], labels[20]) == (21, [-100] * 20, tokens[20])
    path.write_text("")
    with pytest.raises(SystemExit, match="no sample"):
        texts.read_samples(path, tokenizer, 20)


def test_samples_are_filled_up_and_only_real_tokens_are_learned(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    samples = [([5, 6, 7, 8], [-100, -100, 7, 8]), ([9, 10], [9, 10])]
    with torch.no_grad():
        whole, number = finetune.total_loss(model, texts.collate(samples))
        alone = [finetune.total_loss(model, texts.collate([each])) for each in samples]
    assert number == 3 == sum(count for _, count in alone)
    torch.testing.assert_close(whole, alone[0][0] + alone[1][0], rtol=1e-5, atol=1e-5)
