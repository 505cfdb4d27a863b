"""The pages beside the form: recipes, history and report, clicked on every gradio."""

from __future__ import annotations

import csv
import time

import pytest

from lib_merge.presets import Presets, from_text
from tests.browser.reports import NASTY, keep_large_report
from tests.browser.tab import until

pytestmark = pytest.mark.browser

ALPHA = "#merge_merge_param_alpha input[type=number]"


def radio(tab, where, text):
    """An entry of a list of recipes or runs."""
    return tab.page.locator(f"{where} label").filter(has_text=text).first


def past_run(tab, text):
    """An entry of the history; gradio 5 can lose what a page shows when it is turned to for the first time."""
    found = radio(tab, "#merge_runs", text)
    for _ in range(12):
        tab.turn_to("History")
        for _ in range(100):
            if found.is_visible():
                return found
            tab.page.wait_for_timeout(50)
        tab.turn_to("Merge")
    raise AssertionError(f"{text} is not in the history")


def text_of(tab, where):
    return tab.page.locator(f"{where} textarea, {where} input").first.input_value()


def page_work(tab):
    """Tells the seconds of CPU that the page's main thread has used: no other load on the machine counts."""
    session = tab.page.context.new_cdp_session(tab.page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def worked():
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(item["value"] for item in metrics if item["name"] == "TaskDuration")

    return worked


def test_a_preset_is_loaded_changed_saved_shared_and_deleted(tab, server):
    presets = Presets(server.data / "presets")
    tab.open()
    tab.choose("B", "style.safetensors")
    tab.turn_to("Recipes")
    radio(tab, "#merge_presets", "style-30-percent").click()
    tab.wait_text("#merge_preset_said", "alpha 0.3")
    tab.page.click("#merge_preset_load")
    tab.wait_text("#merge_note_filled", "style-30-percent")
    assert (tab.value("A"), tab.value("B")) == ("base.safetensors", "style.safetensors")
    assert tab.page.locator(ALPHA).input_value() == "0.3"
    tab.page.locator(ALPHA).fill("0.4")
    tab.turn_to("Recipes")
    tab.page.click("#merge_preset_take")
    tab.wait_text("#merge_preset_said", "alpha 0.4")
    tab.page.locator("#merge_preset_name textarea, #merge_preset_name input").first.fill("mine")
    tab.page.click("#merge_preset_save")
    tab.wait_text("#merge_preset_said", "Saved")
    assert presets.load("mine").params == {"alpha": 0.4}
    tab.page.locator("#merge_section_export button, #merge_section_export .label-wrap").first.click()
    tab.page.click("#merge_preset_export")
    until(lambda: text_of(tab, "#merge_preset_word").startswith("lib-merge-1."), tab.page)
    assert from_text(text_of(tab, "#merge_preset_word")) == presets.load("mine")
    # by keyboard: the button has the focus, a second press deletes
    tab.page.focus("#merge_preset_delete")
    tab.page.keyboard.press("Enter")
    tab.wait_text("#merge_preset_said", "Delete it?")
    assert "mine" in presets.all()
    tab.page.keyboard.press("Enter")
    tab.wait_text("#merge_preset_said", "Deleted")
    assert "mine" not in presets.all()


def test_a_run_is_found_in_the_history_verified_and_done_again(tab, server):
    tab.open()
    tab.choose("B", "portraits.safetensors")
    tab.page.locator(ALPHA).fill("0.2")
    tab.wait_plan("merged")
    tab.merge()
    tab.made("base+portraits weighted_sum 0.2")
    past_run(tab, "base+portraits weighted_sum 0.2").click()
    assert "alpha 0.2" in tab.wait_text("#merge_run_said", "alpha 0.2")
    tab.page.click("#merge_run_verify")
    assert "1,143 tensors" in tab.wait_text("#merge_run_checked", "Verified", "Different", "Not")
    tab.page.click("#merge_run_again")
    again = "base+portraits weighted_sum 0.2_1.safetensors"
    tab.wait_text("#merge_status", again)
    until(lambda: (server.models / again).exists(), tab.page)
    first = server.models / "base+portraits weighted_sum 0.2.safetensors"
    assert (server.models / again).read_bytes() == first.read_bytes()
    tab.page.locator(ALPHA).fill("0.9")
    past_run(tab, "weighted_sum 0.2").click()
    tab.wait_text("#merge_run_said", "alpha 0.2")
    tab.page.click("#merge_run_load")
    tab.wait_text("#merge_note_filled", "the run of")
    until(lambda: tab.page.locator(ALPHA).input_value() == "0.2", tab.page)
    # a row of its report shows the values of that tensor
    tab.turn_to("Report")
    tab.wait_text("#merge_report_said", "away from A")
    row = "#merge_report_table td:visible, #merge_report_table [role=gridcell]:visible"
    tab.page.locator(row).filter(has_text="weight").nth(3).click()
    tab.page.wait_for_selector("#merge_report_values .main-svg")
    said = tab.wait_text("#merge_report_numbers", "Standard deviation")
    assert all(name in said for name in ("A: base.safetensors", "B: portraits.safetensors", f"result: {again}"))


def test_the_names_of_the_pages_are_tabs_that_say_which_is_chosen(tab):
    tab.open()
    chosen = "#merge_pages [role=tab][aria-selected=true]:visible"
    until(lambda: tab.page.locator(chosen).all_inner_texts() == ["Merge"], tab.page)
    tab.turn_to("Recipes")
    until(lambda: tab.page.locator(chosen).all_inner_texts() == ["Recipes"], tab.page)
    names = tab.page.locator("#merge_pages [role=tablist] [role=tab]:visible").all_inner_texts()
    assert names == ["Merge", "Report", "Recipes", "History"]


def test_a_report_of_thousands_of_rows_is_shown_and_the_page_goes_on(tab, server):
    entry = keep_large_report(server.data)
    tab.open("?__theme=dark")
    worked = page_work(tab)
    before, begun = worked(), time.monotonic()
    tab.turn_to("Report")
    assert "away from A" in tab.wait_text("#merge_report_said", "away from A")
    tab.page.wait_for_selector("#merge_report_heatmap .main-svg")
    tab.page.wait_for_selector("#merge_report_spread .main-svg")
    shown_s, work_s = time.monotonic() - begun, worked() - before
    print(f"\nreport shown after {shown_s:.1f} s, for which the page worked {work_s:.1f} s")
    assert work_s < 6  # 1 to 2 in most versions; what the page computes without a pause cannot be longer
    said = tab.page.locator("#merge_report_said").first.inner_text()
    assert NASTY in said
    assert tab.page.evaluate("window.xss") is None
    assert not tab.page.locator("#merge_root img[src=x]").count()
    # another quantity, a tensor of the table, the whole table as a file
    tab.page.click("#merge_report_quantity input")
    tab.entry("cosine").click()
    tab.wait_text("#merge_report_heatmap", "cosine")
    cells = "#merge_report_table td:visible, #merge_report_table [role=gridcell]:visible"
    cell = tab.page.locator(cells).filter(has_text="weight").nth(3)
    key = cell.inner_text().strip()
    cell.click()
    until(lambda: tab.page.locator("#merge_report_tensor input").first.input_value() == key, tab.page)
    said = tab.wait_text("#merge_report_numbers", "is not there any more")  # no run has left this report's files
    assert key in said
    tab.page.click("#merge_report_csv")
    link = tab.page.locator("#merge_report_file a[href]").first
    address = link.get_attribute("href")
    text = tab.page.evaluate("async address => (await fetch(address)).text()", address)
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == int(entry.said.split()[0].replace(",", ""))
    assert float(rows[0]["norm_a"]) > 0
