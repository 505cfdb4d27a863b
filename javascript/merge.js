// Small helpers for the Merge tab, which works without them: keys, emptied numbers, focus after a run,
// progress where there is no queue.
// Elements are found by id: hosts translate texts.
(function () {
    "use strict";
    if (window.libMergeTab) return;
    window.libMergeTab = true;

    const POLL_MS = 500;
    let wasBusy = false;

    function element(id) {
        const root = typeof gradioApp === "function" ? gradioApp() : document;
        return root.querySelector("#" + id);
    }

    // A button's id stands on the button itself or, in some versions, on what is around it.
    function button(id) {
        const found = element(id);
        return found && found.tagName !== "BUTTON" ? found.querySelector("button") : found;
    }

    // The oldest hosts' gradio draws the names of our pages as plain buttons: tell what they are and which is turned to.
    function nameTabs() {
        const bar = element("merge_pages") && element("merge_pages").querySelector(":scope > .tab-nav");
        if (!bar || bar.getAttribute("role")) return;
        bar.setAttribute("role", "tablist");
        const tell = () => bar.querySelectorAll(":scope > button").forEach(name => {
            const chosen = String(name.classList.contains("selected"));
            name.setAttribute("role", "tab");
            if (name.getAttribute("aria-selected") !== chosen) name.setAttribute("aria-selected", chosen);
        });
        tell();
        new MutationObserver(tell).observe(bar, {attributes: true, attributeFilter: ["class"], childList: true, subtree: true});
    }

    function tick() {
        nameTabs();
        const stop = button("merge_interrupt");
        const status = element("merge_status");
        if (!stop || !status) return;
        const busy = Boolean(status.querySelector(".lm-busy"));
        // Hosts press a tab's Stop on Esc when it is displayed as a block.
        stop.style.display = busy ? "block" : "";
        const show = button("merge_show_progress");
        if (busy && show && show.offsetParent) show.click();
        // A disabled button loses the focus: who has not moved on meanwhile finds it on what came of the run.
        const card = status.querySelector(".lm-card");
        if (wasBusy && !busy && card && document.activeElement === document.body) {
            card.setAttribute("tabindex", "-1");
            card.focus({preventScroll: true});
        }
        wasBusy = busy;
    }

    // Hosts bind these keys for every tab; standalone nobody else does.
    function press(event) {
        if (element("tab_merge_tab")) return;
        // In a field or a list Escape closes that; it must not throw away a run.
        const typing = event.target.closest && event.target.closest("input, textarea, select, [role=listbox]");
        const enter = event.key === "Enter" && (event.ctrlKey || event.metaKey);
        const wanted = enter ? button("merge_generate") : event.key === "Escape" && !typing ? button("merge_interrupt") : null;
        if (!wanted || wanted.disabled) return;
        wanted.click();
        event.preventDefault();
    }

    // gradio takes an emptied number for 0: one that is left empty gets back what it was, before gradio hears of it.
    let held = "";

    function number(target) {
        return target.matches && target.matches("#merge_root input[type=number]") ? target : null;
    }

    function refill(event) {
        const field = number(event.target);
        if (!field || field.value !== "" || held === "" || (event.type === "keydown" && event.key !== "Enter")) return;
        field.value = held;
        field.dispatchEvent(new Event("input", {bubbles: true}));
    }

    document.addEventListener("focusin", event => { held = number(event.target) ? event.target.value : ""; });
    document.addEventListener("blur", refill, true);
    document.addEventListener("keydown", refill, true);
    document.addEventListener("keydown", press);
    window.setInterval(tick, POLL_MS);
})();
