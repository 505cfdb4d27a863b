"""All tasks in the order in which the tab shows them."""

from __future__ import annotations

from ..form import Task
from .merge_checkpoints import MERGE_CHECKPOINTS

TASKS: tuple[Task, ...] = (MERGE_CHECKPOINTS,)
BY_ID = {task.id: task for task in TASKS}
