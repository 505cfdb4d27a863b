from __future__ import annotations

import re
import threading

import pytest

from lib_merge import CancelledError, Job, MergeError, Progress
from lib_merge.ui import run_cards
from tests.ui.test_cards import text


def job(*progress):
    """A job that has told so much and waits."""
    told, go = threading.Event(), threading.Event()

    def work(follow, cancel):
        for item in progress:
            follow(item)
        told.set()
        go.wait(10)

    made = Job("A + B", work).start()
    told.wait(10)
    return made, go


def test_progress_has_a_bar_that_can_be_read_aloud():
    running, go = job(Progress("merging", 250_000_000, 1_000_000_000, "model.w"))
    running.started -= 10
    html = run_cards.job_card(running)
    go.set()
    assert re.search(r"role='progressbar'[^>]*aria-valuenow='25'", html)
    assert "role='status'" in html
    said = text(html)
    assert said.startswith("Merging 25% A + B 250.0 MB of 1.00 GB · 10 s gone · about 30 s left · 25 MB/s · RAM ")
    assert re.search(r"\d [MG]B model\.w$", said)


def test_a_run_that_has_told_nothing_yet():
    running, go = job()
    assert text(run_cards.job_card(running)).startswith("Starting 0%")
    go.set()


def test_how_a_run_ended():
    def fail(error):
        def work(follow, cancel):
            raise error

        ended = Job("A + B", work).start()
        ended.wait(10)
        return text(run_cards.job_card(ended))

    assert fail(MergeError("broken", file="/x/a.safetensors", hint="mend it")).startswith(
        "Not done A + B Error: broken a.safetensors mend it"
    )
    assert fail(CancelledError("stopped")).startswith("Stopped A + B: stopped after 0.0 s; nothing was written.")
    assert "KeyError: 'odd'" in fail(KeyError("odd"))


def test_a_run_that_waits_and_one_that_never_began():
    waits = Job("A + B", lambda follow, cancel: None)
    assert text(run_cards.job_card(waits)) == "Waiting A + B Begins when the runs before it are over."
    waits.stop()
    assert text(run_cards.job_card(waits)).startswith("Stopped A + B: stopped before it began; nothing was written.")


def test_a_result_that_the_form_no_longer_asks_for_says_so():
    ended = Job("A + B", lambda follow, cancel: 1 / 0).start()
    ended.wait(10)
    assert "lm-bad" in run_cards.job_card(ended)
    earlier = run_cards.job_card(ended, earlier=True)
    assert text(earlier).startswith("Not done (an earlier run) A + B")
    assert "lm-bad" not in earlier


@pytest.mark.portable
def test_the_list_has_every_run_with_its_state():
    def fail(follow, cancel):
        raise MergeError("broken", hint="mend it")

    running, go = job(Progress("merging", 1, 4))
    failed = Job("C + D", fail).start()
    failed.wait(10)
    waits = Job("E + F", fail)
    before = run_cards.job_list([running, waits, failed])
    said = text(before)
    running.progress = Progress("merging", 3, 4)
    assert run_cards.job_list([running, waits, failed]) == before  # what is unfolded is not built anew
    go.set()
    assert re.fullmatch(
        r"Jobs Running A \+ B since \d\d:\d\d Log merging Waiting E \+ F "
        r"Not done C \+ D \d\d:\d\d, took 0.0 s C \+ D Error: broken mend it Log broken",
        said,
    )
    assert run_cards.job_list([]) == ""
