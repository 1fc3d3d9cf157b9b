"""The documentation site builds and needs no other host; its search finds the page that answers a question, among its
first three results."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What a reader types, and the pages that answer it (starts of paths in the site).
QUESTIONS = {
    "deviceIterations": ("guide/options", "reference/options"),
    "outputMode": ("guide/options", "reference/options"),
    "gradientAccumulation": ("guide/options", "reference/options"),
    "replicationFactor": ("guide/options", "reference/options"),
    "setExecutionStrategy": ("guide/blocks", "reference/options"),
    "enableProfiling": ("guide/profiling", "reference/options"),
    "PipelinedExecution": ("guide/blocks", "reference/"),
    "ShardedExecution": ("guide/blocks", "reference/"),
    "BeginBlock": ("guide/blocks", "reference/"),
    "custom_op": ("guide/custom_ops", "reference/"),
    "loss scaling": ("guide/optimizers", "reference/optimizers"),
    "learning rate": ("guide/optimizers",),
    "gradient clipping": ("guide/optimizers", "coming_from/plain"),
    "float16": ("guide/optimizers", "guide/speed"),
    "checkpoint": ("guide/saving", "guide/scaling"),
    "incomplete batch": ("guide/shapes",),
    "batch norm": ("guide/scaling",),
    "several hosts": ("guide/scaling",),
    "Kubernetes": ("guide/kubernetes",),
    "Windows": ("guide/tools", "labs/"),
    "macOS": ("guide/tools", "guide/"),
    "WSL": ("guide/tools", "labs/"),
    "Colab": ("guide/tools",),
    "tensorboard": ("guide/tools",),
    "wandb": ("guide/tools",),
    "mixed precision": ("guide/tools", "guide/optimizers"),
    "does not fit": ("guide/tools", "guide/profiling", "guide/scaling"),
    "bubble": ("ten_minutes", "labs/bubble", "concepts/step"),
}
SEARCH = """new Promise(done => {
  const list = document.querySelector(".md-search-result__list");
  const meta = document.querySelector(".md-search-result__meta");
  const input = document.querySelector(".md-search__input");
  const links = () => [...list.querySelectorAll(".md-search-result__item > a")].slice(0, 3).map(link => link.href);
  const key = () => input.dispatchEvent(new KeyboardEvent("keyup"));
  const when = (is_so, then) => is_so() ? then() : setTimeout(when, 20, is_so, then);
  const find = () => {
    input.value = %s;
    key();
    when(() => links().length || /No matching/.test(meta.textContent), () => done(links()));
  };
  input.value = "";
  key();
  when(() => !links().length && !/No matching/.test(meta.textContent), find);
})"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if importlib.util.find_spec("material") is None:
        pytest.skip('mkdocs-material is not installed: pip install ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_needs_no_other_host_and_lists_its_pages_as_text(site):
    loads = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")
    pages = sorted(site.rglob("*.html"))
    assert {page.name: found for page in pages if (found := loads.findall(page.read_text()))} == {}
    listed = re.findall(r"^- \[[^\]]*\]\(([^)]*)\)", (site / "llms.txt").read_text(), re.MULTILINE)
    assert len(listed) > 40 and [name for name in listed if not (site / name).is_file()] == []


@pytest.fixture(scope="module")
def search(site, chromium):
    """The links of the first results for a question, on a page that is open."""
    chromium.open(site / "index.html")
    chromium.value("document.querySelector('label[for=__search]').click()")
    chromium.value("document.querySelector('.md-search__input').focus()")
    return lambda question: chromium.value(SEARCH % json.dumps(question))


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_finds_the_page_of(question, site, search):
    found = [link.removeprefix(f"{site.resolve().as_uri()}/") for link in search(question)]
    assert any(page.startswith(QUESTIONS[question]) for page in found), found
