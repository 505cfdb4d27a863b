"""The right column: the buttons that start and stop runs, the card of the one that goes on, the list of all."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gradio as gr

from ..host import Host
from . import cards, gr_compat, run_cards
from .form import Request
from .runs import RUNS, Run

POLL_S = 0.4
# A loop that has not told anything for so long has lost its page.
_LOST_S = 5.0
_ALL = "all that wait"
_EARLIER = "earlier"
Updates = dict[Any, Any]


class RunPanel:
    """Buttons, status and list of the runs; built inside an open gradio context."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._loops: dict[str, float] = {}
        with gr_compat.row():
            # The hosts' scripts press what ends in _generate and _interrupt on Ctrl+Enter and Esc.
            self.start = gr_compat.button("Merge", variant="primary", min_width=80, elem_id="merge_generate")
            self._stop = gr_compat.button(
                "Stop", variant="stop", min_width=80, interactive=False, elem_id="merge_interrupt"
            )
        self._made = gr.State("")  # id of a run whose result the lists of models do not show yet
        self.shown = gr.State("")  # id of the run whose end the card shows, and whether it is marked as an earlier one
        self._begun = gr.State("")  # id of the run that the last click put in line; empty where it was refused
        self._loop = gr.State("")  # the loop that tells this page how the runs go on
        self.status = gr_compat.html(cards.idle_card(), elem_id="merge_status")
        with gr_compat.row():
            self._look = gr_compat.button("Show progress", visible=not host.generators, elem_id="merge_show_progress")
            self._use = gr_compat.button("Use this model now", visible=False, elem_id="merge_use")
        self._note = gr_compat.html(close=True, elem_id="merge_note_use")

    def build_list(self) -> None:
        """The list of runs, and the way to take out one that waits."""
        self._jobs = gr_compat.html(elem_id="merge_jobs")
        with gr.Column(visible=False, elem_id="merge_waiting_box") as self._waiting_box:
            self._waiting = gr_compat.choice([], None, label="Runs that wait", elem_id="merge_waiting")
            self._take_out = gr_compat.button("Take it out", size="sm", elem_id="merge_take_out")

    def listen(
        self,
        blocks: Any,
        begin: Callable[[Sequence[Any]], Run | Updates],
        form: tuple[list[Any], list[Any]],
        lists: tuple[Callable[[], Updates], list[Any]],
        refreshed: tuple[Callable[..., Updates], list[Any]],
    ) -> None:
        """Connect the events.

        Args:
            blocks: the Blocks the page lies in.
            begin: the values of the form -> the run that was started, or what to show instead.
            form: its components, and what `begin` may update besides the panel.
            lists: makes the lists of models as they are now; and what it updates.
            refreshed: makes new lists and a new plan of the form as it is by then; and what it updates.
        """
        self._begin = begin
        self._lists, models = lists
        inputs, notes = form
        refresh, refreshed_parts = refreshed
        queue = self._host.generators
        mine = [self.status, self._stop, self._use, self._note, self._made, self.shown, self._loop, *self._list()]

        def after(made: str, *raw: Any) -> Updates:
            """New lists after a run that made something; else the form stays as it is."""
            return refresh(*raw) if made else {self._made: ""}

        begun = gr_compat.on(
            self.start.click, self._put_in_line, inputs, [self.status, self._note, self.shown, self._begun, *notes]
        )
        self._follow_parts = [*mine, *models]
        self._after = lambda event: gr_compat.on(
            event.then, after, [self._made, *inputs], [self._made, *refreshed_parts]
        )
        # A click is answered at once; gradio 3 keeps a second one waiting as long as the answer goes on.
        for listener, function, first in (
            (begun.then, self._follow_begun if queue else self._look_begun, [self._begun, self._loop]),
            (blocks.load, self._attach if queue else self._look_once, [self._made]),
            (self._look.click, self._look_once, [self._made]),
        ):
            follows = queue and function != self._look_once
            self._after(gr_compat.on(listener, function, first, self._follow_parts, queue=follows))
        # What comes of these two is told by the loop alone: an answer of theirs could come after its last word.
        gr_compat.on(self._stop.click, self._ask_to_stop)
        gr_compat.on(self._take_out.click, self._take_it_out, [self._waiting])
        gr_compat.on(self._use.click, self._use_now, [self.shown], [self._note])

    def follow_after(self, event: Any) -> None:
        """Show the run that an event of another page has put in line."""
        queue = self._host.generators
        function: Any = self._follow_other if queue else self._look_other
        self._after(gr_compat.on(event.then, function, [], self._follow_parts, queue=queue))

    def _list(self) -> list[Any]:
        return [self._jobs, self._waiting_box, self._waiting]

    # Answers

    def refused(self, html: str) -> Updates:
        """What the panel shows of a run that could not begin; the card keeps telling of one that goes on."""
        return {self._note: html} if RUNS.busy else {self.status: html, self.shown: ""}

    def marked(self, shown: str | None, request: Request | None) -> Updates:
        """Say of a result that is shown whether it is what the form asks for now; nothing where nothing changes."""
        id, _, mark = (shown or "").partition(" ")
        run = RUNS.find(id)
        if run is None or RUNS.busy or (earlier := run.request != request) == bool(mark):
            return {}
        return {
            self.status: run_cards.job_card(run.job, earlier=earlier),
            self.shown: f"{id} earlier" if earlier else id,
        }

    def _put_in_line(self, *raw: Any) -> Updates:
        begun = self._begin(raw)
        if isinstance(begun, Run):
            return {self._note: "", self._begun: begun.job.id}
        return {self._note: "", self._begun: "", **begun}

    def _follow_begun(self, begun: str, loop: str) -> Iterator[Updates]:
        followed = RUNS.busy and time.monotonic() - self._loops.get(loop, -_LOST_S) < _LOST_S
        if not begun or followed:  # this page follows the runs already
            yield {self._made: ""}
        else:
            yield from self._follow("")

    def _look_begun(self, begun: str, loop: str) -> Updates:
        return self._look_once("") if begun else {self._made: ""}

    def _follow_other(self) -> Iterator[Updates]:
        yield from self._follow("")

    def _look_other(self) -> Updates:
        return self._look_once("")

    def _attach(self, seen: str) -> Iterator[Updates]:
        """A page that was just loaded takes up the runs that go on, or shows what the last one made."""
        if RUNS.busy:
            yield from self._follow(seen)
        else:  # its lists were made after that
            yield self._ended(seen=RUNS.latest.job.id if RUNS.latest else "")

    def _look_once(self, seen: str) -> Updates:
        return {**self._running(), **self._queue_look()} if RUNS.busy else self._ended(seen)

    def _follow(self, seen: str) -> Iterator[Updates]:
        loop, told, ended = uuid.uuid4().hex, None, len(_ended())
        try:
            while RUNS.busy:
                self._loops[loop] = time.monotonic()
                look = self._queue_look()
                lists = {} if len(_ended()) == ended else self._lists()
                ended = len(_ended())
                yield {**self._running(), self._loop: loop, **lists, **({} if look == told else look)}
                told = look
                if (run := RUNS.latest) is not None:
                    run.job.wait(POLL_S)
        finally:
            self._loops.pop(loop, None)
        yield self._ended(seen)

    def _running(self) -> Updates:
        run = RUNS.latest
        return {
            self.status: run_cards.job_card(run.job) if run else cards.idle_card(),
            self._stop: gr.update(interactive=True),
            self._use: gr.update(visible=False),
            self._made: "",
            self.shown: "",
        }

    def _ended(self, seen: str = "") -> Updates:
        run = RUNS.latest
        if run is None:
            return {self._made: ""}
        done = run.job.state == "done"
        usable = done and run.request.task.writes == "checkpoint" and self._host.use is not None
        return {
            self.status: run_cards.job_card(run.job),
            self._stop: gr.update(interactive=False),
            self._use: gr.update(visible=usable),
            self._made: run.job.id if done and run.job.id != seen else "",
            self.shown: run.job.id,
            **self._queue_look(),
        }

    def _queue_look(self) -> Updates:
        """The list of all runs, and of those that wait to choose from."""
        names = [_name(run) for run in RUNS.waiting]
        offered = [*names, *([_ALL] if len(names) > 1 else [])]
        return {
            self._jobs: run_cards.job_list([run.job for run in RUNS.all]),
            self._waiting_box: gr.update(visible=bool(names)),
            self._waiting: gr.update(choices=offered, value=next(iter(offered), None)),
        }

    def _ask_to_stop(self) -> None:
        RUNS.stop()

    def _take_it_out(self, chosen: Any) -> None:
        for run in RUNS.waiting:
            if gr_compat.blank(chosen) in (_ALL, _name(run)):
                RUNS.stop(run.job.id)

    def _use_now(self, shown: str) -> Updates:
        run = RUNS.find(shown.partition(" ")[0])
        if run is None or run.job.state != "done" or self._host.use is None:
            return {self._note: ""}
        try:
            self._host.use(run.job.result.output)
        except Exception as error:  # the host's own code: whatever it raises, the saved file stays as it is
            return {self._note: cards.error_card(error)}
        return {self._note: cards.help_note(f"{self._host.name} uses {run.job.result.output.name} from now on.")}


def _ended() -> list[Run]:
    return [run for run in RUNS.all if run.over]


def _name(run: Run) -> str:
    """What a run is called in the list of those that wait; no two alike."""
    return f"{run.job.title} ({run.job.id[:4]})"
