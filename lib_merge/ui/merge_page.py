"""The page: the tasks' forms on the left; buttons, progress and plan on the right; and what happens on each event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import gradio as gr

from .. import recipe as recipes
from ..errors import MergeError
from ..host import Host
from . import block_look, cards, filling, form, gr_compat, lora_lines
from .form import FormError
from .run_panel import RunPanel
from .runs import RUNS, Run
from .task import DEVICE, DEVICES, EXISTS, EXISTS_CHOICES, FOLDER, KEEP_RECIPE, MEASURE, NAME, Task
from .task_form import TaskForm, Updates
from .widgets import Widget, choice

# The run whose result is shown, among the values of the form.
SHOWN = "shown"
_READING = "Reading the folders …"


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
            ("", SHOWN, Widget(SHOWN, self._runs.shown, {})),
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
        self._runs = RunPanel(self._host)
        self._plan = gr_compat.html(cards.empty_plan_card(_READING), elem_id="merge_plan")
        self._refresh = gr_compat.button("Refresh the lists of models", size="sm", elem_id="merge_refresh")
        self._runs.build_list()

    # What happens

    def listen(self, blocks: Any) -> None:
        """Connect the events; `blocks` is the Blocks the page lies in."""
        planned = [
            self._plan,
            self._name_note,
            *(note for made in self._forms.values() for note in made.notes.values()),
        ]
        planned += [self._of_result(NAME), self._runs.status, self._runs.shown]
        lists = [component for made in self._forms.values() for component in made.models()]
        for id, name, widget in self._named:
            if (id, name) == ("", "task"):
                shown = [*self._boxes.values(), *self._result_looks(), *planned]
                gr_compat.on(widget.component.input, self._choose_task, self._inputs, shown)
            elif name == "method":
                looks = self._forms[id].looks()
                gr_compat.on(widget.component.input, self._choose_method, self._inputs, [*looks, *planned])
            elif name != SHOWN:
                for event in gr_compat.edits(widget.component):
                    gr_compat.on(event, self._replan, self._inputs, planned, latest_only=True)
        notes = [self._name_note, *(note for made in self._forms.values() for note in made.notes.values())]
        refreshed = self._refreshed, [*lists, *planned]
        self._runs.listen(blocks, self._begin, (self._inputs, notes), (self._lists, lists), refreshed)
        for made in self._forms.values():
            for adder, lines in made.adders:
                event = gr_compat.on(adder.input, self._add_lora, [adder, lines], [adder, lines])
                gr_compat.on(event.then, self._replan, self._inputs, planned)
            for shaper, text in made.shapers:
                parts = [shaper, made.widgets["A"].component, text]
                event = gr_compat.on(shaper.input, partial(self._write_shape, made), parts, [shaper, text])
                gr_compat.on(event.then, self._replan, self._inputs, planned)
            if "matches" in made.notes:
                names = ["A", *made.patterns(made.widgets)]
                parts = [made.widgets[name].component for name in names]
                for typed in (part for part in parts if isinstance(part, gr.Textbox)):
                    match = partial(self._match, made, names)
                    gr_compat.while_typing(typed, match, parts, [made.notes["matches"]])
        gr_compat.on(self._refresh.click, self._refreshed, self._inputs, [*lists, *planned])
        everything = [*self._inputs, *(part for made in self._forms.values() for part in made.looks())]
        gr_compat.on(
            self._write_recipe.click, self._recipe_of_form, self._inputs, [self._recipe_text, self._recipe_note]
        )
        looks = [*self._boxes.values(), *self._result_looks()]
        self.filled = [*dict.fromkeys([*everything, *looks, *planned, self._filled_note])]
        read = [*self.filled, self._recipe_note]
        gr_compat.on(self._read_recipe.click, self._form_of_recipe, [self._recipe_text, *self._inputs], read)
        gr_compat.on(blocks.load, self._refreshed, self._inputs, [*lists, *planned])

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
            self._runs.start: gr.update(value=task.verb),
            self._of_result(FOLDER): gr.update(choices=folders, value=next(iter(folders), None)),
            self._folder_box: gr.update(visible=len(folders) > 1),
            self._device_box: gr.update(visible=task.writes == "checkpoint" and task.gpu),
        }

    def _result_looks(self) -> list[Any]:
        return [self._runs.start, self._of_result(FOLDER), self._folder_box, self._device_box]

    def _folders(self, task: Task) -> list[str]:
        return list(self._host.save_folders(task.writes))

    def _of_result(self, name: str) -> Any:
        """The component of an entry that all tasks share."""
        return next(widget.component for widget in self._result if widget.name == name)

    def _add_lora(self, chosen: Any, text: str) -> list[Any]:
        """The LoRA that was chosen becomes a line; the list is empty again."""
        name = gr_compat.blank(chosen)
        return [gr.update(value=None), lora_lines.added(text, name) if name else text]

    def _write_shape(self, made: TaskForm, chosen: Any, base: Any, text: str) -> list[Any]:
        """The shape that was chosen becomes text; the list is empty again."""
        shape = gr_compat.blank(chosen)
        return [gr.update(value=None), made.shape(shape, base) if shape else text]

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
        looked: Updates = {}
        if "blocks" in made.notes and "A" in known and (look := block_look.blocks_note(values["blocks"], known["A"])):
            notes |= (looked := {made.notes["blocks"]: look})
        looked |= self._matched(made, values)
        notes |= looked
        request = None
        try:
            request = form.request(made.task, values, self._host)
            planned = request.run(self._host, dry_run=True)
        except FormError as error:
            shown = {name: what for name, what in error.fields.items() if values.get(name) not in (None, "")}
            notes |= {self._note_of(made, name): cards.field_note(what) for name, what in shown.items()} | looked
            notes |= self._runs.marked(values[SHOWN], None)
            missing = [made.label(name) for name in error.fields if name not in shown]
            said = error.what if shown else f"Choose {', '.join(missing)} to see what will be done."
            return {**notes, self._plan: cards.empty_plan_card(said)}
        except MergeError as error:
            return {**notes, **self._runs.marked(values[SHOWN], request), self._plan: cards.refusal_card(error)}
        notes |= self._runs.marked(values[SHOWN], request)
        card = cards.planned_card(planned, list(known.items()), replaces=request.exists == "overwrite")
        return {**notes, self._plan: card, self._of_result(NAME): gr.update(placeholder=planned.output.name)}

    def _matched(self, made: TaskForm, values: dict[str, Any]) -> Updates:
        """The list below the rules and filters."""
        return {made.notes["matches"]: made.matches(values)} if "matches" in made.notes else {}

    def _match(self, made: TaskForm, names: Sequence[str], *raw: Any) -> Any:
        """That list alone, while one types."""
        return made.matches({name: made.widgets[name].read(value) for name, value in zip(names, raw, strict=True)})

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
            return {**notes, **self._runs.refused(cards.form_card(wrong))}
        except MergeError as error:
            return self._runs.refused(cards.error_card(error))

    def _lists(self) -> Updates:
        """The lists of models as the folders are now; what is chosen stays."""
        self._host.look_again()
        lists: Updates = {}
        for made in self._forms.values():
            lists |= made.refreshed({})
        return lists

    def _refreshed(self, *raw: Any) -> Updates:
        """Lists of models as the folders are now; what was chosen stays chosen as long as it is there."""
        self._host.look_again()
        made, values = self._read(raw)
        lists: Updates = {}
        for other in self._forms.values():
            lists |= other.refreshed(values if other is made else {})
        values |= dict.fromkeys(made.gone(values))
        return {**lists, **self._planned(made, values)}

    # What other pages ask for

    def follow_after(self, event: Any) -> None:
        """Show the run that an event of another page has begun."""
        self._runs.follow_after(event)

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
