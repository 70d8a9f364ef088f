"""A page in headless Chromium, for the tests of the HTML reports."""
import sys

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
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


def colour(d, name):
    return d.execute_script(
        "return getComputedStyle(document.documentElement).getPropertyValue('--' + arguments[0]).trim()", name)


def luminance(colour):
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def reach(d, presses):
    """What Tab comes by: ids, or classes where there is none."""
    reached = set()
    for _ in range(presses):
        d.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(d.execute_script("return document.activeElement.id || document.activeElement.className"))
    return reached


def look(page, width, scheme, shots, use):
    """Opens the page, checks what holds for every page, and calls use(driver). Returns the colour of its cards."""
    d = driver(width, scheme)
    try:
        d.get("file://" + page)
        assert d.execute_script("return window.halfwireReady") is True
        assert not d.get_log("browser"), d.get_log("browser")
        # Nothing sticks out sideways, and nothing was asked of a network.
        assert d.execute_script("return document.documentElement.scrollWidth") <= width
        assert d.execute_script("return performance.getEntriesByType('resource').length") == 0
        # Text stands out from its card.
        assert contrast(colour(d, "ink"), colour(d, "card")) > 7
        assert contrast(colour(d, "soft"), colour(d, "card")) > 4.4
        use(d)
        assert not d.get_log("browser")
        if shots:
            height = d.execute_script("return document.documentElement.scrollHeight")
            d.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                              {"width": width, "height": min(height, 6000), "deviceScaleFactor": 1, "mobile": False})
            d.save_screenshot(f"{shots}_{width}_{scheme}.png")
        return colour(d, "card")
    finally:
        d.quit()


def main(use):
    """The page that the command line names, at both widths, light and dark. Usage: FILE [SCREENSHOTS]."""
    page, shots = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    cards = [look(page, width, scheme, shots, use) for width in (1280, 390) for scheme in ("light", "dark")]
    assert cards[0] != cards[1]  # the themes differ
    print("the report works at 1280 and 390 pixels, light and dark, by keyboard")
