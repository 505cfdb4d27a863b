"""What a setting of the study is, and how a LoRA is trained for one of its tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

HEAD = "head.safetensors"
Evaluate = Callable[[dict[str, Tensor]], list[float]]


@dataclass(frozen=True)
class Setting:
    """A base network with LoRAs that are to be merged.

    Attributes:
        name: of the row.
        seed: of data, network and training.
        base: key -> weight that LoRAs change.
        loras: PEFT folders, one for each task.
        evaluate: weights -> share of right answers of each task, of what was kept back from training.
        same: all LoRAs were trained for one task; else each for its own, in order.
    """

    name: str
    seed: int
    base: dict[str, Tensor]
    loras: list[Path]
    evaluate: Evaluate
    same: bool = False


def train(
    network: nn.Module,
    head: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    targets: Sequence[str],
    rank: int,
    rate: float,
    out: Path,
) -> None:
    """Train a LoRA of the network (and the head) by PEFT and Adam, save both, and leave the network as it was.

    What an earlier run left in the folder is taken as it is.
    """
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file

    if not (out / HEAD).exists():
        tuned = get_peft_model(network, LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets)))
        learning = [*(weight for weight in tuned.parameters() if weight.requires_grad), *head.parameters()]
        optimizer = torch.optim.Adam(learning, rate)
        for x, y in batches:
            loss = nn.functional.cross_entropy(head(tuned(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        tuned.save_pretrained(str(out))
        tuned.unload()
        save_file(head.state_dict(), out / HEAD)
    head.load_state_dict(load_file(out / HEAD))
    head.requires_grad_(False)
