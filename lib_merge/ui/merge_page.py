"""The page: the tasks' forms on the left; buttons, progress and plan on the right; and what happens on each event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from .. import recipe as recipes
from ..errors import MergeError
from ..host import Host
from . import cards, filling, form, gr_compat, lora_lines
from .form import FormError
from .runs import RUNS, Run
from .task import DEVICE, DEVICES, EXISTS, EXISTS_CHOICES, FOLDER, KEEP_RECIPE, MEASURE, NAME, Task
from .task_form import TaskForm, Updates
from .widgets import Widget, choice

POLL_S = 0.4
_READING = "Reading the folders …"
_NOTHING_CHOSEN = "Choose models to see what will be done."


class MergePage:
    """Builds the page inside an open gradio context, and answers its events.

    Args:
        host: where models come from and results go to.
        tasks: what it offers, the first one shown.
    """

    def __init__(self, host: Host, tasks: Sequence[Task]) -> None:
        self._host = host
        with gr_compat.row():
            with gr.Column(scale=3, min_width=260, elem_id="merge_form"):
                self._build_form(tasks)
            with gr.Column(scale=2, min_width=260, elem_id="merge_side"):
                self._build_side()
        self._named = [
            ("", self._task.name, self._task),
            *(("", widget.name, widget) for widget in self._result),
            *((id, name, widget) for id, made in self._forms.items() for name, widget in made.widgets.items()),
        ]
        self._inputs = [widget.component for _, _, widget in self._named]

    # What it is made of

    def _build_form(self, tasks: Sequence[Task]) -> None:
        self._filled_note = gr_compat.html(elem_id="merge_note_filled")
        texts = {task.id: task.label for task in tasks}
        with gr.Column(visible=len(tasks) > 1):
            self._task = choice("task", "What to do", texts, tasks[0].id, "merge_task")
        self._forms: dict[str, TaskForm] = {}
        self._boxes = {}
        for task in tasks:
            with gr.Column(visible=task is tasks[0], elem_id=f"merge_{task.id}_form") as box:
                self._forms[task.id] = TaskForm(task, self._host)
            self._boxes[task.id] = box
        self._result = list(self._build_result(tasks[0]))
        with gr.Accordion("Recipe", open=False, elem_id="merge_section_recipe"):
            self._recipe_text = gr_compat.own(
                gr.Textbox(label="Recipe as JSON, as lib-merge run takes it", lines=8, elem_id="merge_recipe_text")
            )
            with gr_compat.row():
                self._write_recipe = gr_compat.button("Write the form's recipe", elem_id="merge_recipe_write")
                self._read_recipe = gr_compat.button("Fill the form from it", elem_id="merge_recipe_read")
            self._recipe_note = gr_compat.html(close=True, elem_id="merge_recipe_note")

    def _build_result(self, first: Task) -> Iterator[Widget]:
        folders = list(self._host.save_folders(first.writes))
        name = gr.Textbox(label="Name of the result", placeholder="made of the inputs", elem_id="merge_name")
        yield Widget(NAME, gr_compat.own(name), {})
        self._name_note = gr_compat.html(close=True, elem_id="merge_note_name")
        with gr.Accordion("Saving", open=False, elem_id="merge_section_saving"):
            with gr.Column(visible=len(folders) > 1) as self._folder_box:
                component = gr_compat.choice(folders, next(iter(folders), None), label="Folder", elem_id="merge_folder")
                yield Widget(FOLDER, component, {})
            exists = {value: text for text, value in EXISTS_CHOICES}
            yield choice(EXISTS, "Where a file of that name exists", exists, "number", "merge_exists")
            with gr.Column() as self._device_box:
                device = choice(DEVICE, "Compute on", DEVICES, "cpu", "merge_device")
            yield device
            keep = gr.Checkbox(value=True, label="Store the recipe in the result", elem_id="merge_keep_recipe")
            yield Widget(KEEP_RECIPE, gr_compat.own(keep), {})
            measure = gr.Checkbox(value=True, label="Measure every tensor for the report", elem_id="merge_measure")
            yield Widget(MEASURE, gr_compat.own(measure), {})

    def _build_side(self) -> None:
        with gr_compat.row():
            # The hosts' scripts press what ends in _generate and _interrupt on Ctrl+Enter and Esc.
            self._start = gr_compat.button("Merge", variant="primary", min_width=80, elem_id="merge_generate")
            self._stop = gr_compat.button(
                "Stop", variant="stop", min_width=80, interactive=False, elem_id="merge_interrupt"
            )
        self._made = gr.State("")  # id of a run whose result the lists do not show yet
        self._status = gr_compat.html(cards.idle_card(), elem_id="merge_status")
        with gr_compat.row():
            self._look = gr_compat.button(
                "Show progress", visible=not self._host.generators, elem_id="merge_show_progress"
            )
            self._use = gr_compat.button("Use this model now", visible=False, elem_id="merge_use")
        self._use_note = gr_compat.html(close=True, elem_id="merge_note_use")
        self._plan = gr_compat.html(cards.empty_plan_card(_READING), elem_id="merge_plan")
        self._refresh = gr_compat.button("Refresh the lists of models", size="sm", elem_id="merge_refresh")

    # What happens

    def listen(self, blocks: Any) -> None:
        """Connect the events; `blocks` is the Blocks the page lies in."""
        planned = [
            self._plan,
            self._name_note,
            *(note for made in self._forms.values() for note in made.notes.values()),
        ]
        planned.append(self._of_result(NAME))
        lists = [component for made in self._forms.values() for component in made.models()]
        for id, name, widget in self._named:
            if (id, name) == ("", "task"):
                shown = [*self._boxes.values(), *self._result_looks(), *planned]
                gr_compat.on(widget.component.input, self._choose_task, self._inputs, shown)
            elif name == "method":
                looks = self._forms[id].looks()
                gr_compat.on(widget.component.input, self._choose_method, self._inputs, [*looks, *planned])
            else:
                for event in gr_compat.edits(widget.component):
                    gr_compat.on(event, self._replan, self._inputs, planned, latest_only=True)
        self._listen_to_runs(blocks, [*lists, *planned])
        for made in self._forms.values():
            for adder, lines in made.adders:
                event = gr_compat.on(adder.input, self._add_lora, [adder, lines], [adder, lines])
                gr_compat.on(event.then, self._replan, self._inputs, planned)
        gr_compat.on(self._refresh.click, self._refreshed, self._inputs, [*lists, *planned])
        gr_compat.on(self._use.click, self._use_now, [], [self._use_note])
        everything = [*self._inputs, *(part for made in self._forms.values() for part in made.looks())]
        gr_compat.on(
            self._write_recipe.click, self._recipe_of_form, self._inputs, [self._recipe_text, self._recipe_note]
        )
        looks = [*self._boxes.values(), *self._result_looks()]
        self.filled = [*dict.fromkeys([*everything, *looks, *planned, self._filled_note])]
        read = [*self.filled, self._recipe_note]
        gr_compat.on(self._read_recipe.click, self._form_of_recipe, [self._recipe_text, *self._inputs], read)
        gr_compat.on(blocks.load, self._refreshed, self._inputs, [*lists, *planned])

    def _listen_to_runs(self, blocks: Any, refreshed: list[Any]) -> None:
        """Start, follow and stop; new lists, with the form as it is by then, follow a run that made something."""
        running = [self._status, self._start, self._stop, self._use, self._use_note, self._made]
        self._running_parts, self._refreshed_parts = running, refreshed
        queue = self._host.generators
        look: Any = self._look_once
        run: Any = self._run if queue else self._run_once
        attach: Any = self._attach if queue else look
        notes = [self._name_note, *(note for made in self._forms.values() for note in made.notes.values())]
        for listener, function, more in (
            (self._start.click, run, notes),
            (blocks.load, attach, []),
            (self._look.click, look, []),
        ):
            inputs = self._inputs if function is run else [self._made]
            event = gr_compat.on(listener, function, inputs, [*running, *more], queue=queue and function is not look)
            gr_compat.on(event.then, self._after, [self._made, *self._inputs], refreshed)
        gr_compat.on(self._stop.click, self._ask_to_stop, [], [self._status])

    def _read(self, raw: Sequence[Any]) -> tuple[TaskForm, dict[str, Any]]:
        """The form of the task that is chosen, and its values."""
        chosen = self._task.read(raw[0])
        return self._forms[chosen], self._values(chosen, raw)

    def _values(self, task: str, raw: Sequence[Any]) -> dict[str, Any]:
        """What stands in the form of a task, and in the entries that all tasks share."""
        named = zip(self._named, raw, strict=True)
        return {name: widget.read(value) for (id, name, widget), value in named if id in ("", task)}

    def _choose_task(self, *raw: Any) -> Updates:
        made, values = self._read(raw)
        look = self._task_look(made.task)
        return {**look, **self._planned(made, values | {FOLDER: next(iter(self._folders(made.task)), None)})}

    def _task_look(self, task: Task) -> Updates:
        """Its form alone, its word on the button, and the folders and devices that its results can have."""
        folders = self._folders(task)
        return {
            **{box: gr.update(visible=id == task.id) for id, box in self._boxes.items()},
            self._start: gr.update(value=task.verb),
            self._of_result(FOLDER): gr.update(choices=folders, value=next(iter(folders), None)),
            self._folder_box: gr.update(visible=len(folders) > 1),
            self._device_box: gr.update(visible=task.writes == "checkpoint"),
        }

    def _result_looks(self) -> list[Any]:
        return [self._start, self._of_result(FOLDER), self._folder_box, self._device_box]

    def _folders(self, task: Task) -> list[str]:
        return list(self._host.save_folders(task.writes))

    def _of_result(self, name: str) -> Any:
        """The component of an entry that all tasks share."""
        return next(widget.component for widget in self._result if widget.name == name)

    def _add_lora(self, chosen: Any, text: str) -> list[Any]:
        """The LoRA that was chosen becomes a line; the list is empty again."""
        name = gr_compat.blank(chosen)
        return [gr.update(value=None), lora_lines.added(text, name) if name else text]

    def _choose_method(self, *raw: Any) -> Updates:
        made, values = self._read(raw)
        method = made.task.method(values)
        values |= {param.name: param.default for param in method.params} if method else {}
        return {**made.choose_method(values), **self._planned(made, values)}

    def _replan(self, *raw: Any) -> Updates:
        return self._planned(*self._read(raw))

    def _planned(self, made: TaskForm, values: dict[str, Any]) -> Updates:
        """The plan card and the lines below the fields, from headers alone."""
        notes: Updates = made.plain_notes()
        known = made.facts(values)
        notes |= {made.notes[name]: cards.model_note(fact, None) for name, fact in known.items() if name in made.notes}
        notes[self._name_note] = ""
        try:
            request = form.request(made.task, values, self._host)
            planned = request.run(self._host, dry_run=True)
        except FormError as error:
            shown = {name: what for name, what in error.fields.items() if values.get(name) not in (None, "")}
            notes |= {self._note_of(made, name): cards.field_note(what) for name, what in shown.items()}
            return {**notes, self._plan: cards.empty_plan_card(error.what if shown else _NOTHING_CHOSEN)}
        except MergeError as error:
            return {**notes, self._plan: cards.refusal_card(error)}
        card = cards.planned_card(planned, list(known.items()))
        return {**notes, self._plan: card, self._of_result(NAME): gr.update(placeholder=planned.output.name)}

    def _note_of(self, made: TaskForm, name: str) -> Any:
        """The line below the entry of that name; the parameters share one."""
        place = "params" if name in made.task.params else name
        return made.notes.get(place, self._name_note)

    def _begin(self, raw: Sequence[Any]) -> Run | Updates:
        """Start a run, or say below each field what is wrong with it."""
        made, values = self._read(raw)
        try:
            return RUNS.start(form.request(made.task, values, self._host), self._host)
        except FormError as error:
            notes = {self._note_of(made, name): cards.field_note(what) for name, what in error.fields.items()}
            wrong = [(made.label(name), what) for name, what in error.fields.items()]
            return {**notes, self._status: cards.form_card(wrong), self._made: ""}
        except MergeError as error:
            return {self._status: cards.error_card(error), self._made: ""}

    def _run(self, *raw: Any) -> Iterator[Updates]:
        begun = self._begin(raw)
        if isinstance(begun, Run):
            yield from self._follow(begun)
        else:
            yield begun

    def _run_once(self, *raw: Any) -> Updates:
        begun = self._begin(raw)
        return self._running(begun) if isinstance(begun, Run) else begun

    def _attach(self, seen: str) -> Iterator[Updates]:
        """A page that was just loaded takes up the run that goes on, or shows what the last one made."""
        run = RUNS.latest
        if run is None or run.over:  # its lists were made after that
            yield {self._status: gr.update()} if run is None else self._ended(run, seen=run.job.id)
        else:
            yield from self._follow(run)

    def _look_once(self, seen: str) -> Updates:
        run = RUNS.latest
        if run is None:
            return {self._status: gr.update()}
        return self._ended(run, seen) if run.over else self._running(run)

    def _follow(self, run: Run) -> Iterator[Updates]:
        while not run.over:
            yield self._running(run)
            run.job.wait(POLL_S)
        yield self._ended(run)

    def _running(self, run: Run) -> Updates:
        return {
            self._status: cards.job_card(run.job),
            self._start: gr.update(interactive=False),
            self._stop: gr.update(interactive=True),
            self._use: gr.update(visible=False),
            self._use_note: "",
            self._made: "",
        }

    def _ended(self, run: Run, seen: str = "") -> Updates:
        done = run.job.state == "done"
        usable = done and self._host.use is not None and run.request.task.writes == "checkpoint"
        return {
            self._status: cards.job_card(run.job),
            self._start: gr.update(interactive=True),
            self._stop: gr.update(interactive=False),
            self._use: gr.update(visible=usable),
            self._made: run.job.id if done and run.job.id != seen else "",
        }

    def _after(self, made: str, *raw: Any) -> Updates:
        """New lists after a run that made something; nothing where it made nothing, so that the form stays as it is."""
        return self._refreshed(*raw) if made else {self._plan: gr.update()}

    def _ask_to_stop(self) -> Updates:
        RUNS.stop()
        run = RUNS.latest
        return {self._status: cards.job_card(run.job) if run else cards.idle_card()}

    def _refreshed(self, *raw: Any) -> Updates:
        """Lists of models as the folders are now; what was chosen stays chosen as long as it is there."""
        self._host.look_again()
        made, values = self._read(raw)
        lists: Updates = {}
        for other in self._forms.values():
            lists |= other.refreshed(values if other is made else {})
        values |= dict.fromkeys(made.gone(values))
        return {**lists, **self._planned(made, values)}

    def _use_now(self) -> Updates:
        run = RUNS.latest
        if run is None or run.job.state != "done" or self._host.use is None:
            return {self._use_note: ""}
        try:
            self._host.use(run.job.result.output)
        except Exception as error:  # the host's own code: whatever it raises, the saved file stays as it is
            return {self._use_note: cards.error_card(error)}
        return {self._use_note: cards.help_note(f"{self._host.name} uses {run.job.result.output.name} from now on.")}

    # What other pages ask for

    def follow_after(self, event: Any) -> None:
        """Show the run that an event of another page has begun."""
        function: Any = self._attach if self._host.generators else self._look_once
        followed = gr_compat.on(event.then, function, [self._made], self._running_parts, queue=self._host.generators)
        gr_compat.on(followed.then, self._after, [self._made, *self._inputs], self._refreshed_parts)

    @property
    def inputs(self) -> list[Any]:
        """The components whose values are the form."""
        return self._inputs

    def recipe_of(self, raw: Sequence[Any]) -> recipes.Recipe:
        """The recipe that the form says.

        Raises:
            FormError: an entry is missing or cannot be used.
        """
        made, values = self._read(raw)
        return form.request(made.task, values, self._host).recipe

    def fill(self, recipe: recipes.Recipe, raw: Sequence[Any], title: str = "") -> Updates:
        """The form filled from a recipe, updates of `filled`; models that it leaves open stay as they are chosen.

        Args:
            recipe: of a task that the tab has.
            raw: values of `inputs`.
            title: what the recipe is called, to be told above the form.

        Raises:
            MergeError: the form cannot show it.
        """
        if recipe.task not in self._forms:
            raise MergeError(f"the tab has no task {recipe.task} yet", hint="run the recipe with lib-merge run")
        made = self._forms[recipe.task]
        values = filling.values_of(made.task, recipe, self._host)
        _, before = self._read(raw)
        there = self._values(recipe.task, raw)
        values |= {name: there[name] for name in filling.left_open(made.task, recipe)}
        folders = self._folders(made.task)
        folder = before[FOLDER] if before[FOLDER] in folders else next(iter(folders), None)
        shown = {**before, **values, "task": recipe.task, NAME: before[NAME], FOLDER: folder}
        look = self._task_look(made.task)
        look[self._of_result(FOLDER)] = gr.update(choices=folders, value=folder)
        task = {self._task.component: gr.update(value=self._task.show(recipe.task))}
        note = cards.filled_note(title, filling.not_found(made.task, recipe, self._host))
        return {**made.show(values), **look, **task, **self._planned(made, shown), self._filled_note: note}

    def _recipe_of_form(self, *raw: Any) -> Updates:
        made, values = self._read(raw)
        try:
            text = form.recipe_text(form.request(made.task, values, self._host))
        except MergeError as error:
            return {self._recipe_note: cards.error_card(error)}
        return {self._recipe_text: text, self._recipe_note: ""}

    def _form_of_recipe(self, text: str, *raw: Any) -> Updates:
        try:
            return {**self.fill(recipes.from_json(text), raw), self._recipe_note: ""}
        except MergeError as error:
            return {self._recipe_note: cards.error_card(error)}
