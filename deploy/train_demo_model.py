"""Train the small Llama that ships in deploy/demo_model: a few minutes on one GPU, text every machine has.

    python deploy/train_demo_model.py --out deploy/demo_model --minutes 5 [--stdlib DIR] [--docs DIR]

Corpus: a CPython standard library (source files with their tests, and every docstring and the pydoc topics as
prose; by default the running Python's) and, where given, the documentation's reStructuredText sources. One file in
fifty is held out for the perplexity in the card. Needs torch, transformers, tokenizers; the result is an ordinary
Hugging Face folder of at most 8 MB.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import sys
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

BOS, EOS = "<s>", "</s>"
# It answers nothing, it continues text: so it continues a conversation's.
CHAT_TEMPLATE = '{{ bos_token }}{{ messages | map(attribute="content") | select | join("\\n\\n") }}'
PROSE_WEIGHT = 2  # docstrings and topics are a small part of the bytes and most of what people type; a guess
EVALUATE_EVERY = 100  # steps; the weights kept are those that did best on the held-out text; a guess


def read_corpus(stdlib: Path, docs: Path | None) -> tuple[list[str], list[str]]:
    """(training documents, held-out documents): modules as source, and documentation as prose."""
    train: list[str] = []
    held_out: list[str] = []
    for index, path in enumerate(sorted(stdlib.rglob("*.py"))):
        relative = path.relative_to(stdlib).as_posix()
        if relative.startswith(("site-packages", "dist-packages", "idlelib/", "lib2to3/tests", "encodings/")):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        if relative == "pydoc_data/topics.py":
            topics = [str(text) for text in _topics(tree).values()]
            held_out += topics[::25]
            train += [t for i, t in enumerate(topics) if i % 25] * PROSE_WEIGHT
            continue
        prose = _docstrings(tree)
        if index % 50 == 7:
            held_out.append(source)
        else:
            train.append(source)
            train += ["\n\n".join(prose)] * PROSE_WEIGHT if prose else []
    for index, path in enumerate(sorted(docs.rglob("*.txt")) if docs else []):
        if index % 50 == 7:
            held_out.append(path.read_text(encoding="utf-8"))
        else:
            train += [path.read_text(encoding="utf-8")] * PROSE_WEIGHT
    return train, held_out


def _topics(tree: ast.Module) -> dict[str, str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return dict(ast.literal_eval(node.value))
    raise SystemExit("pydoc_data/topics.py holds no dictionary: is this a CPython standard library?")


def _docstrings(tree: ast.Module) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [text for text in found if text and len(text) > 60]


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 0), (EOS, 1)]
    )
    return tokenizer


def to_ids(tokenizer: Tokenizer, documents: list[str]) -> torch.Tensor:
    """All documents in one row, each between BOS and EOS: int64 [num_tokens]."""
    flat: list[int] = []
    for encoding in tokenizer.encode_batch(documents):
        flat += encoding.ids
        flat.append(1)
    return torch.tensor(flat, dtype=torch.long)


def build_model(vocab_size: int, context: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=576,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, ids: torch.Tensor, context: int, device: str) -> float:
    """Mean negative log-likelihood (nats a token) over consecutive windows of `context` tokens."""
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(ids) - context - 1, context):
        window = ids[start : start + context + 1].to(device)[None]
        logits = model(window[:, :-1]).logits.float()
        total += torch.nn.functional.cross_entropy(logits[0], window[0, 1:], reduction="sum").item()
        count += context
    model.train()
    return total / max(1, count)


def train(model: LlamaForCausalLM, ids: torch.Tensor, held_out: torch.Tensor, arguments: argparse.Namespace) -> int:
    """AdamW, bf16 autocast, warm-up then cosine by elapsed time. Leaves the best weights; returns their step."""
    device, context = arguments.device, arguments.context
    ids = ids.to(device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": arguments.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=arguments.lr,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    forward = torch.compile(model) if device == "cuda" else model
    offsets = torch.arange(context + 1, device=device)
    started, step = time.monotonic(), 0
    best_loss, best_step, best = float("inf"), 0, {}
    while (elapsed := (time.monotonic() - started) / (60 * arguments.minutes)) < 1:
        rate = arguments.lr * min(1.0, (step + 1) / 200) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * elapsed)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(0, len(ids) - context - 1, (arguments.batch,), device=device)
        window = ids[starts[:, None] + offsets]
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = forward(window[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % EVALUATE_EVERY == 0:
            unseen = held_out_loss(model, held_out, min(1024, len(held_out) - 2), device)
            print(f"step {step} loss {loss.item():.3f} held-out {unseen:.3f} time {elapsed:.0%}", flush=True)
            if unseen < best_loss:
                best_loss, best_step = unseen, step
                best = {name: value.clone() for name, value in model.state_dict().items()}
    if best:
        model.load_state_dict(best)
    return best_step or step


def sample(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, device: str) -> str:
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=device)
    out = model.generate(ids, max_new_tokens=64, do_sample=False, pad_token_id=1)  # type: ignore[misc]
    return str(tokenizer.decode(out[0, ids.shape[1] :].tolist()))


PROMPTS = ("The list is sorted in", "def read_lines(path):\n", "Return a new string", "class Queue:\n", "import os\n")


def write_card(out: Path, facts: dict[str, str], samples: dict[str, str]) -> None:
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    shown = "\n".join(f"- `{prompt!r}` → `{text!r}`" for prompt, text in samples.items())
    (out / "README.md").write_text(
        f"# Tandem's demo model\n\nA small Llama for tests, demos and the README; made by `deploy/train_demo_model.py`."
        f" It knows how the Python standard library reads and nothing else.\n\n| | |\n| --- | --- |\n{rows}\n\n"
        f"Greedy completions, 64 tokens:\n\n{shown}\n\nThe text is CPython's, under the PSF licence, which permits"
        f" redistribution; the weights are under this repository's licence.\n"
    )


def save(out: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)  # type: ignore[arg-type]
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--docs", type=Path, help="folder of the documentation's sources (*.txt)")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--context", type=int, default=2048, help="tokens a sequence, and the model's maximum")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    train_documents, held_out = read_corpus(arguments.stdlib, arguments.docs)
    random.Random(arguments.seed).shuffle(train_documents)
    tokenizer = train_tokenizer(train_documents, arguments.vocab)
    ids, held_out_ids = to_ids(tokenizer, train_documents), to_ids(tokenizer, held_out)
    print(f"{len(train_documents)} documents, {len(ids)} tokens; held out {len(held_out_ids)}", flush=True)
    model = build_model(tokenizer.get_vocab_size(), arguments.context).to(arguments.device)
    steps = train(model, ids, held_out_ids, arguments)
    loss = held_out_loss(model, held_out_ids, min(1024, len(held_out_ids) - 2), arguments.device)
    num_bytes = sum(len(text.encode()) for text in held_out)
    samples = {prompt: sample(model, tokenizer, prompt, arguments.device) for prompt in PROMPTS}
    save(arguments.out, model, tokenizer)
    size = sum(f.stat().st_size for f in arguments.out.iterdir() if f.suffix != ".md")
    facts = {
        "architecture": "Llama, 5 layers, hidden 256, 4 query and 2 KV heads of 64, tied embeddings, bf16",
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "size on disk": f"{size / 1e6:.2f} MB",
        "context": f"{arguments.context} tokens",
        "chat template": "the messages' texts, to be continued",
        "tokenizer": f"byte-level BPE, {tokenizer.get_vocab_size()} entries, trained on the same text",
        "trained on": f"CPython's standard library (source, docstrings, pydoc topics)"
        f"{' and documentation' if arguments.docs else ''}; {len(ids):,} tokens, prose {PROSE_WEIGHT} times",
        "training": f"{steps} steps of {arguments.batch} × {arguments.context} tokens, {arguments.minutes:g} minutes"
        f" on {torch.cuda.get_device_name() if arguments.device == 'cuda' else 'CPU'}",
        "held-out perplexity": f"{math.exp(loss):.2f} a token, {loss * len(held_out_ids) / num_bytes / math.log(2):.3f}"
        f" bits a byte ({len(held_out)} documents, {len(held_out_ids):,} tokens; windows of 1,024)",
    }
    write_card(arguments.out, facts, samples)
    json.dump({"facts": facts, "samples": samples}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
