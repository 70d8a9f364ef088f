"""Looks at a page of `halfwire report --html` in headless Chromium. Usage: FILE SCREENSHOTS WORDS, where what stands
between the bars of WORDS is to be read on the page."""
import pathlib
import sys

from selenium.webdriver.common.by import By

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "page"))
import browser


def use(d):
    text = d.find_element(By.TAG_NAME, "main").text
    for words in sys.argv[3].split("|"):
        assert words in text, (words, text)
    # Tables that are wider than the page can be scrolled by keyboard.
    assert "scroll" in browser.reach(d, 4)
    two = "Two runs" in text
    assert d.find_element(By.ID, "s-lines").is_displayed() == two
    rows = d.find_elements(By.CSS_SELECTOR, "#lines tbody tr")
    assert len(rows) == (9 if two else 0), len(rows)
    # Every bar's parts fit its row, and the longest step fills it.
    widths = d.execute_script("return [...document.querySelectorAll('#steps .bar')].map("
                              "b => [...b.children].reduce((w, s) => w + s.getBoundingClientRect().width, 0) / b.getBoundingClientRect().width)")
    assert len(widths) == (2 if two else 1) and abs(max(widths) - 1) < 0.02 and min(widths) > 0, widths


if __name__ == "__main__":
    browser.main(use)
