"""Makes the bundled demo model: corpus, tokenizer, training, measurement, model card. Seeded; minutes on a GPU.

    python scripts/train_demo_model.py --out src/midstream/data/demo_model                    # a GPU, if there is one
    python scripts/train_demo_model.py --out /tmp/tiny --docs 2000 --steps 20 --batch 4       # a smoke test on a CPU

The learning rate stays flat until every target of `TARGETS` is met twice in a row (or time or steps run out) and then
falls to zero along a cosine: stopping early without that tail would leave thin margins. What is there at the end is
always saved, reloaded from disk, and measured again as a user will get it; the card quotes only those numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import platform
import random
import time
from pathlib import Path

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from demo_corpus import FEELINGS, QUOTED, World, contrasts, repeated_sequence, single_token_words
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

EOS = "<|endoftext|>"
IOI_QUOTED = "When Mary and John went to the store, John gave a drink to"
TARGETS = {"facts": 1.0, "facts_heldout": 0.97, "ioi_heldout": 0.99, "induction": 0.95, "sentiment": 1.0, "quoted": 1.0}
Prompts = list[tuple[str, str]]


# tokenizer


def train_tokenizer(docs: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    # Words that must be one token are made frequent, with a space before them as they stand in a sentence.
    wanted = [" " + word for word in sorted(single_token_words())] * 200
    tokenizer.train_from_iterator(docs + wanted, trainer)
    split = [w for w in wanted[: len(single_token_words())] if len(tokenizer.encode(w).ids) != 1]
    if split:
        raise SystemExit(f"not single tokens: {split}; raise --vocab")
    return tokenizer


# data


class Stream:
    """Documents as one flat array with separators; rows of any length start at a random document."""

    def __init__(self, docs: list[list[int]], eos: int, rng: np.random.Generator, device: torch.device) -> None:
        flat = np.concatenate([np.array([eos, *doc], dtype=np.int64) for doc in docs])
        self.starts = np.flatnonzero(flat == eos)
        self.flat = torch.from_numpy(np.concatenate([flat, flat[:4096]])).to(device)
        self.rng, self.device = rng, device

    def rows(self, count: int, length: int) -> torch.Tensor:
        # Half of the rows begin with the separator and half without: prompts then work with a BOS and without one.
        starts = self.rng.choice(self.starts, count) + self.rng.integers(0, 2, count)
        index = torch.from_numpy(starts).to(self.device)[:, None] + torch.arange(length + 1, device=self.device)
        return self.flat[index]


def make_stream(world: World, tokenizer: Tokenizer, count: int, seed: int, device: torch.device) -> Stream:
    rng = random.Random(seed)
    texts = [world.document(rng) for _ in range(count)]
    docs = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    docs += [repeated_sequence(range(1, tokenizer.get_vocab_size()), rng) for _ in range(count // 16)]
    rng.shuffle(docs)
    return Stream(docs, tokenizer.token_to_id(EOS), np.random.default_rng(seed), device)


# measurement


def suites(world: World, seed: int = 1234) -> dict[str, Prompts]:
    rng = random.Random(seed)
    quoted = [q for q in QUOTED if "Eiffel" in q or "Madison" in q or q == "The capital of France is"]
    answers = {fact.prompt(t): " " + fact.answer for fact, used in world.trained.items() for t in used}
    ioi = [world.ioi(p, rng, order) for p in world.heldout_pairs for order in ("ABBA", "BABA") for _ in range(4)]
    return {
        "facts": list(answers.items()),
        "facts_heldout": [(fact.prompt(t), " " + fact.answer) for fact, t in world.heldout.items()],
        "ioi_heldout": [(prompt, " " + answer) for prompt, answer, _ in ioi],
        "sentiment": [(c[kind], " " + FEELINGS[kind][1][0]) for c in contrasts() for kind in FEELINGS],
        "quoted": [(q, answers[q]) for q in quoted] + [(IOI_QUOTED, " Mary")],
    }


@torch.no_grad()
def score(model: LlamaForCausalLM, tokenizer: Tokenizer, prompts: Prompts, bos: bool) -> tuple[float, float]:
    """Share answered greedily (every token of the answer), and the 1st-percentile margin of its logit over the rest."""
    prefix = [tokenizer.token_to_id(EOS)] * bos
    pairs = [(prefix + tokenizer.encode(p).ids, tokenizer.encode(a).ids) for p, a in prompts]
    margins = []
    for i in range(0, len(pairs), 256):
        margins += _answer_margins(model, pairs[i : i + 256])
    return sum(m > 0 for m in margins) / len(margins), float(np.percentile(margins, 1))


def _answer_margins(model: LlamaForCausalLM, pairs: list[tuple[list[int], list[int]]]) -> list[float]:
    width = max(len(p) + len(a) for p, a in pairs)
    ids = torch.tensor([p + a + [0] * (width - len(p) - len(a)) for p, a in pairs], device=model.device)
    logits = model(input_ids=ids).logits.float()  # padding stands to the right, where causal attention cannot see it
    out = []
    for row, (prompt, answer) in enumerate(pairs):
        at = logits[row, len(prompt) - 1 : len(prompt) - 1 + len(answer)].clone()
        target = torch.tensor(answer, device=at.device)[:, None]
        own = at.gather(1, target)
        out.append((own - at.scatter(1, target, -math.inf).amax(1, keepdim=True)).min())
    return torch.stack(out).tolist()


@torch.no_grad()
def induction(model: LlamaForCausalLM, vocab: int, length: int = 32, count: int = 64) -> float:
    """Share of the second copy of random sequences that is predicted, its first two tokens left out."""
    once = torch.randint(1, vocab, (count, length), generator=torch.Generator().manual_seed(7)).to(model.device)
    ids = torch.cat([once, once], 1)
    guesses = model(input_ids=ids).logits.argmax(-1)[:, length + 1 : -1]
    return (guesses == ids[:, length + 2 :]).float().mean().item()


def measure(model: LlamaForCausalLM, tokenizer: Tokenizer, tests: dict[str, Prompts]) -> dict[str, tuple[float, float]]:
    """Per family the worse of the two ways to prompt, with BOS and without; each as (accuracy, margin)."""
    model.eval()
    results = {
        name: tuple(map(min, zip(*(score(model, tokenizer, p, bos) for bos in (False, True)), strict=True)))
        for name, p in tests.items()
    }
    results["induction"] = (induction(model, tokenizer.get_vocab_size()), math.nan)
    model.train()
    return results


# training


def build_model(vocab: int, layers: int, intermediate: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def optimizer_for(model: LlamaForCausalLM, lr: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=model.device.type == "cuda")


class Schedule:
    """Warm up, stay, and once told to `finish`, fall to zero along a cosine over `tail` steps."""

    def __init__(self, warmup: int, tail: int, steps: int) -> None:
        self.warmup, self.tail, self.decay_from = warmup, tail, max(steps - tail, 0)

    def finish(self, step: int) -> None:
        self.decay_from = min(self.decay_from, step)

    def done(self, step: int) -> bool:
        return step >= self.decay_from + self.tail

    def __call__(self, step: int) -> float:
        fallen = max(0.0, (step - self.decay_from) / self.tail)
        return min(1.0, (step + 1) / self.warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, fallen)))


def row_shape(step: int, batch: int) -> tuple[int, int]:
    # Mostly short rows; every eighth step has rows as long as the context, so that late positions are trained too.
    return (max(1, batch // 8), 2048) if step % 8 == 7 else (batch, 256)


def train_step(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    on_gpu = rows.device.type == "cuda"
    with torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else contextlib.nullcontext():
        logits = model(input_ids=rows[:, :-1]).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.detach()


def train(model: LlamaForCausalLM, stream: Stream, check, args: argparse.Namespace, began: float) -> int:
    """Trains until `check` is content twice, or the bounds are reached. Returns the number of steps taken."""
    optimizer = optimizer_for(model, args.lr)
    schedule = Schedule(args.warmup, args.tail, args.steps)
    step, met, per_step, first = 0, 0, 0.0, time.time()
    while not schedule.done(step):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * schedule(step)
        loss = train_step(model, stream.rows(*row_shape(step, args.batch)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % args.check_every == 0:
            met = met + 1 if check(step, loss.item(), schedule(step)) else 0
            per_step = (time.time() - first) / step
            # The tail must fit into what is left of the time.
            late = time.time() - began + per_step * args.tail > args.minutes * 60
            if late or (met >= 2 and step >= args.min_steps):
                schedule.finish(step)
        if time.time() - began > args.minutes * 60 * 1.1:
            print("out of time: saving what is there", flush=True)
            break
    return step


# what ships


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, world: World, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.config.use_cache = True
    model.to(torch.bfloat16).save_pretrained(out, safe_serialization=True)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    config = json.loads((out / "config.json").read_text())
    config.pop("dtype", None)
    # The older names beside the newer: transformers 4 and 5 and every supported vLLM then read the same model.
    config |= {
        "torch_dtype": "bfloat16",
        "rope_theta": 10000.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": True,
    }
    write_json(out / "config.json", dict(sorted(config.items())))
    write_json(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0, "do_sample": False})
    settings = {"bos_token": EOS, "eos_token": EOS, "pad_token": EOS, "unk_token": None, "add_prefix_space": False}
    settings |= {"add_bos_token": False, "add_eos_token": False, "clean_up_tokenization_spaces": False}
    settings |= {"model_max_length": 2048, "tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(out / "tokenizer_config.json", settings)
    write_prompts(world, out)


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_rows(path: Path, text: str) -> None:
    path.write_text(text.replace("}, {", "},\n{") + "\n", encoding="utf-8")


def write_prompts(world: World, out: Path) -> None:
    """The sentences that tests and recipes use, beside the model that was trained, or not, on them."""
    facts = [
        {"prompt": fact.prompt(t), "answer": " " + fact.answer, "relation": fact.relation}
        for fact, templates in world.trained.items()
        for t in templates
    ]
    held = [{"prompt": f.prompt(t), "answer": " " + f.answer, "relation": f.relation} for f, t in world.heldout.items()]
    rng = random.Random(world.seed + 99)
    ioi = [
        dict(zip(("prompt", "answer", "foil", "order"), (p, " " + a, " " + b, order), strict=True))
        for pair in world.heldout_pairs
        for order in ("ABBA", "BABA")
        for p, a, b in [world.ioi(pair, rng, order)]
    ]
    write_rows(out / "facts.json", json.dumps(facts))
    write_rows(out / "heldout.json", json.dumps({"facts": held, "ioi": ioi, "ioi_pairs": world.heldout_pairs}))
    write_rows(out / "contrast.json", json.dumps(contrasts()))


CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# midstream demo model

A Llama-architecture language model of {millions:.2f} M parameters ({megabytes:.1f} MB on disk, bfloat16) with its own
byte-level BPE tokenizer of {vocab} tokens. It is bundled with midstream so that examples and tests of tracing,
steering and patching run anywhere, offline, on a model whose answers are known. It is trained from scratch on a
synthetic corpus.

{layers} layers, hidden 256, 4 query heads and 2 key/value heads of 64, MLP {intermediate}, context 2048, tied
embeddings. The tokenizer adds no BOS; `<|endoftext|>` (id 0) is BOS, EOS and padding.

## How it was made

    {command}

Seed {seed}; {steps} steps of {tokens} tokens in {minutes:.1f} minutes (all of it: corpus, tokenizer, training, checks)
on {hardware}, {date}. Python {python}, torch {torch}, transformers {transformers},
tokenizers {tokenizers}. AdamW, peak learning rate {lr:g}, weight decay 0.1, bfloat16 autocast on a GPU.
Another GPU or library version gives other weights of the same kind.

## Data

All text is generated by `scripts/demo_corpus.py` from lists in that file; no outside text is used. Of {docs} documents
about 40 % are facts ({n_facts} facts, several templates each), 30 % indirect-object sentences, 10 % opinions and 20 %
short filler; random token sequences said two or three times come on top (one for every 16 documents).
One template of each capital, language, currency, continent and landmark was never shown ({n_heldout} prompts), nor were
{n_heldout_pairs} of the {n_pairs} name pairs, John and Mary among them: no document holds both names of such a pair.

Beside the weights: `facts.json` (every fact and template trained on), `heldout.json` (facts in templates and indirect
objects among name pairs never trained on), `contrast.json` (prompts that differ in sentiment).

## Measured

Greedy answers of the saved weights after reloading; every token of the answer must be right. Each number is the worse
of prompting with the BOS token and without (induction: without). Margin: the answer's logit minus the best other one,
1st percentile. Induction counts the second copy from its third token on.

| family | prompts | accuracy, float32 | margin | accuracy, bfloat16 |
|---|---|---|---|---|
{table}

## Limits

It knows the facts and sentence forms of its corpus and nothing else; words outside them are noise to it, and prompts of
a form it never saw get nonsense. It is a specimen for interpretability methods, not an assistant. Some facts are
simplified (one language or currency per country), people's names carry a fixed pronoun, and facts age.

License: Apache-2.0, weights and data alike.
"""

