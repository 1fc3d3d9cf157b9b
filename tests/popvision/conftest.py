import browser
import pytest


@pytest.fixture(scope="module")
def chromium():
    if browser.PROGRAM is None:
        pytest.skip("no Chromium here: apt-get install chromium (.ci/run does)")
    page = browser.Browser()
    yield page
    page.close()
