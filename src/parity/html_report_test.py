"""Looks at a parity report in headless Chromium: both widths, light and dark, by keyboard. Usage: FILE [SCREENSHOTS]."""
import pathlib
import sys

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "page"))
import browser


def use(d):
    charts = d.execute_script("return [...document.querySelectorAll('.chart')].map(c => c.id)")
    assert charts == ["loss", "difference", "gradient", "update"], charts
    # Every chart has a line within its frame.
    for chart in charts:
        box = d.execute_script("const b = document.querySelector('#' + arguments[0] + ' g path:last-of-type').getBBox();"
                               "return [b.width, b.height]", chart)
        assert box[0] > 100, (chart, box)
    # Everything that can be used can be reached by Tab.
    reached = browser.reach(d, 12)
    assert {"scroll", "all", "tail", *charts} <= reached, reached
    loss = d.find_element(By.ID, "loss")
    read = lambda: d.execute_script("return document.querySelector('#loss + .read').textContent")
    d.execute_script("document.getElementById('loss').focus()")
    d.switch_to.active_element.send_keys(Keys.HOME)
    first = read()
    assert "step" in first and "baseline" in first, first
    d.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert read() != first
    d.switch_to.active_element.send_keys(Keys.HOME)
    assert read() == first
    whole = loss.get_attribute("innerHTML")
    d.find_element(By.ID, "tail").send_keys(Keys.ENTER)
    assert loss.get_attribute("innerHTML") != whole
    assert d.find_element(By.ID, "tail").get_attribute("aria-pressed") == "true"
    d.find_element(By.ID, "all").send_keys(Keys.ENTER)
    # Lines stand out from their card, a badge's word from the badge.
    colour = lambda name: browser.colour(d, name)
    for name in ("baseline", "candidate"):
        assert browser.contrast(colour(name), colour("card")) > 4.4, name
    for name in ("equivalent", "different", "undecided", "soft"):
        assert browser.contrast(colour("onbadge"), colour(name)) > 4.4, name


if __name__ == "__main__":
    browser.main(use)
