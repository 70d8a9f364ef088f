"""Looks at an HTML report in headless Chromium: both widths, light and dark, by keyboard. Usage: FILE [SCREENSHOTS]."""
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


def look(page, width, scheme, shots):
    d = driver(width, scheme)
    try:
        d.get("file://" + page)
        assert d.execute_script("return window.halfwireReady") is True
        assert not d.get_log("browser"), d.get_log("browser")
        # Nothing sticks out sideways, and nothing was asked of a network.
        assert d.execute_script("return document.documentElement.scrollWidth") <= width
        assert d.execute_script("return performance.getEntriesByType('resource').length") == 0
        # Everything that can be used can be reached by Tab, in order.
        reached = set()
        body = d.find_element(By.TAG_NAME, "body")
        for _ in range(15):
            d.switch_to.active_element.send_keys(Keys.TAB)
            reached.add(d.execute_script("return document.activeElement.id || document.activeElement.className"))
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
        # Colours of the two themes differ, and text stands out from its card.
        ink, card = d.execute_script("const s = getComputedStyle(document.documentElement);"
                                     "return [s.getPropertyValue('--ink').trim(), s.getPropertyValue('--card').trim()]")
        assert contrast(ink, card) > 7
        if shots:
            height = d.execute_script("return document.documentElement.scrollHeight")
            d.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                              {"width": width, "height": min(height, 6000), "deviceScaleFactor": 1, "mobile": False})
            d.save_screenshot(f"{shots}_{width}_{scheme}.png")
        return card
    finally:
        d.quit()


def contrast(a, b):
    def luminance(colour):
        parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def main():
    page, shots = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    cards = [look(page, width, scheme, shots) for width in (1280, 390) for scheme in ("light", "dark")]
    assert cards[0] != cards[1]
    print("the report works at 1280 and 390 pixels, light and dark, by keyboard")


if __name__ == "__main__":
    main()
