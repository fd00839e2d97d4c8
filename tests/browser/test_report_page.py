"""The report in a real browser: on a phone and on a desk, light and dark."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from browser.chromium import HEIGHT, chromium, picture, printed, show_on
from demonstration.short_demo import short_demo
from reporting.heat_cells import cell_numbers
from reporting.outputs import made, record_of, said, verb, workshop
from reporting.test_curves import NEAR, NEAR_PLANE
from reporting.test_page import CURVE, PLANE

pytestmark = pytest.mark.browser

VIEWS = [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of all kinds; that of the aligned merge has curves too."""
    folder = tmp_path_factory.mktemp("pages")
    flags = []
    for name, content in (("curve.json", CURVE), ("plane.json", PLANE)):
        (folder / name).write_text(json.dumps(content))
        flags += ["--measured", folder / name]
    said("report", made("aligned-merge"), "-o", folder / "aligned-merge.html", *flags)
    for name, near in (("near.json", NEAR), ("near-plane.json", NEAR_PLANE)):
        (folder / name).write_text(json.dumps(near))
    near_flags = ["--measured", folder / "near.json", "--measured", folder / "near-plane.json"]
    said("report", made("ties"), "-o", folder / "near.html", *near_flags)
    for kind in ("ties", "align", "reconstruct", "adapters"):
        said("report", made(kind), "-o", folder / f"{kind}.html")
    said("report", short_demo(epochs=4).out, "-o", folder / "demo.html")
    return folder


