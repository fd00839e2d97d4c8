"""The page to work in, from the first click to the written model: by mouse, and by keyboard on a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from browser.chromium import chromium, picture
from browser.studio_page import ended, make_models, one, serving, text_of, until
from models import tensors

pytestmark = pytest.mark.browser

HERE = Path(__file__).parent
WIDE = "return [document.documentElement.scrollWidth, innerWidth]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("studio"))


@pytest.fixture(scope="module")
def link(folder: Path) -> Iterator[str]:
    with serving(folder) as url:
        yield url


def require_mean(folder: Path, out: str) -> None:
    """It loads in the stock class, and is the mean of the two."""
    loaded = AutoModelForCausalLM.from_pretrained(folder / out).state_dict()
    first, second = tensors(folder / "tuned-for-code"), tensors(folder / "tuned-for-prose")
    assert set(first) <= set(loaded)
    for name, tensor in first.items():
        torch.testing.assert_close(loaded[name], (tensor + second[name]) / 2, rtol=1e-5, atol=1e-6)


def require_readable(driver: Any) -> None:
    wide, inner = driver.execute_script(WIDE)
    assert wide <= inner, "the page scrolls sideways"
    seen, weak = driver.execute_script((HERE / "contrast.js").read_text())
    assert seen > 30 and not weak, weak[:5]
    unlabelled = driver.execute_script(
        "return [...document.querySelectorAll('button, input, select, textarea, [role=region], progress, iframe, img')]"
        ".filter(e => e.getClientRects().length && !e.ariaLabel && !e.title && !e.alt && !e.textContent.trim()"
        " && !e.labels?.length).map(e => e.outerHTML)"
    )
    assert unlabelled == []


def test_by_mouse_from_the_first_click_to_the_written_model(link: str, folder: Path) -> None:
    with chromium(1280, "light") as driver:
        driver.get(link)
        for name in ("tuned-for-code", "tuned-for-prose"):
            one(driver, f"#models input[value={name}]").click()
        one(driver, "#check").click()
        assert "SIBLINGS" in one(driver, ".verdict").text
        assert text_of(driver, "#check-command code") == "isomerge check tuned-for-code tuned-for-prose"
        one(driver, "#take").click()
        until(lambda: "Ready" in text_of(driver, "#judgement"), "the suggested recipe is judged")

        mistake_is_shown_with_its_line(driver)
        form_and_text_say_the_same(driver)
        one(driver, "#merge").click()
        row = ended(driver, "merged")
        assert row.get_attribute("data-state") == "done", row.text
        assert "isomerge merge merged.yml -o merged" in row.text
        require_mean(folder, "merged")

        row.find_element("xpath", ".//button[.='See the report']").click()
        driver.switch_to.frame(one(driver, "iframe"))
        assert one(driver, "h1").text == "merged"
        driver.switch_to.default_content()
        require_readable(driver)
        one(driver, "[aria-label='Lineage: merged']").click()
        tree = one(driver, ".tree").text.split()
        assert tree[0] == "merged" and {"tuned-for-code", "tuned-for-prose"} <= set(tree)

        points_of_a_sweep(driver)
        picture(driver, 1280, folder / "desk.png")
        assert driver.get_log("browser") == []
        origins = "return [...new Set(performance.getEntriesByType('resource').map(e => new URL(e.name).origin))]"
        assert driver.execute_script(origins) == [link.rsplit("/", 2)[0]]


def mistake_is_shown_with_its_line(driver: Any) -> None:
    text = one(driver, "#text")
    before = text.get_attribute("value")
    driver.execute_script("arguments[0].value = arguments[1]", text, before.replace("models:", "modelss:"))
    text.send_keys(" ")
    until(lambda: "Did you mean 'models'?" in text_of(driver, "#judgement"), "the mistake is found")
    assert not one(driver, "#merge").is_enabled()
    line = before[: before.index("models:")].count("\n") + 1
    link = next(e for e in driver.find_elements("css selector", "#judgement button") if e.text == f"line {line}")
    link.click()
    script = "const e = document.activeElement; return e.value.slice(e.selectionStart, e.selectionEnd)"
    assert driver.execute_script(script).strip() == "modelss:"
    driver.execute_script("arguments[0].value = arguments[1]", text, before)
    text.send_keys(" ")
    until(lambda: "Ready" in text_of(driver, "#judgement"), "it is corrected")


def form_and_text_say_the_same(driver: Any) -> None:
    """A weight that is typed into the form is in the text, and one that is removed from the text leaves the form."""
    weight = one(driver, "#weight-1")
    weight.send_keys("0.75")
    value = "return document.getElementById('text').value"
    until(lambda: "weight: 0.75" in driver.execute_script(value), "the weight is written")
    until(lambda: "Ready" in text_of(driver, "#judgement"), "it is judged")
    plain = "\n".join(row for row in driver.execute_script(value).split("\n") if row.strip() not in ("weight: 0.75",))
    text = one(driver, "#text")
    driver.execute_script("arguments[0].value = arguments[1]", text, plain.replace("\n  parameters:\n", "\n"))
    text.send_keys(" ")
    until(lambda: weight.get_attribute("value") == "", "the form follows")
    until(lambda: one(driver, "#merge").is_enabled(), "it may be merged")


def points_of_a_sweep(driver: Any) -> None:
    one(driver, "#sweeping:not([open]) summary, #sweeping[open] summary")
    over = one(driver, "#over")
    over.clear()
    over.send_keys("t=0:1:0.5")
    driver.execute_script(
        "const e = document.getElementById('sweep-data'); e.value = 'texts.txt'; e.dispatchEvent(new Event('input'))"
    )
    assert (
        text_of(driver, "#sweep-command code") == "isomerge sweep swept.yml --over t=0:1:0.5 --data texts.txt -o swept"
    )
    one(driver, "#sweep").click()
    row = ended(driver, "swept")
    assert row.get_attribute("data-state") == "done", row.text
    row.find_element("xpath", ".//button[.='See the points']").click()
    one(driver, "table")
    rows = "[...document.querySelectorAll('#viewed tbody tr')]"
    cells = f"return {rows}.map(row => [+row.cells[0].innerText, +row.cells[1].innerText])"
    points = driver.execute_script(cells)
    assert [t for t, _ in points] == [0, 0.5, 1] and all(loss > 0 for _, loss in points)
    assert until(
        lambda: driver.execute_script("return document.querySelector('#viewed img').naturalWidth"), "a picture"
    )


def test_a_reload_finds_the_run_and_cancel_stops_it(link: str, folder: Path) -> None:
    with chromium(1280, "light") as driver:
        driver.get(link)
        driver.execute_script(
            "arguments[0].value = arguments[1]", one(driver, "#text"), "merge_method: ties\nmodels: ["
        )
        one(driver, "#text").send_keys("{model: tuned-for-code}, {model: tuned-for-prose}]\nbase_model: base")
        out = one(driver, "#out")
        out.clear()
        out.send_keys("stopped")
        until(lambda: one(driver, "#merge").is_enabled(), "it may be merged")
        one(driver, "#merge").click()
        one(driver, "#jobs [data-state=running]")
        driver.refresh()
        row = one(driver, "#jobs [data-state=running]")
        assert "stopped" in row.text and "base_model: base" in one(driver, "#text").get_attribute("value")
        row.find_element("xpath", ".//button[.='Cancel']").click()
        row = ended(driver, "stopped")
        assert row.get_attribute("data-state") == "cancelled", row.text
        assert not (folder / "stopped" / "config.json").exists()


# --- by keyboard ------------------------------------------------------------------------------------------------------
def reach(driver: Any, query: str) -> Any:
    """Press Tab until the element has the focus; on the way everything shows that it has it."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    for _ in range(120):
        ActionChains(driver).send_keys(Keys.TAB).perform()
        active = driver.switch_to.active_element
        seen = driver.execute_script(
            "const e = arguments[0], style = getComputedStyle(e), box = e.getBoundingClientRect();"
            "return e === document.body || (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2"
            " && box.bottom > 0 && box.top < innerHeight)",
            active,
        )
        assert seen, active.get_attribute("outerHTML")
        if driver.execute_script("return arguments[0].matches(arguments[1])", active, query):
            return active
    raise AssertionError(f"{query} was not reached")


