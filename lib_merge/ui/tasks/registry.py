"""All tasks in the order in which the tab shows them."""

from __future__ import annotations

from ..task import Task
from .bake_loras import BAKE_LORAS
from .combine_loras import COMBINE_LORAS
from .convert_checkpoint import CONVERT_CHECKPOINT
from .extract_lora import EXTRACT_LORA
from .fold_adapter import FOLD_ADAPTER
from .merge_checkpoints import MERGE_CHECKPOINTS
from .resize_lora import RESIZE_LORA

TASKS: tuple[Task, ...] = (
    MERGE_CHECKPOINTS,
    BAKE_LORAS,
    CONVERT_CHECKPOINT,
    COMBINE_LORAS,
    EXTRACT_LORA,
    RESIZE_LORA,
    FOLD_ADAPTER,
)
BY_ID = {task.id: task for task in TASKS}
