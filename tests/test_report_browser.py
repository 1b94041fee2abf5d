"""The report of a comparison in a real browser: figures, filters, the fragment, hovering, keys, dark, a phone, no errors."""

import shutil
import statistics

import pytest

from regard.compare.comparison import compare_records
from regard.compare.report_page import report_html
from regard.compare.trained_layers import TrainedLayers
from report_records import HOSTILE, some_records

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("the page is driven by chromium: apt-get install chromium", allow_module_level=True)
api = pytest.importorskip(
    "playwright.sync_api", reason="the page is driven by Playwright: pip install playwright (no browser download)"
)

TASKS = ("recall(length=128)", "copying")
DESK, PHONE = {"width": 1100, "height": 900}, {"width": 390, "height": 844}
READY = "document.documentElement.dataset.ready === '1'"


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--headless=new"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(report_html(compare_records(some_records(7, TASKS)), TrainedLayers()))
    return path.as_uri()


@pytest.fixture
def opened(browser):
    """Opens pages, and checks at the end that none complained or reached out."""
    contexts, problems = [], []

    def visit(address, viewport=DESK, **options):
        context = browser.new_context(viewport=viewport, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda request: None if request.url.startswith(("file:", "data:", "blob:")) else problems.append(request.url),
        )
        page.goto(address)
        page.wait_for_function(READY)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert problems == []


def marks(page, figure="bubble"):
    return page.locator(f"#{figure} circle.mark").count()


def test_every_figure_is_drawn(opened, address):
    page = opened(address)
    assert marks(page) == 7 and marks(page, "cost") == 21 and marks(page, "rates") == 34 and marks(page, "training") == 70
    assert marks(page, "slices") == 28 and "Nothing was measured" in page.locator("#spectrum").inner_text()
    assert page.locator("#rates .note").inner_text().startswith("hybrid(pattern=Local(8)) at 0.01: diverged")
    assert "Local(16) from 600" in page.locator("#cost .note").inner_text()
    dots = page.eval_on_selector_all(
        "#bubble circle.mark",
        "all => all.map(c => [c.dataset.name, +c.getAttribute('cx'), +c.getAttribute('cy'), +c.getAttribute('r')])",
    )
    assert min(dots, key=lambda dot: dot[1])[0] == "softmax"  # the slowest
    assert min(dots, key=lambda dot: dot[2])[0] == "softmax"  # the best is at the top
    sizes = {name: r for name, _, _, r in dots}
    assert sizes["softmax"] < sizes["Local(16)"] < sizes["linear"] < sizes["linformer(rank=8)"]


def test_a_click_filters_families_everywhere_and_the_fragment_keeps_it(opened, address):
    page = opened(address)
    page.locator("#families button", has_text="kernel").click()
    assert marks(page) == 6 and page.locator("tr[data-family=kernel]:visible").count() == 0
    assert "off=kernel" in page.url
    page.locator("#bubble circle.mark[data-family=sparse]").click()
    assert marks(page) == 1 and marks(page, "cost") == 3
    again = opened(page.url)
    assert marks(again) == 1 and again.locator("#families button[aria-pressed=true]").all_inner_texts() == ["sparse"]
    again.locator("#bubble circle.mark").focus()
    again.keyboard.press("Enter")
    assert marks(again) == 7
    page.locator("#all").click()
    assert marks(page) == 7


def test_settings_are_in_the_fragment_and_come_back(opened, address):
    page = opened(address)
    page.select_option("#task", "copying")
    page.select_option("#speed", "infer_tokens_per_s")
    page.select_option("#training select", "loss")
    assert page.locator("section.of-task:visible h2").all_inner_texts() == [
        "Scores on copying",
        "Costs by length, model of copying",
    ]
    again = opened(page.url)
    assert again.locator("#task").input_value() == "copying" and again.locator("#speed").input_value() == "infer_tokens_per_s"
    assert again.locator("#training select").input_value() == "loss"
    again.select_option("#task", "*")
    assert marks(again) == 7 and "mean over 2 tasks" in again.locator("#bubble").inner_text()
    wrong = opened(address + "#task=nothing&x=<b>&off=none,kernel")
    assert marks(wrong) == 6 and wrong.locator("#task").input_value() == "copying"


def test_hovering_and_focus_show_the_settings(opened, address):
    page = opened(address)
    assert page.locator("#tip").is_hidden()
    page.locator("#bubble circle.mark[data-name=linear]").hover()
    text = page.locator("#tip").inner_text()
    assert "linear (kernel)" in text and "lr 0.001, 2 seeds" in text and "memory of a step 4 MiB" in text
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()
    page.locator("#bubble circle.mark[data-name=softmax]").focus()
    assert "softmax" in page.locator("#tip").inner_text()


def test_the_numbers_can_be_saved(opened, address):
    page = opened(address)
    with page.expect_download() as waiting:
        page.locator("#csv").click()
    lines = waiting.value.path().read_text().splitlines()
    assert len(lines) == 17 and lines[0].startswith("task,mixer,family,metric,score")
    assert lines[1].startswith("copying,softmax,softmax,accuracy,0.9385")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_differ_and_a_phone_needs_no_sideways_scrolling(opened, address, scheme, tmp_path):
    from PIL import Image

    page = opened(address, PHONE, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    path = tmp_path / "phone.png"
    page.screenshot(path=path)
    grey = Image.open(path).convert("L").tobytes()
    mean = statistics.fmean(grey)
    assert statistics.pstdev(grey[::7]) > 10 and (mean > 200 if scheme == "light" else mean < 60)
    ground, ink = page.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    assert contrast(ground, ink) > 7


def contrast(one, two):
    """The contrast of two colours by WCAG 2."""

    def light(text):
        parts = [int(part) / 255 for part in text[4:-1].split(",")]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_hostile_names_and_empty_comparisons_raise_no_error(opened, tmp_path):
    hostile = some_records(2, (HOSTILE,))
    hostile[0].reason = HOSTILE
    refused = [one for one in some_records(1) if one.status == "refused"]
    for name, records in {"hostile": hostile, "refused": refused}.items():
        path = tmp_path / f"{name}.html"
        path.write_text(report_html(compare_records(records), TrainedLayers()))
        page = opened(path.as_uri())
        assert marks(page) == (2 if name == "hostile" else 0)
        assert page.evaluate("document.querySelectorAll('b, main script').length") == 0
