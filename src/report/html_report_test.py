"""Looks at an HTML report in headless Chromium: both widths, light and dark, by keyboard. Usage: FILE [SCREENSHOTS]."""
import pathlib
import sys

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "page"))
import browser


def use(d):
    # Everything that can be used can be reached by Tab, in order.
    reached = browser.reach(d, 15)
    assert {"scroll", "pick", "in", "out", "left", "right", "all", "canvas"} <= reached, reached
    canvas = d.find_element(By.ID, "canvas")
    shown = lambda: d.find_element(By.ID, "range").text
    whole = shown()
    canvas.send_keys("+")
    assert shown() != whole
    near = shown()
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert shown() != near
    canvas.send_keys(Keys.HOME)
    assert shown() == whole
    canvas.send_keys("n")
    first = d.find_element(By.ID, "tip").text
    assert "stream" in first, first
    canvas.send_keys("n")
    assert d.find_element(By.ID, "tip").text != first
    canvas.send_keys("p")
    assert d.find_element(By.ID, "tip").text == first


if __name__ == "__main__":
    browser.main(use)