@pytest.fixture(scope="module")
def situations() -> Path:
    """Pages of merges: of siblings, of strangers as they are, aligned and with a barrier, and one damaged later."""
    folder = workshop() / "merges"
    folder.mkdir()
    weights = load_file(workshop() / "first" / "model.safetensors")
    shutil.copytree(workshop() / "first", folder / "sibling")
    near = {name: 1.01 * tensor for name, tensor in weights.items()}
    save_file(near, folder / "sibling" / "model.safetensors", metadata={"format": "pt"})
    said("merge", "first", folder / "sibling", "-o", folder / "siblings")
    said("merge", "first", "second", "-o", folder / "strangers")
    for name in ("barrier", "failed"):
        shutil.copytree(folder / "siblings" if name == "failed" else made("aligned-merge"), folder / name)
    (folder / "barrier" / "barrier.json").write_text(json.dumps({**CURVE, "models": ["first", "second"]}))
    with (folder / "failed" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x11")
    assert verb("verify", folder / "failed").exit_code == 1
    shutil.copytree(made("aligned-merge"), folder / "aligned")
    said("report", folder / "barrier")
    return folder


@pytest.fixture(scope="module", params=VIEWS, ids=lambda view: f"{view[0]}-{view[1]}")
def view(request: pytest.FixtureRequest) -> Iterator[tuple[Any, int, str]]:
    width, scheme = request.param
    with chromium(width, scheme) as driver:
        yield driver, width, scheme


def opened(driver: Any, page: Path) -> Any:
    driver.get(page.as_uri())
    return driver


def some(driver: Any, query: str) -> list[Any]:
    from selenium.webdriver.common.by import By

    return driver.find_elements(By.CSS_SELECTOR, query)


@pytest.mark.parametrize("kind", ["aligned-merge", "ties", "align", "reconstruct", "adapters", "demo"])
def test_the_page_fits_complains_of_nothing_and_can_be_read(view: Any, folder: Path, kind: str) -> None:
    driver, width, scheme = view
    opened(driver, folder / f"{kind}.html")
    wide, inner = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide <= inner == width, "the page scrolls sideways"
    picture(driver, width, folder / f"{kind}-{width}-{scheme}.png")
    seen, weak = driver.execute_script((HERE / "contrast.js").read_text())
    assert seen > 30 and not weak, weak[:5]
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width, "unfolded it scrolls sideways"
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert driver.get_log("browser") == []
    unlabelled = driver.execute_script(
        "return [...document.querySelectorAll('svg, button, input, [role=region], table')]"
        ".filter(e => !e.getAttribute('aria-label') && !e.textContent.trim() && !e.labels?.length).length"
    )
    assert unlabelled == 0


RED, AMBER, GREEN = "red", "amber", "green"
WHO = "first and second, strangers (cosine 0.01), were"
SITUATIONS = {
    "siblings": (
        GREEN,
        "Expect it to work",
        "first and sibling, siblings (cosine 1.00), were averaged: expect the",
    ),
    "strangers": (RED, "Expect noise", f"{WHO} averaged unaligned: expect noise."),
    "aligned": (AMBER, "Expect lower quality", f"{WHO} aligned (level full) and averaged: after alignment they still"),
    "barrier": (AMBER, "A low barrier", "between the parents the loss rises by at most 0.1 above its ends."),
    "failed": (RED, "File check failed", "Do not use failed: the check 'lock' failed"),
}


def hue(element: Any, style: str) -> str:
    red, green, blue = (int(part) for part in re.findall(r"\d+", element.value_of_css_property(style))[:3])
    if green > red:
        return GREEN
    return AMBER if green - blue > 40 else RED


@pytest.mark.parametrize("kind", SITUATIONS)
def test_a_page_opens_with_its_verdict(view: Any, situations: Path, kind: str) -> None:
    """In the colour of its news, above the fold, and before all else but the name."""
    driver, width, scheme = view
    opened(driver, situations / kind / "report.html")
    driver.save_screenshot(str(situations / f"{kind}-{width}-{scheme}.png"))
    colour, label, sentence = SITUATIONS[kind]
    (box,), (badge,), (said_,) = (some(driver, query) for query in (".verdict", ".badge", ".sentence"))
    assert hue(box, "border-left-color") == hue(badge, "color") == colour
    assert label in badge.text and sentence in said_.text
    top, bottom, fold, first = driver.execute_script(
        "const box = document.querySelector('.verdict').getBoundingClientRect();"
        "return [box.top, box.bottom, innerHeight, document.querySelector('section').getBoundingClientRect().top]"
    )
    assert 0 < top < 160 and bottom < fold / 2 and bottom < first
    open_ = [fold.get_attribute("open") is not None for fold in some(driver, "#integrity details, #run details")]
    assert open_ == [kind == "failed", False], "folded, unless there is something wrong"


def test_quality_is_on_top_or_the_commands_that_measure_it(view: Any, situations: Path) -> None:
    driver, _, _ = view
    opened(driver, situations / "barrier" / "report.html")
    cards = [card.text.splitlines()[:2] for card in some(driver, ".cards li")]
    assert cards[0] == ["barrier", "0.5 → 0.1"] and cards[-1] == ["file integrity", "good"]
    assert not some(driver, ".unmeasured")
    opened(driver, situations / "strangers" / "report.html")
    (box,) = some(driver, ".unmeasured")
    assert "Quality: not measured" in box.text and "isomerge eval merges/strangers --data DATA" in box.text
    assert box.rect["y"] + box.rect["height"] < HEIGHT, "above the fold"
    opened(driver, situations / "failed" / "report.html")
    assert not some(driver, ".unmeasured"), "what is damaged is to be written again, not measured"
    assert (
        "Write it again" in some(driver, ".verdict")[0].text and "isomerge reproduce" in some(driver, ".code")[0].text
    )


@pytest.mark.parametrize("allowed", [True, False], ids=["clipboard", "without"])
def test_a_command_is_copied(view: Any, situations: Path, allowed: bool) -> None:
    """Where the clipboard is denied, the text is selected and copied as the keyboard would."""
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    driver, _, _ = view
    opened(driver, situations / "strangers" / "report.html")
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": permissions})
    if not allowed:
        driver.execute_script("navigator.clipboard.writeText = () => Promise.reject(new Error('denied'))")
    read = "const done = arguments[0]; navigator.clipboard.readText().then(done, e => done(String(e)))"
    texts = [driver.execute_script("return arguments[0].textContent", shown) for shown in some(driver, ".code pre")]
    assert len(texts) == 3 and texts[0] == "isomerge merge first second --align -o merges/strangers-aligned"
    for text, button in zip(texts, some(driver, ".copy"), strict=True):
        button.send_keys(Keys.ENTER)
        WebDriverWait(driver, 10).until(lambda _, button=button: button.text == "Copied")
        assert driver.execute_async_script(read).splitlines() == text.splitlines()


def test_the_preference_decides_and_the_switch_overrides_it(view: Any, folder: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    driver, _, scheme = view
    opened(driver, folder / "ties.html")

    def darkness() -> bool:
        colour = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour[4:-1].split(",")[:3]) < 200

    (switch,) = some(driver, "#theme")
    assert darkness() is (scheme == "dark")
    found = []
    for _ in range(3):
        switch.send_keys(Keys.SPACE)
        found.append((switch.text, darkness()))
    assert found == [
        ("Theme: light", False),
        ("Theme: dark", True),
        ("Theme: system", scheme == "dark"),
    ]


def test_the_cells_of_the_heat_maps_are_the_numbers_of_the_record(view: Any, folder: Path) -> None:
    driver, _, _ = view
    opened(driver, folder / "aligned-merge.html")
    cells = driver.execute_script(
        "return [...document.querySelectorAll('.heat td[data-v]')]"
        ".map(e => [+e.dataset.before, +e.dataset.v, e.innerText])"
    )
    spaces = record_of(made("aligned-merge"))["measured"]["spaces"]
    expected = sorted([row["distance"][side][0] for side in ("before", "after")] for row in spaces)
    assert sorted(numbers for *numbers, _ in cells) == expected
    for before, after, text in cells:
        assert cell_numbers(text)[:2] == pytest.approx((before, after), rel=0.006)
    embedded = driver.execute_script("return JSON.parse(document.getElementById('record').textContent)")
    assert embedded["record"] == record_of(made("aligned-merge")) and embedded["measurements"] == [CURVE, PLANE]


def test_the_points_of_the_curve_lie_where_their_numbers_are(view: Any, folder: Path) -> None:
    driver, _, _ = view
    opened(driver, folder / "aligned-merge.html")
    marks = driver.execute_script(
        "return [...document.querySelectorAll('#line figure:first-child .s0 [data-tip]')].map(e => {"
        "const box = e.querySelector('.aim').getBoundingClientRect();"
        "return [e.dataset.tip, box.x + box.width / 2, box.y + box.height / 2]; })"
    )
    assert [tip for tip, _, _ in marks] == [
        f"as they are, {point['t']:.4g}: {point['loss']:.4g}" for point in CURVE["points"]
    ]
    for axis, down in ((1, False), (2, True)):
        steps = [b[axis] - a[axis] for a, b in pairwise(marks)]
        assert steps == pytest.approx([steps[0]] * 4, abs=0.2) and (steps[0] < 0) is down


@pytest.mark.parametrize("kind", ["near", "aligned-merge", "demo"])
def test_the_text_of_drawings_stays_inside_their_sections(view: Any, folder: Path, kind: str) -> None:
    """Numbers with many digits are wide, and a drawing makes no page scroll."""
    driver, _, _ = view
    opened(driver, folder / f"{kind}.html")
    seen, outside = driver.execute_script(
        "const texts = [...document.querySelectorAll('section svg text')].filter(e => e.getClientRects().length);"
        "return [texts.length, texts.filter(e => { const own = e.getBoundingClientRect(),"
        "room = e.closest('section').getBoundingClientRect();"
        "return own.left < room.left + 4 || own.right > room.right - 4; }).map(e => e.textContent)]"
    )
    assert seen > 10 and outside == []


def test_the_demo_shows_the_numbers_of_its_record_as_text_and_as_bars(view: Any, folder: Path) -> None:
    driver, _, _ = view
    opened(driver, folder / "demo.html")
    groups = record_of(short_demo(epochs=4).out)["groups"]
    tables = driver.execute_script(
        "return [...document.querySelectorAll('#ways table')].map(t => [...t.tBodies[0].rows].map(r => {"
        "const bar = r.cells[1].querySelector('.bar'), fill = bar.firstElementChild;"
        "return [r.cells[0].innerText, r.cells[1].innerText.trim(), r.cells[2].innerText,"
        "fill.getBoundingClientRect().width / bar.getBoundingClientRect().width]; }))"
    )
    for group, table in zip(groups, tables, strict=True):
        assert [row[:2] for row in table] == [[r["label"], f"{100 * r['accuracy']:.1f} %"] for r in group["rows"]]
        assert [float(row[2]) for row in table] == pytest.approx([r["loss"] for r in group["rows"]], rel=0.006)
        assert [row[3] for row in table] == pytest.approx([r["accuracy"] for r in group["rows"]], abs=0.01)
    tips = driver.execute_script("return [...document.querySelectorAll('#plane .model')].map(e => e.dataset.tip)")
    assert [tip.split(": ")[0] for tip in tips] == ["A, model 0", "B, model 1", "C, model 1, aligned"]


def test_a_heading_sorts_by_keyboard_both_ways(view: Any, folder: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    driver, _, _ = view
    opened(driver, folder / "ties.html")
    fold = next(e for e in some(driver, ".fold summary") if "Every part" in e.text)
    fold.send_keys(Keys.ENTER)
    column = (
        "return [...document.querySelectorAll('#relations .fold:last-child tbody tr')].map(r => r.cells[4].dataset.v)"
    )
    heads = [e for e in some(driver, "#relations .fold:last-child th button") if e.text.strip() == "cosine"]
    before = [float(value) for value in driver.execute_script(column) if value]
    for keys, sign, word in ((Keys.ENTER, 1, "ascending"), (Keys.SPACE, -1, "descending")):
        heads[0].send_keys(keys)
        values = driver.execute_script(column)
        known = [float(value) for value in values if value]
        assert known == sorted(before, key=lambda value: sign * value)
        assert values[len(known) :] == [""] * (len(values) - len(known)), "what is unknown stays at the end"
        assert len(some(driver, f"th[aria-sort={word}]")) == 1


def test_layers_can_be_chosen_by_keyboard(view: Any, folder: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    driver, _, _ = view
    opened(driver, folder / "aligned-merge.html")
    (box,) = some(driver, "#layers")
    rows = "[...document.querySelectorAll('tr[data-layer]')].filter(row => !row.hidden)"
    shown = f"return [...new Set({rows}.map(row => +row.dataset.layer))].sort()"
    everything = driver.execute_script(shown)
    box.send_keys("1")
    assert driver.execute_script(shown) == [1]
    told = "return document.getElementById('shown').textContent"
    count = driver.execute_script(told)
    assert "rows" in count
    box.send_keys("-")
    assert driver.execute_script(shown) == [1] and driver.execute_script(told) == count, "half-typed, it waits"
    assert box.get_attribute("aria-invalid") == "false"
    box.send_keys("x", Keys.ENTER)
    assert box.get_attribute("aria-invalid") == "true" and "as in 0-3,7" in driver.execute_script(told)
    box.send_keys(Keys.BACKSPACE)
    assert box.get_attribute("aria-invalid") == "false" and driver.execute_script(told) == count
    box.send_keys(Keys.ESCAPE)
    assert driver.execute_script(shown) == everything == [-1, 0, 1] and box.get_attribute("aria-invalid") == "false"
    box.send_keys("0-1", Keys.ENTER)
    assert driver.execute_script(shown) == [0, 1] and "aligned-merge.html" in driver.current_url


@pytest.mark.parametrize("leave", ["\ue007", "\ue004"], ids=["enter", "tab"])
def test_layers_that_cannot_be_read_are_told_whenever_the_box_is_left(view: Any, folder: Path, leave: str) -> None:
    from selenium.webdriver.common.keys import Keys

    driver, _, _ = view
    opened(driver, folder / "aligned-merge.html")
    (box,) = some(driver, "#layers")
    (told,) = some(driver, "#shown")
    for keys in (("abc",), ("d", Keys.BACKSPACE)):  # the second time the text is what it was
        box.send_keys(*keys)
        assert told.text == "", "half-typed, it waits"
        box.send_keys(leave)
        assert told.is_displayed() and "as in 0-3,7" in told.text and box.get_attribute("aria-invalid") == "true"


def test_headings_show_that_they_sort_before_and_after_they_did(view: Any, folder: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    driver, _, _ = view
    opened(driver, folder / "ties.html")
    marks = (
        "return [...document.querySelectorAll('#lineage th .way')]"
        ".map(e => getComputedStyle(e, '::after').content.slice(1, -1).trim())"
    )
    before = driver.execute_script(marks)
    assert set(before) == {"↕"} and len(before) > 2 and not some(driver, "#lineage th[aria-sort]")
    some(driver, "#lineage th button")[0].send_keys(Keys.ENTER)
    assert driver.execute_script(marks) == ["↑", *before[1:]]


def test_no_line_ends_inside_a_flag(view: Any, folder: Path) -> None:
    driver, _, _ = view
    opened(driver, folder / "aligned-merge.html")
    lines = driver.execute_script(
        "const note = document.querySelector('#line .notes li');"
        "return [...Array(60).keys()].map(n => { note.style.width = `${120 + 4 * n}px`;"
        "return [...note.querySelectorAll('.flag')].map(e => e.getClientRects().length); })"
    )
    assert lines == [[1, 1]] * 60


@pytest.mark.parametrize("kind", ["demo", "adapters", "align"])
def test_every_page_with_layers_has_the_filter(view: Any, folder: Path, kind: str) -> None:
    driver, _, _ = view
    opened(driver, folder / f"{kind}.html")
    (box,) = some(driver, "#layers")
    box.send_keys("1")
    left = driver.execute_script(
        "return [...document.querySelectorAll('tr[data-layer]')].map(row => [+row.dataset.layer, row.hidden])"
    )
    assert {layer for layer, hidden in left if not hidden} == {1} and any(hidden for _, hidden in left)


def test_units_that_moved_unfold_by_keyboard_and_keep_to_the_layers(view: Any, folder: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    driver, _, _ = view
    opened(driver, folder / "align.html")
    (fold,) = [e for e in some(driver, ".fold summary") if e.text.startswith("Which units")]
    fold.send_keys(Keys.ENTER)
    (box,) = some(driver, "#layers")
    box.send_keys("1")
    names = driver.execute_script(
        "return [...document.querySelectorAll('table[aria-label^=\"Which units\"] tbody tr')]"
        ".filter(row => row.offsetHeight).map(row => row.cells[0].innerText)"
    )
    spaces = record_of(made("align"))["alignment"]["models"][0]["spaces"]
    assert names == sorted(row["name"] for row in spaces if row["units"] and row["name"].endswith(".1"))


def test_a_value_shows_under_the_pointer(view: Any, folder: Path) -> None:
    from selenium.webdriver import ActionChains

    driver, width, _ = view
    opened(driver, folder / "aligned-merge.html")
    cell = some(driver, ".heat td[data-tip]")[0]
    driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", cell)
    ActionChains(driver).move_to_element(cell).perform()
    (tip,) = some(driver, "#tip")
    assert tip.text == cell.get_attribute("data-tip")
    box = tip.rect
    assert box["x"] >= 0 and box["x"] + box["width"] <= width


def test_it_prints(view: Any, folder: Path) -> None:
    driver, _, scheme = view
    opened(driver, folder / "ties.html")
    pdf = printed(driver)
    assert pdf.startswith(b"%PDF") and len(pdf) > 10_000
    show_on(driver, "print", scheme)
    hidden = driver.execute_script("return getComputedStyle(document.querySelector('nav')).display")
    paper = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    show_on(driver, "screen", scheme)
    assert hidden == "none" and paper == "rgb(255, 255, 255)"
