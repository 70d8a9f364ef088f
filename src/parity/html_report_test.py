"""Looks at a parity report in headless Chromium: both widths, light and dark, by keyboard. Usage: FILE [SCREENSHOTS]."""
import sys

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys


def driver(width, scheme):
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    d = webdriver.Chrome(service=Service("/usr/bin/chromedriver"), options=options)
    d.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                      {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    d.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    return d


def luminance(colour):
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def look(page, width, scheme, shots):
    d = driver(width, scheme)
    try:
        d.get("file://" + page)
        assert d.execute_script("return window.halfwireReady") is True
        assert not d.get_log("browser"), d.get_log("browser")
        # Nothing sticks out sideways, and nothing was asked of a network.
        assert d.execute_script("return document.documentElement.scrollWidth") <= width
        assert d.execute_script("return performance.getEntriesByType('resource').length") == 0
        charts = d.execute_script("return [...document.querySelectorAll('.chart')].map(c => c.id)")
        assert charts == ["loss", "difference", "gradient", "update"], charts
        # Every chart has a line within its frame.
        for chart in charts:
            box = d.execute_script("const b = document.querySelector('#' + arguments[0] + ' g path:last-of-type').getBBox();"
                                   "return [b.width, b.height]", chart)
            assert box[0] > 100, (chart, box)
        # Everything that can be used can be reached by Tab.
        reached = set()
        for _ in range(12):
            d.switch_to.active_element.send_keys(Keys.TAB)
            reached.add(d.execute_script("return document.activeElement.id || document.activeElement.className"))
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
        # Text stands out from its card, a badge's word from the badge.
        colour = lambda name: d.execute_script(
            "return getComputedStyle(document.documentElement).getPropertyValue('--' + arguments[0]).trim()", name)
        assert contrast(colour("ink"), colour("card")) > 7
        for name in ("soft", "baseline", "candidate"):
            assert contrast(colour(name), colour("card")) > 4.4, name
        for name in ("equivalent", "different", "undecided", "soft"):
            assert contrast(colour("onbadge"), colour(name)) > 4.4, name
        if shots:
            height = d.execute_script("return document.documentElement.scrollHeight")
            d.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                              {"width": width, "height": min(height, 6000), "deviceScaleFactor": 1, "mobile": False})
            d.save_screenshot(f"{shots}_{width}_{scheme}.png")
        return colour("card")
    finally:
        d.quit()


def main():
    page, shots = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    cards = [look(page, width, scheme, shots) for width in (1280, 390) for scheme in ("light", "dark")]
    assert cards[0] != cards[1]
    print("the report works at 1280 and 390 pixels, light and dark, by keyboard")


if __name__ == "__main__":
    main()
