"""The tab as a person meets it: choosing, pressing and reading in a real page, the same on every gradio."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Machines that run tests may be slow and busy; nothing here waits longer than it must.
PATIENCE_MS = 120_000

_COUNT = "window.presses = 0; addEventListener('pointerdown', e => { window.presses += e.isTrusted ? 1 : 0 }, true);"


class Tab:
    """One open page.

    Args:
        page: Playwright's.
        url: of the server.
    """

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.complaints: list[str] = []
        self.task = "merge"  # whose form `choose`, `value` and `note` mean
        page.set_default_timeout(PATIENCE_MS)
        page.route(lambda address: not address.startswith(url), lambda route: route.abort())
        page.add_init_script(_COUNT)
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(f"page error: {error}"))

    def _note(self, message: Any) -> None:
        ours = message.location.get("url", "").startswith(self.url)
        if message.type == "error" and ours:
            self.complaints.append(message.text)

    def open(self, query: str = "") -> None:
        """Load the page and wait until it has its first answers."""
        with self._leaving():
            self.page.goto(f"{self.url}{query}", wait_until="commit")
        self.ready()

    def reload(self) -> None:
        """Load it anew."""
        with self._leaving():
            self.page.reload(wait_until="commit")
        self.ready()

    def close(self) -> None:
        """Leave for good."""
        with self._leaving():
            self.page.context.close()

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """What the old page says of its cut connections while it goes is not counted."""
        before = list(self.complaints)
        yield
        self.complaints = before

    def ready(self) -> None:
        self.page.wait_for_selector("#merge_generate")
        self.page.wait_for_function("!document.querySelector('#merge_plan').innerText.includes('Reading')")

    @property
    def presses(self) -> int:
        """Pointer presses since the page was loaded."""
        return int(self.page.evaluate("window.presses"))

    def field(self, name: str) -> str:
        """Selector of an entry of the form."""
        return f"#merge_{self.task}_{name}"

    def choose_task(self, id: str, label: str) -> None:
        """Choose what to do: two presses."""
        self.page.click("#merge_task input")
        self.entry(label).click()
        self.page.locator(f"#merge_{id}_form").first.wait_for()
        self.task = id

    def choose(self, name: str, text: str) -> None:
        """Open a list by a press and press an entry: two presses."""
        self.page.click(f"{self.field(name)} input")
        self.entry(text).click()

    def type_choice(self, name: str, text: str) -> None:
        """Choose by the keyboard, the focus being wherever Tab leads.

        An answer of the server that arrives while one types may take the text away: like a person, look and type again.
        """
        for _ in range(3):
            self._pick(name, text)
            if self.value(name) == text:
                return
        raise AssertionError(f"{text!r} cannot be typed into {name}: it holds {self.value(name)!r}")

    def type_entry(self, name: str, text: str) -> None:
        """Type into an entry of any kind, as `type_choice` does into a list of models."""
        if name == "add_lora":  # the list is empty again when the choice has become a line
            self._pick(name, text)
            until(lambda: text in self.page.input_value(f"{self.field('loras')} textarea"), self.page)
        elif not self.page.locator(f"{self.field(name)} [data-testid=textbox]").count():
            self.type_choice(name, text)
        else:
            self.tab_to(self.field(name))
            self.page.keyboard.press("Control+a")
            self.page.keyboard.insert_text(text)
            self.page.keyboard.press("Tab")

    def _pick(self, name: str, text: str) -> None:
        self.tab_to(f"{self.field(name)} input")
        self.page.keyboard.press("Control+a")
        self.page.keyboard.type(text)
        self.page.wait_for_timeout(300)
        self.page.keyboard.press("Enter")
        self.page.wait_for_timeout(300)

    def tab_to(self, selector: str) -> None:
        """Press Tab until the focus is there."""
        for _ in range(60):
            if self.page.evaluate("s => Boolean(document.activeElement.closest(s))", selector):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"Tab does not lead to {selector}")

    def entry(self, text: str) -> Any:
        """An entry of the list that is open."""
        whole = re.compile(rf"^\W*{re.escape(text)}\s*$")
        return self.page.locator("li.item:visible, [role=option]:visible").filter(has_text=whole).first

    def turn_to(self, title: str) -> None:
        """Press the name of a page; some versions build a second, unseen row of names to measure it."""
        named = self.page.locator(f"#merge_page_{title.lower()}-button")
        plain = self.page.locator("#merge_pages > .tab-nav button").filter(has_text=title)
        (named if named.count() else plain).last.click()

    def merge(self) -> None:
        self.page.click("#merge_generate")

    def made(self, name: str) -> str:
        """Wait until a run of that name is over; returns what the status says of it."""
        self.page.wait_for_function(
            "name => { const said = document.querySelector('#merge_status').innerText;"
            " return said.includes(name) && /Merged|Baked|Converted|Done|Not done/.test(said) }",
            arg=name,
        )
        return self.status()

    def status(self) -> str:
        return str(self.page.locator("#merge_status .lm-card").first.inner_text())

    def plan(self) -> str:
        return str(self.page.locator("#merge_plan .lm-card").first.inner_text())

    def note(self, name: str) -> str:
        return str(self.page.locator(self.field(f"note_{name}")).first.inner_text())

    def value(self, name: str) -> str:
        return str(self.page.locator(f"{self.field(name)} input").first.input_value())

    def wait_status(self, *words: str) -> str:
        """Wait until the status says one of these words; returns all that it says."""
        return self._wait("#merge_status", words)

    def wait_plan(self, *words: str) -> str:
        """Wait until the plan says one of these words."""
        return self._wait("#merge_plan", words)

    def wait_text(self, where: str, *words: str) -> str:
        """Wait until an element says one of these words; returns all that it says."""
        return self._wait(where, words)

    def _wait(self, where: str, words: tuple[str, ...]) -> str:
        try:
            self.page.wait_for_function(
                "([where, words]) => words.some(word => document.querySelector(where).innerText.includes(word))",
                arg=[where, list(words)],
            )
        except Exception as error:
            raise AssertionError(f"{words} not in {self.page.inner_text('#merge_root')}") from error
        return str(self.page.locator(where).first.inner_text())


def until(true: Callable[[], bool], page: Any, timeout_ms: int = PATIENCE_MS) -> None:
    """Wait until something is true, letting the page work meanwhile."""
    waited = 0
    while not true():
        assert waited < timeout_ms, "waited too long"
        page.wait_for_timeout(50)
        waited += 50