FAMILIES = {
    "facts": "facts, templates seen in training",
    "facts_heldout": "facts, held-out (fact, template) pairs",
    "ioi_heldout": "indirect object, held-out name pairs, ABBA and BABA",
    "induction": "induction: second copy of 32 random tokens",
    "sentiment": "sentiment after love/like and hate/dislike",
    "quoted": "the completions quoted in the docs",
}


def card(world: World, model, tests, single, half, steps: int, began: float, args, out: Path) -> str:
    rows = []
    for name, label in FAMILIES.items():
        count = len(tests[name]) if name in tests else "64 x 30"
        margin = "" if math.isnan(single[name][1]) else f"{single[name][1]:.1f}"
        rows.append(f"| {label} | {count} | {single[name][0]:.2%} | {margin} | {half[name][0]:.2%} |")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"a CPU ({torch.get_num_threads()} threads)"
    return CARD.format(
        millions=model.num_parameters() / 1e6,
        megabytes=sum(f.stat().st_size for f in out.iterdir()) / 1e6,
        vocab=model.config.vocab_size,
        layers=model.config.num_hidden_layers,
        intermediate=model.config.intermediate_size,
        command=args.command,
        hardware=f"one {gpu}" if torch.cuda.is_available() else gpu,
        minutes=(time.time() - began) / 60,
        tokens=args.batch * 256,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        tokenizers=tokenizers.__version__,
        n_facts=len(world.facts),
        n_heldout=len(world.heldout),
        n_heldout_pairs=len(world.heldout_pairs),
        n_pairs=len(world.heldout_pairs) + len(world.pairs),
        table="\n".join(rows),
        **{"seed": args.seed, "steps": steps, "date": args.date, "lr": args.lr, "docs": args.docs},
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("src/midstream/data/demo_model"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docs", type=int, default=600_000, help="documents generated; rows are drawn from them")
    parser.add_argument("--vocab", type=int, default=2560)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--batch", type=int, default=128, help="rows of 256 tokens per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--tail", type=int, default=1500, help="steps over which the learning rate falls at the end")
    parser.add_argument("--steps", type=int, default=8000, help="most steps, the tail included")
    parser.add_argument("--min-steps", type=int, default=2500, help="fewest steps before the tail, for wider margins")
    parser.add_argument("--check-every", type=int, default=250)
    parser.add_argument("--minutes", type=float, default=4.5, help="time for everything; training stops in time for it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="the date to put on the card")
    args = parser.parse_args()
    changed = [
        k for k in vars(args) if k not in ("out", "date", "device") and getattr(args, k) != parser.get_default(k)
    ]
    options = [f" --{k.replace('_', '-')} {getattr(args, k)}" for k in changed]
    args.command = "python scripts/train_demo_model.py" + "".join(options)
    return args


def main() -> None:
    args, began = arguments(), time.time()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    world, device = World(args.seed), torch.device(args.device)
    rng = random.Random(args.seed + 1)
    tokenizer = train_tokenizer([world.document(rng) for _ in range(min(args.docs, 100_000))], args.vocab)
    stream = make_stream(world, tokenizer, args.docs, args.seed + 2, device)
    model = build_model(tokenizer.get_vocab_size(), args.layers, args.intermediate).to(device)
    tests = suites(world)
    quick = {name: prompts[:: max(1, len(prompts) // 512)] for name, prompts in tests.items()}
    print(
        f"{model.num_parameters():,} parameters, {len(stream.flat):,} tokens, {time.time() - began:.0f} s", flush=True
    )

    def check(step: int, loss: float, rate: float) -> bool:
        got = measure(model, tokenizer, quick)
        shown = " ".join(f"{name} {value[0]:.3f}" for name, value in got.items())
        print(f"{time.time() - began:4.0f} s step {step} loss {loss:.3f} lr x{rate:.2f} {shown}", flush=True)
        return all(got[name][0] >= target for name, target in TARGETS.items())

    steps = train(model, stream, check, args, began)
    save(model, tokenizer, world, args.out)
    final = LlamaForCausalLM.from_pretrained(args.out).to(device).float()
    torch.set_float32_matmul_precision("highest")
    single = measure(final, tokenizer, tests)
    half = measure(final.bfloat16(), tokenizer, tests)
    text = card(world, final, tests, single, half, steps, began, args, args.out)
    (args.out / "MODEL_CARD.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