def test_by_keyboard_alone_on_a_phone(link: str, folder: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    shutil.rmtree(folder / "by-keyboard", ignore_errors=True)
    with chromium(390, "dark") as driver:
        driver.get(link)
        one(driver, "#models input")
        for name in ("tuned-for-code", "tuned-for-prose"):
            reach(driver, f"#models input[value={name}]").send_keys(Keys.SPACE)
        until(lambda: "Ready" in text_of(driver, "#judgement"), "the recipe of the form is judged")
        reach(driver, "#check").send_keys(Keys.ENTER)
        assert "SIBLINGS" in one(driver, ".verdict").text
        reach(driver, "#out").send_keys(Keys.CONTROL, "a")
        driver.switch_to.active_element.send_keys("by-keyboard")
        reach(driver, "#merge").send_keys(Keys.ENTER)
        row = ended(driver, "by-keyboard")
        assert row.get_attribute("data-state") == "done", row.text
        assert "done" in driver.execute_script("return document.getElementById('spoken').textContent")
        require_mean(folder, "by-keyboard")
        reach(driver, "[aria-label='Report: by-keyboard']").send_keys(Keys.ENTER)
        one(driver, "iframe")
        assert driver.switch_to.active_element.text == "Report of by-keyboard"
        require_readable(driver)
        picture(driver, 390, folder / "phone.png")
        assert driver.execute_script(WIDE) == [390, 390] and driver.get_log("browser") == []
